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

/// A message ready to be published to the default exchange.
#[derive(Debug)]
pub struct Outgoing {
    /// Unique in its batch, because returns are matched by it; also in the properties.
    pub message_id: Uuid,
    /// The queue, which is the routing key on the default exchange.
    pub queue: ShortString,
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
const ATTEMPT_ID: &str = "x-retry-attempt-id";
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
    let restored = headers::to_amqp(original);
    let mut table = restored.headers().clone().unwrap_or_default();
    let id = task.message_id.to_string();
    insert(&mut table, RETRY_ID, text(&id));
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
    if let Some(error) = &task.error {
        let hint = cut(error, MAX_ERROR_HEADER_BYTES);
        insert(&mut table, ORIGINAL_ERROR, text(hint));
    }
    Ok(Outgoing {
        message_id: task.message_id,
        queue,
        properties: persistent(restored.with_message_id(id.into()).with_headers(table)),
        body: std::mem::take(&mut task.payload),
    })
}

fn insert(table: &mut FieldTable, name: &str, value: AMQPValue) {
    table.insert(name.into(), value);
}

fn text(value: &str) -> AMQPValue {
    AMQPValue::LongString(LongString::from(value))
}

/// Sets the delivery mode of all that we publish.
pub(super) fn persistent(properties: BasicProperties) -> BasicProperties {
    properties.with_delivery_mode(PERSISTENT)
}
