//! RabbitMQ: connect, find or make queues, consume, publish a batch.
//!
//! Nothing here recovers: a connection that failed is dropped, and the loop that
//! owns it builds a new one. Every wait for the broker has a deadline.

use std::{collections::HashMap, time::Duration};

use futures::StreamExt;
use lapin::{
    Channel, Confirmation, Connection, ConnectionProperties, Consumer,
    message::Delivery,
    options::{
        BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, BasicQosOptions,
        ConfirmSelectOptions, QueueDeclareOptions,
    },
    types::{FieldTable, LongString, ShortString},
    uri::AMQPUri,
};
use secrecy::ExposeSecret;
use tokio::time::{Instant, timeout, timeout_at};
use tracing::info;

use crate::{config::Settings, plant::Bug, wire::Outgoing};

/// The broker did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// The broker, or the way to it, failed.
    #[error("RabbitMQ: {0}")]
    Failed(#[from] lapin::Error),
    /// It did not answer.
    #[error("RabbitMQ did not answer {0} within {1:?}")]
    Silent(&'static str, Duration),
    /// The consumer was cancelled: its queue was deleted or the broker stops.
    #[error("RabbitMQ ended the subscription: the queue was deleted, or the node is going away")]
    Cancelled,
    /// The client cannot parse what the broker sends, and so cannot refuse it.
    #[error(
        "a message at the head of {0:?} cannot be read by this AMQP client (is one of its \
         properties not UTF-8?): take it out by hand, for example on RabbitMQ's management page"
    )]
    Unreadable(String),
    /// Not usable with AMQP.
    #[error("{0}")]
    Unusable(String),
}

/// How to reach the broker.
#[derive(Clone)]
pub struct Broker {
    uri: AMQPUri,
    name: String,
    timeout: Duration,
    confirm_timeout: Duration,
}

impl Broker {
    /// Takes what is needed from the settings.
    pub fn new(settings: &Settings) -> anyhow::Result<Self> {
        let mut uri: AMQPUri = settings
            .rabbitmq_url
            .expose_secret()
            .parse()
            .map_err(|e| anyhow::anyhow!("RABBITMQ_URL: {e}"))?;
        // The broker's own default of 60 s would hide a frozen node for two minutes.
        uri.query
            .heartbeat
            .get_or_insert(settings.broker_heartbeat_seconds);
        Ok(Self {
            uri,
            name: settings.service_name.clone(),
            timeout: settings.broker_timeout,
            confirm_timeout: settings.confirm_timeout,
        })
    }

    async fn connect(&self, role: &str) -> Result<Connection, BrokerError> {
        let name = LongString::from(format!("{} {role}", self.name));
        let properties = ConnectionProperties::default().with_connection_name(name);
        self.answer(
            "a connection request",
            Connection::connect_uri(self.uri.clone(), properties),
        )
        .await
    }

    /// Subscribes to `queue`, declaring it durable when it is absent.
    pub async fn subscribe(&self, queue: &str, prefetch: u16) -> Result<Subscription, BrokerError> {
        let connection = self.connect("intake").await?;
        let queue = short(queue)?;
        self.ensure_queue(&connection, &queue).await?;
        let channel = self
            .answer("channel.open", connection.create_channel())
            .await?;
        self.answer(
            "basic.qos",
            channel.basic_qos(prefetch, BasicQosOptions::default()),
        )
        .await?;
        let consumer = self
            .answer(
                "basic.consume",
                channel.basic_consume(
                    queue,
                    ShortString::default(),
                    BasicConsumeOptions::default(),
                    FieldTable::default(),
                ),
            )
            .await?;
        Ok(Subscription {
            connection,
            consumer,
            timeout: self.timeout,
        })
    }

    /// Opens a connection to publish on, and makes sure that `review` exists.
    pub async fn publisher(&self, review: &str) -> Result<Publisher, BrokerError> {
        let connection = self.connect("dispatch").await?;
        self.ensure_queue(&connection, &short(review)?).await?;
        let channel = self.confirming(&connection).await?;
        self.prove_publishing(&channel).await?;
        Ok(Publisher {
            broker: self.clone(),
            connection,
            channel,
        })
    }

