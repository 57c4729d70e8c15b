//! A task bound for review becomes the envelope that people read.

use lapin::{
    BasicProperties,
    types::{AMQPValue, FieldTable, ShortString},
};
use prost::Message;

use super::{
    Outgoing,
    proto::{Properties, ReviewMessage},
    republish::persistent,
};
use crate::domain::{review::Reason, task::Task};

/// The largest payload that is put into JSON. JSON makes it a third larger, and
/// RabbitMQ 4 refuses messages of over 16 MiB by default: a larger payload is put
/// into protobuf, and the content type says so.
const MAX_JSON_PAYLOAD_BYTES: usize = 8 << 20;

/// How envelopes are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReviewFormat {
    /// The JSON mapping of proto3.
    Json,
    /// Protobuf.
    Protobuf,
}

/// The whole message with everything known about it, for the review queue. The
/// task's payload moves into it.
pub fn review(
    task: &mut Task,
    reason: Reason,
    queue: &str,
    format: ReviewFormat,
) -> Result<Outgoing, String> {
    let queue = ShortString::try_new(queue).map_err(|e| e.to_string())?;
    let format = if task.payload.len() > MAX_JSON_PAYLOAD_BYTES {
        ReviewFormat::Protobuf
    } else {
        format
    };
    let text = |s: &Option<String>| s.clone().unwrap_or_default();
    let envelope = ReviewMessage {
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
    };
    let (content_type, body) = match format {
        ReviewFormat::Json => (
            "application/json",
            serde_json::to_vec(&envelope).map_err(|e| e.to_string())?,
        ),
        ReviewFormat::Protobuf => ("application/x-protobuf", envelope.encode_to_vec()),
    };
    let mut headers = FieldTable::default();
    headers.insert(
        "x-review-reason".into(),
        AMQPValue::LongString(reason.as_str().into()),
    );
    Ok(Outgoing {
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
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::{budget::Budget, task::Labels};
    use chrono::DateTime;

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
        let out = review(&mut task(payload), Reason::Exhausted, "review", format).unwrap();
        let content_type = out.properties.content_type().clone().unwrap();
        (content_type.to_string(), out)
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
}
