//! A task bound for review becomes the envelope that people read.

use lapin::{
    BasicProperties,
    types::{AMQPValue, FieldTable, ShortString},
};
use prost::Message;
use sha2::{Digest, Sha256};

use super::{
    Outgoing, cut,
    proto::{self, Properties, ReviewMessage},
    republish::persistent,
};
use crate::domain::{review::Reason, task::Task};

/// The largest payload that is put into JSON. JSON makes it a third larger, and
/// RabbitMQ 4 refuses messages of over 16 MiB by default: a larger payload is put
/// into protobuf, and the content type says so.
const MAX_JSON_PAYLOAD_BYTES: usize = 8 << 20;

/// The most bytes of error text in an envelope that has to be small.
const MAX_CUT_ERROR_BYTES: usize = 1024;

/// How envelopes are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReviewFormat {
    /// The JSON mapping of proto3.
    Json,
    /// Protobuf.
    Protobuf,
}

/// What an envelope leaves out, because the broker would not take it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeftOut {
    /// Nothing.
    Nothing,
    /// The payload.
    Payload,
    /// All that may be large: payload, properties, and most of the error text.
    PayloadAndProperties,
}

/// An envelope for the review queue.
#[derive(Debug)]
pub struct Envelope {
    /// The message to publish.
    pub message: Outgoing,
    /// What it does not say.
    pub left_out: LeftOut,
}

/// The message with everything known about it, for the review queue. The task's payload
/// moves into it. It is the whole message, unless that would have `too_large` bytes or
/// more: then it says where the rest is. `table` is the table of tasks, as people can type
/// it into a statement.
pub fn review(
    task: &mut Task,
    reason: Reason,
    queue: &str,
    wanted: ReviewFormat,
    too_large: usize,
    table: &str,
) -> Result<Envelope, String> {
    let queue = ShortString::try_new(queue).map_err(|e| e.to_string())?;
    let mut format = if task.payload.len() > MAX_JSON_PAYLOAD_BYTES {
        ReviewFormat::Protobuf
    } else {
        wanted
    };
    let text = |s: &Option<String>| s.clone().unwrap_or_default();
    let mut envelope = ReviewMessage {
        message_id: task.message_id.to_string(),
        producer_id: text(&task.producer_id),
        reason: reason.to_string(),
        error: text(&task.error),
        original_queue: task.queue.clone(),
        retry_count: task.budget.retry_count,
        max_retries: task.budget.max_retries,
        first_failed_at_ms: task.first_failed_at.timestamp_millis(),
        last_failed_at_ms: task.last_failed_at.timestamp_millis(),
        error_class: task
            .class
            .map(|class| class.to_string())
            .unwrap_or_default(),
        policy: text(&task.policy),
        category: text(&task.labels.category),
        operation: text(&task.labels.operation),
        error_type: text(&task.labels.error_type),
        tenant_id: text(&task.labels.tenant),
        correlation_id: text(&task.labels.correlation_id),
        trace_id: text(&task.labels.trace_id),
        // Stored properties that cannot be read must not keep the message from people.
        properties: Properties::decode(task.properties.as_slice()).ok(),
        original_payload: std::mem::take(&mut task.payload),
        left_out: None,
    };
    let mut left_out = LeftOut::Nothing;
    let mut body = encode(&envelope, format)?;
    if body.len() >= too_large && format == ReviewFormat::Json {
        format = ReviewFormat::Protobuf;
        body = encode(&envelope, format)?;
    }
    if body.len() >= too_large {
        left_out = LeftOut::Payload;
        format = wanted;
        let payload = std::mem::take(&mut envelope.original_payload);
        envelope.left_out = Some(proto::LeftOut {
            payload_bytes: payload.len() as u64,
            payload_sha256: format!("{:x}", Sha256::digest(&payload)),
            table: table.into(),
            column: "original_payload".into(),
            id: task.id,
            properties: false,
        });
        body = encode(&envelope, format)?;
    }
    if let Some(left) = &mut envelope.left_out
        && body.len() >= too_large
    {
        left_out = LeftOut::PayloadAndProperties;
        left.properties = true;
        envelope.properties = None;
        envelope.error = cut(&envelope.error, MAX_CUT_ERROR_BYTES).to_owned();
        body = encode(&envelope, format)?;
    }
    let content_type = match format {
        ReviewFormat::Json => "application/json",
        ReviewFormat::Protobuf => "application/x-protobuf",
    };
    let mut headers = FieldTable::default();
    headers.insert(
        "x-review-reason".into(),
        AMQPValue::LongString(reason.as_str().into()),
    );
    let message = Outgoing {
        message_id: task.message_id,
        queue,
        routing_key: None,
        properties: persistent(
            BasicProperties::default()
                .with_content_type(content_type.into())
                .with_message_id(envelope.message_id.into())
                .with_type("retry.v1.ReviewMessage".into())
                .with_headers(headers),
        ),
        body,
    };
    Ok(Envelope { message, left_out })
}

