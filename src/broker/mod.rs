//! RabbitMQ: connect, find or make queues, consume, publish a batch.
//!
//! Nothing here recovers by itself: a connection that failed is dropped, and the loop
//! that owns it builds a new one. Every wait for the broker has a deadline.

mod bindings;
mod marks;
mod publisher;
mod sizes;
mod subscription;

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lapin::{
    Channel, Connection, ConnectionProperties,
    options::{
        BasicConsumeOptions, BasicPublishOptions, BasicQosOptions, ConfirmSelectOptions,
        QueueDeclareOptions,
    },
    types::{FieldTable, LongString, ShortString},
    uri::AMQPUri,
};
use secrecy::ExposeSecret;
use tokio::time::timeout;
use tracing::info;

use bindings::Bindings;
use marks::Marks;
pub use publisher::{Fault, Outcome, Publisher};
use sizes::Sizes;
pub use subscription::{Delivery, Subscription};

use crate::config::Settings;

/// The broker did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum BrokerError {
    /// The broker, or the way to it, failed.
    #[error("RabbitMQ: {0}")]
    Failed(#[from] lapin::Error),
    /// The broker did not answer within the deadline.
    #[error("RabbitMQ did not answer {0} within {1:?}")]
    Silent(&'static str, Duration),
    /// The broker ended the subscription: its queue was deleted, or the broker stops.
    #[error("RabbitMQ ended the subscription: the queue was deleted, or the node is going away")]
    Cancelled,
    /// The AMQP client cannot parse a delivery, and so cannot refuse it either.
    #[error(
        "a message at the head of {0:?} cannot be read by this AMQP client (is one of its \
         properties not UTF-8?): take it out by hand, for example on RabbitMQ's management page"
    )]
    Unreadable(String),
    /// A name that AMQP cannot carry.
    #[error("{0}")]
    Unusable(String),
}

/// How to reach the broker, and how long to wait for it.
#[derive(Clone)]
pub struct Broker {
    uri: AMQPUri,
    name: String,
    timeout: Duration,
    confirm_timeout: Duration,
    /// Whether the broker has refused to let us bind queues to an exchange of ours.
    binding_refused: Arc<AtomicBool>,
    sizes: Arc<Sizes>,
    /// The queues that the settings name.
    own_queues: Vec<ShortString>,
    marks: Arc<Marks>,
}

impl Broker {
    /// Takes address and deadlines from the settings.
    pub fn new(settings: &Settings) -> anyhow::Result<Self> {
        let mut uri: AMQPUri = settings
            .rabbitmq_url
            .expose_secret()
            .parse()
            .map_err(|e| anyhow::anyhow!("RABBITMQ_URL: {e}"))?;
        // With the broker's own default of 60 s a frozen node would be noticed only
        // after two minutes.
        uri.query
            .heartbeat
            .get_or_insert(settings.broker_heartbeat_seconds);
        let mut own_queues = vec![
            short(&settings.retry_queue)?,
            short(&settings.manual_review_queue)?,
        ];
        for queue in &settings.dead_letter_queues {
            own_queues.push(short(queue)?);
        }
        Ok(Self {
            uri,
            name: settings.service_name.clone(),
            timeout: settings.broker_timeout,
            confirm_timeout: settings.confirm_timeout,
            binding_refused: Arc::default(),
            sizes: Arc::default(),
            own_queues,
            marks: Arc::default(),
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
        self.mark(&connection, &queue).await?;
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
        let review = short(review)?;
        self.ensure_queue(&connection, &review).await?;
        self.mark(&connection, &review).await?;
        let channel = self.confirming(&connection).await?;
        self.prove_publishing(&channel).await?;
        Ok(Publisher {
            broker: self.clone(),
            bindings: Bindings::new(self)?,
            connection,
            channel,
            taken: 0,
            channel_for_marks: None,
        })
    }

    /// The smallest body that the broker has refused for its size; the largest number while
    /// it has refused none.
    pub fn refused_size(&self) -> usize {
        self.sizes.refused()
    }

    /// What a publisher can do, for people.
    pub fn describe(&self) -> &'static str {
        if self.binding_refused.load(Ordering::Relaxed) {
            "connected, but may not bind queues: republished messages bear their queue's name as \
             routing key"
        } else {
            "connected"
        }
    }

    /// Publishes a message that no queue receives, and waits for its confirm. Under an
    /// alarm the broker reads nothing, says so only to connections that publish, and later
    /// delivers all that it was sent. This probe finds that out before a batch of real
    /// messages does.
    async fn prove_publishing(&self, channel: &Channel) -> Result<(), BrokerError> {
        let confirm = self
            .answer(
                "basic.publish",
                channel.basic_publish(
                    ShortString::default(),
                    self.nowhere()?,
                    BasicPublishOptions::default(),
                    b"",
                    lapin::BasicProperties::default(),
                ),
            )
            .await?;
        self.answer("a test message", confirm).await?;
        Ok(())
    }

    /// The name of a queue that does not exist.
    fn nowhere(&self) -> Result<ShortString, BrokerError> {
        short(&format!("{}.probe.{}", self.name, uuid::Uuid::new_v4()))
    }

    async fn confirming(&self, connection: &Connection) -> Result<Channel, BrokerError> {
        let channel = self
            .answer("channel.open", connection.create_channel())
            .await?;
        // Without this the client would report every publish as done at once.
        self.answer(
            "confirm.select",
            channel.confirm_select(ConfirmSelectOptions::default()),
        )
        .await?;
        Ok(channel)
    }

    /// Makes sure that the queue exists. It looks first, because declaring a queue that
    /// exists with other arguments fails; such a queue is used as it is.
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

    /// Declares `queue` durable if it is absent, on a connection of its own.
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
fn short(text: &str) -> Result<ShortString, BrokerError> {
    ShortString::try_new(text).map_err(|e| BrokerError::Unusable(e.to_string()))
}

fn amqp_code(error: &lapin::Error) -> Option<u16> {
    match error.kind() {
        lapin::ErrorKind::ProtocolError(e) => Some(e.get_id()),
        _ => None,
    }
}

/// Closes a connection, but does not wait for ever: under an alarm the broker never
/// answers.
async fn close(connection: &Connection, deadline: Duration) {
    const REPLY_SUCCESS: u16 = 200;
    let goodbye = connection.close(REPLY_SUCCESS, "goodbye".into());
    // A connection that is merely cut is cleaned up by the broker, too.
    let _ = timeout(deadline, goodbye).await;
}
