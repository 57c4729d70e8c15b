//! Waits until something is due, without asking Postgres more often than needed.

use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::Dispatcher;

/// How long to wait when rows are due but others hold them: look again soon, but not
/// at once.
const CONTENDED_NAP: Duration = Duration::from_millis(50);

/// What a worker does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Claim: something is due, or may be.
    Claim,
    /// Wait: nothing was due.
    Watch,
    /// Wait: all that was due is in others' hands.
    WatchOthers,
}

impl Dispatcher {
    /// Waits until something is due, at most the poll interval. One of all workers
    /// watches while the others queue for that role, so that an idle service asks
    /// Postgres one question a poll interval.
    pub(super) async fn watch(&self, look: Look) -> Look {
        let Ok(watcher) = timeout(self.poll_interval, self.wake.watcher.lock()).await else {
            return look;
        };
        // Intake has stored something that is due by now: there is no need to ask.
        if self.wake.has_come() {
            return Look::Claim;
        }
        let due = self.store.next_due().await;
        // The time until then is counted from the answer, not from the question: a claim
        // that comes slightly too early finds nothing, and would take that for rows that
        // others hold.
        let now = Instant::now();
        let latest = now + self.poll_interval;
        match due {
            Ok(Some(Duration::ZERO)) => {
                // Release the watch before napping, so that another worker can take it
                // and notice rows that fall due meanwhile.
                drop(watcher);
                if look == Look::WatchOthers {
                    tokio::time::sleep(CONTENDED_NAP).await;
                }
                Look::Claim
            }
            Ok(due) => {
                let known = due.is_some_and(|due| now + due <= latest);
                let until = due.map_or(latest, |due| latest.min(now + due));
                match self.wake.sleep(until).await || known {
                    true => Look::Claim,
                    false => Look::Watch,
                }
            }
            // The claim will meet the same error, report it and back off.
            Err(_) => Look::Claim,
        }
    }
}
