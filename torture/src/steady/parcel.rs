//! The messages of a steady load. Everything about a parcel follows from its number.

use fastrand::Rng;
use prost::Message as _;
use retry_scheduler::wire::proto::{ErrorClass, RetryMessage};
use uuid::Uuid;

use crate::message::TARGETS;

/// A queue whose messages are rejected instead of reported, so that RabbitMQ dead-letters them to the service.
pub const LETTERS: &str = "torture.letters";

/// The bit of a course that stands for review; the others stand for retry counts.
pub const REVIEWED: u16 = 1 << 15;

/// The longest wait that a producer asks for.
pub const LONGEST_MS: u64 = 60_000;

/// What happens to a parcel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// It is done when it comes back.
    Succeeds,
    /// It is done when it comes back, and its producer asks for a wait before that.
    Delayed,
    /// It is done when it comes back, and its failure is reported twice under one idempotency key.
    Keyed,
    /// It is done when it comes back, and it is dead-lettered instead of reported.
    Letter,
    /// It fails when it comes back for the first time.
    FailsOnce,
    /// Its failure is a rate limit, which spends no attempt; then it fails once more.
    RateLimited,
    /// It fails until its retries are spent.
    Exhausted,
    Final,
    Terminal,
    /// It is no RetryMessage.
    Garbage,
    /// Its queue does not exist.
    Unroutable,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parcel {
    pub number: usize,
    /// It must not come back before this moment, in Unix ms. 0 means any time.
    pub not_before: u64,
}

impl Parcel {
    /// A parcel that is sent at this moment, in Unix ms.
    pub fn new(number: usize, now: u64) -> Self {
        let mut parcel = Self {
            number,
            not_before: 0,
        };
        if parcel.fate() == Fate::Delayed {
            parcel.not_before = now + parcel.random().u64(..LONGEST_MS);
        }
        parcel
    }

    pub fn fate(self) -> Fate {
        match self.number % 20 {
            0 => Fate::Final,
            1 => Fate::Terminal,
            2 if self.number % 40 == 2 => Fate::Garbage,
            2 => Fate::Unroutable,
            3 | 4 => Fate::RateLimited,
            5 | 6 => Fate::Keyed,
            7 => Fate::Letter,
            8 | 9 => Fate::Exhausted,
            10..=12 => Fate::FailsOnce,
            13..=15 => Fate::Delayed,
            _ => Fate::Succeeds,
        }
    }

    /// How it must come back: a bit for each retry count with which it does, and [`REVIEWED`].
    pub fn course(self) -> u16 {
        match self.fate() {
            Fate::Succeeds | Fate::Delayed | Fate::Keyed | Fate::Letter => 0b10,
            Fate::FailsOnce => 0b110,
            Fate::RateLimited => 0b11,
            Fate::Exhausted => 0b1110 | REVIEWED,
            Fate::Final | Fate::Terminal | Fate::Garbage | Fate::Unroutable => REVIEWED,
        }
    }

    /// The reason with which it ends in review, if it does.
    pub fn reason(self) -> Option<&'static str> {
        match self.fate() {
            Fate::Exhausted => Some("exhausted"),
            Fate::Final => Some("final"),
            Fate::Terminal => Some("terminal"),
            Fate::Garbage => Some("invalid"),
            Fate::Unroutable => Some("unroutable"),
            _ => None,
        }
    }

    pub fn queue(self) -> &'static str {
        match self.fate() {
            Fate::Letter => LETTERS,
            Fate::Unroutable => "torture.nowhere",
            _ => TARGETS[self.number % TARGETS.len()],
        }
    }

    /// Whether its consumer fails it when it comes back with this count.
    pub fn fails(self, count: i32) -> bool {
        match self.fate() {
            Fate::FailsOnce => count <= 1,
            Fate::RateLimited => count == 0,
            Fate::Exhausted => true,
            _ => false,
        }
    }

    fn random(self) -> Rng {
        Rng::with_seed(self.number as u64)
    }

    /// A payload of 64 B to 64 KiB; each doubling of the size is as likely as any other.
    pub fn payload(self) -> Vec<u8> {
        let mut random = self.random();
        let least = 64 << random.u32(..10);
        let size = random.usize(least..=2 * least);
        let filler = random.u64(..).to_le_bytes();
        let mut payload = format!("steady {} {} ", self.number, self.not_before).into_bytes();
        payload.extend(filler.repeat(size / filler.len()));
        payload.truncate(size);
        payload
    }

    /// The parcel that has this payload; `None` if the payload is damaged.
    pub fn of_payload(payload: &[u8]) -> Option<Self> {
        let mut words = payload.splitn(4, |b| *b == b' ').skip(1);
        let mut word = || std::str::from_utf8(words.next()?).ok()?.parse::<u64>().ok();
        let parcel = Self {
            number: usize::try_from(word()?).ok()?,
            not_before: word()?,
        };
        (payload == parcel.payload()).then_some(parcel)
    }

    /// The body with which its producer reports the first failure, or its consumer a failure after so many
    /// retries.
    pub fn report(self, retries: Option<i32>) -> Vec<u8> {
        let fate = self.fate();
        let mut message = RetryMessage {
            message_id: Uuid::new_v5(&Uuid::NAMESPACE_OID, &self.number.to_be_bytes()).to_string(),
            original_payload: self.payload(),
            original_queue: self.queue().into(),
            error_reason: "upstream timed out".into(),
            retry_count: retries.unwrap_or(0),
            max_retries: if fate == Fate::Unroutable { 1 } else { 3 },
            next_retry_at_ms: self.not_before.cast_signed(),
            tenant_id: format!("tenant-{}", self.number % 7),
            ..RetryMessage::default()
        };
        match fate {
            Fate::Garbage => return self.payload(),
            Fate::Keyed => message.idempotency_key = format!("key-{}", self.number),
            Fate::Terminal => message.error_reason = "no such account [terminal]".into(),
            Fate::Final => message.error_class = ErrorClass::Final.into(),
            Fate::RateLimited if retries.is_none() => {
                message.error_class = ErrorClass::RateLimited.into();
                message.retry_after_ms = Some(2000);
            }
            _ => {}
        }
        message.encode_to_vec()
    }
}
