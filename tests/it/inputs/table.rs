//! A row of a table: what is sent, by which door, and where it ends.

use lapin::BasicProperties;
use prost::Message;
use retry_scheduler::wire::proto::RetryMessage;

use crate::support::{Bed, Received, message};

/// The queues of the test.
pub struct At {
    pub intake: String,
    pub dead_letters: String,
    pub review: String,
    pub target: String,
    /// A name of 255 bytes, the longest there is.
    pub long: String,
    /// A name that is not ASCII.
    pub rabbit: String,
    /// Exists, but is not among ALLOWED_QUEUES.
    pub forbidden: String,
    /// Does not exist.
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

    /// Those that exist.
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

    /// Those where something may end, or must not.
    pub fn ends(&self) -> [&String; 5] {
        [
            &self.target,
            &self.long,
            &self.rabbit,
            &self.forbidden,
            &self.review,
        ]
    }

    /// A delivery on the intake queue that comes back to the target as its name.
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

    /// A RetryMessage in protobuf whose payload is its name.
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

/// Where a case ends.
#[derive(Debug)]
pub enum End {
    /// In this queue.
    Back(String),
    /// With people.
    Review {
        reason: &'static str,
        /// Part of the error.
        says: String,
        /// The original queue; of what is invalid, the one it was found on.
        from: String,
    },
}

impl End {
    pub fn is_invalid(&self) -> bool {
        matches!(self, Self::Review { reason, .. } if *reason == "invalid")
    }
}

/// One bad input.
pub struct Case {
    pub name: String,
    /// The queue it is sent to.
    pub door: String,
    pub body: Vec<u8>,
    pub properties: BasicProperties,
    pub end: End,
    /// The bytes by which it is known at its end.
    pub arrives: Vec<u8>,
    /// What else must hold of what arrives.
    pub check: Option<fn(&Received)>,
}

impl Case {
    /// The queue of its end.
    pub fn place<'t>(&'t self, at: &'t At) -> &'t str {
        match &self.end {
            End::Back(queue) => queue,
            End::Review { .. } => &at.review,
        }
    }

    /// It ends in review, whole.
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

    /// It was understood, and ends in review.
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

    /// It ends in another queue.
    pub fn back_to(self, queue: &str) -> Self {
        Self {
            end: End::Back(queue.to_owned()),
            ..self
        }
    }

    /// It arrives as these bytes.
    pub fn arriving(self, bytes: impl Into<Vec<u8>>) -> Self {
        Self {
            arrives: bytes.into(),
            ..self
        }
    }

    /// Sent with these properties.
    pub fn with(self, properties: BasicProperties) -> Self {
        Self { properties, ..self }
    }

    /// Sent with this content type.
    pub fn typed(self, content_type: &str) -> Self {
        let properties = self.properties.clone();
        self.with(properties.with_content_type(content_type.into()))
    }

    /// What else must hold.
    pub fn checked(self, check: fn(&Received)) -> Self {
        Self {
            check: Some(check),
            ..self
        }
    }
}
