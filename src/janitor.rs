//! Janitor: keeps the gauges fresh and removes what is too old, in small batches.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::{
    metrics::Metrics,
    store::{
        Store, StoreError,
        maintenance::{Retention, Walk},
    },
};

/// How often it looks around.
const INTERVAL: Duration = Duration::from_secs(5);

/// How long it rests from removing after a round that found nothing old and came
/// to the last task.
const QUIET: Duration = Duration::from_secs(60);

/// Counting takes longer with the backlog; it may take this part of the time.
const DUTY: u32 = 50;

/// Rows looked at in one statement: few enough not to be in anybody's way.
const BATCH: i64 = 2000;

/// How long one round of removing may take.
const ROUND: Duration = Duration::from_secs(1);

/// How long it may look at tasks without finding one to remove. Over a table of
/// young rows a whole round of that was an eighth of the time of all statements.
const FRUITLESS: Duration = Duration::from_millis(100);

/// The loop that looks after what nobody waits for.
pub struct Janitor {
    /// Asked.
    pub store: Store,
    /// Told.
    pub metrics: Arc<Metrics>,
    /// What is too old.
    pub retention: Retention,
}

impl Janitor {
    /// Runs until cancelled.
    pub async fn run(self, cancelled: CancellationToken) {
        let mut walk = Walk::default();
        let mut look_at = Instant::now();
        while !cancelled.is_cancelled() {
            let started = Instant::now();
            if let Err(e) = self.count().await {
                self.failed(&e, "the backlog could not be counted");
            }
            let pause = INTERVAL.max(started.elapsed() * DUTY);
            if look_at <= Instant::now() {
                match self.remove_old(&mut walk).await {
                    Ok(0) if walk.is_at_start() => look_at = Instant::now() + QUIET,
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

    /// One round: over the tasks until the walk is at its start again, over
    /// events and keys until none is old, each within its time. Returns how many
    /// rows it removed.
    pub async fn remove_old(&self, walk: &mut Walk) -> Result<u64, StoreError> {
        let mut removed = 0;
        let started = Instant::now();
        let mut fruitful = started;
        loop {
            let tasks = self.store.remove_old_tasks(self.retention, walk, BATCH);
            let tasks = tasks.await?;
            self.removed("task", tasks);
            removed += tasks;
            if tasks > 0 {
                fruitful = Instant::now();
            }
            let tired = started.elapsed() > ROUND || fruitful.elapsed() > FRUITLESS;
            if walk.is_at_start() || tired {
                break;
            }
        }
        let started = Instant::now();
        loop {
            let events = self.store.remove_old_events(self.retention, BATCH).await?;
            let keys = self.store.remove_expired_keys(BATCH).await?;
            self.removed("event", events);
            self.removed("idempotency_key", keys);
            removed += events + keys;
            if events + keys == 0 || started.elapsed() > ROUND {
                return Ok(removed);
            }
        }
    }

    fn removed(&self, kind: &str, rows: u64) {
        self.metrics.removed.with_label_values(&[kind]).inc_by(rows);
    }

    fn failed(&self, error: &StoreError, what: &'static str) {
        self.metrics.store_errors.inc();
        debug!(%error, what);
    }
}
