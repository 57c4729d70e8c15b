//! Deliveries from one queue, until something ends them.

use std::time::Duration;

use futures::StreamExt;
use lapin::{Acker, Connection, Consumer, options::BasicAckOptions};
use tokio::time::timeout;

use super::{BrokerError, close};
use crate::{plant::Point, wire::Arrived};

/// Deliveries from one queue.
pub struct Subscription {
    pub(super) connection: Connection,
    pub(super) consumer: Consumer,
    pub(super) timeout: Duration,
}

/// A message that the broker handed to us and that is not yet acknowledged.
pub struct Delivery {
    /// What the broker delivered.
    pub arrived: Arrived,
    /// Lets [`Subscription::ack_through`] acknowledge this delivery and all before it.
    pub receipt: Receipt,
}

/// The right to acknowledge a delivery.
pub struct Receipt(Acker);

impl Subscription {
    /// The next delivery. Safe to cancel. The end of the stream is an error: the
    /// connection may look healthy while nothing will ever come again.
    pub async fn next(&mut self) -> Result<Delivery, BrokerError> {
        match self.consumer.next().await {
            Some(Ok(delivery)) => Ok(Delivery {
                arrived: Arrived {
                    body: delivery.data,
                    properties: delivery.properties,
                    redelivered: delivery.redelivered,
                },
                receipt: Receipt(delivery.acker),
            }),
            Some(Err(e)) if matches!(e.kind(), lapin::ErrorKind::ParsingError(_)) => {
                Err(BrokerError::Unreadable(self.consumer.queue().to_string()))
            }
            Some(Err(e)) => Err(e.into()),
            None => Err(BrokerError::Cancelled),
        }
    }

    /// Acknowledges the delivery that `last` came with, and all before it.
    pub async fn ack_through(&self, last: &Receipt) -> Result<(), BrokerError> {
        let ack = last.0.ack(BasicAckOptions { multiple: true });
        Point::BeforeAck.pass();
        let acked = match timeout(self.timeout, ack).await {
            Ok(result) => result.map(drop).map_err(Into::into),
            Err(_) => Err(BrokerError::Silent("basic.ack", self.timeout)),
        };
        Point::AfterAck.pass();
        acked
    }

    /// Closes the connection, which hands all that is not acknowledged back to the
    /// queue.
    pub async fn close(self) {
        close(&self.connection, self.timeout).await;
    }
}
