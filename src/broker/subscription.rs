//! Deliveries from one queue, until something ends them.

use std::{pin::Pin, sync::Arc, time::Duration};

use futures::StreamExt;
use lapin::{
    Acker, Channel, Connection, Consumer,
    options::{BasicAckOptions, BasicCancelOptions, BasicConsumeOptions, BasicQosOptions},
    types::{FieldTable, ShortString},
};
use tokio::time::timeout;
use tracing::debug;

use super::{Broker, BrokerError, close, short, throttle::Gate};
use crate::{domain::window::Window, plant::Point, wire::Arrived};

/// Deliveries from one queue.
///
/// The window grows while the subscription lives. The broker applies a new window only to new
/// consumers, so the consumer is cancelled and another one takes its place, on the same channel.
/// What was delivered to the first stays ours to acknowledge, and comes before all that is
/// delivered to the second, so an acknowledgement of several still means the ones before.
pub struct Subscription {
    connection: Connection,
    channel: Channel,
    consumer: Consumer,
    /// Whether the consumer was cancelled and has given all that was delivered to it.
    drained: bool,
    /// Replaces the consumer by one with a larger window.
    growth: Option<Growth>,
    /// The consumer that takes over when the present one is drained.
    successor: Option<Consumer>,
    window: Window,
    gate: Arc<Gate>,
    timeout: Duration,
}

type Growth = Pin<Box<dyn Future<Output = lapin::Result<Consumer>> + Send>>;

/// A message that the broker handed to us and that is not yet acknowledged.
pub struct Delivery {
    /// What the broker delivered.
    pub arrived: Arrived,
    /// Lets [`Subscription::ack_through`] acknowledge this delivery and all before it.
    pub receipt: Receipt,
}

/// The right to acknowledge a delivery.
pub struct Receipt(Acker);

impl Broker {
    /// Subscribes to `queue`, declaring it and `review` durable when they are absent. At most
    /// `memory` bytes of deliveries are held, or one delivery that is larger.
    pub async fn subscribe(
        &self,
        queue: &str,
        review: &str,
        window: Window,
        memory: usize,
    ) -> Result<Subscription, BrokerError> {
        let gate = Gate::new(memory);
        let connection = self.connect_throttled("intake", Some(gate.clone())).await?;
        self.ensure_intake(&connection, queue, review).await?;
        let queue = short(queue)?;
        self.mark(&connection, &queue).await?;
        let channel = self
            .answer("channel.open", connection.create_channel())
            .await?;
        let consuming = consume(channel.clone(), queue, window.size());
        let consumer = self.answer("basic.consume", consuming).await?;
        Ok(Subscription {
            connection,
            channel,
            consumer,
            drained: false,
            growth: None,
            successor: None,
            window,
            gate,
            timeout: self.timeout,
        })
    }
}

async fn consume(channel: Channel, queue: ShortString, window: u16) -> lapin::Result<Consumer> {
    channel
        .basic_qos(window, BasicQosOptions::default())
        .await?;
    channel
        .basic_consume(
            queue,
            ShortString::default(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        )
        .await
}

impl Subscription {
    /// The next delivery. Safe to cancel. The end of the stream is an error: the
    /// connection may look healthy while nothing will ever come again.
    pub async fn next(&mut self) -> Result<Delivery, BrokerError> {
        loop {
            if self.drained {
                match self.successor.take() {
                    Some(successor) => {
                        self.consumer = successor;
                        self.drained = false;
                    }
                    None if self.growth.is_none() => return Err(BrokerError::Cancelled),
                    None => {}
                }
            }
            let Some(growth) = &mut self.growth else {
                match self.consumer.next().await {
                    Some(delivered) => return self.delivered(delivered),
                    None => self.drained = true,
                }
                continue;
            };
            // The answers to what makes the window grow come behind what was delivered
            // before, so deliveries are taken meanwhile. The broker is silent only if neither
            // comes.
            tokio::select! {
                biased;
                delivered = self.consumer.next(), if !self.drained => {
                    match delivered {
                        Some(delivered) => return self.delivered(delivered),
                        None => self.drained = true,
                    }
                }
                grown = growth => {
                    self.growth = None;
                    self.successor = Some(grown.map_err(|e| self.failed(e))?);
                }
                () = tokio::time::sleep(self.timeout) => {
                    return Err(BrokerError::Silent("basic.cancel", self.timeout));
                }
            }
        }
    }

    fn delivered(
        &self,
        delivered: lapin::Result<lapin::message::Delivery>,
    ) -> Result<Delivery, BrokerError> {
        let delivery = delivered.map_err(|e| self.failed(e))?;
        Ok(Delivery {
            arrived: Arrived {
                body: delivery.data,
                properties: delivery.properties,
                redelivered: delivery.redelivered,
            },
            receipt: Receipt(delivery.acker),
        })
    }

    fn failed(&self, error: lapin::Error) -> BrokerError {
        match error.kind() {
            lapin::ErrorKind::ParsingError(_) => BrokerError::Unreadable {
                queue: self.consumer.queue().to_string(),
                held: self.window.size(),
            },
            _ => error.into(),
        }
    }

    /// Whether no more deliveries come before the `held` ones in hand are acknowledged.
    pub fn is_full(&self, held: usize) -> bool {
        held >= usize::from(self.window.size()) || self.gate.is_shut()
    }

    /// Acknowledges `deliveries`, of which the last one came with `last`: it and all before
    /// it. Then the window grows, if it may.
    pub async fn ack_through(
        &mut self,
        last: &Receipt,
        deliveries: usize,
    ) -> Result<(), BrokerError> {
        let ack = last.0.ack(BasicAckOptions { multiple: true });
        Point::BeforeAck.pass();
        let acked = match timeout(self.timeout, ack).await {
            Ok(result) => result.map(drop).map_err(|e| self.failed(e)),
            Err(_) => Err(BrokerError::Silent("basic.ack", self.timeout)),
        };
        Point::AfterAck.pass();
        acked?;
        self.gate.release(deliveries);
        self.window.acked(deliveries);
        self.grow();
        Ok(())
    }

    fn grow(&mut self) {
        if self.growth.is_some() || self.successor.is_some() {
            return;
        }
        let Some(size) = self.window.next() else {
            return;
        };
        self.window.grown_to(size);
        debug!(window = size, "intake may hold more");
        let (channel, queue, tag) = (
            self.channel.clone(),
            self.consumer.queue(),
            self.consumer.tag(),
        );
        self.growth = Some(Box::pin(async move {
            channel
                .basic_cancel(tag, BasicCancelOptions::default())
                .await?;
            consume(channel, queue, size).await
        }));
    }

    /// Closes the connection, which hands all that is not acknowledged back to the
    /// queue.
    pub async fn close(self) {
        close(&self.connection, self.timeout).await;
    }
}
