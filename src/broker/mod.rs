//! RabbitMQ: connect, find or make queues, consume, publish a batch.
//!
//! Nothing here recovers by itself: a connection that failed is dropped, and the loop
//! that owns it builds a new one. Every wait for the broker has a deadline.

mod bindings;
mod dial;
mod greeting;
mod head;
mod home;
mod inspect;
mod management;
mod marks;
mod outcome;
mod publisher;
mod queues;
mod sizes;
mod stream;
mod subscription;
mod throttle;

use std::{
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use lapin::{
    Channel, Connection, ConnectionProperties,
    options::{BasicPublishOptions, ConfirmSelectOptions},
    types::{LongString, ShortString},
    uri::AMQPUri,
};
use secrecy::ExposeSecret;
use tokio::time::timeout;

use bindings::Bindings;
pub use greeting::Greeting;
pub use head::{Got, Head, Tag};
pub use home::{Home, Introduction};
pub use inspect::{Inspector, Seen, Taken};
pub use management::{ApiError, Binding, ExchangeFacts, Management, Node, Overview, QueueFacts};
use marks::Marks;
pub use outcome::{Fault, Outcome};
pub use publisher::Publisher;
use queues::Role;
use sizes::Sizes;
pub use subscription::{Delivery, Subscription};
use throttle::Gate;

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
    #[error("a message near the head of {queue:?} cannot be read by the AMQP client")]
    Unreadable {
        /// The queue that the message came from.
        queue: String,
        /// How many deliveries the window allowed, so how far from the head it may be.
        held: u16,
    },
    /// The broker did not say what was expected on a connection with frames of our own.
    #[error("RabbitMQ: {0}")]
    Unexpected(String),
    /// The connection leads to another broker than the one that the database belongs to.
    #[error(
        "RABBITMQ_URL leads to the broker {found:?}, but the database belongs to {home:?}: nothing \
         is taken from there or sent there (if it is meant to, see `retry-scheduler move --help`)"
    )]
    Elsewhere {
        /// The name of the broker that was found.
        found: String,
        /// The name of the one that the database belongs to.
        home: String,
    },
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
    /// The broker that the database belongs to, once that is known.
    home: Arc<OnceLock<Home>>,
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
            home: Arc::default(),
            sizes: Arc::default(),
            own_queues,
            marks: Arc::default(),
        })
    }

    async fn connect(&self, role: &str) -> Result<Connection, BrokerError> {
        self.connect_throttled(role, None).await
    }

    /// Connects, and lets a gate decide how far the connection is read.
    async fn connect_throttled(
        &self,
        role: &str,
        gate: Option<Arc<Gate>>,
    ) -> Result<Connection, BrokerError> {
        let (connection, greeting) = self.greeted(role, gate).await?;
        self.recognise(connection, greeting.cluster).await
    }

    /// What the broker says of itself.
    pub async fn greeting(&self) -> Result<Greeting, BrokerError> {
        let (connection, greeting) = self.greeted("doctor", None).await?;
        close(&connection, self.timeout).await;
        Ok(greeting)
    }

    /// A connection, and what the broker says of itself.
    async fn greeted(
        &self,
        role: &str,
        gate: Option<Arc<Gate>>,
    ) -> Result<(Connection, Greeting), BrokerError> {
        let properties = ConnectionProperties::default().with_connection_name(self.called(role));
        self.answer(
            "a connection request",
            stream::connect(self.uri.clone(), properties, gate),
        )
        .await
    }

    /// How the broker lists a connection with this role.
    fn called(&self, role: &str) -> LongString {
        format!("{} {role}", self.name).into()
    }

    /// Opens a connection to publish on, and makes sure that `review` exists.
    pub async fn publisher(&self, review: &str) -> Result<Publisher, BrokerError> {
        let connection = self.connect("dispatch").await?;
        self.ensure_queue(&connection, review, Role::Review).await?;
        self.mark(&connection, &short(review)?).await?;
        let channel = self.confirming(&connection).await?;
        self.prove_publishing(&channel, &ShortString::default())
            .await?;
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
    async fn prove_publishing(
        &self,
        channel: &Channel,
        exchange: &ShortString,
    ) -> Result<(), BrokerError> {
        let confirm = self
            .answer(
                "basic.publish",
                channel.basic_publish(
                    exchange.clone(),
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
