//! A delivery from an intake queue becomes a task.

pub(super) mod dead_letter;
mod json;
#[cfg(test)]
mod tests;

use std::time::Duration;

use lapin::{BasicProperties, types::ShortString};
use prost::Message;
use sha2::{Digest, Sha256};
use uuid::Uuid;

use dead_letter::Death;

use super::{
    cut, headers,
    proto::{
        ErrorClass as WireClass, Priority as WirePriority, Properties, RetryMessage,
        header_value::Kind,
    },
    republish, storable,
};
use crate::domain::{
    budget::Budget,
    classify::{self, ErrorClass},
    limits::{LATEST_MS, MAX_ERROR_BYTES, MAX_LABEL_BYTES, MAX_PROPERTIES_BYTES},
    policy::{Identity, PolicyBook, WhenUndelivered},
    queues::{AllowedQueues, name_problem},
    review::Reason,
    task::{Labels, NewTask, Priority},
};

/// Namespace of the UUIDs made from producers' own ids.
const PRODUCER_IDS: Uuid = Uuid::from_u128(0x6f1c_2d3a_9b7e_4c55_8e21_7d0b_5a94_f3c6);

/// What a delivery is judged by.
#[derive(Clone, Debug)]
pub struct Rules {
    /// The policies to choose from.
    pub book: PolicyBook,
    /// The queues that messages may go back to.
    pub allowed: AllowedQueues,
    /// The queue that the deliveries come from.
    pub intake_queue: String,
    /// What that queue holds.
    pub source: Source,
    /// No message gets more retries than this, whatever it asks for.
    pub max_retries_limit: i32,
    /// A message with a larger payload is not retried but goes to review.
    pub max_payload_bytes: usize,
}

/// What an intake queue holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// RetryMessages, in protobuf or JSON.
    RetryMessages,
    /// Messages as a dead-letter exchange hands them over.
    DeadLetters,
}

/// The content of a delivery.
#[derive(Debug)]
#[allow(missing_docs)] // the names are AMQP's
pub struct Arrived {
    pub body: Vec<u8>,
    pub properties: BasicProperties,
    /// Whether the broker may have delivered it before.
    pub redelivered: bool,
}

/// Turns a delivery into a task. A delivery that cannot be understood, or asks for
/// what is not allowed, becomes a task for review that holds it whole. `fresh` makes
/// an unused id, for deliveries without one and for those that become a case for review.
pub fn decode(arrived: Arrived, rules: &Rules, fresh: fn() -> Uuid) -> NewTask {
    let Arrived {
        body,
        properties,
        redelivered,
    } = arrived;
    let valid = match rules.source {
        Source::RetryMessages => {
            parse(&body, &properties).and_then(|message| validate(message, rules, fresh))
        }
        Source::DeadLetters => dead_letter::parse(&body, &properties).and_then(|dead| {
            let task = validate(dead.message, rules, fresh)?;
            let then = match dead.death {
                Death::Failed => WhenUndelivered::Retry,
                Death::Expired => task.policy.expired,
                Death::PushedOut => task.policy.maxlen,
            };
            Ok(NewTask {
                verdict: (then == WhenUndelivered::Review).then_some(Reason::Undelivered),
                producer_id: dead.producer_id.map(label).or(task.producer_id),
                // Where equal bodies are one message, an equal id is this message's own.
                unseen: dead.first_death
                    && !redelivered
                    && task.policy.identity == Identity::MessageId,
                ..task
            })
        }),
    };
    match valid {
        Ok(task) => task,
        Err(problem) => invalid(body, &properties, problem, rules, fresh),
    }
}

/// Turns a message that came by another way than a delivery into a task, by the same rules.
pub fn decode_message(message: RetryMessage, rules: &Rules, fresh: fn() -> Uuid) -> NewTask {
    let body = message.encode_to_vec();
    let id = ShortString::try_new(message.message_id.as_str()).unwrap_or_default();
    let properties = BasicProperties::default()
        .with_content_type("application/x-protobuf".into())
        .with_message_id(id);
    validate(message, rules, fresh)
        .unwrap_or_else(|problem| invalid(body, &properties, problem, rules, fresh))
}

