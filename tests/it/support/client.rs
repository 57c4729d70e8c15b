//! A broker client for tests: publish with confirms, receive with a deadline.

use std::time::Instant;

use futures::StreamExt;
use lapin::{
    BasicProperties, Channel, Connection, Consumer,
    options::{BasicAckOptions, BasicConsumeOptions, BasicPublishOptions, QueueDeleteOptions},
    types::FieldTable,
};
use prost::Message;
use retry_scheduler::wire::proto::{RetryMessage, ReviewMessage};
use testkit::amqp;

use super::PATIENCE;

/// A connection of the test's own.
pub struct Client {
    connection: Connection,
    channel: Channel,
}

/// A message taken from a queue (and acknowledged).
#[derive(Debug)]
pub struct Received {
    /// Body.
    pub body: Vec<u8>,
    /// Properties with headers.
    pub properties: BasicProperties,
    /// When it came.
    pub at: Instant,
}

impl Received {
    /// `message_id` as text.
    pub fn id(&self) -> String {
        let id = self.properties.message_id().as_ref();
        id.expect("a message_id").to_string()
    }

    /// An integer header.
    pub fn number(&self, header: &str) -> Option<i64> {
        let headers = self.properties.headers().as_ref()?;
        headers.inner().get(header)?.as_long_int().map(i64::from)
    }

    /// A text header.
    pub fn text(&self, header: &str) -> Option<String> {
        let headers = self.properties.headers().as_ref()?;
        let text = headers.inner().get(header)?.as_long_string()?;
        Some(text.to_string())
    }

    /// The body as a review envelope in JSON.
    pub fn review(&self) -> ReviewMessage {
        serde_json::from_slice(&self.body).expect("a ReviewMessage in JSON")
    }
}

impl Client {
    /// Connects.
    pub async fn connect(url: &str) -> Self {
        let connection = amqp::connect(url, "test")
            .await
            .expect("the test connects to RabbitMQ");
        let channel = amqp::confirming_channel(&connection)
            .await
            .expect("a channel");
        Self {
            connection,
            channel,
        }
    }

    /// Another channel, for what may close it.
    pub async fn channel(&self) -> Channel {
        self.connection.create_channel().await.expect("a channel")
    }

    /// Declares a durable queue.
    pub async fn declare(&self, queue: &str) {
        self.declare_with(queue, FieldTable::default()).await;
    }

    /// Declares a durable queue with arguments.
    pub async fn declare_with(&self, queue: &str, arguments: FieldTable) {
        amqp::declare(&self.channel, queue, arguments)
            .await
            .expect("the queue is declared");
    }

    /// Deletes a queue.
    pub async fn delete(&self, queue: &str) {
        self.channel
            .queue_delete(queue.into(), QueueDeleteOptions::default())
            .await
            .expect("the queue is deleted");
    }

    /// Messages ready in a queue, or `None` if there is no such queue.
    pub async fn depth(&self, queue: &str) -> Option<u32> {
        self.look(queue).await.map(|q| q.message_count())
    }

    /// Consumers of a queue, or `None` if there is no such queue.
    pub async fn consumers(&self, queue: &str) -> Option<u32> {
        self.look(queue).await.map(|q| q.consumer_count())
    }

    async fn look(&self, queue: &str) -> Option<lapin::Queue> {
        amqp::inspect(&self.channel().await, queue).await.ok()
    }

    /// Publishes bytes and waits for the confirm.
    pub async fn publish(&self, queue: &str, body: &[u8], properties: BasicProperties) {
        let confirm = self.publish_soon(queue, body, properties).await;
        assert!(confirm.await.expect("a confirm").is_ack());
    }

    /// Publishes bytes; the confirm is the caller's to await.
    pub async fn publish_soon(
        &self,
        queue: &str,
        body: &[u8],
        properties: BasicProperties,
    ) -> lapin::PublisherConfirm {
        self.channel
            .basic_publish(
                "".into(),
                queue.into(),
                BasicPublishOptions::default(),
                body,
                properties.with_delivery_mode(2),
            )
            .await
            .expect("published")
    }

    /// Publishes RetryMessages in protobuf and waits for all confirms.
    pub async fn send_all(&self, queue: &str, messages: &[RetryMessage]) {
        let mut confirms = Vec::new();
        for message in messages {
            let body = message.encode_to_vec();
            confirms.push(self.publish_soon(queue, &body, Default::default()).await);
        }
        for confirm in confirms {
            assert!(confirm.await.expect("a confirm").is_ack());
        }
    }

    /// Publishes one RetryMessage.
    pub async fn send(&self, queue: &str, message: &RetryMessage) {
        self.send_all(queue, std::slice::from_ref(message)).await;
    }

    /// Takes `n` messages from a queue and keeps only their ids: fast.
    pub async fn ids(&self, queue: &str, n: usize) -> Vec<String> {
        let channel = self.channel().await;
        let options = BasicConsumeOptions {
            no_ack: true,
            ..Default::default()
        };
        let consumer = channel
            .basic_consume(queue.into(), "".into(), options, FieldTable::default())
            .await
            .expect("subscribed");
        let id = |delivery: lapin::Result<lapin::message::Delivery>| {
            let properties = delivery.expect("a delivery").properties;
            let id = properties.message_id().as_ref();
            id.expect("a message_id").to_string()
        };
        let ids = consumer.take(n).map(id).collect();
        tokio::time::timeout(PATIENCE, ids)
            .await
            .unwrap_or_else(|_| panic!("fewer than {n} came to {queue}"))
    }

    /// Subscribes; each message is acknowledged as it is read.
    pub async fn consume(&self, queue: &str) -> Inbox {
        let channel = self.channel().await;
        let consumer = amqp::subscribe(&channel, queue).await.expect("subscribed");
        Inbox {
            consumer,
            queue: queue.to_owned(),
        }
    }
}

/// Messages as they come.
pub struct Inbox {
    consumer: Consumer,
    queue: String,
}

impl Inbox {
    /// The next message; panics when none comes.
    pub async fn next(&mut self) -> Received {
        let delivery = tokio::time::timeout(PATIENCE, self.consumer.next())
            .await
            .unwrap_or_else(|_| panic!("nothing came to {}", self.queue))
            .expect("still subscribed")
            .expect("a delivery");
        delivery
            .ack(BasicAckOptions::default())
            .await
            .expect("acked");
        Received {
            body: delivery.data,
            properties: delivery.properties,
            at: Instant::now(),
        }
    }

    /// The next `n` messages.
    pub async fn take(&mut self, n: usize) -> Vec<Received> {
        let mut received = Vec::with_capacity(n);
        for _ in 0..n {
            received.push(self.next().await);
        }
        received
    }
}
