//! Feeds bytes to the decoders of RetryMessages, as protobuf and as JSON.

use lapin::BasicProperties;
use prost::Message;
use retry_scheduler::{
    domain::task::NewTask,
    wire::{Source, proto::RetryMessage},
};
use serde_json::Value;

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
    // The reader that is generated from the contract must understand the body as our decoder does.
    // It skips fields that it does not know without checking them, so only well-formed JSON is
    // compared.
    let well_formed = serde_json::from_slice::<Value>(body).is_ok();
    if let (true, Ok(message)) = (well_formed, serde_json::from_slice::<RetryMessage>(body)) {
        let same = decoded_as(PROTOBUF, &message.encode_to_vec());
        assert_eq!(
            task.verdict, same.verdict,
            "{} / {}",
            task.error, same.error
        );
        if task.verdict.is_none() {
            assert_eq!(task, same);
        }
    }
}
