//! The waits between attempts to reach Postgres or RabbitMQ: growing, capped, jittered,
//! without end.

use std::time::Duration;

use backon::{BackoffBuilder, ExponentialBackoff, ExponentialBuilder};
use tokio_util::sync::CancellationToken;

const FIRST: Duration = Duration::from_millis(100);
const LONGEST: Duration = Duration::from_secs(5);

/// The wait before the next attempt. It grows with each attempt until
/// [`Backoff::reset`]; jitter may double it.
pub struct Backoff(ExponentialBackoff);

impl Default for Backoff {
    fn default() -> Self {
        Self(
            ExponentialBuilder::default()
                .with_min_delay(FIRST)
                .with_max_delay(LONGEST)
                .with_jitter()
                .without_max_times()
                .build(),
        )
    }
}

impl Backoff {
    /// Begins anew with the shortest wait: the attempt has worked.
    pub fn reset(&mut self) {
        *self = Self::default();
    }

    /// Waits, or returns at once when cancelled.
    pub async fn wait(&mut self, cancelled: &CancellationToken) {
        let pause = self.0.next().unwrap_or(LONGEST);
        let _ = cancelled
            .run_until_cancelled(tokio::time::sleep(pause))
            .await;
    }
}
