//! RetryMessages, as bytes that claim to be one.

use lapin::BasicProperties;
use prost::Message;
use retry_scheduler::{
    task::NewTask,
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

/// The body as protobuf, whatever its first byte says.
pub fn protobuf(body: &[u8]) {
    let task = check(body, &said_to_be(PROTOBUF), Source::RetryMessages);
    if task.verdict.is_some() {
        return;
    }
    let message = RetryMessage::decode(body).expect("it was understood");
    assert_eq!(task.payload, message.original_payload, "byte for byte");
    assert_eq!(task.queue, message.original_queue);
    // Unknown fields apart, the message says the same when it is written anew.
    assert_eq!(task, decoded_as(PROTOBUF, &message.encode_to_vec()));
    // So it does in JSON, which has no room for an enum of a newer contract.
    let sayable = message.properties.as_ref().is_none_or(speaks_json);
    if let (true, Ok(body)) = (sayable, serde_json::to_vec(&message)) {
        assert_eq!(task, decoded_as(JSON, &body));
    }
}

/// The body as JSON, whatever its first byte says.
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
    // Where the contract's own reader understands it too, both mean the same. That one skims over what it need not know.
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
