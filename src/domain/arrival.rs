//! What an arriving failure means for the row that has its id, or its key.

use uuid::Uuid;

use super::{
    UnknownText,
    review::{Budget, Reason},
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
}

/// What an arriving failure does to the row that has its id.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// The failure was reported twice: the row stays, its count may rise.
    Duplicate(Budget),
    /// The message failed again: the row goes back to `pending` with this count.
    Again {
        /// The higher of the two counts.
        retry_count: i32,
    },
    /// The failure cannot use this row: it goes to review in a row of its own.
    Beside(Reason),
    /// The row is not ours to touch: the failure goes to review in a row of its own.
    Unknown(UnknownText),
}

impl Known {
    /// Decides by the table in `ARCHITECTURE.md`, "It is stored".
    pub fn meets(&self, arriving: &NewTask) -> Arrival {
        let budget = self.budget.at_least(arriving.budget.retry_count);
        match &self.status {
            Ok(Status::Pending) if self.same_message => Arrival::Duplicate(budget),
            Ok(Status::Pending) => Arrival::Beside(Reason::Conflict),
            Ok(Status::Retried) => Arrival::Again {
                retry_count: budget.retry_count,
            },
            Ok(Status::Failed | Status::Cancelled) => Arrival::Beside(Reason::Late),
            Err(unknown) => Arrival::Unknown(unknown.clone()),
        }
    }
}

/// What an idempotency key is, or is to be, applied to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Retries made by then.
    pub retry_count: i32,
    /// SHA-256 of the payload.
    pub digest: Vec<u8>,
}

/// What a failure is whose idempotency key was applied before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyMatch {
    /// The same failure, reported again.
    Same,
    /// The next failure of the same message.
    Next,
    /// Another message under the same key.
    Other,
}

impl Applied {
    /// Only what is provably the same failure may be dropped, so the payload has to
    /// be the same and the count not higher.
    pub fn meets(&self, arriving: &Self) -> KeyMatch {
        if self.digest != arriving.digest {
            KeyMatch::Other
        } else if arriving.retry_count > self.retry_count {
            KeyMatch::Next
        } else {
            KeyMatch::Same
        }
    }
}
