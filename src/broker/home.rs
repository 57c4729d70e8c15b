//! Recognises the broker that the database belongs to.
//!
//! A broker says the name of its cluster, but a cluster to which nobody gave a name has one
//! for each node. So the broker also bears a mark, an exchange with an id that the database
//! remembers: whichever node answers, the mark is there, and no other broker has it. A broker
//! that lost its data, and so the mark, is recognised by its name.

use lapin::{
    Connection, ExchangeKind,
    options::{ExchangeDeclareOptions, ExchangeDeleteOptions},
    types::{FieldTable, ShortString},
};
use tracing::warn;
use uuid::Uuid;

use super::{Broker, BrokerError, amqp_code, close, short};
use crate::domain::place::Place;

const ACCESS_REFUSED: u16 = 403;
const NOT_FOUND: u16 = 404;
const PRECONDITION_FAILED: u16 = 406;

/// The broker that the database belongs to.
#[derive(Clone, Debug)]
pub struct Home {
    /// The name of its cluster when the database was given to it.
    pub broker: String,
    /// Its mark.
    pub mark: Uuid,
}

/// A broker that has said its name, and to which nothing was published yet.
pub struct Introduction {
    broker: Broker,
    connection: Connection,
    name: String,
}

impl Broker {
    /// Connects to learn which broker this is, whether the database belongs to it or not.
    pub async fn introduction(&self) -> Result<Introduction, BrokerError> {
        let (connection, greeting) = self.greeted("place", None).await?;
        Ok(Introduction {
            broker: self.clone(),
            connection,
            name: greeting.cluster,
        })
    }

    /// From now on only connections to `home` are used.
    pub fn settle_at(&self, home: Home) {
        let _ = self.home.set(home);
    }

    /// Closes the connection and fails, unless it leads to the broker that the database
    /// belongs to.
    pub(super) async fn recognise(
        &self,
        connection: Connection,
        name: String,
    ) -> Result<Connection, BrokerError> {
        let Some(home) = self.home.get() else {
            return Ok(connection);
        };
        if home.broker == name || self.bears(&connection, home.mark).await? {
            return Ok(connection);
        }
        close(&connection, self.timeout).await;
        Err(BrokerError::Elsewhere {
            found: name,
            home: home.broker.clone(),
        })
    }

    async fn bears(&self, connection: &Connection, mark: Uuid) -> Result<bool, BrokerError> {
        let passive = ExchangeDeclareOptions {
            passive: true,
            ..ExchangeDeclareOptions::default()
        };
        match self.declare_mark(connection, mark, passive).await {
            Ok(()) => Ok(true),
            Err(BrokerError::Failed(e)) if amqp_code(&e) == Some(NOT_FOUND) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// On a channel of its own, because the broker closes it when it refuses.
    async fn declare_mark(
        &self,
        connection: &Connection,
        mark: Uuid,
        options: ExchangeDeclareOptions,
    ) -> Result<(), BrokerError> {
        let channel = self
            .answer("channel.open", connection.create_channel())
            .await?;
        let declare = channel.exchange_declare(
            name_of(mark)?,
            ExchangeKind::Direct,
            options,
            FieldTable::default(),
        );
        self.answer("exchange.declare", declare).await
    }
}

impl Introduction {
    /// The place of an instance with this intake queue.
    pub fn place(&self, queue: &str) -> Place {
        Place {
            broker: self.name.clone(),
            vhost: self.broker.uri.vhost.clone(),
            queue: queue.to_owned(),
        }
    }

    /// Whether the virtual host has this mark.
    pub async fn bears(&self, mark: Uuid) -> Result<bool, BrokerError> {
        self.broker.bears(&self.connection, mark).await
    }

    /// Puts the mark there. Without the right to declare it, or beyond a limit on exchanges,
    /// the name alone has to do.
    pub async fn put(&self, mark: Uuid) -> Result<(), BrokerError> {
        let lasting = ExchangeDeclareOptions {
            durable: true,
            // Nobody can publish to an internal exchange.
            internal: true,
            ..ExchangeDeclareOptions::default()
        };
        let put = self.broker.declare_mark(&self.connection, mark, lasting);
        match put.await {
            Err(BrokerError::Failed(e))
                if matches!(amqp_code(&e), Some(ACCESS_REFUSED | PRECONDITION_FAILED)) =>
            {
                warn!(
                    error = %e,
                    "the broker cannot be marked, and is recognised by its name alone; give a \
                     cluster of several nodes a name (cluster_name in rabbitmq.conf)"
                );
                Ok(())
            }
            other => other,
        }
    }

    /// Removes a mark that nobody needs. When that fails, it stays, and does no harm.
    pub async fn remove(&self, mark: Uuid) {
        let Ok(name) = name_of(mark) else { return };
        let open = self.connection.create_channel();
        if let Ok(channel) = self.broker.answer("channel.open", open).await {
            let delete = channel.exchange_delete(name, ExchangeDeleteOptions::default());
            let _ = self.broker.answer("exchange.delete", delete).await;
        }
    }

    /// Closes the connection, within the deadline.
    pub async fn close(self) {
        close(&self.connection, self.broker.timeout).await;
    }
}

/// The name of the exchange that is the mark.
fn name_of(mark: Uuid) -> Result<ShortString, BrokerError> {
    short(&format!("retry-scheduler.place.{mark}"))
}
