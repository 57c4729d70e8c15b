//! The messages of a campaign. Everything about a message follows from its kind and its number.

use prost::Message as _;
use retry_scheduler::wire::proto::RetryMessage;
use uuid::Uuid;

pub const INTAKE: &str = "torture.retry.scheduled";
pub const REVIEW: &str = "torture.manual-review.pending";
pub const DEAD_LETTERS: &str = "torture.dead-letters";
pub const TARGETS: [&str; 3] = ["torture.one", "torture.two", "torture.three"];

/// The routing keys by which the targets are bound to the exchange that producers publish to.
pub const KEYS: [&str; 3] = ["order.one", "order.two", "order.three"];

/// RabbitMQ takes no larger message. This is what RabbitMQ 4 has as its default.
pub const LARGEST: usize = 16 << 20;

/// How many different `message_id`s the producers of letters have. They use them again and again.
const PRODUCERS_IDS: usize = 50;

/// What a message is sent for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// The load of the whole campaign.
    Usual,
    /// Waits in the intake queue while an instance dies again and again.
    Waiting,
    /// Large, and waits in the intake queue with many of its kind.
    Large,
    /// A dead letter for which RabbitMQ has just enough room, and that has none left for an envelope.
    Oversized,
    /// Has a property that is not UTF-8.
    Unreadable,
}

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
    pub kind: Kind,
    pub number: usize,
}

impl Kind {
    const ALL: [Self; 5] = [
        Self::Usual,
        Self::Waiting,
        Self::Large,
        Self::Oversized,
        Self::Unreadable,
    ];

    /// The first word of the payloads of this kind.
    fn word(self) -> &'static str {
        match self {
            Self::Usual => "usual",
            Self::Waiting => "waiting",
            Self::Large => "large",
            Self::Oversized => "oversized",
            Self::Unreadable => "unreadable",
        }
    }
}

impl Message {
    /// A message of the campaign's load.
    pub fn usual(number: usize) -> Self {
        let kind = Kind::Usual;
        Self { kind, number }
    }

    pub fn conduct(self) -> Conduct {
        match self.kind {
            Kind::Waiting | Kind::Large => return Conduct::Succeeds,
            Kind::Oversized => return Conduct::FailsAlways,
            Kind::Unreadable => return Conduct::Garbage,
            Kind::Usual => {}
        }
        match self.number % 25 {
            7 => Conduct::Garbage,
            0 | 5 | 10 | 15 | 20 => Conduct::FailsAlways,
            1 | 6 | 11 | 16 | 21 => Conduct::FailsOnce,
            _ => Conduct::Succeeds,
        }
    }

    /// Whether it is an ordinary message of its queue, whose consumer rejects it when it fails, so that the
    /// service gets it as a dead letter. The failures of all others are reported to the service.
    pub fn is_letter(self) -> bool {
        match self.kind {
            Kind::Oversized => true,
            Kind::Usual => self.number % 4 < 2 && self.conduct() != Conduct::Garbage,
            Kind::Waiting | Kind::Large | Kind::Unreadable => false,
        }
    }

    pub fn id(self) -> Uuid {
        Uuid::new_v5(&Uuid::NAMESPACE_OID, &self.number.to_be_bytes())
    }

    /// The `message_id` with which its consumer must see it. A letter's is its producer's, who gives the same
    /// one to many publications.
    pub fn message_id(self) -> String {
        match self.kind {
            Kind::Oversized => format!("{}-{}", self.kind.word(), self.number),
            _ if self.is_letter() => format!("order-{}", self.number % PRODUCERS_IDS),
            _ => self.id().to_string(),
        }
    }

    pub fn queue(self) -> &'static str {
        TARGETS[self.number % TARGETS.len()]
    }

    /// The routing key with which its consumer must see it: the one it was first published with.
    pub fn routing_key(self) -> &'static str {
        if self.is_letter() {
            KEYS[self.number % KEYS.len()]
        } else {
            self.queue()
        }
    }

    /// A dead letter gets as many retries as is usual, which is three.
    pub fn max_retries(self) -> i32 {
        if self.is_letter() || self.number.is_multiple_of(2) {
            3
        } else {
            5
        }
    }

    /// A payload that contains the kind and the number. It has up to 2 KiB, or the size of its kind.
    pub fn payload(self) -> Vec<u8> {
        let filler = self.id().as_u128().to_le_bytes();
        let mut payload = format!("{} {} ", self.kind.word(), self.number).into_bytes();
        let more = match self.kind {
            Kind::Large => (4 << 20) / filler.len(),
            Kind::Oversized => (LARGEST - payload.len()) / filler.len(),
            _ => self.number % 128,
        };
        payload.extend(filler.repeat(more));
        payload
    }

    /// The message that has this payload; `None` if the payload is damaged.
    pub fn of_payload(payload: &[u8]) -> Option<Self> {
        let message = Self::of_beginning(payload)?;
        (payload == message.payload()).then_some(message)
    }

    /// The message whose payload begins like this.
    pub fn of_beginning(payload: &[u8]) -> Option<Self> {
        let mut words = payload.splitn(3, |b| *b == b' ');
        let mut word = || std::str::from_utf8(words.next()?).ok();
        let kind = word()?;
        let number = word()?.parse().ok()?;
        let kind = Kind::ALL.into_iter().find(|known| known.word() == kind)?;
        Some(Self { kind, number })
    }

    /// The message that an envelope without a body tells of, by the id that its producer gave it.
    pub fn of_producers_id(id: &str) -> Option<Self> {
        let kind = Kind::Oversized;
        let number = id.strip_prefix(kind.word())?.strip_prefix('-')?;
        let number = number.parse().ok()?;
        Some(Self { kind, number })
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
