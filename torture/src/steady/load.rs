//! The producer and the consumers of a steady load. Nothing disturbs them, so any error of theirs ends the run.

use std::{
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use anyhow::{Context, ensure};
use futures::{StreamExt, future::try_join_all};
use lapin::{
    BasicProperties, Channel, Confirmation,
    message::Delivery,
    options::{BasicAckOptions, BasicNackOptions, BasicPublishOptions, BasicQosOptions},
    types::{AMQPValue, FieldTable, LongString},
};
use retry_scheduler::wire::proto::ReviewMessage;
use testkit::amqp;
use tokio::time::{Instant, MissedTickBehavior, interval};

use super::{
    oracle::Oracle,
    parcel::{Fate, LETTERS, Parcel},
};
use crate::{
    message::{DEAD_LETTERS, INTAKE, REVIEW},
    post::open,
};

const PREFETCH: u16 = 200;

/// How often the producer sends the messages that are due.
const TICK: Duration = Duration::from_millis(50);

/// Publishes messages, and waits until RabbitMQ has confirmed all of them.
async fn publish(channel: &Channel, messages: Vec<(&str, Parcel, Vec<u8>)>) -> anyhow::Result<()> {
    let mandatory = BasicPublishOptions {
        mandatory: true,
        ..BasicPublishOptions::default()
    };
    let mut confirms = Vec::with_capacity(messages.len());
    for (queue, parcel, body) in messages {
        let properties = BasicProperties::default()
            .with_message_id(parcel.number.to_string().into())
            .with_delivery_mode(2);
        let publish = channel.basic_publish("".into(), queue.into(), mandatory, &body, properties);
        confirms.push(publish.await?);
    }
    for answer in try_join_all(confirms).await? {
        ensure!(
            matches!(answer, Confirmation::Ack(None)),
            "RabbitMQ did not take a message"
        );
    }
    Ok(())
}

/// Sends `rate` parcels a second for `time`.
pub async fn produce(
    url: String,
    oracle: Arc<Oracle>,
    rate: u32,
    time: Duration,
) -> anyhow::Result<()> {
    let (_connection, channel) = open(&url).await?;
    let begun = Instant::now();
    let mut tick = interval(TICK);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while begun.elapsed() < time {
        tick.tick().await;
        let due = usize::try_from(begun.elapsed().as_millis() * u128::from(rate) / 1000)?;
        let mut messages = Vec::new();
        for number in oracle.count()..due {
            let parcel = Parcel::new(number, now());
            oracle.sent();
            match parcel.fate() {
                Fate::Letter => messages.push((LETTERS, parcel, parcel.payload())),
                Fate::Keyed => messages.extend(vec![(INTAKE, parcel, parcel.report(None)); 2]),
                _ => messages.push((INTAKE, parcel, parcel.report(None))),
            }
        }
        publish(&channel, messages).await?;
    }
    Ok(())
}

/// Consumes one queue until this future is dropped.
pub async fn consume(url: String, queue: &'static str, oracle: Arc<Oracle>) -> anyhow::Result<()> {
    let (_connection, channel) = open(&url).await?;
    declare(&channel, queue).await?;
    channel
        .basic_qos(PREFETCH, BasicQosOptions::default())
        .await?;
    let consumer = amqp::subscribe(&channel, queue).await?;
    let mut chunks = consumer.ready_chunks(usize::from(PREFETCH));
    loop {
        let chunk = chunks.next().await.context("the subscription ended")?;
        let mut fail = Vec::new();
        let mut reject = Vec::new();
        let mut done = Vec::new();
        for delivery in chunk {
            let delivery = delivery?;
            if queue == REVIEW {
                reviewed(&oracle, &delivery);
            } else if queue == LETTERS && retries(&delivery).is_none() {
                reject.push(delivery);
                continue;
            } else if let Some((parcel, report)) = came_back(&oracle, queue, &delivery) {
                fail.push((INTAKE, parcel, report));
            }
            done.push(delivery);
        }
        publish(&channel, fail).await?;
        for delivery in done {
            delivery.ack(BasicAckOptions::default()).await?;
        }
        for delivery in reject {
            let to_dlx = BasicNackOptions {
                requeue: false,
                ..BasicNackOptions::default()
            };
            delivery.nack(to_dlx).await?;
        }
    }
}

async fn declare(channel: &Channel, queue: &str) -> lapin::Result<()> {
    let mut arguments = FieldTable::default();
    if queue == LETTERS {
        let text = |text: &str| AMQPValue::LongString(LongString::from(text));
        arguments.insert("x-dead-letter-exchange".into(), text(""));
        arguments.insert("x-dead-letter-routing-key".into(), text(DEAD_LETTERS));
    }
    amqp::declare(channel, queue, arguments).await?;
    Ok(())
}

fn retries(delivery: &Delivery) -> Option<i32> {
    let headers = delivery.properties.headers().as_ref()?;
    headers.inner().get("x-retry-count")?.as_long_int()
}

/// Records a parcel that came back. If it is to fail again, returns it and the report of that.
fn came_back(oracle: &Oracle, queue: &str, delivery: &Delivery) -> Option<(Parcel, Vec<u8>)> {
    let parcel = Parcel::of_payload(&delivery.data);
    let (Some(parcel), Some(count)) = (parcel, retries(delivery)) else {
        oracle.unexpected(format!("{queue} got something strange"));
        return None;
    };
    if parcel.queue() != queue {
        oracle.unexpected(format!("{parcel:?} came to {queue}"));
    }
    if now() < parcel.not_before {
        oracle.unexpected(format!("{parcel:?} came too early"));
    }
    oracle.arrived(parcel, Some(count));
    parcel
        .fails(count)
        .then(|| (parcel, parcel.report(Some(count))))
}

fn reviewed(oracle: &Oracle, delivery: &Delivery) {
    let review = serde_json::from_slice::<ReviewMessage>(&delivery.data);
    let parcel = review.as_ref().ok().and_then(|review| {
        let parcel = Parcel::of_payload(&review.original_payload)?;
        (parcel.reason() == Some(review.reason.as_str())).then_some(parcel)
    });
    match parcel {
        Some(parcel) => oracle.arrived(parcel, None),
        None => {
            let what = review.map_or_else(
                |e| e.to_string(),
                |review| {
                    let (id, reason) = (review.message_id, review.reason);
                    format!("{id} as {reason}: {}", review.error)
                },
            );
            oracle.unexpected(format!("review got {what}"));
        }
    }
}

/// Unix time in ms.
fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    u64::try_from(since.unwrap_or_default().as_millis()).unwrap_or(u64::MAX)
}
