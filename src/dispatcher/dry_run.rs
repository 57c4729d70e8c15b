//! Dry run: says what would be sent now, and sends, takes and changes nothing.

use std::{collections::HashSet, time::Duration};

use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    observe::{health::Part, telemetry::chain},
    store::{Store, StoreError},
};

/// The most due rows that one look reads; rows behind them are told of once these are gone.
const LOOK: usize = 1000;

/// The loop of `serve --dry-run`: reads what is due and logs what would be done with it.
#[allow(missing_docs)] // fields without a comment are the parts it works with
pub struct DryRun {
    pub store: Store,
    pub part: Part,
    /// The time between two looks.
    pub poll_interval: Duration,
}

impl DryRun {
    /// Runs until cancelled, and tells of each due row once.
    pub async fn run(self, cancelled: CancellationToken) {
        info!("dry run: nothing is consumed, published or changed");
        let mut told = HashSet::new();
        while !cancelled.is_cancelled() {
            match self.run_once(&mut told).await {
                Ok(()) => self.part.up("looking"),
                Err(e) => {
                    self.part.down(chain(&e));
                    warn!(error = chain(&e), "cannot look at what is due");
                }
            }
            cancelled
                .run_until_cancelled(tokio::time::sleep(self.poll_interval))
                .await;
        }
    }

    async fn run_once(&self, told: &mut HashSet<i64>) -> Result<(), StoreError> {
        let due = self.store.look_at_due(LOOK).await?;
        told.retain(|id| due.iter().any(|task| task.id == *id));
        for task in due {
            if !told.insert(task.id) {
                continue;
            }
            match task.review_reason() {
                Some(reason) => info!(
                    event_type = "dry_run",
                    message_id = %task.message_id,
                    queue = task.queue,
                    reason = reason.as_str(),
                    total_attempts = task.budget.executions(),
                    "would be given to review"
                ),
                None => info!(
                    event_type = "dry_run",
                    message_id = %task.message_id,
                    queue = task.queue,
                    attempt_number = task.budget.executions(),
                    max_attempts = task.budget.max_executions(),
                    late_seconds = task.late.as_secs_f64(),
                    "would be sent back to its queue"
                ),
            }
        }
        Ok(())
    }
}
