//! What the gauges show.

use std::time::Duration;

use super::{Store, StoreError};

/// The backlog at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Backlog {
    /// Rows that wait.
    pub pending: i64,
    /// How long the oldest due row has been due.
    pub oldest_due: Duration,
}

impl Store {
    /// Counts what waits.
    pub async fn backlog(&self) -> Result<Backlog, StoreError> {
        let (pending, late_us): (i64, Option<i64>) = self
            .within(
                sqlx::query_as(
                    "SELECT count(*),
                            (EXTRACT(EPOCH FROM clock_timestamp() - min(next_retry_at))
                             * 1000000)::bigint
                     FROM retry_queue WHERE status = 'pending'",
                )
                .fetch_one(&self.pool),
            )
            .await?;
        Ok(Backlog {
            pending,
            oldest_due: Duration::from_micros(
                late_us.and_then(|us| u64::try_from(us).ok()).unwrap_or(0),
            ),
        })
    }
}
