//! A delivery from an intake queue becomes a task.

pub(super) mod dead_letter;
mod json;

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

#[cfg(test)]
mod tests {
    use lapin::types::{AMQPValue, FieldTable};

    use super::*;
    use crate::domain::policy::Policy;

    const FRESH: Uuid = Uuid::from_u128(42);

    fn rules() -> Rules {
        let own = ["retry.scheduled", "manual-review.pending"];
        Rules {
            book: PolicyBook::parse("", Policy::default()).unwrap(),
            allowed: AllowedQueues::new(own.map(String::from).into(), None),
            intake_queue: "retry.scheduled".into(),
            source: Source::RetryMessages,
            max_retries_limit: 100,
            max_payload_bytes: 100,
        }
    }

    fn message() -> RetryMessage {
        RetryMessage {
            message_id: "0198f6f0-0000-7000-8000-000000000001".into(),
            original_payload: b"body".to_vec(),
            original_queue: "invoices".into(),
            error_reason: "timeout".into(),
            ..RetryMessage::default()
        }
    }

    fn decoded(message: &RetryMessage) -> NewTask {
        decode(
            Arrived {
                body: message.encode_to_vec(),
                properties: BasicProperties::default(),
                redelivered: false,
            },
            &rules(),
            || FRESH,
        )
    }

    #[test]
    fn a_plain_message_is_understood() {
        let task = decoded(&message());
        assert_eq!(task.verdict, None);
        assert_eq!(task.queue, "invoices");
        assert_eq!(task.payload, b"body");
        assert_eq!(task.budget.max_retries, 3);
        assert_eq!(task.producer_id, None);
        assert_eq!(
            task.message_id.to_string(),
            "0198f6f0-0000-7000-8000-000000000001"
        );
    }

    #[test]
    fn an_id_that_is_no_uuid_always_maps_to_the_same_one() {
        let with_id = |id: &str| {
            decoded(&RetryMessage {
                message_id: id.into(),
                ..message()
            })
        };
        let order = with_id("order-7");
        assert_eq!(order.message_id, with_id("order-7").message_id);
        assert_ne!(order.message_id, with_id("order-8").message_id);
        assert_eq!(order.producer_id.as_deref(), Some("order-7"));
        assert_eq!(with_id("").message_id, FRESH);
    }

    #[test]
    fn what_is_not_allowed_is_kept_whole_for_review() {
        let bad: [(&str, RetryMessage); 11] = [
            (
                "original_queue is empty",
                RetryMessage {
                    original_queue: String::new(),
                    ..message()
                },
            ),
            (
                "more than 255",
                RetryMessage {
                    original_queue: "q".repeat(256),
                    ..message()
                },
            ),
            (
                "control characters",
                RetryMessage {
                    original_queue: "a\r\nb".into(),
                    ..message()
                },
            ),
            (
                "own queues",
                RetryMessage {
                    original_queue: "retry.scheduled".into(),
                    ..message()
                },
            ),
            (
                "belong to the broker",
                RetryMessage {
                    original_queue: "amq.gen-1".into(),
                    ..message()
                },
            ),
            (
                "MAX_PAYLOAD_BYTES",
                RetryMessage {
                    original_payload: vec![0; 101],
                    ..message()
                },
            ),
            (
                "retry_count is negative",
                RetryMessage {
                    retry_count: i32::MIN,
                    ..message()
                },
            ),
            (
                "max_retries is negative",
                RetryMessage {
                    max_retries: -1,
                    ..message()
                },
            ),
            (
                "after the year 9999",
                RetryMessage {
                    next_retry_at_ms: i64::MAX,
                    ..message()
                },
            ),
            (
                "out of range",
                RetryMessage {
                    retry_after_ms: Some(-1),
                    ..message()
                },
            ),
            (
                "properties have",
                RetryMessage {
                    properties: Some(crate::wire::proto::Properties {
                        app_id: "x".repeat(70_000),
                        ..Default::default()
                    }),
                    ..message()
                },
            ),
        ];
        for (why, message) in bad {
            let task = decoded(&message);
            assert_eq!(task.verdict, Some(Reason::Invalid), "{why}");
            assert!(task.error.contains(why), "{why}: {}", task.error);
            assert_eq!(task.payload, message.encode_to_vec(), "{why}");
            assert_eq!(task.queue, "retry.scheduled", "{why}");
            assert_eq!(task.message_id, FRESH, "{why}");
        }
    }

