//! A RetryMessage in JSON: proto3 names or snake_case, payload in base64 or as
//! Node's `{"type":"Buffer","data":[…]}`.

use base64::{Engine, engine::general_purpose::STANDARD};
use serde_json::Value;

use crate::wire::proto::RetryMessage;

pub(super) fn parse(body: &[u8]) -> Result<RetryMessage, String> {
    let explain = |e: serde_json::Error| format!("not a RetryMessage in JSON: {e}");
    let mut value: Value = serde_json::from_slice(body).map_err(explain)?;
    drop_nulls(&mut value);
    if let Some(properties) = value.get_mut("properties") {
        drop_nulls(properties);
    }
    for name in ["originalPayload", "original_payload"] {
        if let Some(payload) = value.get_mut(name)
            && let Some(bytes) = node_buffer(payload)?
        {
            *payload = Value::String(STANDARD.encode(bytes));
        }
    }
    serde_json::from_value(value).map_err(explain)
}

/// Removes fields that are null: by the JSON mapping of proto3 they are left out.
fn drop_nulls(message: &mut Value) {
    if let Some(fields) = message.as_object_mut() {
        fields.retain(|_, value| !value.is_null());
    }
}

fn node_buffer(payload: &Value) -> Result<Option<Vec<u8>>, String> {
    let Some(object) = payload.as_object() else {
        return Ok(None);
    };
    let data = object
        .get("data")
        .and_then(Value::as_array)
        .filter(|_| object.get("type").and_then(Value::as_str) == Some("Buffer"))
        .ok_or("original_payload is an object, but not a Node Buffer")?;
    data.iter()
        .map(|n| n.as_u64().and_then(|n| u8::try_from(n).ok()))
        .collect::<Option<_>>()
        .map(Some)
        .ok_or_else(|| "original_payload: a Buffer's data must be bytes".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_and_both_payload_forms_are_understood() {
        for body in [
            r#"{"messageId":"m","originalPayload":"aGk=","originalQueue":"q","retryCount":2,"nextRetryAtMs":"7"}"#,
            r#"{"message_id":"m","original_payload":{"type":"Buffer","data":[104,105]},"original_queue":"q","retry_count":2,"next_retry_at_ms":7,"unknown":{"x":1}}"#,
        ] {
            let message = parse(body.as_bytes()).unwrap();
            assert_eq!(message.message_id, "m");
            assert_eq!(message.original_payload, b"hi");
            assert_eq!(message.original_queue, "q");
            assert_eq!(message.retry_count, 2);
            assert_eq!(message.next_retry_at_ms, 7);
        }
    }

    #[test]
    fn a_field_that_is_null_is_left_out() {
        let body = r#"{"originalQueue":"q","originalPayload":null,"error_reason":null,
            "retryCount":null,"properties":{"appId":null,"type":"t"}}"#;
        let message = parse(body.as_bytes()).unwrap();
        assert_eq!(message.original_queue, "q");
        assert_eq!(message.error_reason, "");
        assert_eq!(message.properties.unwrap().r#type, "t");
    }

    #[test]
    fn what_is_not_a_message_says_why() {
        for (body, why) in [
            ("{", "not a RetryMessage in JSON"),
            (r#"{"retryCount":"many"}"#, "not a RetryMessage in JSON"),
            (
                r#"{"original_payload":{"type":"Buffer","data":[256]}}"#,
                "must be bytes",
            ),
            (r#"{"original_payload":{"data":[1]}}"#, "not a Node Buffer"),
        ] {
            let error = parse(body.as_bytes()).unwrap_err();
            assert!(error.contains(why), "{body}: {error}");
        }
        let deep = format!("{}{}", r#"{"a":"#.repeat(500), "}".repeat(500));
        assert!(parse(deep.as_bytes()).is_err());
    }
}
