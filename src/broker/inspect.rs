//! What can be asked of the broker by AMQP, and done by hand: look at queues, take single
//! messages. For `doctor`; the service consumes and publishes in other ways.

use lapin::{
    Acker, Channel, Connection,
    options::{BasicAckOptions, BasicGetOptions, BasicRejectOptions, QueueDeclareOptions},
    types::{FieldTable, ShortString},
};

use super::{Broker, BrokerError, amqp_code, bindings, bindings::Bindings, close, short};
use crate::wire::Arrived;

/// A connection to ask on.
pub struct Inspector {
    broker: Broker,
    connection: Connection,
    channel: Option<Channel>,
}

/// A queue as AMQP tells it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Seen {
    /// Messages that wait.
    pub messages: u32,
    /// Consumers that are subscribed.
    pub consumers: u32,
}

/// A message that was taken from a queue. It is in our hands until it is acknowledged or
/// rejected, and goes back when the inspector's connection closes.
pub struct Taken {
    /// What was delivered.
    pub arrived: Arrived,
    /// The routing key that it bears.
    pub routing_key: String,
    acker: Acker,
}

impl Broker {
    /// Opens a connection to ask on.
    pub async fn inspector(&self) -> Result<Inspector, BrokerError> {
        Ok(Inspector {
            broker: self.clone(),
            connection: self.connect("doctor").await?,
            channel: None,
        })
    }

    /// Host, port and vhost, for people.
    pub fn address(&self) -> String {
        let authority = &self.uri.authority;
        let (host, port) = (&authority.host, authority.port);
        format!("{host}:{port}, vhost {:?}", self.uri.vhost)
    }

    /// The virtual host.
    pub fn vhost(&self) -> &str {
        &self.uri.vhost
    }

    /// The exchange by which a republish keeps its routing key.
    pub fn own_exchange(&self) -> String {
        bindings::exchange_name(&self.name)
    }
}

impl Inspector {
    /// Looks at a queue; `None` if there is no such queue.
    pub async fn look(&mut self, queue: &str) -> Result<Option<Seen>, BrokerError> {
        const NOT_FOUND: u16 = 404;
        let queue = short(queue)?;
        let passive = QueueDeclareOptions {
            passive: true,
            ..QueueDeclareOptions::default()
        };
        let channel = self.channel().await?;
        let declare = channel.queue_declare(queue, passive, FieldTable::default());
        match self.broker.answer("queue.declare", declare).await {
            Ok(queue) => Ok(Some(Seen {
                messages: queue.message_count(),
                consumers: queue.consumer_count(),
            })),
            Err(BrokerError::Failed(e)) if amqp_code(&e) == Some(NOT_FOUND) => Ok(None),
            Err(e) => Err(e),
        }
    }

    /// Publishes what no queue receives by the default exchange. Fails without the right to do
    /// so, and under an alarm.
    pub async fn try_publishing(&self) -> Result<(), BrokerError> {
        let channel = self.broker.confirming(&self.connection).await?;
        let default = ShortString::default();
        self.broker.prove_publishing(&channel, &default).await
    }

    /// Declares our exchange, binds these queues to it and publishes to it, as a republish
    /// would.
    pub async fn try_binding(&self, queues: &[String]) -> Result<(), BrokerError> {
        Bindings::new(&self.broker)?
            .try_out(&self.broker, &self.connection, queues)
            .await
    }

    /// Takes the first message of a queue, if there is one.
    pub async fn take(&mut self, queue: &str) -> Result<Option<Taken>, BrokerError> {
        let queue = short(queue)?;
        let channel = self.channel().await?;
        let get = channel.basic_get(queue, BasicGetOptions::default());
        let got = self.broker.answer("basic.get", get).await?;
        Ok(got.map(|message| {
            let delivery = message.delivery;
            Taken {
                arrived: Arrived {
                    body: delivery.data,
                    properties: delivery.properties,
                    redelivered: delivery.redelivered,
                },
                routing_key: delivery.routing_key.to_string(),
                acker: delivery.acker,
            }
        }))
    }

    /// Rejects a message, so that it dies.
    pub async fn reject(&self, taken: &Taken) -> Result<(), BrokerError> {
        let reject = taken.acker.reject(BasicRejectOptions { requeue: false });
        self.broker.answer("basic.reject", reject).await.map(drop)
    }

    /// Removes a message.
    pub async fn remove(&self, taken: &Taken) -> Result<(), BrokerError> {
        let ack = taken.acker.ack(BasicAckOptions::default());
        self.broker.answer("basic.ack", ack).await.map(drop)
    }

    /// Closes the connection. What was taken and is still in our hands goes back.
    pub async fn close(self) {
        close(&self.connection, self.broker.timeout).await;
    }

    /// The channel; another one if the broker has closed it over the last question.
    async fn channel(&mut self) -> Result<Channel, BrokerError> {
        if let Some(channel) = &self.channel
            && channel.status().connected()
        {
            return Ok(channel.clone());
        }
        let channel = self
            .broker
            .answer("channel.open", self.connection.create_channel())
            .await?;
        Ok(self.channel.insert(channel).clone())
    }
}
