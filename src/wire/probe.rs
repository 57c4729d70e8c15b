//! A message that is sent round a dead-letter loop to see whether it comes back.

use lapin::{
    BasicProperties,
    types::{AMQPValue, ShortString},
};
use uuid::Uuid;

use super::{
    Arrived, Outgoing,
    decode::dead_letter,
    headers,
    republish::{RETRY_ID, insert, persistent, text},
};

/// The header that marks a probe, and names it.
const PROBE: &str = "x-retry-doctor-probe";

const BODY: &[u8] = b"A probe of `retry-scheduler doctor`. It means nothing and may be deleted.";

/// A probe for a queue, with the routing key that its messages bear. `message_id` is the
/// producer's id, by which the store finds it.
pub fn probe(id: Uuid, message_id: &str, queue: &str, key: &str) -> Result<Outgoing, String> {
    let short = |text: &str| ShortString::try_new(text).map_err(|e| e.to_string());
    let mut table = lapin::types::FieldTable::default();
    insert(&mut table, PROBE, text(&id.to_string()));
    let properties = BasicProperties::default()
        .with_message_id(short(message_id)?)
        .with_app_id("retry-scheduler doctor".into())
        .with_headers(table);
    Ok(Outgoing {
        message_id: id,
        queue: short(queue)?,
        routing_key: Some(short(key)?),
        properties: persistent(properties),
        body: BODY.to_vec(),
    })
}

/// Whether a message is the probe with this id.
pub fn is_probe(arrived: &Arrived, id: Uuid) -> bool {
    let headers = arrived.properties.headers().as_ref();
    let name = headers
        .and_then(|headers| headers.inner().get(PROBE))
        .and_then(AMQPValue::as_long_string);
    name.is_some_and(|name| name.as_bytes() == id.to_string().as_bytes())
}

/// A probe that has died, as the service would send it back: with the key that it first had.
pub fn probe_again(dead: &Arrived, id: Uuid) -> Result<Outgoing, String> {
    let dead = dead_letter::parse(&dead.body, &dead.properties)?.message;
    let short = |text: &str| ShortString::try_new(text).map_err(|e| e.to_string());
    let original = dead.properties.unwrap_or_default();
    let key = original.routing_key.as_deref().map(short).transpose()?;
    let restored = headers::to_amqp(original);
    let mut table = restored.headers().clone().unwrap_or_default();
    insert(&mut table, RETRY_ID, text(&id.to_string()));
    Ok(Outgoing {
        message_id: id,
        queue: short(&dead.original_queue)?,
        routing_key: key,
        properties: persistent(restored.with_headers(table)),
        body: dead.original_payload,
    })
}

#[cfg(test)]
mod tests {
    use lapin::types::{FieldTable, LongString};

    use super::*;

    #[test]
    fn a_dead_probe_is_sent_back_to_its_queue_with_its_key_and_without_its_deaths() {
        let id = Uuid::from_u128(7);
        let first = probe(id, "doctor-7", "orders", "order.created").unwrap();
        let mut death = FieldTable::default();
        let long = |text: &str| AMQPValue::LongString(LongString::from(text));
        death.insert("queue".into(), long("orders"));
        let keys = AMQPValue::FieldArray(vec![long("order.created")].into());
        death.insert("routing-keys".into(), keys);
        let mut table = first.properties.headers().clone().unwrap();
        let deaths = AMQPValue::FieldArray(vec![AMQPValue::FieldTable(death)].into());
        table.insert("x-death".into(), deaths);
        let dead = Arrived {
            body: first.body,
            properties: first.properties.with_headers(table),
            redelivered: false,
        };
        assert!(is_probe(&dead, id));
        assert!(!is_probe(&dead, Uuid::from_u128(8)));
        let again = probe_again(&dead, id).unwrap();
        assert_eq!(again.queue.as_str(), "orders");
        assert_eq!(again.routing_key.unwrap().as_str(), "order.created");
        let headers = again.properties.headers().clone().unwrap();
        assert!(!headers.contains_key("x-death"));
        assert!(headers.contains_key(PROBE) && headers.contains_key(RETRY_ID));
        assert_eq!(again.properties.delivery_mode(), &Some(2));
    }
}
