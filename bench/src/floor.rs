//! The floors: what the broker does with the same messages when the service is not there.

use std::{
    process::{Child, Command, Stdio},
    task::Poll,
    time::Duration,
};

use anyhow::{Context, bail, ensure};
use futures::StreamExt;
use lapin::{
    BasicProperties, Channel, Confirmation, Consumer,
    message::Delivery,
    options::{BasicAckOptions, BasicPublishOptions, BasicQosOptions},
    types::{AMQPValue, FieldTable},
};
use prost::Message;
use retry_scheduler::wire::proto::RetryMessage;
use testkit::amqp;
use tokio::time::{Instant, sleep, timeout_at};

use crate::field::{RELAY, target};

/// The relay has what retry-scheduler has by default: two publishers, 1,000 unacknowledged
/// deliveries in all, batches of 500. Only its linger is shorter: waiting for a larger batch pays
/// where a batch costs a transaction, and the relay has none.
const WORKERS: u16 = 2;
const PREFETCH: u16 = 500;
const BATCH: usize = 500;
const LINGER: Duration = Duration::from_millis(5);

/// The relay, as a process of its own that is killed when this is dropped.
pub struct Relay {
    child: Child,
}

impl Relay {
    /// Starts the relay and returns when its workers have subscribed.
    pub async fn start(rabbitmq_url: &str, channel: &Channel) -> anyhow::Result<Self> {
        let child = Command::new(std::env::current_exe()?)
            .args(["--relay", RELAY])
            .env("RABBITMQ_URL", rabbitmq_url)
            .stdin(Stdio::null())
            .spawn()
            .context("starting the relay")?;
        let relay = Self { child };
        for _ in 0..1000 {
            let queue = amqp::inspect(channel, RELAY).await?;
            if queue.consumer_count() == u32::from(WORKERS) {
                return Ok(relay);
            }
            sleep(Duration::from_millis(10)).await;
        }
        bail!("the relay does not subscribe");
    }

    /// The id of its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs as the relay until the process is killed.
pub async fn relay(queue: &str) -> anyhow::Result<()> {
    let url = std::env::var("RABBITMQ_URL").context("RABBITMQ_URL")?;
    let workers = (0..WORKERS).map(|_| relay_worker(&url, queue));
    futures::future::try_join_all(workers).await?;
    Ok(())
}

/// Consumes on one connection and publishes on another, as retry-scheduler does.
async fn relay_worker(url: &str, queue: &str) -> anyhow::Result<()> {
    let incoming = amqp::connect(url, "relay").await?;
    let outgoing = amqp::connect(url, "relay").await?;
    let publisher = amqp::confirming_channel(&outgoing).await?;
    let channel = incoming.create_channel().await?;
    channel
        .basic_qos(PREFETCH, BasicQosOptions::default())
        .await?;
    let mut deliveries = amqp::subscribe(&channel, queue).await?;
    while let Some(batch) = next_batch(&mut deliveries, BATCH, LINGER).await? {
        pass_on(&publisher, &decoded(&batch)?).await?;
        if let Some(last) = batch.last() {
            last.ack(BasicAckOptions { multiple: true }).await?;
        }
    }
    bail!("RabbitMQ ended the relay's subscription")
}

/// Waits for a delivery, and then at most `linger` for more. Returns `None` at the end of the
/// subscription.
pub async fn next_batch(
    deliveries: &mut Consumer,
    most: usize,
    linger: Duration,
) -> anyhow::Result<Option<Vec<Delivery>>> {
    let Some(first) = deliveries.next().await else {
        return Ok(None);
    };
    let mut batch = vec![first?];
    let deadline = Instant::now() + linger;
    while batch.len() < most {
        match timeout_at(deadline, deliveries.next()).await {
            Ok(Some(delivery)) => batch.push(delivery?),
            Ok(None) | Err(_) => break,
        }
    }
    Ok(Some(batch))
}

/// Decodes what a batch of deliveries carries.
pub fn decoded(batch: &[Delivery]) -> anyhow::Result<Vec<RetryMessage>> {
    let messages = batch
        .iter()
        .map(|delivery| RetryMessage::decode(delivery.data.as_slice()));
    Ok(messages.collect::<Result<_, _>>()?)
}

/// Publishes a batch as retry-scheduler does: all messages are handed to lapin before the first
/// confirm is waited for.
pub async fn pass_on(publisher: &Channel, messages: &[RetryMessage]) -> anyhow::Result<()> {
    let mut handed_over = Vec::with_capacity(messages.len());
    for message in messages {
        let properties = BasicProperties::default()
            .with_delivery_mode(2)
            .with_message_id(message.message_id.as_str().into());
        let mut publish = Box::pin(publisher.basic_publish(
            "".into(),
            message.original_queue.as_str().into(),
            BasicPublishOptions {
                mandatory: true,
                ..BasicPublishOptions::default()
            },
            &message.original_payload,
            properties,
        ));
        let polled = futures::poll!(publish.as_mut());
        handed_over.push((publish, polled));
    }
    let mut confirms = Vec::with_capacity(messages.len());
    for (publish, polled) in handed_over {
        confirms.push(match polled {
            Poll::Ready(written) => written?,
            Poll::Pending => publish.await?,
        });
    }
    for confirm in confirms {
        let confirmation = confirm.await?;
        ensure!(
            matches!(confirmation, Confirmation::Ack(None)),
            "a message was not taken"
        );
    }
    Ok(())
}

/// The arguments of a queue whose messages expire into the first target queue after a millisecond.
pub fn into_first_target() -> FieldTable {
    let mut arguments = FieldTable::default();
    arguments.insert("x-message-ttl".into(), AMQPValue::LongInt(1));
    let text = |text: String| AMQPValue::LongString(text.into());
    arguments.insert("x-dead-letter-exchange".into(), text(String::new()));
    arguments.insert("x-dead-letter-routing-key".into(), text(target(0)));
    arguments
}
