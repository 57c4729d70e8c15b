//! Watches, for all intake loops of the instance, for messages that come back under a new id
//! each time.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::domain::{
    loops::{Fingerprint, LoopWatch},
    policy::{self, Identity},
    review::Reason,
    task::{NewTask, Next},
};

/// A queue's loops are told of in the log once in this time.
const TELL_EVERY: Duration = Duration::from_secs(3600);

/// What this instance has seen of bodies that came under new ids.
pub struct Loops {
    watch: Mutex<LoopWatch>,
    seed: u64,
    began: Instant,
    /// When each queue was last told of, by its metric label: of those there are few.
    told: Mutex<HashMap<String, Instant>>,
}

impl Default for Loops {
    fn default() -> Self {
        Self {
            watch: Mutex::default(),
            seed: fastrand::u64(..),
            began: Instant::now(),
            told: Mutex::default(),
        }
    }
}

impl Loops {
    /// The case for review that `task`, arriving `at` this moment, becomes if its id is new:
    /// only if its policy wants that, and another retry would be one round too many.
    pub(super) fn case(&self, task: &NewTask, at: Instant) -> Option<NewTask> {
        let ends_anyway = || matches!(task.next(task.budget.retry_count, 0.0), Next::Review(_));
        if task.policy.loops != policy::Loops::Review || ends_anyway() {
            return None;
        }
        let fingerprint = self.fingerprint(task)?;
        let generation = self.locked().generation(fingerprint, at - self.began);
        is_suspect(task, generation).then(|| {
            let error = format!(
                "the same body came to this queue {generation} times under new ids, so its retries were \
                 never spent, and its policy has loops = \"review\"; the last error: {}",
                task.error
            );
            NewTask {
                error,
                verdict: Some(Reason::Looping),
                ..task.clone()
            }
        })
    }

    /// Notes that `task` was stored under a new id `at` this moment, and is due after `delay`.
    /// Returns its generation, if that is one too many.
    pub(super) fn came_new(&self, task: &NewTask, at: Instant, delay: Duration) -> Option<u32> {
        let fingerprint = self.fingerprint(task)?;
        let generation = self.locked().came_new(fingerprint, at - self.began, delay);
        is_suspect(task, generation).then_some(generation)
    }

    /// Notes that `task` failed again under the id that it was sent back with.
    pub(super) fn came_back(&self, task: &NewTask) {
        if let Some(fingerprint) = self.fingerprint(task) {
            self.locked().came_back(fingerprint);
        }
    }

    /// Whether it is time to tell of the queue with this metric label.
    pub(super) fn may_tell(&self, label: &str, now: Instant) -> bool {
        let mut told = self.told.lock().unwrap_or_else(PoisonError::into_inner);
        let due = told
            .get(label)
            .is_none_or(|before| now - *before >= TELL_EVERY);
        if due {
            told.insert(label.to_owned(), now);
        }
        due
    }

    /// None where equal bodies are one message anyway: those share its retries.
    fn fingerprint(&self, task: &NewTask) -> Option<Fingerprint> {
        let by_id = task.policy.identity == Identity::MessageId;
        by_id.then(|| Fingerprint::of(self.seed, &task.queue, &task.payload))
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, LoopWatch> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The first failure is the first generation, and each retry allows for one more.
fn is_suspect(task: &NewTask, generation: u32) -> bool {
    generation > task.budget.max_retries.unsigned_abs()
}
