//! A message as a dead-letter exchange hands it over becomes a RetryMessage.
//!
//! The first entry of `x-death` is the latest death: it names the queue that the message
//! died in, and so goes back to. The headers that an earlier republish put on it say which message
//! it is and how often it was tried.

use lapin::{
    BasicProperties,
    types::{AMQPValue, FieldTable},
};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::wire::{headers, proto::RetryMessage, republish};

/// Namespace of the identities of dead letters that we have not seen before.
const FIRST_DEATHS: Uuid = Uuid::from_u128(0x0d7e_51b0_3c1f_4f0a_9f5e_2b86_c1d4_7a39);

/// A dead letter that was understood.
#[derive(Debug)]
pub(in crate::wire) struct DeadLetter {
    pub message: RetryMessage,
    /// The producer's own id, of a message that we have not seen before.
    pub producer_id: Option<String>,
    /// Whether we have not seen the message before: it bears no header of ours.
    pub first_death: bool,
    pub death: Death,
}

/// How a message died.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::wire) enum Death {
    /// A consumer failed: it rejected the message, or lost it too often.
    Failed,
    /// Its time to live in the queue was over.
    Expired,
    /// The queue was full.
    PushedOut,
}

/// Reads a dead letter.
pub(in crate::wire) fn parse(
    body: &[u8],
    properties: &BasicProperties,
) -> Result<DeadLetter, String> {
    let headers = properties.headers().as_ref();
    let death = headers
        .and_then(|h| h.inner().get("x-death"))
        .and_then(AMQPValue::as_array)
        .and_then(|deaths| deaths.as_slice().first())
        .and_then(AMQPValue::as_field_table)
        .ok_or("not a dead letter: it has no x-death header")?;
    let queue = text(death, "queue").ok_or("x-death does not name a queue")?;
    let reason = text(death, "reason").unwrap_or_else(|| "an unknown reason".into());
    let ours = |name| headers.and_then(|h| text(h, name));
    let retry_count = headers
        .and_then(|h| h.inner().get(republish::RETRY_COUNT))
        .and_then(number)
        .and_then(|n| i32::try_from(n).ok())
        .map_or(0, |n| n.max(0));
    let mut kept = headers::from_amqp(properties);
    let retry_id = ours(republish::RETRY_ID);
    let first_death = retry_id.is_none();
    if first_death {
        kept.exchange = text(death, "exchange").unwrap_or_default();
        kept.routing_key = routing_key(death);
    } else {
        // This death is of a republish, by our exchange; our headers tell of the first one.
        kept.exchange = ours(republish::ORIGINAL_EXCHANGE).unwrap_or_default();
        kept.routing_key = ours(republish::ORIGINAL_ROUTING_KEY);
    }
    let producer_id = properties.message_id().as_ref().map(ToString::to_string);
    let message_id = match (retry_id, &producer_id) {
        (Some(id), _) => id,
        (None, Some(id)) => publication(&queue, id, death, body),
        (None, None) => String::new(),
    };
    let (death, error_reason) = match reason.as_str() {
        "expired" => (
            Death::Expired,
            format!("expired in queue {queue} after waiting"),
        ),
        "maxlen" => (
            Death::PushedOut,
            format!("pushed out of the full queue {queue}"),
        ),
        _ => (
            Death::Failed,
            format!("dead-lettered from {queue}: {reason}"),
        ),
    };
    let message = RetryMessage {
        message_id,
        original_payload: body.to_vec(),
        error_reason,
        original_queue: queue,
        retry_count,
        properties: Some(kept),
        ..RetryMessage::default()
    };
    Ok(DeadLetter {
        message,
        producer_id: producer_id.filter(|_| first_death),
        first_death,
        death,
    })
}