/// Turns a message that the AMQP client could not read into a task for review, with what is
/// wrong with it.
pub fn unreadable(
    arrived: Arrived,
    problems: &[String],
    rules: &Rules,
    fresh: fn() -> Uuid,
) -> NewTask {
    let problem = format!(
        "the AMQP client cannot read this message: {}",
        problems.join("; ")
    );
    invalid(arrived.body, &arrived.properties, problem, rules, fresh)
}

/// The task for review that holds a delivery whole, with what is wrong with it.
fn invalid(
    body: Vec<u8>,
    properties: &BasicProperties,
    problem: String,
    rules: &Rules,
    fresh: fn() -> Uuid,
) -> NewTask {
    let policy = rules.book.choose("", &rules.intake_queue);
    NewTask {
        message_id: fresh(),
        producer_id: properties
            .message_id()
            .as_ref()
            .map(|id| storable(id.to_string())),
        payload: body,
        queue: rules.intake_queue.clone(),
        properties: headers::from_amqp(properties).encode_to_vec(),
        error: storable(cut(&problem, MAX_ERROR_BYTES).to_owned()),
        class: ErrorClass::Final,
        terminal: false,
        retry_after: None,
        not_before_ms: None,
        first_failed_at_ms: None,
        attempt: None,
        budget: Budget::default(),
        policy: policy.clone(),
        priority: Priority::Live,
        idempotency_key: None,
        labels: Labels::default(),
        unseen: false,
        verdict: Some(Reason::Invalid),
    }
}

fn parse(body: &[u8], properties: &BasicProperties) -> Result<RetryMessage, String> {
    let content_type = properties.content_type().as_ref().map(|t| t.as_str());
    let is_json = match content_type {
        Some(t) if t.contains("json") => true,
        Some(t) if t.contains("protobuf") => false,
        // A RetryMessage in protobuf cannot begin with `{`: that byte opens a group in
        // field 15, and field 15 is no group.
        _ => body.first() == Some(&b'{'),
    };
    if is_json {
        json::parse(body)
    } else {
        RetryMessage::decode(body).map_err(|e| format!("not a RetryMessage in protobuf: {e}"))
    }
}

fn validate(message: RetryMessage, rules: &Rules, fresh: fn() -> Uuid) -> Result<NewTask, String> {
    let queue = queue_name(message.original_queue, &rules.allowed)?;
    let payload = message.original_payload;
    if payload.len() > rules.max_payload_bytes {
        return Err(format!(
            "original_payload has {} bytes, more than MAX_PAYLOAD_BYTES ({})",
            payload.len(),
            rules.max_payload_bytes
        ));
    }
    let given = message.properties.unwrap_or_default();
    // The limit holds for both encodings: protobuf writes a small number in few
    // bytes, AMQP in as many as its type has.
    let properties = given.encode_to_vec();
    let size = properties.len().max(headers::size(&given));
    if size > MAX_PROPERTIES_BYTES {
        return Err(format!(
            "properties have {size} bytes, more than {MAX_PROPERTIES_BYTES}"
        ));
    }
    let policy = rules.book.choose(&message.category, &queue);
    let error = storable(cut(&message.error_reason, MAX_ERROR_BYTES).to_owned());
    let stated = match WireClass::try_from(message.error_class) {
        Ok(WireClass::Final) => Some(ErrorClass::Final),
        Ok(WireClass::Retryable) => Some(ErrorClass::Retryable),
        Ok(WireClass::RateLimited) => Some(ErrorClass::RateLimited),
        // The class may be one of a newer contract: then the error text decides.
        Ok(WireClass::Unspecified) | Err(_) => None,
    };
    let classified = classify::classify(stated, &error, policy);
    let retry_count = not_negative("retry_count", message.retry_count)?;
    let max_retries = match not_negative("max_retries", message.max_retries)? {
        0 => policy.max_retries,
        asked => asked,
    }
    .min(rules.max_retries_limit);
    let retry_after = match message.retry_after_ms {
        Some(ms) if !(0..=LATEST_MS).contains(&ms) => {
            return Err(format!("retry_after_ms {ms} is out of range"));
        }
        // A pause of zero is taken for none: it would spend no attempt, and the
        // message would go round for ever at full speed.
        Some(0) | None => None,
        Some(ms) => Some(Duration::from_millis(ms.unsigned_abs())),
    };
    let (message_id, producer_id) = match policy.identity {
        Identity::MessageId => identify(message.message_id, fresh),
        Identity::Payload => (
            lineage(&queue, &payload),
            (!message.message_id.is_empty()).then(|| label(message.message_id)),
        ),
    };
    let optional = |text: String| (!text.is_empty()).then(|| label(text));
    Ok(NewTask {
        message_id,
        producer_id,
        payload,
        properties,
        error,
        class: classified.class,
        terminal: classified.terminal,
        retry_after,
        not_before_ms: moment("next_retry_at_ms", message.next_retry_at_ms)?,
        first_failed_at_ms: moment("first_failed_at_ms", message.first_failed_at_ms)?,
        attempt: attempt(&given),
        budget: Budget {
            retry_count,
            max_retries,
        },
        policy: policy.clone(),
        priority: match WirePriority::try_from(message.priority) {
            Ok(WirePriority::Backfill) => Priority::Backfill,
            Ok(WirePriority::Live) | Err(_) => Priority::Live,
        },
        idempotency_key: idempotency_key(message.idempotency_key)?,
        labels: Labels {
            category: optional(message.category),
            operation: optional(message.operation),
            error_type: optional(message.error_type),
            tenant: optional(message.tenant_id),
            correlation_id: optional(message.correlation_id),
            trace_id: optional(message.trace_id),
        },
        queue,
        unseen: false,
        verdict: None,
    })
}

