//! A client of RabbitMQ for tests: it publishes with confirms and receives with a deadline.

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

/// A test's own connection to RabbitMQ.
pub struct Client {
    connection: Connection,
    channel: Channel,
}

/// A message that was taken from a queue and acknowledged.
#[derive(Debug)]
pub struct Received {
    pub body: Vec<u8>,
    pub properties: BasicProperties,
    /// When the message was received.
    pub at: Instant,
}

impl Received {
    /// The AMQP property `message_id`.
    pub fn id(&self) -> String {
        let id = self.properties.message_id().as_ref();
        id.expect("a message_id").to_string()
    }

    /// The value of a header, if it is a 32-bit integer.
    pub fn number(&self, header: &str) -> Option<i64> {
        let headers = self.properties.headers().as_ref()?;
        headers.inner().get(header)?.as_long_int().map(i64::from)
    }

    /// The value of a header, if it is a text.
    pub fn text(&self, header: &str) -> Option<String> {
        let headers = self.properties.headers().as_ref()?;
        let text = headers.inner().get(header)?.as_long_string()?;
        Some(text.to_string())
    }

    /// Reads the body as a review envelope in JSON.
    pub fn review(&self) -> ReviewMessage {
        serde_json::from_slice(&self.body).expect("a ReviewMessage in JSON")
    }
}

impl Client {
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

    /// Opens another channel, for calls that make RabbitMQ close theirs when they fail.
    pub async fn channel(&self) -> Channel {
        self.connection.create_channel().await.expect("a channel")
    }

    pub async fn declare(&self, queue: &str) {
        self.declare_with(queue, FieldTable::default()).await;
    }

    /// Declares a durable queue.
    pub async fn declare_with(&self, queue: &str, arguments: FieldTable) {
        amqp::declare(&self.channel, queue, arguments)
            .await
            .expect("the queue is declared");
    }

    pub async fn delete(&self, queue: &str) {
        self.channel
            .queue_delete(queue.into(), QueueDeleteOptions::default())
            .await
            .expect("the queue is deleted");
    }

    /// How many messages are ready in a queue; `None` if there is no such queue.
    pub async fn depth(&self, queue: &str) -> Option<u32> {
        self.look(queue).await.map(|q| q.message_count())
    }

    /// How many consumers a queue has; `None` if there is no such queue.
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

    /// Publishes bytes, and leaves it to the caller to wait for the confirm.
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

    /// Takes `n` messages from a queue, and returns their ids. RabbitMQ expects no
    /// acknowledgements here, so this is fast.
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

    /// Subscribes to a queue. Each message is acknowledged when it is read.
    pub async fn consume(&self, queue: &str) -> Inbox {
        let channel = self.channel().await;
        let consumer = amqp::subscribe(&channel, queue).await.expect("subscribed");
        Inbox {
            consumer,
            queue: queue.to_owned(),
        }
    }
}

/// A subscription to a queue.
pub struct Inbox {
    consumer: Consumer,
    queue: String,
}

impl Inbox {
    /// The next message; panics when none comes within [`PATIENCE`].
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