/// The identity of one publication's first death in one queue: the same each time this dead
/// letter is delivered to us. A producer may use an id again (an order that is created, then
/// paid; a job that runs every minute), so the body and the second of the death count too.
fn publication(queue: &str, producer_id: &str, death: &FieldTable, body: &[u8]) -> String {
    let time = match death.inner().get("time") {
        Some(AMQPValue::Timestamp(seconds)) => *seconds,
        _ => 0,
    };
    let mut name = format!("{queue}\u{1f}{producer_id}\u{1f}{time}\u{1f}").into_bytes();
    name.extend_from_slice(&Sha256::digest(body));
    Uuid::new_v5(&FIRST_DEATHS, &name).to_string()
}

/// The routing key of a death; further keys are those of the header `CC`.
fn routing_key(death: &FieldTable) -> Option<String> {
    let keys = death.inner().get("routing-keys")?.as_array()?;
    let key = keys.as_slice().first()?.as_long_string()?;
    Some(key.to_string())
}

fn text(table: &FieldTable, name: &str) -> Option<String> {
    match table.inner().get(name)? {
        AMQPValue::LongString(text) => Some(text.to_string()),
        AMQPValue::ShortString(text) => Some(text.to_string()),
        _ => None,
    }
}

/// An integer header of any width: clients rewrite headers, and not all keep it.
fn number(value: &AMQPValue) -> Option<i64> {
    match value {
        AMQPValue::ShortShortInt(n) => Some((*n).into()),
        AMQPValue::ShortShortUInt(n) => Some((*n).into()),
        AMQPValue::ShortInt(n) => Some((*n).into()),
        AMQPValue::ShortUInt(n) => Some((*n).into()),
        AMQPValue::LongInt(n) => Some((*n).into()),
        AMQPValue::LongUInt(n) => Some((*n).into()),
        AMQPValue::LongLongInt(n) => Some(*n),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dead(headers: Vec<(&str, AMQPValue)>) -> BasicProperties {
        let mut table = FieldTable::default();
        for (name, value) in headers {
            table.insert(name.into(), value);
        }
        BasicProperties::default()
            .with_message_id("order-1".into())
            .with_headers(table)
    }

    fn died(queue: &str, time: u64) -> AMQPValue {
        death_at(AMQPValue::LongString(queue.into()), time)
    }

    fn death(queue: AMQPValue) -> AMQPValue {
        death_at(queue, 1)
    }

    fn death_at(queue: AMQPValue, time: u64) -> AMQPValue {
        let text = |text: &str| AMQPValue::LongString(text.into());
        let mut table = FieldTable::default();
        table.insert("queue".into(), queue);
        table.insert("reason".into(), text("rejected"));
        table.insert("time".into(), AMQPValue::Timestamp(time));
        table.insert("exchange".into(), text("events"));
        table.insert(
            "routing-keys".into(),
            AMQPValue::FieldArray(vec![text("order.created")].into()),
        );
        AMQPValue::FieldArray(vec![AMQPValue::FieldTable(table)].into())
    }

    fn in_queue(name: &str) -> AMQPValue {
        death(AMQPValue::LongString(name.into()))
    }

    #[test]
    fn a_first_death_is_understood_from_the_brokers_headers() {
        let in_orders = dead(vec![("x-death", in_queue("orders"))]);
        let first = parse(b"body", &in_orders).unwrap();
        assert!(first.first_death);
        assert_eq!(first.message.original_queue, "orders");
        assert_eq!(first.message.original_payload, b"body");
        assert_eq!(first.producer_id.as_deref(), Some("order-1"));
        assert_eq!(first.message.retry_count, 0);
        assert_eq!(
            first.message.error_reason,
            "dead-lettered from orders: rejected"
        );
        let kept = first.message.properties.unwrap();
        assert_eq!(kept.message_id, "order-1");
        assert_eq!(kept.exchange, "events");
        assert_eq!(kept.routing_key.as_deref(), Some("order.created"));
    }

    #[test]
    fn a_publication_is_one_message_however_often_it_is_delivered_and_no_other() {
        let id = |body: &[u8], death: AMQPValue| {
            let properties = dead(vec![("x-death", death)]);
            parse(body, &properties).unwrap().message.message_id
        };
        let first = id(b"created", died("orders", 100));
        assert_eq!(first, id(b"created", died("orders", 100)));
        assert_ne!(first, id(b"paid", died("orders", 100)), "another body");
        assert_ne!(first, id(b"created", died("orders", 160)), "a minute later");
        assert_ne!(first, id(b"created", died("audit", 100)), "another queue");
    }

    #[test]
    fn a_later_death_is_recognised_by_our_own_headers() {
        let properties = dead(vec![
            ("x-death", in_queue("orders")),
            ("x-retry-id", AMQPValue::LongString("the-id".into())),
            ("x-retry-count", AMQPValue::LongLongInt(2)),
            ("x-original-exchange", AMQPValue::LongString("first".into())),
            ("x-original-routing-key", AMQPValue::LongString("k".into())),
        ]);
        let later = parse(b"", &properties).unwrap();
        assert!(!later.first_death);
        assert_eq!(later.producer_id, None);
        assert_eq!(later.message.message_id, "the-id");
        assert_eq!(later.message.retry_count, 2);
        let kept = later.message.properties.unwrap();
        assert_eq!(kept.message_id, "order-1");
        assert_eq!(kept.exchange, "first");
        assert_eq!(kept.routing_key.as_deref(), Some("k"));
    }

    #[test]
    fn what_expired_or_was_pushed_out_is_told_from_what_failed() {
        for (reason, death, error) in [
            ("rejected", Death::Failed, "dead-lettered from q: rejected"),
            (
                "delivery_limit",
                Death::Failed,
                "dead-lettered from q: delivery_limit",
            ),
            (
                "expired",
                Death::Expired,
                "expired in queue q after waiting",
            ),
            ("maxlen", Death::PushedOut, "pushed out of the full queue q"),
        ] {
            let text = |text: &str| AMQPValue::LongString(text.into());
            let mut newest = FieldTable::default();
            newest.insert("queue".into(), text("q"));
            newest.insert("reason".into(), text(reason));
            let mut older = FieldTable::default();
            older.insert("queue".into(), text("other"));
            older.insert("reason".into(), text("expired"));
            let deaths = [newest, older].map(AMQPValue::FieldTable).to_vec();
            let deaths = AMQPValue::FieldArray(deaths.into());
            let dead = parse(b"", &dead(vec![("x-death", deaths)])).unwrap();
            assert_eq!(dead.death, death);
            assert_eq!(dead.message.error_reason, error);
        }
    }

    #[test]
    fn a_death_that_tells_nothing_but_its_queue_is_enough() {
        let mut death = FieldTable::default();
        death.insert("queue".into(), AMQPValue::LongString("orders".into()));
        let deaths = AMQPValue::FieldArray(vec![AMQPValue::FieldTable(death)].into());
        let dead = parse(b"body", &dead(vec![("x-death", deaths)])).unwrap();
        assert!(dead.message.error_reason.contains("an unknown reason"));
        let kept = dead.message.properties.unwrap();
        assert_eq!((kept.exchange.as_str(), kept.routing_key), ("", None));
    }

    #[test]
    fn hostile_headers_are_refused_or_ignored() {
        for properties in [
            BasicProperties::default(),
            dead(vec![]),
            dead(vec![("x-death", AMQPValue::Boolean(true))]),
            dead(vec![("x-death", AMQPValue::FieldArray(vec![].into()))]),
            dead(vec![("x-death", death(AMQPValue::LongInt(7)))]),
        ] {
            assert!(parse(b"x", &properties).is_err());
        }
        for count in [
            AMQPValue::LongLongInt(i64::MIN),
            AMQPValue::LongLongInt(i64::MAX),
            AMQPValue::LongString("three".into()),
        ] {
            let properties = dead(vec![("x-death", in_queue("q")), ("x-retry-count", count)]);
            assert_eq!(parse(b"x", &properties).unwrap().message.retry_count, 0);
        }
    }
}
