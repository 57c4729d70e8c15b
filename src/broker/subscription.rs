//! Deliveries from one queue, until something ends them.

use std::time::Duration;

use futures::StreamExt;
use lapin::{Connection, Consumer, message::Delivery, options::BasicAckOptions};
use tokio::time::timeout;

use super::{BrokerError, close};
use crate::plant::Point;

/// Deliveries from one queue.
pub struct Subscription {
    pub(super) connection: Connection,
    pub(super) consumer: Consumer,
    pub(super) timeout: Duration,
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
        Point::BeforeAck.pass();
        let acked = match timeout(self.timeout, ack).await {
            Ok(result) => result.map(drop).map_err(Into::into),
            Err(_) => Err(BrokerError::Silent("basic.ack", self.timeout)),
        };
        Point::AfterAck.pass();
        acked
    }

    /// Hands everything unacknowledged back to the queue.
    pub async fn close(self) {
        close(&self.connection, self.timeout).await;
    }
}
