//! Waits until something is due, without asking Postgres more often than needed.

use std::time::Duration;

use tokio::time::{Instant, timeout};

use super::Dispatcher;
use crate::store::dispatch::NextDue;

/// The longest wait while rows are due but others hold them.
const LONGEST_NAP: Duration = Duration::from_millis(50);

/// The shortest one: a look costs Postgres about as much as this.
const SHORTEST_NAP: Duration = Duration::from_millis(1);

/// How long a worker waits when rows are due but others hold them.
///
/// It waits for about as long as its last turn took. Where turns are short, rows trickle in,
/// and one that falls due while the others are busy should not wait for long. Where they are
/// long, much is due, and a worker that looks at once would take a few rows at a time, which
/// costs more for each. Every look in vain doubles the wait, because others may hold their
/// rows for as long as the broker keeps them waiting.
#[derive(Debug)]
pub(super) struct Nap(Duration);

impl Default for Nap {
    fn default() -> Self {
        Self(LONGEST_NAP)
    }
}

impl Nap {
    pub(super) fn after_turn(took: Duration) -> Self {
        Self(took.clamp(SHORTEST_NAP, LONGEST_NAP))
    }

    /// This wait; the next one is longer.
    fn next(&mut self) -> Duration {
        let nap = self.0;
        self.0 = (nap * 2).min(LONGEST_NAP);
        nap
    }
}

/// What a worker does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// Claim: something is due, or may be.
    Claim,
    /// Wait: nothing was due.
    Watch,
    /// Wait: the claim before told that the next row falls due at this moment.
    WatchUntil(Instant),
    /// Wait: a claim that began at this moment found no row that was due and free.
    WatchAfter(Instant),
}

impl Look {
    /// Whether a row that at `now` has been due for `overdue` is in others' hands.
    ///
    /// It is if it was due before the claim began, since the claim did not get it. A row
    /// that fell due later is probably free, and to wait would make it late. Times are
    /// compared and not moments, because Postgres's clock may differ from ours. `now` is
    /// taken after Postgres has answered, so in doubt the row counts as free. That costs
    /// one claim more: by the end of that one the row has been due for longer.
    fn shows_held(self, overdue: Duration, now: Instant) -> bool {
        matches!(self, Self::WatchAfter(claim) if overdue >= now.duration_since(claim))
    }
}

impl Dispatcher {
    /// Waits until something is due, at most the poll interval. One of all workers
    /// watches while the others queue for that role, so that an idle service asks
    /// Postgres one question a poll interval.
    pub(super) async fn watch(&self, look: Look, nap: &mut Nap) -> Look {
        let Ok(watcher) = timeout(self.poll_interval, self.wake.watcher.lock()).await else {
            return look;
        };
        // Intake has stored something that is due by now: there is no need to ask.
        if self.wake.has_come() {
            return Look::Claim;
        }
        // The claim has asked already. What was stored since, intake tells `wake`.
        if let Look::WatchUntil(next) = look {
            let latest = Instant::now() + self.poll_interval;
            self.wake.sleep(next.min(latest)).await;
            return Look::Claim;
        }
        let due = self.store.next_due().await;
        // The time until then is counted from the answer, not from the question: a claim
        // that comes slightly too early finds nothing and has to be made again.
        let now = Instant::now();
        match due {
            Ok(Some(NextDue::Since(overdue))) => {
                // Release the watch before napping, so that another worker can take it
                // and notice rows that fall due meanwhile.
                drop(watcher);
                if look.shows_held(overdue, now) {
                    tokio::time::sleep(nap.next()).await;
                }
                Look::Claim
            }
            Ok(Some(NextDue::In(time))) if time <= self.poll_interval => {
                self.wake.sleep(now + time).await;
                Look::Claim
            }
            Ok(_) => match self.wake.sleep(now + self.poll_interval).await {
                true => Look::Claim,
                false => Look::Watch,
            },
            // A claim that meets the same error reports it and backs off. The question may
            // also fail alone, for example over a due time of infinity that an operator
            // set; it is not to be asked again without a pause.
            Err(_) => {
                drop(watcher);
                tokio::time::sleep(LONGEST_NAP).await;
                Look::Claim
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    #[test]
    fn a_row_that_fell_due_after_a_claim_in_vain_is_claimed_at_once() {
        let claim = Instant::now();
        let look = Look::WatchAfter(claim);
        assert!(!look.shows_held(Duration::ZERO, claim + MS));
        assert!(!look.shows_held(2 * MS, claim + 3 * MS));
    }

    #[test]
    fn a_row_that_was_due_before_a_claim_in_vain_is_in_others_hands() {
        let claim = Instant::now();
        let look = Look::WatchAfter(claim);
        assert!(look.shows_held(3 * MS, claim + 3 * MS));
        assert!(look.shows_held(3600 * 1000 * MS, claim + 3 * MS));
    }

    #[test]
    fn without_a_claim_in_vain_nothing_shows_that_others_hold_a_row() {
        assert!(!Look::Watch.shows_held(3600 * 1000 * MS, Instant::now()));
    }

    #[test]
    fn a_nap_is_as_long_as_the_last_turn_and_doubles_with_each_look_in_vain() {
        let mut nap = Nap::after_turn(20 * MS);
        assert_eq!(
            [nap.next(), nap.next(), nap.next()],
            [20 * MS, 40 * MS, 50 * MS]
        );
        assert_eq!(Nap::after_turn(Duration::ZERO).next(), MS);
        assert_eq!(Nap::after_turn(1000 * MS).next(), 50 * MS);
        assert_eq!(Nap::default().next(), 50 * MS);
    }
}
