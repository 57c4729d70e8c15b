//! How a claimed task ends: by what the broker said of its message.

use std::time::Duration;

use super::{event::EventKind, review::Reason, task::Status};

/// How a claimed task ends.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// The message is back in its queue.
    SentBack {
        /// The count after this republish.
        retry_count: i32,
    },
    /// The message was given to people.
    Reviewed(Reason),
    /// The message could not be sent back, because its queue does not exist, the broker
    /// closed the channel over its content, or it could not be made: an attempt is
    /// spent, and the task waits again. Or it may not be sent there at all: then it goes
    /// to review.
    Returned {
        /// The count after this attempt.
        retry_count: i32,
        /// The wait before the next attempt.
        delay: Duration,
        /// What the broker said.
        error: String,
        /// Set when that was the last attempt: the next stop is review.
        reason: Option<Reason>,
    },
    /// The broker refused the message for now or did not confirm it in time, or review
    /// could not be reached: the task waits, nothing is spent.
    Deferred {
        /// The wait before the next try.
        delay: Duration,
    },
}

impl Settlement {
    /// The status of the row afterwards.
    pub fn status(&self) -> Status {
        match self {
            Self::SentBack { .. } => Status::Retried,
            Self::Reviewed(_) => Status::Failed,
            Self::Returned { .. } | Self::Deferred { .. } => Status::Pending,
        }
    }

    /// The event that tells of it.
    pub fn event(&self) -> EventKind {
        match self {
            Self::SentBack { .. } => EventKind::SentBack,
            Self::Reviewed(_) => EventKind::Reviewed,
            Self::Returned { .. } => EventKind::Returned,
            Self::Deferred { .. } => EventKind::Deferred,
        }
    }
}