    /// Publishes to nowhere and waits for the confirm. Under an alarm the broker
    /// reads nothing, says so only to those who publish, and delivers all it was
    /// sent when the alarm clears: better this than a batch of messages.
    async fn prove_publishing(&self, channel: &Channel) -> Result<(), BrokerError> {
        let nowhere = format!("{}.probe.{}", self.name, uuid::Uuid::new_v4());
        let confirm = self
            .answer(
                "basic.publish",
                channel.basic_publish(
                    ShortString::default(),
                    short(&nowhere)?,
                    BasicPublishOptions::default(),
                    b"",
                    lapin::BasicProperties::default(),
                ),
            )
            .await?;
        self.answer("a test message", confirm).await?;
        Ok(())
    }

    async fn confirming(&self, connection: &Connection) -> Result<Channel, BrokerError> {
        let channel = self
            .answer("channel.open", connection.create_channel())
            .await?;
        // Without this every publish would be reported as done at once.
        self.answer(
            "confirm.select",
            channel.confirm_select(ConfirmSelectOptions::default()),
        )
        .await?;
        Ok(channel)
    }

    /// Looks first: declaring a queue that exists with other arguments fails,
    /// and then it is to be used as it is.
    async fn ensure_queue(
        &self,
        connection: &Connection,
        queue: &ShortString,
    ) -> Result<(), BrokerError> {
        const NOT_FOUND: u16 = 404;
        let passive = QueueDeclareOptions {
            passive: true,
            ..QueueDeclareOptions::default()
        };
        let probe = self
            .answer("channel.open", connection.create_channel())
            .await?;
        let found = self
            .answer(
                "queue.declare",
                probe.queue_declare(queue.clone(), passive, FieldTable::default()),
            )
            .await;
        match found {
            Ok(_) => {}
            Err(BrokerError::Failed(e)) if amqp_code(&e) == Some(NOT_FOUND) => {
                let channel = self
                    .answer("channel.open", connection.create_channel())
                    .await?;
                self.answer(
                    "queue.declare",
                    channel.queue_declare(
                        queue.clone(),
                        QueueDeclareOptions::durable(),
                        FieldTable::default(),
                    ),
                )
                .await?;
                info!(queue = queue.as_str(), "declared the queue, it was absent");
            }
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Declares `queue` durable if it is absent: for the command line.
    pub async fn declare(&self, queue: &str) -> Result<(), BrokerError> {
        let connection = self.connect("command").await?;
        self.ensure_queue(&connection, &short(queue)?).await?;
        close(&connection, self.timeout).await;
        Ok(())
    }

    async fn answer<T>(
        &self,
        what: &'static str,
        work: impl Future<Output = lapin::Result<T>>,
    ) -> Result<T, BrokerError> {
        match timeout(self.timeout, work).await {
            Ok(result) => Ok(result?),
            Err(_) => Err(BrokerError::Silent(what, self.timeout)),
        }
    }
}

/// A queue name as AMQP takes it.
pub fn short(text: &str) -> Result<ShortString, BrokerError> {
    ShortString::try_new(text).map_err(|e| BrokerError::Unusable(e.to_string()))
}

fn amqp_code(error: &lapin::Error) -> Option<u16> {
    match error.kind() {
        lapin::ErrorKind::ProtocolError(e) => Some(e.get_id()),
        _ => None,
    }
}

/// Closing waits for the broker, which under an alarm never answers.
async fn close(connection: &Connection, deadline: Duration) {
    const REPLY_SUCCESS: u16 = 200;
    let goodbye = connection.close(REPLY_SUCCESS, "goodbye".into());
    // The broker cleans up after a connection that was merely cut, too.
    let _ = timeout(deadline, goodbye).await;
}

/// Deliveries from one queue.
pub struct Subscription {
    connection: Connection,
    consumer: Consumer,
    timeout: Duration,
}

impl Subscription {
    /// The next delivery. Safe to cancel. The end of the stream is a fault: the
    /// connection may look healthy while nothing will ever come again.
    pub async fn next(&mut self) -> Result<Delivery, BrokerError> {
        match self.consumer.next().await {
            Some(Ok(delivery)) => Ok(delivery),
            Some(Err(e)) if matches!(e.kind(), lapin::ErrorKind::ParsingError(_)) => {
                Err(BrokerError::Unreadable(self.consumer.queue().to_string()))
            }
            Some(Err(e)) => Err(e.into()),
            None => Err(BrokerError::Cancelled),
        }
    }

    /// Acknowledges this delivery and all before it.
    pub async fn ack_through(&self, last: &Delivery) -> Result<(), BrokerError> {
        let ack = last.ack(BasicAckOptions { multiple: true });
        match timeout(self.timeout, ack).await {
            Ok(result) => result.map(drop).map_err(Into::into),
            Err(_) => Err(BrokerError::Silent("basic.ack", self.timeout)),
        }
    }

    /// Hands everything unacknowledged back to the queue.
    pub async fn close(self) {
        close(&self.connection, self.timeout).await;
    }
}

/// What became of one published message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// In its queue.
    Confirmed,
    /// There is no such queue.
    Returned(String),
    /// The broker would not take it (a full queue, for example).
    Refused,
    /// Not known: it may or may not be in its queue.
    Unknown,
}

/// What kept a batch from being answered in full. The publisher is spent.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The broker closed the channel, or all of the connection, over one
    /// message's content.
    #[error("RabbitMQ closed the channel: {0}")]
    Channel(String),
    /// The connection failed.
    #[error("RabbitMQ: {0}")]
    Connection(String),
    /// Confirms did not come in time.
    #[error("RabbitMQ did not confirm within {0:?}")]
    Timeout(Duration),
}

