//! The simulated services. They do what a team's own producers, consumers and
//! dead-letter handlers would do.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, bail};
use futures::StreamExt;
use lapin::{
    BasicProperties, Channel, Confirmation, Connection,
    options::{BasicAckOptions, BasicPublishOptions, QueueDeleteOptions},
    types::FieldTable,
};
use prost::Message;
use retry_scheduler::wire::{
    headers,
    proto::{ErrorClass, RetryMessage, ReviewMessage},
};
use testkit::amqp;
use tokio::time::{Instant, MissedTickBehavior, interval};
use uuid::Uuid;

use crate::ledger::{Ledger, Mark};

pub const INTAKE: &str = "demo.retry.scheduled";
pub const REVIEW: &str = "demo.manual-review.pending";

/// A simulated service.
pub struct Service {
    pub name: &'static str,
    /// What one of its messages is called.
    pub one: &'static str,
    /// The original queue of its tasks.
    pub queue: &'static str,
    pub habit: &'static str,
    conduct: Conduct,
    /// How many of 25 messages are for this service.
    share: usize,
}

#[derive(Clone, Copy, PartialEq)]
enum Conduct {
    FailsOnce,
    Flaky,
    AlwaysFails,
    RefusesSome,
    /// The service's queue does not exist, but failures are still reported for it.
    Gone,
    /// This is no service, but garbage on the intake queue.
    Garbage,
}

#[rustfmt::skip]
pub const SERVICES: [Service; 6] = [
    Service { name: "invoices", one: "invoice", queue: "demo.invoices", habit: "fails once", conduct: Conduct::FailsOnce, share: 8 },
    Service { name: "emails", one: "email", queue: "demo.emails", habit: "fails 60 %", conduct: Conduct::Flaky, share: 7 },
    Service { name: "payments", one: "payment", queue: "demo.payments", habit: "always fails", conduct: Conduct::AlwaysFails, share: 3 },
    Service { name: "orders", one: "order", queue: "demo.orders", habit: "refuses 1 in 3", conduct: Conduct::RefusesSome, share: 4 },
    Service { name: "reports", one: "report", queue: "demo.reports", habit: "queue is missing", conduct: Conduct::Gone, share: 2 },
    Service { name: "garbage", one: "garbage", queue: INTAKE, habit: "not a RetryMessage", conduct: Conduct::Garbage, share: 1 },
];

/// Why a service could not do its work.
struct Failure {
    error: &'static str,
    class: ErrorClass,
}

impl Service {
    pub fn consumes(&self) -> bool {
        !matches!(self.conduct, Conduct::Gone | Conduct::Garbage)
    }

    fn work(&self, number: usize, retries: i32) -> Result<(), Failure> {
        let fail = |error, class| Err(Failure { error, class });
        match self.conduct {
            Conduct::FailsOnce if retries == 0 => {
                fail("the tax office hung up", ErrorClass::Retryable)
            }
            Conduct::Flaky if fastrand::f32() < 0.6 => {
                fail("mail server timed out", ErrorClass::Retryable)
            }
            Conduct::AlwaysFails => fail("card processor is down", ErrorClass::Retryable),
            Conduct::RefusesSome if number.is_multiple_of(3) => {
                fail("no such product", ErrorClass::Final)
            }
            _ => Ok(()),
        }
    }
}

/// Which service the `n`th message is for. Each gets its share, and 7 has no divisor in
/// common with 25, so that the shares are mixed.
fn recipient(n: usize) -> usize {
    let total: usize = SERVICES.iter().map(|s| s.share).sum();
    let mut place = n * 7 % total;
    for (index, service) in SERVICES.iter().enumerate() {
        match place.checked_sub(service.share) {
            Some(rest) => place = rest,
            None => return index,
        }
    }
    unreachable!("the place is below the total")
}

/// Publishes one message at a time, and waits for its confirm.
struct Post(Channel);

impl Post {
    async fn open(connection: &Connection) -> lapin::Result<Self> {
        Ok(Self(amqp::confirming_channel(connection).await?))
    }

    async fn send(&self, queue: &str, id: Uuid, kind: &str, body: &[u8]) -> anyhow::Result<()> {
        let mandatory = BasicPublishOptions {
            mandatory: true,
            ..BasicPublishOptions::default()
        };
        let properties = BasicProperties::default()
            .with_message_id(id.to_string().into())
            .with_content_type(kind.into())
            .with_delivery_mode(2);
        let confirm = self
            .0
            .basic_publish("".into(), queue.into(), mandatory, body, properties);
        match confirm.await?.await? {
            Confirmation::Ack(None) => Ok(()),
            other => bail!("RabbitMQ did not take a message for {queue}: {other:?}"),
        }
    }

    /// Reports a failure to the intake queue, as a dead-letter handler does.
    async fn report(&self, id: Uuid, failed: RetryMessage) -> anyhow::Result<()> {
        let body = failed.encode_to_vec();
        self.send(INTAKE, id, "application/x-protobuf", &body).await
    }
}

