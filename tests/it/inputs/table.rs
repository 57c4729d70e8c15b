//! A case: what is sent, to which queue, and where it must end.

use lapin::BasicProperties;
use prost::Message;
use retry_scheduler::wire::proto::RetryMessage;

use crate::support::{Bed, Received, message};

/// The names of the test's queues.
pub struct At {
    pub intake: String,
    pub dead_letters: String,
    pub review: String,
    pub target: String,
    /// A queue with a name of 255 bytes, the longest that AMQP allows.
    pub long: String,
    /// A queue with a name that is not ASCII.
    pub rabbit: String,
    /// A queue that exists, but is not among `ALLOWED_QUEUES`.
    pub forbidden: String,
    /// A queue that does not exist.
    pub missing: String,
}

impl At {
    pub fn in_bed(bed: &Bed) -> Self {
        let long = bed.queue("long.");
        let prefix = bed.queue("");
        Self {
            intake: bed.intake(),
            dead_letters: bed.setting("DEAD_LETTER_QUEUE").to_owned(),
            review: bed.review(),
            target: bed.queue("target"),
            long: format!("{long}{}", "q".repeat(255 - long.len())),
            rabbit: bed.queue("🐇"),
            forbidden: format!("payroll.{prefix}"),
            missing: bed.queue("missing"),
        }
    }

    /// All queues that exist.
    pub fn all(&self) -> [&String; 7] {
        let [target, long, rabbit, forbidden, review] = self.ends();
        [
            target,
            long,
            rabbit,
            forbidden,
            review,
            &self.intake,
            &self.dead_letters,
        ]
    }

    /// The queues in which cases may end, and `forbidden`, in which none may.
    pub fn ends(&self) -> [&String; 5] {
        [
            &self.target,
            &self.long,
            &self.rabbit,
            &self.forbidden,
            &self.review,
        ]
    }

    /// A case that sends `body` to the intake queue. Unless changed, it expects its name as a
    /// message in the target queue.
    pub fn raw(&self, name: impl Into<String>, body: impl Into<Vec<u8>>) -> Case {
        let name = name.into();
        Case {
            door: self.intake.clone(),
            body: body.into(),
            properties: BasicProperties::default(),
            end: End::Back(self.target.clone()),
            arrives: name.clone().into_bytes(),
            check: None,
            name,
        }
    }

    /// A case that sends a RetryMessage in protobuf. Unless changed, the payload is the case's
    /// name, and it is expected in the target queue.
    pub fn sent(&self, name: impl Into<String>, change: impl FnOnce(&mut RetryMessage)) -> Case {
        let name = name.into();
        let mut sent = message(&self.target, name.clone());
        change(&mut sent);
        Case {
            arrives: sent.original_payload.clone(),
            ..self.raw(name, sent.encode_to_vec())
        }
    }
}

/// Where a case must end.
#[derive(Debug)]
pub enum End {
    /// The message is sent back to this queue.
    Back(String),
    /// The message goes to review.
    Review {
        reason: &'static str,
        /// A part of the envelope's error text.
        says: String,
        /// The envelope's original queue. For an invalid delivery that is the queue to which
        /// it was sent.
        from: String,
    },
}

impl End {
    pub fn is_invalid(&self) -> bool {
        matches!(self, Self::Review { reason, .. } if *reason == "invalid")
    }
}

/// One bad or odd input.
pub struct Case {
    pub name: String,
    /// The queue to which the case is sent.
    pub door: String,
    pub body: Vec<u8>,
    pub properties: BasicProperties,
    pub end: End,
    /// The payload by which the case is recognised at its end.
    pub arrives: Vec<u8>,
    /// What else to check of the message at its end.
    pub check: Option<fn(&Received)>,
}

impl Case {
    /// The queue in which the case must end.
    pub fn place<'t>(&'t self, at: &'t At) -> &'t str {
        match &self.end {
            End::Back(queue) => queue,
            End::Review { .. } => &at.review,
        }
    }

    /// Expects the whole delivery in review as `invalid`, with `says` in the error text.
    pub fn invalid(self, says: impl Into<String>) -> Self {
        Self {
            end: End::Review {
                reason: "invalid",
                says: says.into(),
                from: self.door.clone(),
            },
            arrives: self.body.clone(),
            ..self
        }
    }

    /// Expects the message, which was understood, in review for this reason.
    pub fn reviewed(self, reason: &'static str, from: &str, says: impl Into<String>) -> Self {
        Self {
            end: End::Review {
                reason,
                says: says.into(),
                from: from.to_owned(),
            },
            ..self
        }
    }

    /// Expects the message in another queue than the target.
    pub fn back_to(self, queue: &str) -> Self {
        Self {
            end: End::Back(queue.to_owned()),
            ..self
        }
    }

    /// Expects these bytes as the payload.
    pub fn arriving(self, bytes: impl Into<Vec<u8>>) -> Self {
        Self {
            arrives: bytes.into(),
            ..self
        }
    }

    /// Sends the delivery with these AMQP properties.
    pub fn with(self, properties: BasicProperties) -> Self {
        Self { properties, ..self }
    }

    /// Sends the delivery with this content type.
    pub fn typed(self, content_type: &str) -> Self {
        let properties = self.properties.clone();
        self.with(properties.with_content_type(content_type.into()))
    }

    /// Checks more of the message at its end.
    pub fn checked(self, check: fn(&Received)) -> Self {
        Self {
            check: Some(check),
            ..self
        }
    }
}
