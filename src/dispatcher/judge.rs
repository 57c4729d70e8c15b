//! What the broker said of a message becomes the end of its task.

use std::time::Duration;

use tracing::warn;

use super::turn::Bound;
use crate::{
    broker::Outcome,
    domain::{
        review::{Evidence, Reason},
        settlement::Settlement,
    },
    observe::telemetry::one_line,
    plant::Bug,
    wire::{self, LeftOut},
};

/// The longest wait of a message that was not confirmed in time.
const LONGEST_STAND_BACK: Duration = Duration::from_secs(60);

/// The shortest wait of a message that the broker refused, whatever its policy says.
const SHORTEST_DEFERRAL: Duration = Duration::from_millis(100);

/// Gives each published task its end. Returns whether the review queue is missing.
pub(super) fn judge(bound: &mut [Bound<'_>], outcomes: &[Outcome]) -> bool {
    let mut review_is_missing = false;
    let published = bound.iter_mut().filter(|b| b.end.is_none());
    for (bound, outcome) in published.zip(outcomes) {
        review_is_missing |= bound.review.is_some() && matches!(outcome, Outcome::Returned(_));
        bound.end = bound.end_by(outcome);
    }
    review_is_missing
}

impl Bound<'_> {
    /// How the task ends, by what the broker said; none leaves it as it was.
    fn end_by(&self, outcome: &Outcome) -> Option<Settlement> {
        match (outcome, self.review) {
            (Outcome::Confirmed, None) => Some(self.sent_back()),
            (Outcome::Confirmed, Some(reason)) => Some(Settlement::Reviewed(reason)),
            (Outcome::Returned(why), _) => {
                let error = format!("queue {:?} does not exist ({why})", self.task.queue);
                Some(self.returned(error))
            }
            (Outcome::Forbidden(why), _) => Some(self.forbidden(why.clone())),
            (Outcome::Refused, _) => Some(self.deferred()),
            (Outcome::Unknown | Outcome::Unconfirmed, None) if Bug::SettleUnconfirmed.planted() => {
                Some(self.sent_back())
            }
            // The next envelope is smaller.
            (Outcome::TooLarge(_), Some(_)) if self.left_out != LeftOut::PayloadAndProperties => {
                None
            }
            (Outcome::TooLarge(why) | Outcome::Unacceptable(why), _) => {
                Some(self.returned(why.clone()))
            }
            (Outcome::Unconfirmed, _) => Some(self.stands_back()),
            (Outcome::Unknown | Outcome::Unsent, _) => None,
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

    /// The message was not sent: its queue does not exist, the broker closed the channel
    /// over it, or it could not be made. An attempt is spent, except by a task bound for
    /// review, which has nowhere else to go.
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
            returned: true,
            ..Evidence::of(budget)
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

    /// The message may not go to its queue, however often it is tried: its next stop is
    /// review.
    fn forbidden(&self, error: String) -> Settlement {
        Settlement::Returned {
            retry_count: self.task.budget.retry_count,
            delay: Duration::ZERO,
            error,
            reason: Some(Reason::Invalid),
        }
    }

    /// The task waits as its policy says, and spends nothing: the broker refused the message
    /// for now, or review could not be reached.
    fn deferred(&self) -> Settlement {
        let delay = self.delay(self.task.budget.retry_count);
        Settlement::Deferred {
            delay: delay.max(SHORTEST_DEFERRAL),
        }
    }

    /// The broker may still deliver a message that it did not confirm in time, so the same
    /// message is not sent again soon; and the wait keeps a queue that never confirms from
    /// holding up every turn. A message that the broker fails over is treated alike. No
    /// attempt is spent, since the message may not be at fault; if this goes on, the task
    /// expires.
    fn stands_back(&self) -> Settlement {
        Settlement::Deferred {
            delay: self.policy.max_delay.min(LONGEST_STAND_BACK),
        }
    }

    fn delay(&self, retries: i32) -> Duration {
        self.policy.delay(retries.unsigned_abs(), fastrand::f64())
    }
}
