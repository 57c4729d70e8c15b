//! The row as types: what a failed message is, and what may become of it.

use std::{fmt, str::FromStr, time::Duration};

use chrono::{DateTime, Utc};
use uuid::Uuid;

use crate::classify::ErrorClass;

/// `pending → retried | failed`, and `cancelled` by an operator.
///
/// A `retried` row goes back to `pending` when its message fails again. What
/// is `failed` or `cancelled` never leaves that state by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Waits for its due time.
    Pending,
    /// Republished, and not heard of since.
    Retried,
    /// With people.
    Failed,
    /// Stopped by an operator.
    Cancelled,
}

/// Why a message goes to people instead of back to its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// Its retries are spent.
    Exhausted,
    /// It is older than its policy allows.
    Expired,
    /// Its error cannot be helped by another try.
    Final,
    /// Its error carries the `[terminal]` marker.
    Terminal,
    /// Its queue does not exist, and its retries are spent on finding that out.
    Unroutable,
    /// It cannot be understood, or asks for what is not allowed.
    Invalid,
    /// Its id belongs to another message that is still waiting.
    Conflict,
    /// Its id belongs to a message that has already ended.
    Late,
}

macro_rules! text_form {
    ($type:ident { $($variant:ident => $text:literal),* $(,)? }) => {
        impl $type {
            /// The form used in Postgres, metrics, logs and on the wire.
            pub const fn as_str(self) -> &'static str {
                match self { $(Self::$variant => $text),* }
            }
        }
        impl fmt::Display for $type {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(self.as_str())
            }
        }
        impl FromStr for $type {
            type Err = UnknownText;
            fn from_str(text: &str) -> Result<Self, UnknownText> {
                match text {
                    $($text => Ok(Self::$variant),)*
                    _ => Err(UnknownText { what: stringify!($type), text: text.to_owned() }),
                }
            }
        }
    };
}

/// A text in the database that no version of ours wrote.
#[derive(Debug, thiserror::Error)]
#[error("{text:?} is not a {what}")]
pub struct UnknownText {
    what: &'static str,
    text: String,
}

text_form!(Status {
    Pending => "pending",
    Retried => "retried",
    Failed => "failed",
    Cancelled => "cancelled",
});

text_form!(Reason {
    Exhausted => "exhausted",
    Expired => "expired",
    Final => "final",
    Terminal => "terminal",
    Unroutable => "unroutable",
    Invalid => "invalid",
    Conflict => "conflict",
    Late => "late",
});

/// Which of two due messages goes first.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Priority {
    /// Ordinary work.
    #[default]
    Live,
    /// Old work done again: it yields to live work, but is never starved.
    Backfill,
}

/// What happens to a failure next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Wait, then back to its queue.
    Retry {
        /// How long.
        delay: Duration,
        /// A wait the other side asked for spends no attempt.
        free: bool,
    },
    /// To people, at once.
    Review(Reason),
}

/// A failure as it arrived, understood or not; ready to be stored.
#[derive(Clone, Debug, PartialEq)]
pub struct NewTask {
    /// Identity across failures.
    pub message_id: Uuid,
    /// The producer's id where it is not the UUID itself.
    pub producer_id: Option<String>,
    /// Body to send back.
    pub payload: Vec<u8>,
    /// Queue to send it back to.
    pub queue: String,
    /// Encoded [`crate::wire::proto::Properties`].
    pub properties: Vec<u8>,
    /// Why it failed.
    pub error: String,
    /// What kind of failure it was.
    pub class: ErrorClass,
    /// `[terminal]` was in the error.
    pub terminal: bool,
    /// Asked for by a rate-limited failure.
    pub retry_after: Option<Duration>,
    /// The producer's "not before", in Unix ms.
    pub not_before_ms: Option<i64>,
    /// The producer's word on the first failure, in Unix ms.
    pub first_failed_at_ms: Option<i64>,
    /// Retries made, as the producer counts.
    pub retry_count: i32,
    /// Retries allowed.
    pub max_retries: i32,
    /// Name of the policy that governs it.
    pub policy: String,
    /// How long after its first failure it may still be retried.
    pub max_age: Duration,
    /// Live or backfill.
    pub priority: Priority,
    /// Names this one failure, so that it is applied once.
    pub idempotency_key: Option<String>,
    /// The producer's words, kept for search and history.
    pub labels: Labels,
    /// Decided before storing: it is not retried but reviewed.
    pub verdict: Option<Reason>,
}

/// What a producer says of a message for search, fairness and history.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)]
pub struct Labels {
    pub category: Option<String>,
    pub tenant: Option<String>,
    pub correlation_id: Option<String>,
    pub trace_id: Option<String>,
}

