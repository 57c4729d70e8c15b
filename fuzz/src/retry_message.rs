//! Feeds bytes to the decoders of RetryMessages, as protobuf and as JSON.

use lapin::BasicProperties;
use prost::Message;
use retry_scheduler::{
    domain::{review::Reason, task::NewTask},
    wire::{Source, proto::RetryMessage},
};
use serde_json::{Map, Value, json};

use crate::{check, decoded, speaks_json};

const PROTOBUF: &str = "application/x-protobuf";
const JSON: &str = "application/json";

fn said_to_be(content_type: &str) -> BasicProperties {
    BasicProperties::default().with_content_type(content_type.into())
}

fn decoded_as(content_type: &str, body: &[u8]) -> NewTask {
    decoded(body, &said_to_be(content_type), Source::RetryMessages)
}

/// Checks a body whose content type says protobuf. Without a content type, its first byte would
/// decide whether it is read as protobuf or as JSON.
pub fn protobuf(body: &[u8]) {
    let task = check(body, &said_to_be(PROTOBUF), Source::RetryMessages);
    if task.verdict.is_some() {
        return;
    }
    let message = RetryMessage::decode(body).expect("it was understood");
    assert_eq!(task.payload, message.original_payload, "byte for byte");
    assert_eq!(task.queue, message.original_queue);
    // Encoding the message again drops unknown fields, and must change nothing else.
    assert_eq!(task, decoded_as(PROTOBUF, &message.encode_to_vec()));
    // The same message in JSON must become the same task. It cannot be written as JSON if it has an
    // enum value that this version does not know.
    let sayable = message.properties.as_ref().is_none_or(speaks_json);
    if let (true, Ok(body)) = (sayable, serde_json::to_vec(&message)) {
        assert_eq!(task, decoded_as(JSON, &body));
    }
}

/// Checks a body whose content type says JSON. If it begins with `{`, it must be understood in the
/// same way without a content type.
pub fn json(body: &[u8]) {
    let task = check(body, &said_to_be(JSON), Source::RetryMessages);
    if body.first() == Some(&b'{') {
        let unsaid = BasicProperties::default();
        let unsaid = decoded(body, &unsaid, Source::RetryMessages);
        assert_eq!(
            (task.verdict, &task.payload),
            (unsaid.verdict, &unsaid.payload)
        );
    }
    // The reader that is generated from the contract skips fields that it does not know without
    // checking them, so only well-formed JSON is compared.
    let Ok(Value::Object(fields)) = serde_json::from_slice(body) else {
        return;
    };
    if let Ok(message) = serde_json::from_slice::<RetryMessage>(body) {
        understood_by_the_contract(&task, &message, &fields);
    }
    if task.verdict.is_none() {
        let message = spelled_out(fields, &task.payload);
        assert_eq!(task, decoded_as(PROTOBUF, &message.encode_to_vec()));
    }
}

/// The fields that JSON has beyond the contract: a payload as it is. The generated reader skips them.
const PAYLOAD_AS_IT_IS: [[&str; 2]; 2] = [
    ["originalPayloadText", "original_payload_text"],
    ["originalPayloadJson", "original_payload_json"],
];

/// Checks that our decoder understands a body as the generated reader does, if the body has only
/// what is in the contract.
fn understood_by_the_contract(task: &NewTask, message: &RetryMessage, fields: &Map<String, Value>) {
    let mut beyond = PAYLOAD_AS_IT_IS.iter().flatten();
    if beyond.any(|name| fields.contains_key(*name)) {
        return;
    }
    if !headers_of(fields).all(has_a_known_type) {
        let why = "a header that would lose its value is refused";
        assert_eq!(task.verdict, Some(Reason::Invalid), "{why}");
        return;
    }
    let same = decoded_as(PROTOBUF, &message.encode_to_vec());
    assert_eq!(
        task.verdict, same.verdict,
        "{} / {}",
        task.error, same.error
    );
    if task.verdict.is_none() {
        assert_eq!(*task, same);
    }
}

fn headers_of(fields: &Map<String, Value>) -> impl Iterator<Item = &Value> {
    let headers = fields.get("properties").and_then(|p| p.get("headers"));
    headers
        .and_then(Value::as_object)
        .into_iter()
        .flat_map(Map::values)
}

/// Whether a header's value, in the form of the contract, names one type that the contract has, or
/// none at all.
fn has_a_known_type(header: &Value) -> bool {
    const SCALARS: [&str; 17] = [
        "text",
        "rawText",
        "raw_text",
        "boolean",
        "int8",
        "uint8",
        "int16",
        "uint16",
        "int32",
        "uint32",
        "int64",
        "float32",
        "float64",
        "decimal",
        "timestamp",
        "bytes",
        "void",
    ];
    let mut types = header
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(_, value)| !value.is_null());
    let (first, second) = (types.next(), types.next());
    second.is_none()
        && first.is_none_or(|(name, value)| match (name.as_str(), value.get("values")) {
            ("list", Some(Value::Array(values))) => values.iter().all(has_a_known_type),
            ("table", Some(Value::Object(values))) => values.values().all(has_a_known_type),
            ("list" | "table", _) => true,
            (name, _) => SCALARS.contains(&name),
        })
}

/// The message of a body that our decoder has understood, by the generated reader: first, all that
/// JSON may say in another form is written in the contract's own. `payload` is what our decoder
/// made of the body's payload.
fn spelled_out(mut fields: Map<String, Value>, payload: &[u8]) -> RetryMessage {
    fields.retain(|_, value| !value.is_null());
    let [text, json] = PAYLOAD_AS_IT_IS.map(|[camel, snake]| {
        let camel = fields.remove(camel);
        camel.or_else(|| fields.remove(snake))
    });
    let buffer = ["originalPayload", "original_payload"]
        .into_iter()
        .find(|name| fields.get(*name).is_some_and(Value::is_object))
        .and_then(|name| fields.remove(name));
    if let Some(Value::Object(properties)) = fields.get_mut("properties") {
        properties.retain(|_, value| !value.is_null());
        if let Some(Value::Object(headers)) = properties.get_mut("headers") {
            headers.values_mut().for_each(name_the_type);
        }
    }
    let mut message: RetryMessage =
        serde_json::from_value(Value::Object(fields)).expect("it was understood");
    if let Some(text) = text {
        message.original_payload = text.as_str().expect("a text").into();
    }
    if let Some(json) = json {
        let read: Value = serde_json::from_slice(payload).expect("the payload is JSON");
        assert_eq!(read, json);
        message.original_payload = payload.to_vec();
    }
    if let Some(buffer) = buffer {
        message.original_payload =
            serde_json::from_value(buffer["data"].clone()).expect("a Buffer's bytes");
    }
    message
}

/// Turns a plain header value into the form of the contract.
fn name_the_type(header: &mut Value) {
    match header {
        Value::Null => *header = json!({"void": {}}),
        Value::Bool(_) => *header = json!({"boolean": header}),
        Value::Number(_) => *header = json!({"int64": header}),
        Value::String(_) => *header = json!({"text": header}),
        Value::Array(_) => {}
        Value::Object(typed) => {
            typed.retain(|_, value| !value.is_null());
            for (_, value) in typed {
                match value.get_mut("values") {
                    Some(Value::Array(values)) => values.iter_mut().for_each(name_the_type),
                    Some(Value::Object(values)) => values.values_mut().for_each(name_the_type),
                    _ => {}
                }
            }
        }
    }
}
