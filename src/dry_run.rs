//! Dry run: says what would be sent now, and sends, takes and changes nothing.

use std::{collections::HashSet, time::Duration};

use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{health::Part, store::Store};

/// Most rows looked at in one turn.
const LOOK: usize = 1000;

/// The loop that only looks.
pub struct DryRun {
    /// Looked at.
    pub store: Store,
    /// Says that we look.
    pub part: Part,
    /// Between two looks.
    pub poll_interval: Duration,
}

impl DryRun {
    /// Runs until cancelled; tells of each due row once.
    pub async fn run(self, cancelled: CancellationToken) {
        info!("dry run: nothing is consumed, published or changed");
        let mut told = HashSet::new();
        while !cancelled.is_cancelled() {
            match self.run_once(&mut told).await {
                Ok(()) => self.part.up("looking"),
                Err(e) => {
                    self.part.down(e.to_string());
                    warn!(error = %e, "cannot look at what is due");
                }
            }
            cancelled
                .run_until_cancelled(tokio::time::sleep(self.poll_interval))
                .await;
        }
    }

    async fn run_once(&self, told: &mut HashSet<i64>) -> Result<(), crate::store::StoreError> {
        let due = self.store.look_at_due(LOOK).await?;
        told.retain(|id| due.iter().any(|task| task.id == *id));
        for task in due {
            if !told.insert(task.id) {
                continue;
            }
            let attempt_number = task.next_count();
            match task.review_reason() {
                Some(reason) => info!(
                    event_type = "dry_run",
                    message_id = %task.message_id,
                    queue = task.queue,
                    reason = reason.as_str(),
                    total_attempts = task.retry_count,
                    "would be given to review"
                ),
                None => info!(
                    event_type = "dry_run",
                    message_id = %task.message_id,
                    queue = task.queue,
                    attempt_number,
                    max_attempts = task.max_retries,
                    late_seconds = task.late.as_secs_f64(),
                    "would be sent back to its queue"
                ),
            }
        }
        Ok(())
    }
}
