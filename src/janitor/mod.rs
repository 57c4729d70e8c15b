//! Janitor: removes rows, events and keys past their retention, in small batches, and
//! refreshes the gauges.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{
    observe::{metrics::Metrics, telemetry::chain},
    store::{
        Store, StoreError,
        maintenance::{Retention, Unknown, Walk},
    },
};

/// How often the janitor works.
const INTERVAL: Duration = Duration::from_secs(5);

/// How long the janitor rests from removing after a round that found nothing old and
/// came to the last task.
const QUIET: Duration = Duration::from_secs(60);

/// Counting takes longer the more tasks wait. The pause after it is this many times as
/// long as it took, so that it takes at most a fiftieth of the time.
const DUTY: u32 = 50;

/// How many rows one statement looks at: few enough to hold nobody up.
const BATCH: i64 = 2000;

/// How long one round of removing may take.
const ROUND: Duration = Duration::from_secs(1);

/// How long a round may look at tasks without finding one to remove. With a whole
/// round spent on a table of young rows, these looks took an eighth of the time of all
/// statements.
const FRUITLESS: Duration = Duration::from_millis(100);

/// The loop that removes what is too old, and refreshes the gauges.
#[allow(missing_docs)] // the parts it works with
pub struct Janitor {
    pub store: Store,
    pub metrics: Arc<Metrics>,
    pub retention: Retention,
}

/// What one round of removing did.
#[derive(Debug, Default)]
pub struct Round {
    /// How many rows were removed.
    pub removed: u64,
    /// Whether the walk over the tasks came to the last one.
    pub finished: bool,
}

impl Janitor {
    /// Runs until cancelled.
    pub async fn run(self, cancelled: CancellationToken) {
        let mut walk = Walk::default();
        let mut rest_until = Instant::now();
        while !cancelled.is_cancelled() {
            let started = Instant::now();
            if let Err(e) = self.count().await {
                self.failed(&e, "the backlog could not be counted");
            }
            let pause = INTERVAL.max(started.elapsed() * DUTY);
            if rest_until <= Instant::now() {
                match self.remove_old(&mut walk).await {
                    Ok(Round {
                        removed: 0,
                        finished: true,
                    }) => rest_until = Instant::now() + QUIET,
                    Ok(_) => {}
                    Err(e) => self.failed(&e, "old rows could not be removed"),
                }
            }
            cancelled
                .run_until_cancelled(tokio::time::sleep(pause))
                .await;
        }
    }

    async fn count(&self) -> Result<(), StoreError> {
        let backlog = self.store.backlog().await?;
        self.metrics.queue_depth.set(backlog.pending);
        self.metrics
            .oldest_due_seconds
            .set(backlog.oldest_due.as_secs_f64());
        Ok(())
    }

    /// One round: over the tasks until the walk is at its end, over events and keys
    /// until none is old, each within its time.
    pub async fn remove_old(&self, walk: &mut Walk) -> Result<Round, StoreError> {
        let mut round = Round::default();
        let started = Instant::now();
        let mut fruitful = started;
        loop {
            let step = self.store.remove_old_tasks(self.retention, walk, BATCH);
            let step = step.await?;
            self.removed("task", step.removed);
            round.removed += step.removed;
            if step.removed > 0 {
                fruitful = Instant::now();
            }
            if let Some(unknown) = &step.finished {
                self.tell_of_unknown(unknown);
                round.finished = true;
            }
            let tired = started.elapsed() > ROUND || fruitful.elapsed() > FRUITLESS;
            if round.finished || tired {
                break;
            }
        }
        let started = Instant::now();
        loop {
            let history = self.store.rotate_history(self.retention, BATCH).await?;
            let keys = self.store.remove_expired_keys(BATCH).await?;
            self.removed("history", history);
            self.removed("idempotency_key", keys);
            round.removed += history + keys;
            if history + keys == 0 || started.elapsed() > ROUND {
                return Ok(round);
            }
        }
    }

    /// Shows how many rows of a newer version there are, and says so when the first
    /// ones appear.
    fn tell_of_unknown(&self, unknown: &Unknown) {
        let before = self.metrics.rows_not_understood.get();
        self.metrics.rows_not_understood.set(unknown.rows);
        if before == 0 && unknown.rows > 0 {
            warn!(
                rows = unknown.rows,
                sample = unknown.sample,
                "some rows were written by a newer version; they are left alone"
            );
        }
    }

    fn removed(&self, kind: &str, rows: u64) {
        self.metrics.removed.with_label_values(&[kind]).inc_by(rows);
    }

    fn failed(&self, error: &StoreError, what: &'static str) {
        self.metrics.store_errors.inc();
        warn!(error = chain(error), "{what}");
    }
}