impl NewTask {
    /// What follows from this failure once `retry_count` retries have been
    /// made; `random` in `[0, 1)` is the jitter's.
    pub fn next(&self, policy: &crate::policy::Policy, retry_count: i32, random: f64) -> Next {
        if let Some(reason) = self.verdict {
            Next::Review(reason)
        } else if self.terminal {
            Next::Review(Reason::Terminal)
        } else if self.class == ErrorClass::Final {
            Next::Review(Reason::Final)
        } else if retry_count >= self.max_retries {
            Next::Review(Reason::Exhausted)
        } else if let (ErrorClass::RateLimited, Some(wait)) = (self.class, self.retry_after) {
            Next::Retry {
                delay: wait,
                free: true,
            }
        } else {
            Next::Retry {
                delay: policy.delay(retry_count.unsigned_abs(), random),
                free: false,
            }
        }
    }

    /// Where its idempotency key is unique: its queue and tenant. A queue's name
    /// holds no control character, so no two pairs look alike.
    pub fn scope(&self) -> String {
        let tenant = self.labels.tenant.as_deref().unwrap_or_default();
        format!("{}\u{1f}{tenant}", self.queue)
    }

    /// The same message as a case for people, under an id of its own because
    /// its own is taken.
    pub fn beside(mut self, id: Uuid, reason: Reason) -> Self {
        let taken = self.message_id.to_string();
        self.producer_id.get_or_insert(taken);
        self.message_id = id;
        self.verdict = Some(reason);
        self
    }
}

/// What is already stored under the id of an arriving failure.
#[derive(Clone, Debug)]
pub struct Known {
    /// Row id.
    pub id: i64,
    /// The shared identity.
    pub message_id: Uuid,
    /// Where it stands.
    pub status: Status,
    /// Retries made, as we count.
    pub retry_count: i32,
    /// Whether queue and payload are those of the arrival.
    pub same_message: bool,
}

/// What an arriving failure does to the row that has its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Arrival {
    /// Said twice: the row stays, its count may rise.
    Duplicate {
        /// The higher of the two counts.
        retry_count: i32,
    },
    /// It failed again: the row goes back to `pending`.
    Again {
        /// The higher of the two counts.
        retry_count: i32,
    },
    /// It cannot use this row: to review beside it.
    Beside(Reason),
}

impl Known {
    /// The table "the same message again" of the design.
    pub fn meets(&self, arriving: &NewTask) -> Arrival {
        let retry_count = self.retry_count.max(arriving.retry_count);
        match self.status {
            Status::Pending if self.same_message => Arrival::Duplicate { retry_count },
            Status::Pending => Arrival::Beside(Reason::Conflict),
            Status::Retried => Arrival::Again { retry_count },
            Status::Failed | Status::Cancelled => Arrival::Beside(Reason::Late),
        }
    }
}

/// A row that fell due, claimed and locked.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // the fields are those of NewTask
pub struct Task {
    pub id: i64,
    pub message_id: Uuid,
    pub producer_id: Option<String>,
    pub payload: Vec<u8>,
    pub queue: String,
    pub properties: Vec<u8>,
    pub error: Option<String>,
    pub class: Option<String>,
    pub retry_count: i32,
    pub max_retries: i32,
    /// This retry spends no attempt.
    pub free: bool,
    pub policy: Option<String>,
    pub labels: Labels,
    /// Set: bound for review.
    pub reason: Option<Reason>,
    /// Past its `max_age`.
    pub expired: bool,
    pub first_failed_at: DateTime<Utc>,
    pub last_failed_at: DateTime<Utc>,
    /// How late it was when it was claimed.
    pub late: Duration,
}

impl Task {
    /// Why this row goes to review rather than back to its queue, if it does.
    pub fn review_reason(&self) -> Option<Reason> {
        self.reason
            .or((self.retry_count >= self.max_retries).then_some(Reason::Exhausted))
            .or(self.expired.then_some(Reason::Expired))
    }

    /// The count after one more republish.
    pub fn next_count(&self) -> i32 {
        self.retry_count.saturating_add(i32::from(!self.free))
    }
}

/// How a claimed row ends its turn.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Settlement {
    /// Back in its queue.
    Retried {
        /// Count after this republish.
        retry_count: i32,
    },
    /// Given to people.
    Reviewed(Reason),
    /// A failed execution: an attempt is spent, and it waits again.
    Failed {
        /// Count after this attempt.
        retry_count: i32,
        /// Until the next one.
        delay: Duration,
        /// What the broker said.
        error: String,
        /// Set when that was the last attempt.
        reason: Option<Reason>,
    },
    /// The broker would not take it now: it waits, nothing is spent.
    Deferred {
        /// Until the next try.
        delay: Duration,
    },
}