/// Removes the queues of the last demo, and makes those of the services that consume.
pub async fn prepare(connection: &Connection) -> lapin::Result<()> {
    let channel = connection.create_channel().await?;
    let delete = QueueDeleteOptions::default();
    channel.queue_delete(REVIEW.into(), delete).await?;
    for service in &SERVICES {
        channel.queue_delete(service.queue.into(), delete).await?;
        if service.consumes() {
            amqp::declare(&channel, service.queue, FieldTable::default()).await?;
        }
    }
    channel.close(200, "prepared".into()).await
}

/// Sends `rate` messages a second for `time`.
pub async fn produce(
    connection: Arc<Connection>,
    ledger: Arc<Ledger>,
    rate: u32,
    time: Duration,
) -> anyhow::Result<()> {
    let post = Post::open(&connection).await?;
    let mut pace = interval(Duration::from_secs(1) / rate);
    pace.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let end = Instant::now() + time;
    for n in 0.. {
        let due = pace.tick().await;
        if due >= end || Instant::now() >= end {
            break;
        }
        let index = recipient(n);
        let service = &SERVICES[index];
        let (id, label) = ledger.announce(index);
        match service.conduct {
            Conduct::Garbage => post.send(INTAKE, id, "", label.as_bytes()).await?,
            Conduct::Gone => {
                let failed = RetryMessage {
                    message_id: id.to_string(),
                    original_payload: label.into_bytes(),
                    original_queue: service.queue.into(),
                    error_reason: "the report service is gone".into(),
                    ..RetryMessage::default()
                };
                ledger.failed(id);
                post.report(id, failed).await?;
            }
            _ => {
                let body = label.as_bytes();
                post.send(service.queue, id, "text/plain", body).await?;
            }
        }
        ledger.sent(id);
    }
    Ok(())
}

/// Runs one service. It acknowledges a message only after it has done its work or has
/// reported the failure, so that no message is lost in between.
pub async fn serve(
    connection: Arc<Connection>,
    ledger: Arc<Ledger>,
    index: usize,
) -> anyhow::Result<()> {
    let service = &SERVICES[index];
    let post = Post::open(&connection).await?;
    let channel = connection.create_channel().await?;
    let mut deliveries = amqp::subscribe(&channel, service.queue).await?;
    while let Some(delivery) = deliveries.next().await {
        let delivery = delivery?;
        let header = |name: &str| {
            let headers = delivery.properties.headers().as_ref()?;
            headers.inner().get(name)?.as_long_int()
        };
        let id = delivery.properties.message_id().as_ref();
        let id: Uuid = id.context("a message without an id")?.to_string().parse()?;
        let retries = header("x-retry-count").unwrap_or(0);
        let limit = header("x-max-retries").unwrap_or(0);
        let number = ledger.delivered(id, index, retries, &delivery.data);
        let back = format!("came back (retry {retries} of {limit})");
        match service.work(number, retries) {
            Ok(()) => {
                if retries > 0 {
                    ledger.tell(Mark::Done, id, &format!("{back} and is done"));
                }
                ledger.succeeded(id);
            }
            Err(failure) => {
                if retries > 0 {
                    ledger.tell(Mark::Back, id, &format!("{back} and fails again"));
                }
                ledger.failed(id);
                let failed = RetryMessage {
                    message_id: id.to_string(),
                    original_payload: delivery.data.clone(),
                    original_queue: service.queue.into(),
                    error_reason: failure.error.into(),
                    retry_count: retries,
                    error_class: failure.class.into(),
                    properties: Some(headers::from_amqp(&delivery.properties)),
                    ..RetryMessage::default()
                };
                post.report(id, failed).await?;
            }
        }
        delivery.ack(BasicAckOptions::default()).await?;
    }
    bail!("RabbitMQ ended the subscription to {}", service.queue)
}

/// Reads the review queue. It acknowledges nothing, so that all messages stay there for
/// people.
pub async fn review(connection: Arc<Connection>, ledger: Arc<Ledger>) -> anyhow::Result<()> {
    let channel = connection.create_channel().await?;
    let mut deliveries = amqp::subscribe(&channel, REVIEW).await?;
    while let Some(delivery) = deliveries.next().await {
        let message: ReviewMessage =
            serde_json::from_slice(&delivery?.data).context("reading a review message")?;
        // Garbage goes to review under a new id. The id that the producer set as an AMQP
        // property is then in `producer_id`; for the other messages that field is empty.
        let id = match message.producer_id.as_str() {
            "" => message.message_id.parse()?,
            own => own.parse()?,
        };
        ledger.tell(
            Mark::Review,
            id,
            &format!("→ review: {} ({})", message.reason, message.error),
        );
        ledger.reviewed(id, &message.original_payload);
    }
    bail!("RabbitMQ ended the subscription to {REVIEW}")
}

/// How many messages are ready in the review queue. While somebody reads them without
/// acknowledging, they are not counted.
pub async fn in_review_queue(connection: &Connection) -> lapin::Result<u32> {
    let channel = connection.create_channel().await?;
    Ok(amqp::inspect(&channel, REVIEW).await?.message_count())
}
