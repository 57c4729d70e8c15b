//! Publishes messages, each marked with the run it belongs to and its number in it.

use std::collections::VecDeque;

use anyhow::{Context, ensure};
use lapin::{BasicProperties, Channel, Connection, PublisherConfirm, options::BasicPublishOptions};
use prost::Message;
use retry_scheduler::wire::proto::RetryMessage;
use uuid::Uuid;

use crate::field::target;

/// Most messages that a load has published and not yet seen confirmed.
const WINDOW: usize = 1000;

/// The value of `next_retry_at_ms` that leaves it to the policy when a message is due.
const NO_DUE_MOMENT: i64 = 0;

/// How many messages to send, how large each is, and to how many target queues they go.
#[derive(Clone, Copy, Debug)]
pub struct Load {
    pub count: u32,
    pub size: usize,
    pub targets: u32,
}

/// The body of a published message: a RetryMessage, or the payload alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shape {
    RetryMessage,
    Payload,
}

/// A publisher with confirms.
pub struct Producer {
    channel: Channel,
}

impl Producer {
    pub async fn open(connection: &Connection) -> anyhow::Result<Self> {
        let channel = testkit::amqp::confirming_channel(connection).await?;
        Ok(Self { channel })
    }

    /// Publishes a whole load as fast as the broker takes it, and waits for its confirms.
    pub async fn send(
        &self,
        entry: &str,
        shape: Shape,
        run: u32,
        load: Load,
    ) -> anyhow::Result<()> {
        let mut window = VecDeque::with_capacity(WINDOW);
        for number in 0..load.count {
            let payload = payload(run, number, load.size);
            if window.len() == WINDOW {
                confirmed(window.pop_front()).await?;
            }
            let sent = self.publish(entry, shape, payload, number % load.targets, NO_DUE_MOMENT);
            window.push_back(sent.await?);
        }
        while !window.is_empty() {
            confirmed(window.pop_front()).await?;
        }
        Ok(())
    }

    /// Publishes one message for the target queue `to`. Does not wait for the confirm.
    pub async fn send_one(
        &self,
        entry: &str,
        run: u32,
        number: u32,
        to: u32,
    ) -> anyhow::Result<()> {
        let payload = payload(run, number, 1024);
        self.publish(entry, Shape::RetryMessage, payload, to, NO_DUE_MOMENT)
            .await?;
        Ok(())
    }

    /// Publishes one message that is due at `due_ms`, in Unix time, for the first target queue.
    /// Does not wait for the confirm.
    pub async fn send_due_at(
        &self,
        entry: &str,
        run: u32,
        number: u32,
        due_ms: i64,
    ) -> anyhow::Result<()> {
        let payload = payload(run, number, 1024);
        self.publish(entry, Shape::RetryMessage, payload, 0, due_ms)
            .await?;
        Ok(())
    }

    async fn publish(
        &self,
        entry: &str,
        shape: Shape,
        payload: Vec<u8>,
        to: u32,
        due_ms: i64,
    ) -> anyhow::Result<PublisherConfirm> {
        let id = Uuid::new_v4().to_string();
        let body = match shape {
            Shape::Payload => payload,
            Shape::RetryMessage => RetryMessage {
                message_id: id.clone(),
                original_payload: payload,
                original_queue: target(to),
                error_reason: "upstream timed out".into(),
                max_retries: 3,
                next_retry_at_ms: due_ms,
                ..RetryMessage::default()
            }
            .encode_to_vec(),
        };
        let properties = BasicProperties::default()
            .with_delivery_mode(2)
            .with_message_id(id.into());
        let published = self.channel.basic_publish(
            "".into(),
            entry.into(),
            BasicPublishOptions::default(),
            &body,
            properties,
        );
        published.await.context("the producer lost RabbitMQ")
    }
}

async fn confirmed(confirm: Option<PublisherConfirm>) -> anyhow::Result<()> {
    if let Some(confirm) = confirm {
        ensure!(confirm.await?.is_ack(), "RabbitMQ refused a message");
    }
    Ok(())
}

/// A payload that begins with the number of its run and its own number.
fn payload(run: u32, number: u32, size: usize) -> Vec<u8> {
    let mut payload = vec![b'.'; size.max(8)];
    payload[..4].copy_from_slice(&run.to_be_bytes());
    payload[4..8].copy_from_slice(&number.to_be_bytes());
    payload
}

/// Reads the run and the number that a payload begins with.
pub fn identity(body: &[u8]) -> Option<(u32, u32)> {
    let run = body.get(..4)?.try_into().ok()?;
    let number = body.get(4..8)?.try_into().ok()?;
    Some((u32::from_be_bytes(run), u32::from_be_bytes(number)))
}
