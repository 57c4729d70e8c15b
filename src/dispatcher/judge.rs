//! What the broker said of a message becomes the end of its task.

use std::time::Duration;

use tracing::warn;

use super::turn::Bound;
use crate::{
    broker::{Fault, Outcome},
    domain::{review::Evidence, settlement::Settlement},
    observe::telemetry::one_line,
    plant::Bug,
    wire,
};

/// The longest wait of a message that was not confirmed in time.
const LONGEST_STAND_BACK: Duration = Duration::from_secs(60);

/// The shortest wait of a message that the broker refused, whatever its policy says.
const SHORTEST_DEFERRAL: Duration = Duration::from_millis(100);

/// What a fault of the broker says about the messages of which nothing else is known.
pub(super) enum Verdict {
    /// Nothing: they stay as they were, for another turn.
    Innocent,
    /// The broker closed the channel over the only message there was.
    Guilty(String),
    /// The broker failed over the only message there was, or did not confirm in time:
    /// it may yet deliver what it was sent.
    Suspect,
}

impl Verdict {
    /// The verdict on the rest of a batch of `published` messages.
    pub(super) fn on(fault: &Option<Fault>, published: usize) -> Self {
        match fault {
            Some(Fault::Channel(why)) if published == 1 => Self::Guilty(why.clone()),
            Some(Fault::Internal(_)) if published == 1 => Self::Suspect,
            Some(Fault::Timeout(_)) => Self::Suspect,
            _ => Self::Innocent,
        }
    }
}

impl Bound<'_> {
    /// How the task ends, by what the broker said; none leaves it as it was.
    pub(super) fn end_by(&self, outcome: &Outcome, verdict: &Verdict) -> Option<Settlement> {
        match (outcome, self.review) {
            (Outcome::Confirmed, None) => Some(self.sent_back()),
            (Outcome::Confirmed, Some(reason)) => Some(Settlement::Reviewed(reason)),
            (Outcome::Returned(why), _) => {
                let error = format!("queue {:?} does not exist ({why})", self.task.queue);
                Some(self.returned(error))
            }
            (Outcome::Refused, _) => Some(self.deferred()),
            (Outcome::Unknown, None) if Bug::SettleUnconfirmed.planted() => Some(self.sent_back()),
            (Outcome::Unknown, _) => match verdict {
                Verdict::Innocent => None,
                Verdict::Guilty(why) => Some(self.returned(why.clone())),
                Verdict::Suspect => Some(self.stands_back()),
            },
        }
    }

    fn sent_back(&self) -> Settlement {
        let retry_count = if Bug::CountNotRaised.planted() {
            self.task.budget.retry_count
        } else {
            self.task.next_count()
        };
        Settlement::SentBack { retry_count }
    }

    /// The message could not be sent. A task that is bound for review spends nothing on
    /// that: there is nowhere else for it to go.
    pub(super) fn returned(&self, error: String) -> Settlement {
        let task = &self.task;
        if self.review.is_some() {
            warn!(
                message_id = %task.message_id,
                error = %one_line(&error),
                "review could not be reached; will try again"
            );
            return self.deferred();
        }
        // Even an attempt that would spend nothing counts here, or the search for a
        // missing queue would never end.
        let budget = task
            .budget
            .at_least(task.budget.retry_count.saturating_add(1));
        let evidence = Evidence {
            budget,
            returned: true,
            ..Evidence::default()
        };
        let reason = evidence.reason();
        Settlement::Returned {
            retry_count: budget.retry_count,
            delay: match reason {
                Some(_) => Duration::ZERO,
                None => self.delay(budget.retry_count),
            },
            error: wire::storable(error),
            reason,
        }
    }

    /// The broker refused the message for now: the task waits as its policy says.
    fn deferred(&self) -> Settlement {
        let delay = self.delay(self.task.budget.retry_count);
        Settlement::Deferred {
            delay: delay.max(SHORTEST_DEFERRAL),
        }
    }

    /// A queue that does not confirm may yet deliver what it was sent: it is not sent
    /// more of the same soon, nor allowed to hold up all others. The same holds for a
    /// message that the broker fails over. Nothing is spent, since it may not be the
    /// message's fault; in the end the task expires.
    fn stands_back(&self) -> Settlement {
        Settlement::Deferred {
            delay: self.policy.max_delay.min(LONGEST_STAND_BACK),
        }
    }

    fn delay(&self, retries: i32) -> Duration {
        self.policy.delay(retries.unsigned_abs(), fastrand::f64())
    }
}
