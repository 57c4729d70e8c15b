//! A RetryMessage as a producer publishes it to the intake queue.

use lapin::{BasicProperties, types::ShortString};
use prost::Message;
use uuid::Uuid;

use super::{Outgoing, proto::RetryMessage, republish::persistent};

/// The message in protobuf, for the intake queue. Fails only on a queue name that
/// AMQP cannot carry.
pub fn request(message: &RetryMessage, intake_queue: &str) -> Result<Outgoing, String> {
    let properties = BasicProperties::default().with_content_type("application/x-protobuf".into());
    Ok(Outgoing {
        message_id: Uuid::now_v7(),
        queue: ShortString::try_new(intake_queue).map_err(|e| e.to_string())?,
        properties: persistent(properties),
        body: message.encode_to_vec(),
    })
}