/// Publishes batches, one at a time.
pub struct Publisher {
    broker: Broker,
    connection: Connection,
    channel: Channel,
}

impl Publisher {
    /// Whether a batch can be tried: connected, and no alarm raised.
    pub fn usable(&self) -> Result<(), &'static str> {
        let status = self.connection.status();
        if !status.connected() || !self.channel.status().connected() {
            Err("the connection is closed")
        } else if status.blocked() {
            Err("RabbitMQ has blocked publishers (memory or disk alarm)")
        } else {
            Ok(())
        }
    }

    /// Whether the broker has raised an alarm. A connection that has since died
    /// still says so of itself, but will never be told that the alarm is over.
    pub fn blocked(&self) -> bool {
        let status = self.connection.status();
        status.connected() && self.channel.status().connected() && status.blocked()
    }

    /// Publishes all, then waits for all confirms: an outcome each.
    ///
    /// lapin hands a return to whichever confirm comes next, not to its own, so
    /// returns are matched by `message_id` over the whole batch. A message's
    /// return is on the wire before its ack; so one that is acked and not among
    /// the returns of all resolved confirms is in its queue, even if the batch
    /// broke off later.
    pub async fn publish(&mut self, batch: &[Outgoing]) -> (Vec<Outcome>, Option<Fault>) {
        let deadline = Instant::now() + self.broker.confirm_timeout;
        let mut fault = None;
        let mut confirms = Vec::with_capacity(batch.len());
        for message in batch {
            let publish = self.channel.basic_publish(
                ShortString::default(),
                message.queue.clone(),
                // Without `mandatory` a message to a missing queue is dropped and acked.
                BasicPublishOptions {
                    mandatory: true,
                    ..BasicPublishOptions::default()
                },
                &message.body,
                message.properties.clone(),
            );
            match timeout_at(deadline, publish).await {
                Ok(Ok(confirm)) => confirms.push(confirm),
                Ok(Err(e)) => {
                    blame(&mut fault, &e);
                    break;
                }
                Err(_) => {
                    fault = Some(Fault::Timeout(self.broker.confirm_timeout));
                    break;
                }
            }
        }
        let mut outcomes = vec![Outcome::Unknown; batch.len()];
        let mut returned: HashMap<String, String> = HashMap::new();
        for (outcome, confirm) in outcomes.iter_mut().zip(confirms) {
            let answer = match timeout_at(deadline, confirm).await {
                Ok(Ok(confirmation)) => confirmation,
                Ok(Err(e)) => {
                    blame(&mut fault, &e);
                    continue;
                }
                Err(_) => {
                    fault.get_or_insert(Fault::Timeout(self.broker.confirm_timeout));
                    continue;
                }
            };
            *outcome = match answer {
                Confirmation::Ack(_) => Outcome::Confirmed,
                Confirmation::Nack(_) => Outcome::Refused,
                Confirmation::NotRequested => Outcome::Unknown,
            };
            if let Some(back) = answer.take_message()
                && let Some(id) = back.delivery.properties.message_id()
            {
                let text = format!("{} {}", back.reply_code, back.reply_text);
                returned.insert(id.to_string(), text);
            }
        }
        if !returned.is_empty() && !Bug::IgnoreReturns.planted() {
            for (outcome, message) in outcomes.iter_mut().zip(batch) {
                if let Some(text) = returned.remove(&message.message_id.to_string()) {
                    *outcome = Outcome::Returned(text);
                }
            }
        }
        (outcomes, fault)
    }

    /// A new channel on the same connection, after the broker closed the old one.
    pub async fn reopen(&mut self) -> Result<(), BrokerError> {
        self.channel = self.broker.confirming(&self.connection).await?;
        Ok(())
    }

    /// Makes `queue` again if somebody deleted it.
    pub async fn ensure_queue(&self, queue: &ShortString) -> Result<(), BrokerError> {
        self.broker.ensure_queue(&self.connection, queue).await
    }

    /// Says goodbye, within the deadline.
    pub async fn close(self) {
        close(&self.connection, self.broker.timeout).await;
    }
}

