//! Janitor: keeps the gauges fresh.

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::debug;

use crate::{metrics::Metrics, store::Store};

/// How often the backlog is counted.
const INTERVAL: Duration = Duration::from_secs(5);

/// Counting takes longer with the backlog; it may take this part of the time.
const DUTY: u32 = 50;

/// The loop that looks after what nobody waits for.
pub struct Janitor {
    /// Asked.
    pub store: Store,
    /// Told.
    pub metrics: Arc<Metrics>,
}

impl Janitor {
    /// Runs until cancelled.
    pub async fn run(self, cancelled: CancellationToken) {
        while !cancelled.is_cancelled() {
            let started = Instant::now();
            self.run_once().await;
            let pause = INTERVAL.max(started.elapsed() * DUTY);
            cancelled
                .run_until_cancelled(tokio::time::sleep(pause))
                .await;
        }
    }

    /// Counts once.
    pub async fn run_once(&self) {
        match self.store.backlog().await {
            Ok(backlog) => {
                self.metrics.queue_depth.set(backlog.pending);
                self.metrics
                    .oldest_due_seconds
                    .set(backlog.oldest_due.as_secs_f64());
            }
            Err(e) => {
                self.metrics.store_errors.inc();
                debug!(error = %e, "the backlog could not be counted");
            }
        }
    }
}
