//! What becomes of a delivery: a task that is retried, or a case for review that holds it whole.

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
