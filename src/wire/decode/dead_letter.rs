//! A message as a dead-letter exchange hands it over becomes a RetryMessage.
//!
//! The first entry of `x-death` names the queue that the message died in, and so
//! goes back to. The headers that an earlier republish put on it say which message
//! it is and how often it was tried.

use lapin::{
    BasicProperties,
    types::{AMQPValue, FieldTable},
};
use uuid::Uuid;

use crate::wire::{headers, proto::RetryMessage, republish};

/// Namespace of the identities of dead letters that we have not seen before.
const FIRST_DEATHS: Uuid = Uuid::from_u128(0x0d7e_51b0_3c1f_4f0a_9f5e_2b86_c1d4_7a39);

/// The message and, beside it, its producer's own id. The id of a first death is
/// made from the queue and the producer's id: an event that was routed to several
/// queues and died in two of them is two messages.
pub(super) fn parse(
    body: &[u8],
    properties: &BasicProperties,
) -> Result<(RetryMessage, Option<String>), String> {
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
    let producer_id = properties.message_id().as_ref().map(ToString::to_string);
    let first_death = |id: &String| {
        let place = format!("{queue}\u{1f}{id}");
        Uuid::new_v5(&FIRST_DEATHS, place.as_bytes()).to_string()
    };
    let (message_id, producer_id) = match ours(republish::RETRY_ID) {
        Some(id) => (id, None),
        None => (
            producer_id.as_ref().map(first_death).unwrap_or_default(),
            producer_id,
        ),
    };
    let message = RetryMessage {
        message_id,
        original_payload: body.to_vec(),
        error_reason: format!("dead-lettered from {queue}: {reason}"),
        original_queue: queue,
        retry_count,
        properties: Some(headers::from_amqp(properties)),
        ..RetryMessage::default()
    };
    Ok((message, producer_id))
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

    fn death(queue: AMQPValue) -> AMQPValue {
        let mut table = FieldTable::default();
        table.insert("queue".into(), queue);
        table.insert("reason".into(), AMQPValue::LongString("rejected".into()));
        AMQPValue::FieldArray(vec![AMQPValue::FieldTable(table)].into())
    }

    fn in_queue(name: &str) -> AMQPValue {
        death(AMQPValue::LongString(name.into()))
    }

    #[test]
    fn a_first_death_is_understood_from_the_brokers_headers() {
        let in_orders = dead(vec![("x-death", in_queue("orders"))]);
        let (message, producer_id) = parse(b"body", &in_orders).unwrap();
        assert_eq!(message.original_queue, "orders");
        assert_eq!(message.original_payload, b"body");
        assert_eq!(producer_id.as_deref(), Some("order-1"));
        assert_eq!(message.retry_count, 0);
        let again = parse(b"body", &in_orders).unwrap().0;
        assert_eq!(message.message_id, again.message_id);
        let copy = dead(vec![("x-death", in_queue("audit"))]);
        let copy = parse(b"body", &copy).unwrap().0;
        assert_ne!(
            message.message_id, copy.message_id,
            "fan-out makes two messages"
        );
        assert_eq!(message.error_reason, "dead-lettered from orders: rejected");
    }

    #[test]
    fn a_later_death_is_recognised_by_our_own_headers() {
        let properties = dead(vec![
            ("x-death", in_queue("orders")),
            ("x-retry-id", AMQPValue::LongString("the-id".into())),
            ("x-retry-count", AMQPValue::LongLongInt(2)),
        ]);
        let message = parse(b"", &properties).unwrap().0;
        assert_eq!(message.message_id, "the-id");
        assert_eq!(message.retry_count, 2);
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
            assert_eq!(parse(b"x", &properties).unwrap().0.retry_count, 0);
        }
    }
}
