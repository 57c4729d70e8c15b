//! A due task becomes the message that goes back to its queue.

use lapin::{
    BasicProperties,
    types::{AMQPValue, FieldTable, LongString, ShortString},
};
use prost::Message;
use uuid::Uuid;

use super::{cut, headers, proto::Properties};
use crate::domain::task::Task;

/// The most bytes of error text in a header: it is a hint, and all headers together
/// must fit one frame.
const MAX_ERROR_HEADER_BYTES: usize = 1024;

/// The delivery mode of all that we publish: persistent, so that a restart of the
/// broker does not lose what is already settled.
const PERSISTENT: u8 = 2;

/// A message ready to be published.
#[derive(Debug)]
pub struct Outgoing {
    /// Unique in its batch, because returns are matched by it; [`retry_id`] finds it in the
    /// properties.
    pub message_id: Uuid,
    /// The queue, which is the routing key on the default exchange.
    pub queue: ShortString,
    /// The routing key to bear instead, when the message had another one at first.
    pub routing_key: Option<ShortString>,
    /// The AMQP properties, headers included.
    pub properties: BasicProperties,
    /// The body, byte for byte.
    pub body: Vec<u8>,
}

/// The header that carries a message's identity.
pub(super) const RETRY_ID: &str = "x-retry-id";
/// The header that says how many retries were made, this one included.
pub(super) const RETRY_COUNT: &str = "x-retry-count";
/// The header that carries the id of this one attempt.
pub(super) const ATTEMPT_ID: &str = "x-retry-attempt-id";
/// The header that names the exchange that the message was first published to.
pub(super) const ORIGINAL_EXCHANGE: &str = "x-original-exchange";
/// The header that carries the routing key it was first published with.
pub(super) const ORIGINAL_ROUTING_KEY: &str = "x-original-routing-key";
/// The header that says how many retries are allowed.
const MAX_RETRIES: &str = "x-max-retries";
/// The header with the beginning of the error text.
const ORIGINAL_ERROR: &str = "x-original-error";
/// The header that names this service.
const SCHEDULER: &str = "x-retry-scheduler";

/// Whether a lower-case header name is one that we write.
pub(super) fn is_ours(name: &str) -> bool {
    [
        RETRY_ID,
        RETRY_COUNT,
        ATTEMPT_ID,
        ORIGINAL_EXCHANGE,
        ORIGINAL_ROUTING_KEY,
        MAX_RETRIES,
        ORIGINAL_ERROR,
        SCHEDULER,
    ]
    .contains(&name)
}

/// The original message with its properties restored, and headers of ours that say
/// which message and which attempt it is. The task's payload moves into it. Fails
/// only when the row holds a queue name or properties that no version of ours wrote.
pub fn republish(task: &mut Task, service: &str) -> Result<Outgoing, String> {
    let queue = ShortString::try_new(task.queue.as_str()).map_err(|e| e.to_string())?;
    let original = Properties::decode(task.properties.as_slice())
        .map_err(|e| format!("the stored properties cannot be read: {e}"))?;
    let exchange = original.exchange.clone();
    let routing_key = original.routing_key.clone();
    let restored = headers::to_amqp(original);
    let mut table = restored.headers().clone().unwrap_or_default();
    let id = task.message_id.to_string();
    insert(&mut table, RETRY_ID, text(&id));
    let restored = match restored.message_id() {
        Some(_) => restored,
        None => restored.with_message_id(id.into()),
    };
    insert(
        &mut table,
        RETRY_COUNT,
        AMQPValue::LongInt(task.next_count()),
    );
    let attempt = task.attempt_id().to_string();
    insert(&mut table, ATTEMPT_ID, text(&attempt));
    insert(
        &mut table,
        MAX_RETRIES,
        AMQPValue::LongInt(task.budget.max_retries),
    );
    insert(&mut table, SCHEDULER, text(service));
    if let Some(key) = &routing_key {
        insert(&mut table, ORIGINAL_EXCHANGE, text(&exchange));
        insert(&mut table, ORIGINAL_ROUTING_KEY, text(key));
    }
    if let Some(error) = &task.error {
        let hint = cut(error, MAX_ERROR_HEADER_BYTES);
        insert(&mut table, ORIGINAL_ERROR, text(hint));
    }
    Ok(Outgoing {
        message_id: task.message_id,
        queue,
        // A key that AMQP cannot carry was no routing key; the queue's name must do.
        routing_key: routing_key.and_then(|key| ShortString::try_new(key).ok()),
        properties: persistent(restored.with_headers(table)),
        body: std::mem::take(&mut task.payload),
    })
}

/// The id by which a published message is known to us: the header on a republish, else
/// the `message_id`.
pub fn retry_id(properties: &BasicProperties) -> Option<String> {
    let header = properties
        .headers()
        .as_ref()
        .and_then(|headers| headers.inner().get(RETRY_ID))
        .and_then(AMQPValue::as_long_string);
    match header {
        Some(id) => Some(id.to_string()),
        None => properties.message_id().as_ref().map(ToString::to_string),
    }
}

/// The same properties with a header that routes the message by `key` as well, and that
/// the broker removes.
pub fn with_bcc(properties: BasicProperties, key: &str) -> BasicProperties {
    let mut table = properties.headers().clone().unwrap_or_default();
    insert(
        &mut table,
        "BCC",
        AMQPValue::FieldArray(vec![text(key)].into()),
    );
    properties.with_headers(table)
}

pub(super) fn insert(table: &mut FieldTable, name: &str, value: AMQPValue) {
    table.insert(name.into(), value);
}

pub(super) fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(LongString::from(value))
}

/// Sets the delivery mode of all that we publish.
pub(super) fn persistent(properties: BasicProperties) -> BasicProperties {
    properties.with_delivery_mode(PERSISTENT)
}
