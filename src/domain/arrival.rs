//! What an arriving failure means for the row that has its id, or its key.

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::{
    UnknownText, attempt,
    budget::Budget,
    review::Reason,
    task::{NewTask, Status},
};

/// What is already stored under the id of an arriving failure.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // fields without a comment are columns
pub struct Known {
    pub id: i64,
    pub message_id: Uuid,
    /// Where the task stands; an error when a newer version wrote what this one
    /// cannot read.
    pub status: Result<Status, UnknownText>,
    pub budget: Budget,
    /// Whether queue and payload of a waiting row are those of the arrival.
    pub same_message: bool,
    /// Whether the row is on its way to review, or went there.
    pub for_review: bool,
    pub last_failed_at: DateTime<Utc>,
}

/// What an arriving failure does to the row that has its id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// The failure was reported twice: the row stays, its count may rise.
    Duplicate(Budget),
    /// The message failed again, or the failure ends the wait for its retry: the row is
    /// `pending` with this count, and with this failure.
    Again {
        /// The higher of the two counts.
        retry_count: i32,
    },
    /// The row is of another publication: the failure gets a row of its own, and its
    /// retries.
    Apart,
    /// The failure cannot use this row: it goes to review in a row of its own.
    Beside(Reason),
    /// The same, because a newer version wrote the row, and it is not ours to touch.
    BesideUnknown(Reason, UnknownText),
}

impl Known {
    /// The attempt that an arriving failure names, if it is not the last one that the
    /// message was sent back with. Then it may be an earlier one, whose failure is known
    /// already.
    pub fn names_another_attempt(&self, arriving: &NewTask) -> Option<Uuid> {
        // Since it was sent back, neither the count nor the moment has changed.
        let last = || {
            attempt::id(
                self.message_id,
                self.budget.retry_count,
                self.last_failed_at,
            )
        };
        let named = arriving.attempt?;
        (self.status == Ok(Status::Retried) && named != last()).then_some(named)
    }

    /// A waiting row with the same queue and payload: the failure was reported twice,
    /// unless the report says what the row does not know yet, that another try cannot help. A
    /// waiting row with others: one id for two messages. A row that was sent back: the
    /// message failed again. A row that has ended: the failure is late. A dead letter
    /// that was never delivered before has no row yet, whatever its id.
    pub fn meets(&self, arriving: &NewTask) -> Arrival {
        let budget = self.budget.at_least(arriving.budget.retry_count);
        let again = Arrival::Again {
            retry_count: budget.retry_count,
        };
        match &self.status {
            _ if arriving.unseen => Arrival::Apart,
            Ok(Status::Pending) if self.same_message && arriving.is_final() && !self.for_review => {
                again
            }
            Ok(Status::Pending) if self.same_message => Arrival::Duplicate(budget),
            Ok(Status::Pending) => Arrival::Beside(Reason::Conflict),
            Ok(Status::Retried) => again,
            Ok(Status::Failed | Status::Cancelled) => Arrival::Beside(Reason::Late),
            Err(text) => Arrival::BesideUnknown(Reason::Conflict, text.clone()),
        }
    }
}

/// As much of a failure as an idempotency key needs to recognise it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Retries made by then.
    pub retry_count: i32,
    /// SHA-256 of the payload.
    pub digest: Vec<u8>,
}

/// What became of the failure that an idempotency key was applied to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Since {
    /// Its task waits, or has ended: nobody got the message since.
    Held,
    /// The message was sent back, and not heard of since.
    SentBack {
        /// Retries made, that one included if it spent one.
        retry_count: i32,
    },
    /// Its task was removed, or a newer version wrote it.
    Unknown,
}

/// What a failure is whose idempotency key was applied before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyMatch {
    /// The same failure, reported again.
    Same,
    /// The next failure of the same message.
    Next,
    /// Another message under the same key: people have to look at it.
    Other(Reason),
}

impl Applied {
    /// A key that comes again with another payload names another message; with a higher
    /// count, the next failure. With the same count it may be the next failure too, once
    /// the message was sent back by a retry that spent nothing. Only the rest is provably
    /// the same failure, and may be dropped.
    pub fn meets(&self, arriving: &Self, since: Since) -> KeyMatch {
        if self.digest != arriving.digest {
            return KeyMatch::Other(Reason::Conflict);
        }
        let same = arriving.retry_count <= self.retry_count
            && match since {
                Since::Held => true,
                Since::SentBack { retry_count } => arriving.retry_count < retry_count,
                Since::Unknown => false,
            };
        if same { KeyMatch::Same } else { KeyMatch::Next }
    }
}