    #[test]
    fn bytes_that_are_no_message_are_kept_whole_for_review() {
        for body in [&b"\xff\xff\xff"[..], b"{not json", b"hello", b"{}"] {
            let task = decode(
                Arrived {
                    body: body.to_vec(),
                    properties: BasicProperties::default().with_message_id("mine".into()),
                    redelivered: false,
                },
                &rules(),
                || FRESH,
            );
            assert_eq!(task.verdict, Some(Reason::Invalid));
            assert_eq!(task.payload, body);
            assert_eq!(task.producer_id.as_deref(), Some("mine"));
        }
    }

    #[test]
    fn text_is_made_storable_and_cut_at_a_character() {
        let task = decoded(&RetryMessage {
            error_reason: format!("a\0b{}", "é".repeat(100_000)),
            tenant_id: "é".repeat(200),
            ..message()
        });
        assert!(task.error.starts_with("a\u{2400}b"));
        assert!(task.error.len() <= MAX_ERROR_BYTES + 2);
        assert_eq!(task.labels.tenant.unwrap().len(), 254);
    }

    #[test]
    fn a_payload_identity_ignores_the_producers_new_ids() {
        let mut rules = rules();
        rules.book = PolicyBook::parse(
            "[policy.default]\nidentity = \"payload\"\n",
            Policy::default(),
        )
        .unwrap();
        let with = |id: &str, payload: &[u8]| {
            let message = RetryMessage {
                message_id: id.into(),
                original_payload: payload.to_vec(),
                ..message()
            };
            let arrived = Arrived {
                body: message.encode_to_vec(),
                properties: BasicProperties::default(),
                redelivered: false,
            };
            decode(arrived, &rules, || FRESH).message_id
        };
        assert_eq!(with("a", b"x"), with("b", b"x"));
        assert_ne!(with("a", b"x"), with("a", b"y"));
    }

    #[test]
    fn a_dead_letter_is_unseen_unless_delivered_before_or_known_by_its_payload() {
        let mut death = FieldTable::default();
        death.insert("queue".into(), AMQPValue::LongString("orders".into()));
        let deaths = AMQPValue::FieldArray(vec![AMQPValue::FieldTable(death)].into());
        let mut headers = FieldTable::default();
        headers.insert("x-death".into(), deaths);
        let properties = BasicProperties::default().with_headers(headers);
        let unseen = |policies: &str, redelivered: bool| {
            let rules = Rules {
                book: PolicyBook::parse(policies, Policy::default()).unwrap(),
                source: Source::DeadLetters,
                ..rules()
            };
            let arrived = Arrived {
                body: b"body".to_vec(),
                properties: properties.clone(),
                redelivered,
            };
            decode(arrived, &rules, || FRESH).unseen
        };
        assert!(unseen("", false));
        assert!(!unseen("", true));
        // Or a consumer that drops our headers would get a fresh budget at each death.
        assert!(!unseen("[policy.default]\nidentity = \"payload\"", false));
    }

    #[test]
    fn a_later_death_names_the_attempt_that_failed() {
        let named = |attempt: AMQPValue| {
            let mut death = FieldTable::default();
            death.insert("queue".into(), AMQPValue::LongString("orders".into()));
            let deaths = AMQPValue::FieldArray(vec![AMQPValue::FieldTable(death)].into());
            let mut headers = FieldTable::default();
            headers.insert("x-death".into(), deaths);
            headers.insert("x-retry-attempt-id".into(), attempt);
            let arrived = Arrived {
                body: b"body".to_vec(),
                properties: BasicProperties::default().with_headers(headers),
                redelivered: false,
            };
            let rules = Rules {
                source: Source::DeadLetters,
                ..rules()
            };
            decode(arrived, &rules, || FRESH).attempt
        };
        let id = AMQPValue::LongString(FRESH.to_string().into());
        assert_eq!(named(id), Some(FRESH));
        assert_eq!(named(AMQPValue::LongString("the first".into())), None);
        assert_eq!(named(AMQPValue::LongInt(1)), None);
    }
}
