//! Which fault explains that something came twice.
//!
//! A message is sent twice where its publish was not followed by the commit that
//! settles it, and taken in twice where the commit that stores it was not
//! followed by its ack. A fault that cannot have come between excuses nothing.

use std::time::Duration;

use tokio::time::Instant;

use crate::{fault::Fault, instance::LONGEST_TURN, ledger::Arrival};

/// What was published is with its consumer after this, once RabbitMQ works.
const LAG: Duration = Duration::from_secs(2);

/// A fault that has happened.
#[derive(Clone, Copy, Debug)]
pub struct Record {
    pub fault: Fault,
    /// The one instance it hit; `None` for all.
    pub whom: Option<usize>,
    pub begun: Instant,
    /// When the service had recovered; a death is over at once.
    pub ended: Instant,
}

impl Record {
    /// An instance has just died, and was noticed to.
    pub fn of_death(fault: Fault, whom: usize) -> Self {
        let ended = Instant::now();
        Self {
            fault,
            whom: Some(whom),
            begun: ended - Duration::from_secs(1),
            ended,
        }
    }

    /// Whether it may have kept the first one from being settled.
    pub fn sent_twice(&self, first: &Arrival, second: &Arrival) -> bool {
        // What was held up on its way may come second.
        let senders = [first.from, second.from];
        let hit = |sender: &Option<usize>| sender.is_none() || *sender == self.whom;
        self.fault.breaks_settling()
            && (self.whom.is_none() || senders.iter().any(hit))
            && self.begun <= second.at
            && self.begun <= first.at + LONGEST_TURN
            && self.ended + LAG >= first.at
    }

    /// Whether it may have kept a failure sent at `sent` from being acked.
    pub fn taken_twice(&self, sent: Instant, seen: Instant) -> bool {
        self.fault.breaks_acking() && self.begun <= seen && self.ended + LAG >= sent
    }
}

impl Fault {
    /// Whether it may come between a publish and the commit that settles it.
    fn breaks_settling(self) -> bool {
        !matches!(
            self,
            // These finish what is in hand, or concern nothing that was sent.
            Self::Leave | Self::ClockSkew | Self::IntakeGone | Self::MqReject
            // Committed, though nobody heard of it.
            | Self::PgCommitLost
            // The consumers' connection: the publishers' is another.
            | Self::MqAckUnsent
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
        )
    }

    /// Whether an instance dies of it. Such a fault is a moment, and is recorded then.
    pub fn is_death(self) -> bool {
        self == Self::Kill || self.point().is_some()
    }

    /// Whether it hits one instance only.
    pub fn hits_one(self) -> bool {
        matches!(
            self,
            Self::Freeze
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