fn encode(envelope: &ReviewMessage, format: ReviewFormat) -> Result<Vec<u8>, String> {
    match format {
        ReviewFormat::Json => serde_json::to_vec(envelope).map_err(|e| e.to_string()),
        ReviewFormat::Protobuf => Ok(envelope.encode_to_vec()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{budget::Budget, task::Labels};
    use chrono::DateTime;

    const TABLE: &str = "\"a schema\".retry_queue";

    fn task(payload: Vec<u8>) -> Task {
        Task {
            id: 1,
            message_id: uuid::Uuid::nil(),
            producer_id: Some("mine".into()),
            payload,
            queue: "q".into(),
            properties: vec![0xff],
            error: Some("why".into()),
            class: None,
            budget: Budget {
                retry_count: 3,
                max_retries: 3,
            },
            free: false,
            policy: None,
            labels: Labels::default(),
            reason: None,
            expired: false,
            first_failed_at: DateTime::UNIX_EPOCH,
            last_failed_at: DateTime::UNIX_EPOCH,
            due_at: DateTime::UNIX_EPOCH,
            late: std::time::Duration::ZERO,
        }
    }

    fn envelope(payload: Vec<u8>, format: ReviewFormat) -> (String, Outgoing) {
        let (content_type, envelope) = limited(task(payload), format, usize::MAX);
        assert_eq!(envelope.left_out, LeftOut::Nothing);
        (content_type, envelope.message)
    }

    fn limited(mut task: Task, format: ReviewFormat, too_large: usize) -> (String, Envelope) {
        let reason = Reason::Exhausted;
        let made = review(&mut task, reason, "review", format, too_large, TABLE);
        let envelope = made.unwrap();
        let content_type = envelope.message.properties.content_type().clone();
        (content_type.unwrap().to_string(), envelope)
    }

    #[test]
    fn an_envelope_says_the_same_in_json_and_in_protobuf() {
        let (content_type, json) = envelope(b"x".to_vec(), ReviewFormat::Json);
        assert_eq!(content_type, "application/json");
        let json: ReviewMessage = serde_json::from_slice(&json.body).unwrap();
        let (content_type, protobuf) = envelope(b"x".to_vec(), ReviewFormat::Protobuf);
        assert_eq!(content_type, "application/x-protobuf");
        assert_eq!(
            ReviewMessage::decode(protobuf.body.as_slice()).unwrap(),
            json
        );
        assert_eq!(
            (json.reason.as_str(), json.error.as_str()),
            ("exhausted", "why")
        );
        assert_eq!(json.original_payload, b"x");
        assert_eq!(json.properties, None, "what cannot be read is left out");
    }

    #[test]
    fn a_large_payload_is_not_made_larger() {
        let size = MAX_JSON_PAYLOAD_BYTES + 1;
        let (content_type, out) = envelope(vec![7; size], ReviewFormat::Json);
        assert_eq!(content_type, "application/x-protobuf");
        assert!(out.body.len() < size + 1000);
    }

    #[test]
    fn an_envelope_that_is_too_large_says_where_the_rest_is() {
        let payload = vec![7; 100_000];
        // In protobuf it may just fit, with the body.
        let (content_type, out) = limited(task(payload.clone()), ReviewFormat::Json, 110_000);
        assert_eq!(content_type, "application/x-protobuf");
        assert_eq!(out.left_out, LeftOut::Nothing);

        let mut heavy = task(payload.clone());
        heavy.properties = Properties {
            app_id: "a".repeat(10_000),
            ..Properties::default()
        }
        .encode_to_vec();
        heavy.error = Some("é".repeat(10_000));
        let digest = format!("{:x}", Sha256::digest(&payload));
        for format in [ReviewFormat::Json, ReviewFormat::Protobuf] {
            for (too_large, expected) in [
                (100_000, LeftOut::Payload),
                (20_000, LeftOut::PayloadAndProperties),
                (0, LeftOut::PayloadAndProperties),
            ] {
                let (_, out) = limited(heavy.clone(), format, too_large);
                assert_eq!(out.left_out, expected);
                let body = out.message.body;
                let said = match format {
                    ReviewFormat::Json => serde_json::from_slice(&body).unwrap(),
                    ReviewFormat::Protobuf => ReviewMessage::decode(body.as_slice()).unwrap(),
                };
                assert_eq!(said.original_payload, b"");
                let bare = expected == LeftOut::PayloadAndProperties;
                assert_eq!(said.properties.is_none(), bare);
                assert_eq!(said.error.len() <= MAX_CUT_ERROR_BYTES, bare);
                let left_out = said.left_out.unwrap();
                assert_eq!(left_out.payload_bytes, 100_000);
                assert_eq!(left_out.payload_sha256, digest);
                assert_eq!(left_out.properties, bare);
                assert_eq!(
                    (
                        left_out.table.as_str(),
                        left_out.column.as_str(),
                        left_out.id
                    ),
                    (TABLE, "original_payload", 1)
                );
            }
        }
    }
}
