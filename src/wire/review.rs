//! A spent task → the envelope that people read.

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
use crate::{
    config::ReviewFormat,
    task::{Reason, Task},
};

/// The whole message with everything known about it, for the review queue.
pub fn review(
    task: &mut Task,
    reason: Reason,
    queue: &ShortString,
    format: ReviewFormat,
) -> Result<Outgoing, String> {
    let text = |s: &Option<String>| s.clone().unwrap_or_default();
    let envelope = ReviewMessage {
        message_id: task.message_id.to_string(),
        producer_id: text(&task.producer_id),
        reason: reason.to_string(),
        error: text(&task.error),
        original_queue: task.queue.clone(),
        retry_count: task.retry_count,
        max_retries: task.max_retries,
        first_failed_at_ms: task.first_failed_at.timestamp_millis(),
        last_failed_at_ms: task.last_failed_at.timestamp_millis(),
        error_class: text(&task.class),
        policy: text(&task.policy),
        category: text(&task.labels.category),
        tenant_id: text(&task.labels.tenant),
        correlation_id: text(&task.labels.correlation_id),
        trace_id: text(&task.labels.trace_id),
        // Properties nobody can read must not keep the message from people.
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
        queue: queue.clone(),
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
