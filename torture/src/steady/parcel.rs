//! What a steady load is made of: everything about the `n`th parcel follows from its number.

use fastrand::Rng;
use prost::Message as _;
use retry_scheduler::wire::proto::{ErrorClass, RetryMessage};
use uuid::Uuid;

use crate::message::TARGETS;

/// Its messages are never reported: they are rejected, and a DLX passes them on.
pub const LETTERS: &str = "torture.letters";

/// The bit of a parcel that is in review; the others are retry counts.
pub const REVIEWED: u16 = 1 << 15;

/// The longest wait that a producer asks for.
pub const LONGEST_MS: u64 = 60_000;

/// What becomes of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    /// Done when it comes back.
    Succeeds,
    /// The same, and its producer asks for a wait.
    Delayed,
    /// The same, and its failure is reported twice under one idempotency key.
    Keyed,
    /// The same, and it is dead-lettered and not reported.
    Letter,
    /// Fails once more.
    FailsOnce,
    /// Asked to wait, which spends nothing, and fails once more.
    RateLimited,
    /// Fails until its retries are spent.
    Exhausted,
    Final,
    Terminal,
    /// No RetryMessage at all.
    Garbage,
    /// Its queue does not exist.
    Unroutable,
}

/// One message of the load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parcel {
    pub number: usize,
    /// Not to come back before, in Unix ms; 0 is any time.
    pub not_before: u64,
}

impl Parcel {
    /// Made at this moment, in Unix ms.
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

    /// As what it comes back, all in all: a bit for each retry count, and review's.
    pub fn course(self) -> u16 {
        match self.fate() {
            Fate::Succeeds | Fate::Delayed | Fate::Keyed | Fate::Letter => 0b10,
            Fate::FailsOnce => 0b110,
            Fate::RateLimited => 0b11,
            Fate::Exhausted => 0b1110 | REVIEWED,
            Fate::Final | Fate::Terminal | Fate::Garbage | Fate::Unroutable => REVIEWED,
        }
    }

    /// Why it is in review in the end, if it is.
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

    /// 64 B to 64 KiB, as many small ones as large ones.
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

    /// Which one this is, if it is whole.
    pub fn of_payload(payload: &[u8]) -> Option<Self> {
        let mut words = payload.splitn(4, |b| *b == b' ').skip(1);
        let mut word = || std::str::from_utf8(words.next()?).ok()?.parse::<u64>().ok();
        let parcel = Self {
            number: usize::try_from(word()?).ok()?,
            not_before: word()?,
        };
        (payload == parcel.payload()).then_some(parcel)
    }

    /// What its producer says of its first failure, or its consumer after so many retries.
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
