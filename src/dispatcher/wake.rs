//! Lets intake wake the dispatcher for what falls due before it would look.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::{
    sync::Notify,
    time::{Instant, sleep_until, timeout},
};

/// The longest wait for another worker's turn to end.
const LONGEST_GATHERING: Duration = Duration::from_millis(50);

/// The earliest moment at which intake knows something to be due.
#[derive(Default)]
pub struct Wake {
    /// Held by the one worker that watches on behalf of all.
    pub(super) watcher: tokio::sync::Mutex<()>,
    /// Held by a worker that has claimed all that was due, until its turn is over.
    pub(super) emptied: tokio::sync::Mutex<()>,
    next: Mutex<Option<Instant>>,
    changed: Notify,
}

impl Wake {
    /// Says that something is due at `when`.
    pub fn at(&self, when: Instant) {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        if next.is_none_or(|known| when < known) {
            *next = Some(when);
            self.changed.notify_waiters();
        }
    }

    /// Sleeps until `latest` or the earliest known moment, whichever is first, and
    /// returns whether such a moment came. It is then forgotten. Safe to cancel.
    pub(super) async fn sleep(&self, latest: Instant) -> bool {
        loop {
            // Registered before the look, so that no change between the two is missed.
            let changed = self.changed.notified();
            let until = self.known().map_or(latest, |known| known.min(latest));
            tokio::select! {
                () = sleep_until(until) => break,
                () = changed => {}
            }
        }
        self.has_come()
    }

    /// Before a claim: waits until the turn is over of a worker that has just claimed all that was
    /// due. What fell due since is little. In the meantime it becomes more, and is cheaper together:
    /// a second worker that took a few rows at a time cost a twentieth of the processor time of a
    /// message. Where one claim cannot take all that is due, nobody waits.
    pub(super) async fn let_gather(&self) {
        let _ = timeout(LONGEST_GATHERING, self.emptied.lock()).await;
    }

    /// Whether the earliest known moment has come. It is then forgotten.
    pub(super) fn has_come(&self) -> bool {
        let mut next = self.next.lock().unwrap_or_else(PoisonError::into_inner);
        next.take_if(|known| *known <= Instant::now()).is_some()
    }

    fn known(&self) -> Option<Instant> {
        *self.next.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[tokio::test(start_paused = true)]
    async fn a_claim_waits_for_the_turn_that_took_all_that_was_due_but_not_for_long() {
        let wake = Arc::new(Wake::default());
        let start = Instant::now();
        wake.let_gather().await;
        assert_eq!(start.elapsed(), Duration::ZERO, "nobody is at it");

        let turn = wake.emptied.lock().await;
        let gathered = timeout(Duration::from_secs(1), wake.let_gather()).await;
        gathered.expect("it does not wait for ever");
        assert_eq!(start.elapsed(), LONGEST_GATHERING, "the turn takes long");

        let waiter = tokio::spawn({
            let wake = wake.clone();
            async move { wake.let_gather().await }
        });
        tokio::time::sleep(Duration::from_millis(3)).await;
        drop(turn);
        waiter.await.expect("no panic");
        let waited = start.elapsed() - LONGEST_GATHERING;
        assert_eq!(waited, Duration::from_millis(3), "the turn is over");
    }

    #[tokio::test(start_paused = true)]
    async fn an_earlier_moment_cuts_the_sleep_short_and_is_then_forgotten() {
        let wake = Arc::new(Wake::default());
        let start = Instant::now();
        let sleeper = tokio::spawn({
            let wake = wake.clone();
            async move { wake.sleep(start + Duration::from_secs(60)).await }
        });
        tokio::task::yield_now().await;
        wake.at(start + Duration::from_secs(2));
        wake.at(start + Duration::from_secs(5));
        assert!(sleeper.await.unwrap(), "woken early");
        assert_eq!(start.elapsed(), Duration::from_secs(2));
        assert!(!wake.sleep(start + Duration::from_secs(9)).await);
        assert_eq!(start.elapsed(), Duration::from_secs(9));
    }
}
