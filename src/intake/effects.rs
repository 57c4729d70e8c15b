//! What storing a batch did, and who is told of it: the metrics, the log, the dispatcher.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;
use tracing::warn;
use uuid::Uuid;

use super::Loops;
use crate::{
    dispatcher::Wake,
    domain::{
        UnknownText,
        review::Reason,
        task::{NewTask, Next},
    },
    observe::{
        audit,
        metrics::{IntakeOutcome, Metrics},
    },
    store::arrivals::Planned,
};

/// What storing a task did, to be told once it is durable.
pub(super) enum Effect<'t> {
    /// A row was inserted, or went back to `pending`; it waits this long for its retry or
    /// for review.
    Stored {
        planned: Planned<'t>,
        delay: Duration,
        /// Whether the id was new.
        new: bool,
    },
    /// The same under another id, because its own is another publication's.
    Apart {
        task: Box<NewTask>,
        next: Next,
        delay: Duration,
    },
    /// The task goes to review under another id, because its id or its key is taken.
    Beside {
        task: &'t NewTask,
        stored_as: Uuid,
        reason: Reason,
    },
    /// A waiting row already holds this failure.
    Duplicate(&'t NewTask),
    /// The message was sent back again since the attempt that failed.
    Outdated(&'t NewTask),
    /// The failure's key was applied before, to the message with this id.
    Hit {
        task: &'t NewTask,
        applied_to: Option<Uuid>,
    },
}

impl Effect<'_> {
    /// The id of a row that this transaction inserted or sent back to `pending`, by which a
    /// lost COMMIT is looked up.
    pub fn stored_as(&self) -> Option<Uuid> {
        match self {
            Self::Stored { planned, .. } => Some(planned.task.message_id),
            Self::Apart { task, .. } => Some(task.message_id),
            Self::Beside { stored_as, .. } => Some(*stored_as),
            Self::Duplicate(_) | Self::Outdated(_) | Self::Hit { .. } => None,
        }
    }
}

/// Tells what was stored.
#[derive(Clone)]
pub(super) struct Teller {
    pub wake: Arc<Wake>,
    pub metrics: Arc<Metrics>,
    pub loops: Arc<Loops>,
    /// Whether the warning about a newer version's row was logged; it is logged once.
    pub told_of_unknown: Arc<AtomicBool>,
}

impl Teller {
    /// Updates the metrics, writes the log lines and wakes the dispatcher, once the batch
    /// is durable.
    pub fn tell(&self, effects: &[Effect<'_>], started: Instant) {
        let mut soonest: Option<Duration> = None;
        let mut due_in = |delay: Duration| {
            soonest = Some(soonest.map_or(delay, |known| known.min(delay)));
        };
        for effect in effects {
            match effect {
                Effect::Stored {
                    planned,
                    delay,
                    new,
                } => {
                    due_in(*delay);
                    let (task, retry_count) = (planned.task, planned.retry_count);
                    self.tell_of_stored(task, retry_count, planned.next, *delay);
                    if *new {
                        self.look_out_for_loop(task, planned.next, started, *delay);
                    } else {
                        self.loops.came_back(task);
                    }
                }
                Effect::Apart { task, next, delay } => {
                    due_in(*delay);
                    self.tell_of_stored(task, task.budget.retry_count, *next, *delay);
                    self.look_out_for_loop(task, *next, started, *delay);
                }
                Effect::Beside {
                    task,
                    reason,
                    stored_as,
                } => {
                    self.metrics.bound_for_review(*reason);
                    due_in(Duration::ZERO);
                    let retry_count = task.budget.retry_count;
                    audit::bound_for_review(task, retry_count, *reason, *stored_as);
                }
                Effect::Duplicate(task) => {
                    self.metrics.intake(IntakeOutcome::Duplicate);
                    audit::duplicate(task);
                }
                Effect::Outdated(task) => {
                    self.metrics.intake(IntakeOutcome::Duplicate);
                    audit::outdated(task);
                }
                Effect::Hit { task, applied_to } => {
                    self.metrics.intake(IntakeOutcome::IdempotencyHit);
                    audit::key_hit(task, *applied_to);
                }
            }
        }
        if let Some(delay) = soonest {
            self.wake.at(started + delay);
        }
    }

    /// Counts and tells of a failure under a new id that seems to be one round of a loop.
    /// What goes to review for another reason has an end, and is in none.
    fn look_out_for_loop(&self, task: &NewTask, next: Next, at: Instant, delay: Duration) {
        if !matches!(next, Next::Retry { .. } | Next::Review(Reason::Looping)) {
            return;
        }
        let Some(times) = self.loops.came_new(task, at, delay) else {
            return;
        };
        let label = self.metrics.suspected_loop(&task.queue);
        if self.loops.may_tell(label, at) {
            warn!(
                queue = task.queue,
                times,
                max_retries = task.budget.max_retries,
                policy = task.policy.name,
                message_id = %task.message_id,
                "a message seems to loop: the same body comes to this queue again and again under \
                 new ids, so its retries are never spent. If its producer mints an id for each \
                 failure, set identity = \"payload\" in its policy, or loops = \"review\" to send \
                 such messages to review (told once an hour for each queue)"
            );
        }
    }

    fn tell_of_stored(&self, task: &NewTask, retry_count: i32, next: Next, delay: Duration) {
        match next {
            Next::Retry { .. } => {
                self.metrics.scheduled(&task.queue);
                audit::scheduled(task, retry_count, delay);
            }
            Next::Review(reason) => {
                self.metrics.bound_for_review(reason);
                audit::bound_for_review(task, retry_count, reason, task.message_id);
            }
        }
    }

    /// Says once that a row is left alone because a newer version wrote it.
    pub fn tell_of_unknown(&self, task_id: i64, text: &UnknownText) {
        if !self.told_of_unknown.swap(true, Ordering::Relaxed) {
            warn!(
                task_id,
                error = %text,
                "a failure's id belongs to a row that a newer version wrote; the row is left \
                 alone, and the failure goes to review as a conflict (told once)"
            );
        }
    }
}
