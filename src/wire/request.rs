//! A RetryMessage as a producer publishes it to the intake queue.

use lapin::{BasicProperties, types::ShortString};
use prost::Message;
use uuid::Uuid;

use super::{Outgoing, proto::RetryMessage, republish::persistent};

/// The message in protobuf, for the intake queue, under an unused `id`. Fails only on a
/// queue name that AMQP cannot carry.
pub fn request(message: &RetryMessage, intake_queue: &str, id: Uuid) -> Result<Outgoing, String> {
    let properties = BasicProperties::default()
        .with_content_type("application/x-protobuf".into())
        .with_message_id(id.to_string().into());
    Ok(Outgoing {
        message_id: id,
        queue: ShortString::try_new(intake_queue).map_err(|e| e.to_string())?,
        routing_key: None,
        properties: persistent(properties),
        body: message.encode_to_vec(),
    })
}