/// Notes why a batch broke off. What the broker said of a message's content
/// outweighs what followed from it: publishing on may fail first, because the
/// channel is gone.
fn blame(fault: &mut Option<Fault>, error: &lapin::Error) {
    const CONTENT_TOO_LARGE: u16 = 311;
    const PRECONDITION_FAILED: u16 = 406;
    const FRAME_ERROR: u16 = 501;
    const SYNTAX_ERROR: u16 = 502;
    if let Some(CONTENT_TOO_LARGE | PRECONDITION_FAILED | FRAME_ERROR | SYNTAX_ERROR) =
        amqp_code(error)
    {
        *fault = Some(Fault::Channel(error.to_string()));
    } else {
        fault.get_or_insert_with(|| Fault::Connection(error.to_string()));
    }
}

#[cfg(test)]
mod tests {
    use lapin::{
        ChannelState, ErrorKind,
        protocol::{AMQPError, AMQPErrorKind, AMQPHardError, AMQPSoftError},
    };

    use super::*;

    fn said(kind: impl Into<AMQPErrorKind>) -> lapin::Error {
        ErrorKind::ProtocolError(AMQPError::new(kind.into(), "said".into())).into()
    }

    #[test]
    fn a_message_is_blamed_for_its_content_whichever_error_is_seen_first() {
        let gone: lapin::Error =
            ErrorKind::InvalidChannelState(ChannelState::Error, "basic.publish").into();
        let by_content = [
            said(AMQPSoftError::PRECONDITIONFAILED),
            said(AMQPHardError::FRAMEERROR),
        ];
        for content in &by_content {
            for order in [[content, &gone], [&gone, content]] {
                let mut fault = None;
                for error in order {
                    blame(&mut fault, error);
                }
                assert!(matches!(fault, Some(Fault::Channel(_))), "{fault:?}");
            }
        }
    }

    #[test]
    fn an_outage_is_nobodys_fault() {
        let mut fault = None;
        for outage in [
            said(AMQPHardError::CONNECTIONFORCED),
            said(AMQPSoftError::ACCESSREFUSED),
        ] {
            blame(&mut fault, &outage);
            assert!(matches!(fault, Some(Fault::Connection(_))), "{fault:?}");
        }
    }
}
