//! Lets a republish bear the routing key that its message first had, and still reach its
//! own queue only.
//!
//! A dead letter keeps its routing key unless its queue says otherwise. Published to the
//! default exchange a message bears its queue's name as its key, and its next death may
//! match no binding of the team's dead-letter exchange: the broker would drop it. So such a
//! message goes to a direct exchange of ours under the key it first had. No queue is bound
//! there by such a key; its own queue is bound by a key that nobody else uses, and that key
//! is in the header `BCC`, which the broker routes by and removes.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use lapin::{
    Channel, Connection, ExchangeKind,
    options::{ExchangeDeclareOptions, QueueBindOptions},
    types::{FieldTable, ShortString},
};
use tokio::time::Instant;
use tracing::warn;
use uuid::Uuid;

use super::{Broker, BrokerError, amqp_code, short};
use crate::{plant::Bug, wire::Outgoing};

/// Namespace of our binding keys.
const BINDINGS: Uuid = Uuid::from_u128(0x8e0a_44d1_7f3b_4c62_a5d9_30c7_be16_f284);

const ACCESS_REFUSED: u16 = 403;
const NOT_FOUND: u16 = 404;
const PRECONDITION_FAILED: u16 = 406;

/// How a message reaches its queue.
pub(super) enum Way {
    /// By the default exchange, under the queue's name.
    ByName,
    /// By our exchange, under the message's own key; this key is the queue's.
    ByKey(String),
    /// There is no such queue.
    Nowhere(String),
    /// Not now: binding has taken too long already.
    Later,
}

/// The queues that are bound to our exchange, as far as this connection knows.
pub(super) struct Bindings {
    pub(super) exchange: ShortString,
    channel: Option<Channel>,
    bound: HashSet<String>,
    /// Whether we may declare and bind; shared by all connections, so that it is said once.
    refused: Arc<AtomicBool>,
}

impl Bindings {
    pub(super) fn new(broker: &Broker) -> Result<Self, BrokerError> {
        Ok(Self {
            exchange: short(&exchange_name(&broker.name))?,
            channel: None,
            bound: HashSet::new(),
            refused: broker.binding_refused.clone(),
        })
    }

    /// The way to a message's queue, which is bound if that is needed. After `latest`
    /// nothing more is bound: the rows of a batch are locked meanwhile, and Postgres ends a
    /// transaction that stands idle for too long.
    pub(super) async fn way(
        &mut self,
        broker: &Broker,
        connection: &Connection,
        message: &Outgoing,
        latest: Instant,
    ) -> Result<Way, BrokerError> {
        let queue = message.queue.as_str();
        let by_name = match &message.routing_key {
            None => true,
            Some(key) => key.as_str() == queue,
        };
        let by_name = by_name || Bug::RepublishByName.planted();
        if by_name || self.refused.load(Ordering::Relaxed) {
            return Ok(Way::ByName);
        }
        let key = binding_key(queue);
        if self.bound.contains(queue) {
            return Ok(Way::ByKey(key));
        }
        if Instant::now() > latest {
            return Ok(Way::Later);
        }
        match self.bind(broker, connection, queue, &key).await {
            Ok(()) => {
                self.bound.insert(queue.to_owned());
                Ok(Way::ByKey(key))
            }
            Err(BrokerError::Failed(e)) => {
                // The broker has closed the channel over it.
                self.channel = None;
                match amqp_code(&e) {
                    Some(NOT_FOUND) => Ok(Way::Nowhere(e.to_string())),
                    Some(ACCESS_REFUSED | PRECONDITION_FAILED) => {
                        self.refuse(&e);
                        Ok(Way::ByName)
                    }
                    _ => Err(e.into()),
                }
            }
            Err(e) => Err(e),
        }
    }

    /// Gives our exchange up, and says so once: we may not declare it, bind to it or publish
    /// to it.
    fn refuse(&self, error: &lapin::Error) {
        if !self.refused.swap(true, Ordering::Relaxed) {
            warn!(
                exchange = self.exchange.as_str(),
                %error,
                "our exchange cannot be used, so republished messages bear their queue's name as \
                 routing key; a dead-letter exchange that is bound by other keys drops their next \
                 death (told once)"
            );
        }
    }

    /// Notes a failed publish to our exchange: without the right to write there, every batch
    /// would end the same way.
    pub(super) fn note(&self, error: &lapin::Error) {
        if amqp_code(error) == Some(ACCESS_REFUSED) {
            self.refuse(error);
        }
    }

    /// Forgets that a queue is bound: it may have been deleted and made again.
    pub(super) fn forget(&mut self, queue: &str) {
        self.bound.remove(queue);
    }

    /// Does what a republish with a key of its own needs: declares our exchange, binds these
    /// queues to it, and publishes to it what no queue receives.
    pub(super) async fn try_out(
        &mut self,
        broker: &Broker,
        connection: &Connection,
        queues: &[String],
    ) -> Result<(), BrokerError> {
        self.opened(broker, connection).await?;
        for queue in queues {
            let key = binding_key(queue);
            self.bind(broker, connection, queue, &key).await?;
        }
        let channel = broker.confirming(connection).await?;
        broker.prove_publishing(&channel, &self.exchange).await
    }

    async fn bind(
        &mut self,
        broker: &Broker,
        connection: &Connection,
        queue: &str,
        key: &str,
    ) -> Result<(), BrokerError> {
        let channel = self.opened(broker, connection).await?;
        let bind = channel.queue_bind(
            short(queue)?,
            self.exchange.clone(),
            short(key)?,
            QueueBindOptions::default(),
            FieldTable::default(),
        );
        broker.answer("queue.bind", bind).await
    }

    /// The channel to bind on; our exchange is declared when it is opened.
    async fn opened(
        &mut self,
        broker: &Broker,
        connection: &Connection,
    ) -> Result<Channel, BrokerError> {
        if let Some(channel) = &self.channel
            && channel.status().connected()
        {
            return Ok(channel.clone());
        }
        let channel = broker
            .answer("channel.open", connection.create_channel())
            .await?;
        let declare = channel.exchange_declare(
            self.exchange.clone(),
            ExchangeKind::Direct,
            ExchangeDeclareOptions {
                durable: true,
                ..ExchangeDeclareOptions::default()
            },
            FieldTable::default(),
        );
        broker.answer("exchange.declare", declare).await?;
        Ok(self.channel.insert(channel).clone())
    }
}

/// The key by which a queue is bound to our exchange.
fn binding_key(queue: &str) -> String {
    Uuid::new_v5(&BINDINGS, queue.as_bytes()).to_string()
}

/// The name of our exchange.
pub(super) fn exchange_name(service: &str) -> String {
    format!("{service}.republish")
}
