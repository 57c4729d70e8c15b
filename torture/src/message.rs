//! The messages of a campaign. Everything about a message follows from its number.

use prost::Message as _;
use retry_scheduler::wire::proto::RetryMessage;
use uuid::Uuid;

pub const INTAKE: &str = "torture.retry.scheduled";
pub const REVIEW: &str = "torture.manual-review.pending";
pub const TARGETS: [&str; 3] = ["torture.one", "torture.two", "torture.three"];

/// What the consumer does with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conduct {
    /// It is done when it comes back.
    Succeeds,
    /// It fails when it comes back for the first time.
    FailsOnce,
    /// It fails until it is in review.
    FailsAlways,
    /// It is no RetryMessage, and goes to review at once.
    Garbage,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Message {
    pub number: usize,
}

impl Message {
    pub fn conduct(self) -> Conduct {
        match self.number % 25 {
            7 => Conduct::Garbage,
            0 | 5 | 10 | 15 | 20 => Conduct::FailsAlways,
            1 | 6 | 11 | 16 | 21 => Conduct::FailsOnce,
            _ => Conduct::Succeeds,
        }
    }

    pub fn id(self) -> Uuid {
        Uuid::new_v5(&Uuid::NAMESPACE_OID, &self.number.to_be_bytes())
    }

    pub fn queue(self) -> &'static str {
        TARGETS[self.number % TARGETS.len()]
    }

    pub fn max_retries(self) -> i32 {
        if self.number.is_multiple_of(2) { 3 } else { 5 }
    }

    /// A payload of up to 2 KiB that contains the number.
    pub fn payload(self) -> Vec<u8> {
        let filler = self.id().as_u128().to_le_bytes();
        let mut payload = format!("garbage? {} ", self.number).into_bytes();
        for _ in 0..self.number % 128 {
            payload.extend_from_slice(&filler);
        }
        payload
    }

    /// The message that has this payload; `None` if the payload is damaged.
    pub fn of_payload(payload: &[u8]) -> Option<Self> {
        let number = payload.splitn(3, |b| *b == b' ').nth(1)?;
        let number = std::str::from_utf8(number).ok()?.parse().ok()?;
        let message = Self { number };
        (payload == message.payload()).then_some(message)
    }

    /// The body with which its producer or its consumer reports a failure. It leaves counting to the service.
    pub fn report(self, error: &str) -> Vec<u8> {
        if self.conduct() == Conduct::Garbage {
            return self.payload();
        }
        RetryMessage {
            message_id: self.id().to_string(),
            original_payload: self.payload(),
            original_queue: self.queue().into(),
            error_reason: error.into(),
            max_retries: self.max_retries(),
            ..RetryMessage::default()
        }
        .encode_to_vec()
    }

    /// Whether its consumer fails it when it comes back for the `count`th time.
    pub fn fails(self, count: i32) -> bool {
        match self.conduct() {
            Conduct::FailsOnce => count <= 1,
            Conduct::FailsAlways => true,
            Conduct::Succeeds | Conduct::Garbage => false,
        }
    }
}
