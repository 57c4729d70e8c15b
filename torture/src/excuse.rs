//! Which fault explains that something came twice.
//!
//! A message is sent twice where its publish was not followed by the commit that
//! settles it, and taken in twice where the commit that stores it was not
//! followed by its ack. A fault that cannot have come between excuses nothing.

use std::time::Duration;

use tokio::time::Instant;

use crate::{fault::Fault, instance::LONGEST_TURN, ledger::Arrival};

/// Once RabbitMQ works, a published message is with its consumer within this time.
const LAG: Duration = Duration::from_secs(2);

/// A fault that has happened, and when.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    pub fault: Fault,
    /// The instance that was hit; `None` for all of them.
    pub whom: Option<usize>,
    pub begun: Instant,
    /// When the instances had recovered. A death is over at once.
    pub ended: Instant,
}

impl Record {
    /// A record of an instance that has died within the last second.
    pub fn of_death(fault: Fault, whom: usize) -> Self {
        let ended = Instant::now();
        Self {
            fault,
            whom: Some(whom),
            begun: ended - Duration::from_secs(1),
            ended,
        }
    }

    /// Whether this fault may have kept the publish of the first arrival from being settled, so that there was
    /// a second.
    pub fn sent_twice(&self, first: &Arrival, second: &Arrival) -> bool {
        // The message that was published first may have been held up and have arrived second.
        let senders = [first.from, second.from];
        let hit = |sender: &Option<usize>| sender.is_none() || *sender == self.whom;
        self.fault.breaks_settling()
            && (self.whom.is_none() || senders.iter().any(hit))
            && self.begun <= second.at
            && self.begun <= first.at + LONGEST_TURN
            && self.ended + LAG >= first.at
    }

    /// Whether this fault may have kept a failure that was reported at `sent` from being acknowledged.
    pub fn taken_twice(&self, sent: Instant, seen: Instant) -> bool {
        self.fault.breaks_acking() && self.begun <= seen && self.ended + LAG >= sent
    }

    /// Whether this fault may have made RabbitMQ dead-letter a message twice that was rejected at `died` for the first
    /// time. It does so when it goes down before it knows that the dead letter is in its queue, and the second one may
    /// be stamped with another second: then nothing tells it from another death.
    pub fn dead_lettered_twice(&self, died: Instant, seen: Instant) -> bool {
        self.fault.ends_broker() && self.begun <= seen && self.ended + LAG >= died
    }
}

impl Fault {
    /// Whether it may come between a publish and the commit that settles it.
    fn breaks_settling(self) -> bool {
        !matches!(
            self,
            // An instance that leaves, be it for another clock, settles what it has published first. The other two
            // do not concern what was published.
            Self::Leave | Self::ClockSkew | Self::IntakeGone | Self::MqReject
            // The settling was committed; only the answer was lost.
            | Self::PgCommitLost
            // These break the connection that consumes, and messages are published on another.
            | Self::MqAckUnsent | Self::Unreadable
            // A COMMIT that waits for a standby is waited for.
            | Self::StandbyAway
            // These are nothing but messages, and instances that leave before the large ones come.
            | Self::Large | Self::Oversized
        )
    }

    /// Whether it may come between the commit of a failure and its ack.
    fn breaks_acking(self) -> bool {
        !matches!(
            self,
            Self::Leave
                | Self::ClockSkew
                | Self::IntakeGone
                | Self::MqReject
                | Self::MqConfirmLost
                | Self::MqPublishUnsent
                | Self::StandbyAway
                | Self::Large
                | Self::Oversized
        )
    }

    /// Whether RabbitMQ goes down in it.
    fn ends_broker(self) -> bool {
        matches!(self, Self::MqRestart | Self::MqKill)
    }

    /// Whether an instance dies of it. Such a fault has no duration, and is recorded when it happens.
    pub fn is_death(self) -> bool {
        self == Self::Kill || self.point().is_some()
    }

    /// Whether it hits one instance only.
    pub fn hits_one(self) -> bool {
        matches!(
            self,
            Self::Freeze
                | Self::CrashLoop
                | Self::PgCut
                | Self::PgStall
                | Self::PgMute
                | Self::PgSlow
                | Self::PgHalfClose
                | Self::PgCommitLost
                | Self::PgCommitUnsent
                | Self::MqCut
                | Self::MqStall
                | Self::MqMute
                | Self::MqSlow
                | Self::MqHalfClose
                | Self::MqConfirmLost
                | Self::MqAckUnsent
                | Self::MqPublishUnsent
        )
    }
}
