//! A failed message, as it arrives and as it is claimed.

use std::{sync::Arc, time::Duration};

use chrono::{DateTime, Utc};
use uuid::Uuid;

use super::{
    attempt,
    budget::Budget,
    classify::ErrorClass,
    limits::SHORTEST_FREE_WAIT,
    policy::Policy,
    review::{Evidence, Reason},
};

/// Where a task stands: `pending → retried | failed`, and `cancelled` by an operator.
///
/// A `retried` task goes back to `pending` when its message fails again. A task that
/// is `failed` or `cancelled` never leaves that state by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// The task waits for its due time.
    Pending,
    /// The message was sent back, and has not been heard of since.
    Retried,
    /// The message is with people.
    Failed,
    /// An operator stopped the task. The service itself never does.
    Cancelled,
}

text_form!(Status {
    Pending => "pending",
    Retried => "retried",
    Failed => "failed",
    Cancelled => "cancelled",
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
    /// The task waits, then the message goes back to its queue.
    Retry {
        /// The wait that the policy or the producer asks for.
        delay: Duration,
        /// Whether the republish spends no attempt, because the other side asked for the
        /// wait.
        free: bool,
    },
    /// The message goes to people at once.
    Review(Reason),
}

/// A failure as it arrived, understood or not; ready to be stored.
#[derive(Clone, Debug, PartialEq)]
pub struct NewTask {
    /// Identifies the message across its failures.
    pub message_id: Uuid,
    /// The producer's id, where it is not the UUID itself.
    pub producer_id: Option<String>,
    /// The body to send back.
    pub payload: Vec<u8>,
    /// The queue to send it back to.
    pub queue: String,
    /// The AMQP properties to restore, as an encoded `retry.v1.Properties`.
    pub properties: Vec<u8>,
    /// Why the message failed, for people.
    pub error: String,
    /// The kind of failure.
    pub class: ErrorClass,
    /// Whether `[terminal]` stands in the error text.
    pub terminal: bool,
    /// The pause that a rate-limited failure asks for.
    pub retry_after: Option<Duration>,
    /// The producer's "not before", in Unix ms.
    pub not_before_ms: Option<i64>,
    /// The producer's word on when the message first failed, in Unix ms.
    pub first_failed_at_ms: Option<i64>,
    /// The attempt that failed, if the failure names it.
    pub attempt: Option<Uuid>,
    /// Retries made and retries allowed, as the producer and the policy say.
    pub budget: Budget,
    /// The policy that governs the message.
    pub policy: Arc<Policy>,
    /// Live work or backfill.
    pub priority: Priority,
    /// Names this one failure, so that it is applied once.
    pub idempotency_key: Option<String>,
    /// The producer's words for search and history.
    pub labels: Labels,
    /// Whether this is a publication that nobody has delivered to us before, so that an
    /// equal id in the store is another publication's.
    pub unseen: bool,
    /// The reason for review, when it was known before anything was stored.
    pub verdict: Option<Reason>,
}

/// What a producer says of a message for search, fairness and history.
#[derive(Clone, Debug, Default, PartialEq)]
#[allow(missing_docs)] // the fields of RetryMessage have the same names
pub struct Labels {
    pub category: Option<String>,
    pub operation: Option<String>,
    pub error_type: Option<String>,
    pub tenant: Option<String>,
    pub correlation_id: Option<String>,
    pub trace_id: Option<String>,
}

impl NewTask {
    /// What follows from this failure once `retry_count` retries have been made.
    /// `random`, from 0 to 1, chooses the jitter.
    pub fn next(&self, retry_count: i32, random: f64) -> Next {
        let evidence = Evidence {
            decided: self.verdict,
            terminal: self.terminal,
            class: Some(self.class),
            ..Evidence::of(self.budget.at_least(retry_count))
        };
        if let Some(reason) = evidence.reason() {
            return Next::Review(reason);
        }
        match (self.class, self.retry_after) {
            (ErrorClass::RateLimited, Some(wait)) => Next::Retry {
                delay: wait.max(SHORTEST_FREE_WAIT),
                free: true,
            },
            _ => Next::Retry {
                delay: self.policy.delay(retry_count.unsigned_abs(), random),
                free: false,
            },
        }
    }

    /// Whether the failure itself says that another try cannot help.
    pub fn is_final(&self) -> bool {
        self.terminal || self.class == ErrorClass::Final
    }

    /// Where the idempotency key is unique.
    pub fn scope(&self) -> String {
        super::idempotency::scope(&self.queue, self.labels.tenant.as_deref())
    }

    /// The same message as a case for people, under an id of its own, because its
    /// own id is taken by another task.
    pub fn beside(mut self, id: Uuid, reason: Reason) -> Self {
        let taken = self.message_id.to_string();
        self.producer_id.get_or_insert(taken);
        self.message_id = id;
        self.verdict = Some(reason);
        self
    }
}

/// A task that fell due, claimed and locked.
#[derive(Clone, Debug)]
#[allow(missing_docs)] // fields without a comment are those of NewTask
pub struct Task {
    pub id: i64,
    pub message_id: Uuid,
    pub producer_id: Option<String>,
    pub payload: Vec<u8>,
    pub queue: String,
    pub properties: Vec<u8>,
    pub error: Option<String>,
    pub class: Option<ErrorClass>,
    pub budget: Budget,
    /// The next republish spends no attempt.
    pub free: bool,
    /// The name of the policy; the policy file may have lost it since.
    pub policy: Option<String>,
    pub labels: Labels,
    /// Set when the task is bound for review.
    pub reason: Option<Reason>,
    /// Whether the task is older than its policy's `max_age`.
    pub expired: bool,
    pub first_failed_at: DateTime<Utc>,
    pub last_failed_at: DateTime<Utc>,
    pub due_at: DateTime<Utc>,
    /// How long the task had been due when it was claimed.
    pub late: Duration,
}

impl Task {
    /// Why this task goes to review rather than back to its queue, if it does.
    pub fn review_reason(&self) -> Option<Reason> {
        let evidence = Evidence {
            decided: self.reason,
            expired: self.expired,
            ..Evidence::of(self.budget)
        };
        evidence.reason()
    }

    /// The count after one more republish.
    pub fn next_count(&self) -> i32 {
        let spends = i32::from(!self.free);
        self.budget.retry_count.saturating_add(spends)
    }

    /// The id of the attempt that the next republish is: the same when that republish
    /// has to be made again, another one once a failure was reported.
    pub fn attempt_id(&self) -> Uuid {
        attempt::id(self.message_id, self.next_count(), self.last_failed_at)
    }

    /// The time from the last failure to the moment at which the task was due, deferrals
    /// included.
    pub fn delay(&self) -> Duration {
        let delay = self.due_at - self.last_failed_at;
        delay.to_std().unwrap_or_default()
    }
}
