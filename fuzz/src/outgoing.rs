//! Checks what is sent on from a task: the message that goes back to its queue, and the one that
//! goes to review.

use chrono::DateTime;
use lapin::types::{AMQPValue, FieldTable, generation::gen_field_table};
use prost::Message;
use retry_scheduler::{
    domain::{
        review::Reason,
        task::{NewTask, Task},
    },
    wire::{
        self, Outgoing, ReviewFormat, Source,
        proto::{Properties, ReviewMessage},
    },
};

/// RabbitMQ's default limit of a frame. The headers of a message must fit into one frame.
const FRAME_BYTES: usize = 128 * 1024;

pub(crate) fn check(new: &NewTask) {
    let task = claimed(new);
    if new.verdict.is_none() {
        goes_back(new, task.clone());
    }
    for format in [ReviewFormat::Json, ReviewFormat::Protobuf] {
        goes_to_people(new, task.clone(), format);
    }
}

/// The task as the dispatcher claims it, once it is stored.
fn claimed(new: &NewTask) -> Task {
    Task {
        id: 1,
        message_id: new.message_id,
        producer_id: new.producer_id.clone(),
        payload: new.payload.clone(),
        queue: new.queue.clone(),
        properties: new.properties.clone(),
        error: Some(new.error.clone()),
        class: Some(new.class),
        budget: new.budget,
        free: false,
        policy: Some(new.policy.name.clone()),
        labels: new.labels.clone(),
        reason: new.verdict,
        expired: false,
        first_failed_at: DateTime::UNIX_EPOCH,
        last_failed_at: DateTime::UNIX_EPOCH,
        due_at: DateTime::UNIX_EPOCH,
        late: std::time::Duration::ZERO,
    }
}

fn goes_back(new: &NewTask, mut task: Task) {
    let Outgoing {
        queue,
        properties,
        body,
        ..
    } = wire::republish(&mut task, "fuzz").expect("it can go back");
    assert_eq!(body, new.payload, "byte for byte");
    assert_eq!(queue.as_str(), new.queue);
    assert!(properties.expiration().is_none() && properties.user_id().is_none());
    let mut headers = properties.headers().clone().unwrap_or_default();
    let frame = cookie_factory::gen_simple(gen_field_table(&headers), Vec::new());
    let frame = frame.expect("the headers can be written");
    assert!(
        frame.len() < FRAME_BYTES,
        "{} bytes of headers",
        frame.len()
    );
    for (name, value) in headers.inner() {
        assert!(!harmful(name.as_str()), "{name:?} is replayed");
        assert!(
            is_readable(value),
            "the broker cannot read {name:?}: {value:?}"
        );
    }

    // If it fails there and comes back as a dead letter, it is recognised as the same message.
    let mut death = FieldTable::default();
    death.insert(
        "queue".into(),
        AMQPValue::LongString(new.queue.as_str().into()),
    );
    let deaths = vec![AMQPValue::FieldTable(death)];
    headers.insert("x-death".into(), AMQPValue::FieldArray(deaths.into()));
    let rules = crate::rules(Source::DeadLetters);
    let arrived = wire::Arrived {
        body,
        properties: properties.with_headers(headers),
        redelivered: false,
    };
    let again = wire::decode(arrived, rules, || uuid::Uuid::from_u128(43));
    if again.verdict.is_none() {
        assert_eq!(again.message_id, new.message_id);
        assert_eq!(again.payload, new.payload);
        assert_eq!(again.queue, new.queue);
        assert_eq!(again.budget.retry_count, task.next_count());
    }
}

/// Whether a header must not be sent back: `CC` and `BCC` make the broker send copies, and the
/// others are the broker's own record of earlier deliveries.
fn harmful(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    ["x-death", "x-delivery-count", "cc", "bcc"].contains(&name.as_str())
        || name.starts_with("x-first-death-")
        || name.starts_with("x-last-death-")
}

/// Whether RabbitMQ can read the value. It closes the connection over a float that is NaN or
/// infinite.
fn is_readable(value: &AMQPValue) -> bool {
    match value {
        AMQPValue::Float(x) => x.is_finite(),
        AMQPValue::Double(x) => x.is_finite(),
        AMQPValue::FieldArray(values) => values.as_slice().iter().all(is_readable),
        AMQPValue::FieldTable(table) => table.inner().values().all(is_readable),
        _ => true,
    }
}

fn goes_to_people(new: &NewTask, mut task: Task, format: ReviewFormat) {
    let reason = new.verdict.unwrap_or(Reason::Exhausted);
    let properties = Properties::decode(new.properties.as_slice()).expect("properties");
    let out = wire::review(
        &mut task,
        reason,
        "review",
        format,
        usize::MAX,
        "retry_queue",
    );
    let out = out.expect("it can go to people").message;
    let envelope: ReviewMessage = match format {
        ReviewFormat::Json if !crate::speaks_json(&properties) => return,
        ReviewFormat::Json => serde_json::from_slice(&out.body).expect("an envelope in JSON"),
        ReviewFormat::Protobuf => ReviewMessage::decode(out.body.as_slice()).expect("an envelope"),
    };
    assert_eq!(envelope.original_payload, new.payload, "byte for byte");
    assert_eq!(envelope.original_queue, new.queue);
    assert_eq!(envelope.reason, reason.as_str());
    assert_eq!(envelope.error, new.error);
    assert_eq!(envelope.message_id, new.message_id.to_string());
    if crate::speaks_json(&properties) {
        assert_eq!(envelope.properties, Some(properties), "people see them all");
    }
}
