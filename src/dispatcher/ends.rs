//! What the broker said of a message becomes the end of its turn.

use std::time::Duration;

use tracing::warn;

use super::{Bound, Dispatcher};
use crate::{
    audit,
    broker::Outcome,
    plant::Bug,
    task::{Reason, Settlement, Task},
    wire,
};

/// How long what was not confirmed in time waits at most.
const LONGEST_STAND_BACK: Duration = Duration::from_secs(60);

/// No policy makes a refused message come back faster than this.
const SHORTEST_DEFERRAL: Duration = Duration::from_millis(100);

impl Dispatcher {
    /// How a message's turn ends, by what the broker said of it; `None` leaves it as
    /// it was.
    pub(super) fn end(
        &self,
        bound: &Bound,
        outcome: &Outcome,
        culprit: Option<&str>,
    ) -> Option<Settlement> {
        let retry_count = if Bug::CountNotRaised.planted() {
            bound.task.retry_count
        } else {
            bound.task.next_count()
        };
        match (outcome, bound.review) {
            (Outcome::Confirmed, None) => Some(Settlement::Retried { retry_count }),
            (Outcome::Confirmed, Some(reason)) => Some(Settlement::Reviewed(reason)),
            (Outcome::Returned(why), _) => Some(self.failed(
                &bound.task,
                bound.review,
                format!("queue {:?} does not exist ({why})", bound.task.queue),
            )),
            (Outcome::Refused, _) => Some(Settlement::Deferred {
                delay: self
                    .delay(&bound.task, bound.task.retry_count)
                    .max(SHORTEST_DEFERRAL),
            }),
            (Outcome::Unknown, None) if Bug::SettleUnconfirmed.planted() => {
                Some(Settlement::Retried { retry_count })
            }
            (Outcome::Unknown, _) => {
                culprit.map(|why| self.failed(&bound.task, bound.review, why.to_owned()))
            }
        }
    }

    /// A failed execution. What is bound for review is never spent: there is
    /// nowhere else for it to go.
    pub(super) fn failed(&self, task: &Task, review: Option<Reason>, error: String) -> Settlement {
        if review.is_some() {
            warn!(
                message_id = %task.message_id,
                error = %crate::telemetry::one_line(&error),
                "review could not be reached; will try again"
            );
            return Settlement::Deferred {
                delay: self.delay(task, task.retry_count).max(SHORTEST_DEFERRAL),
            };
        }
        // Even a free attempt counts here, or a missing queue would never end.
        let retry_count = task.retry_count.saturating_add(1);
        let spent = retry_count >= task.max_retries;
        Settlement::Failed {
            retry_count,
            delay: if spent {
                Duration::ZERO
            } else {
                self.delay(task, retry_count)
            },
            error: wire::storable(error),
            reason: spent.then_some(Reason::Unroutable),
        }
    }

    /// A queue that does not confirm may yet deliver what it was sent: it is not
    /// sent more of the same soon, nor allowed to hold up all others. The same for
    /// what the broker fails over. Nothing is spent, it may not be the message's
    /// fault; in the end it expires.
    pub(super) fn stand_back(&self, task: &Task) -> Settlement {
        let policy = self.book.named(task.policy.as_deref().unwrap_or_default());
        Settlement::Deferred {
            delay: policy.max_delay.min(LONGEST_STAND_BACK),
        }
    }

    /// The wait after so many attempts.
    fn delay(&self, task: &Task, attempts: i32) -> Duration {
        let policy = self.book.named(task.policy.as_deref().unwrap_or_default());
        policy.delay(attempts.unsigned_abs(), fastrand::f64())
    }

    /// Metrics and logs, once it is durable.
    pub(super) fn tell(&self, bound: &[Bound], took: Duration) {
        self.metrics.dispatch_seconds.observe(took.as_secs_f64());
        for Bound { task, end, .. } in bound {
            let Some(end) = end else { continue };
            match end {
                Settlement::Retried { retry_count } => {
                    self.metrics.republished(&task.queue, task.late + took);
                    audit::sent_back(task, *retry_count);
                }
                Settlement::Reviewed(reason) => {
                    self.metrics.reviewed(&task.queue, *reason);
                    audit::reviewed(task, *reason);
                }
                Settlement::Failed {
                    retry_count,
                    delay,
                    error,
                    ..
                } => {
                    self.metrics.republish_failed(&task.queue);
                    audit::returned(task, *retry_count, *delay, error);
                }
                Settlement::Deferred { delay } => {
                    self.metrics.deferred.inc();
                    audit::deferred(task, *delay);
                }
            }
        }
    }
}