fn queue_name(queue: String, allowed: &AllowedQueues) -> Result<String, String> {
    if let Some(problem) = name_problem(&queue) {
        return Err(format!("original_queue {problem}"));
    }
    match allowed.refusal(&queue) {
        Some(why) => Err(format!("original_queue {queue:?} is refused: {why}")),
        None => Ok(queue),
    }
}

/// The attempt that failed. A dead letter bears our header, and so does a RetryMessage
/// with the headers of the message that failed.
fn attempt(properties: &Properties) -> Option<Uuid> {
    match &properties.headers.get(republish::ATTEMPT_ID)?.kind {
        Some(Kind::Text(id)) => Uuid::try_parse(id).ok(),
        _ => None,
    }
}

/// A key that is too long is refused rather than cut: two keys with the same
/// beginning name two failures.
fn idempotency_key(key: String) -> Result<Option<String>, String> {
    if key.len() > MAX_LABEL_BYTES {
        return Err(format!(
            "idempotency_key has {} bytes, more than {MAX_LABEL_BYTES}",
            key.len()
        ));
    }
    Ok((!key.is_empty()).then(|| storable(key)))
}

fn not_negative(field: &str, value: i32) -> Result<i32, String> {
    if value < 0 {
        return Err(format!("{field} is negative: {value}"));
    }
    Ok(value)
}

/// 0, and any moment before 1970, mean that the producer did not say.
fn moment(field: &str, ms: i64) -> Result<Option<i64>, String> {
    if ms > LATEST_MS {
        return Err(format!("{field} {ms} is after the year 9999"));
    }
    Ok((ms > 0).then_some(ms))
}

fn label(text: String) -> String {
    storable(cut(&text, MAX_LABEL_BYTES).to_owned())
}

/// The identity of a message: a UUID stays, other text becomes one and is kept
/// beside it.
fn identify(id: String, fresh: fn() -> Uuid) -> (Uuid, Option<String>) {
    if id.is_empty() {
        return (fresh(), None);
    }
    match Uuid::try_parse(&id) {
        Ok(uuid) => (uuid, None),
        Err(_) => (Uuid::new_v5(&PRODUCER_IDS, id.as_bytes()), Some(label(id))),
    }
}

/// The identity of a message whose producer gives it a new id at each failure, made of
/// queue and payload.
fn lineage(queue: &str, payload: &[u8]) -> Uuid {
    let mut hash = Sha256::new();
    hash.update((queue.len() as u64).to_be_bytes());
    hash.update(queue);
    hash.update(payload);
    let digest: [u8; 32] = hash.finalize().into();
    let mut bytes = [0; 16];
    bytes.copy_from_slice(&digest[..16]);
    uuid::Builder::from_custom_bytes(bytes).into_uuid()
}
