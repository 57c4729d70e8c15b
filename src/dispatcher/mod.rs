//! Dispatcher: due rows go back to their queues, spent ones to review.

mod ends;

use std::{sync::Arc, time::Duration};

use lapin::types::ShortString;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::{
    backoff::Backoff,
    broker::{Broker, Fault, Outcome, Publisher},
    config::ReviewFormat,
    health::Part,
    metrics::Metrics,
    plant::Bug,
    policy::PolicyBook,
    store::{Store, StoreError, dispatch::LaneCursor},
    task::{Reason, Settlement, Task},
    wake::Wake,
    wire::{self, Outgoing},
};

/// Something is due but others hold it: look again soon, not at once.
const CONTENDED_NAP: Duration = Duration::from_millis(50);

/// The loop that publishes what is due. Several may run, on several instances.
pub struct Dispatcher {
    /// Where messages go.
    pub broker: Broker,
    /// Where rows are claimed.
    pub store: Store,
    /// For the backoff of retries that found no queue.
    pub book: PolicyBook,
    /// Rings when intake stored something that is due soon.
    pub wake: Arc<Wake>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Says whether we can publish.
    pub part: Part,
    /// Named in the headers of what we publish.
    pub service: String,
    /// Where people look.
    pub review_queue: ShortString,
    /// How people read.
    pub review_format: ReviewFormat,
    /// Most rows in a transaction.
    pub batch: usize,
    /// Most payload bytes in a transaction.
    pub batch_bytes: usize,
    /// Longest sleep.
    pub poll_interval: Duration,
}

/// What one turn of the loop found.
#[derive(Debug, PartialEq, Eq)]
pub enum Turn {
    /// As many rows as were asked for: there may be more.
    Full,
    /// Fewer: all that was due.
    Short,
    /// None that nobody else holds.
    Nothing,
}

/// What to do next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Look {
    /// Something is due, or may be.
    Claim,
    /// Nothing was due.
    Watch,
    /// All that was due is in others' hands.
    WatchOthers,
}

/// Why a turn failed. Its rows are as they were, or settled as far as known.
#[derive(Debug, thiserror::Error)]
pub enum TurnError {
    /// The publisher is spent.
    #[error(transparent)]
    Broker(#[from] Fault),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Whether the next claim must be fair: only a full one can leave others
/// waiting, and a fair claim costs a little more.
#[derive(Debug, Default)]
pub struct Fairness {
    asked: bool,
    lanes: LaneCursor,
}

/// A claimed row, where it is bound, and how its turn ended: `None` leaves it
/// as it was, for another turn.
struct Bound {
    task: Task,
    review: Option<Reason>,
    end: Option<Settlement>,
}

impl Dispatcher {
    /// Runs until cancelled; a batch in hand is finished first.
    pub async fn run(self, cancelled: CancellationToken) {
        let mut backoff = Backoff::default();
        let mut connected_before = false;
        // Turns to take one row at a time, to find the one the broker chokes on.
        // Outlives the connection, which may be what it costs.
        let mut careful = 0_usize;
        let mut fairness = Fairness::default();
        while !cancelled.is_cancelled() {
            match self.broker.publisher(&self.review_queue.to_string()).await {
                Ok(mut publisher) => {
                    if connected_before {
                        self.metrics
                            .reconnects
                            .with_label_values(&["dispatch"])
                            .inc();
                    }
                    connected_before = true;
                    self.part.up("connected");
                    let fault = self
                        .serve(
                            &mut publisher,
                            &cancelled,
                            &mut backoff,
                            &mut careful,
                            &mut fairness,
                        )
                        .await;
                    match &fault {
                        None => self.part.down("stopped"),
                        Some(why) => {
                            self.part.down(why);
                            warn!(error = why, "the dispatcher lost its connection");
                        }
                    }
                    publisher.close().await;
                }
                Err(e) => {
                    self.part.down(e.to_string());
                    warn!(error = %e, "the dispatcher cannot connect yet");
                }
            }
            backoff.wait(&cancelled).await;
        }
    }

    /// Works with one publisher until it is spent (why) or we are cancelled.
    async fn serve(
        &self,
        publisher: &mut Publisher,
        cancelled: &CancellationToken,
        backoff: &mut Backoff,
        careful: &mut usize,
        fairness: &mut Fairness,
    ) -> Option<String> {
        let mut look = Look::Claim;
        while !cancelled.is_cancelled() {
            if let Err(why) = publisher.usable() {
                if !publisher.blocked() {
                    return Some(why.to_owned());
                }
                // An alarm passes: publish nothing, keep the connection, look again.
                self.part.down(why);
                self.nap(self.poll_interval, cancelled).await;
                continue;
            }
            self.part.up("connected");
            if look != Look::Claim {
                let watched = cancelled.run_until_cancelled(self.watch(look));
                look = watched.await.unwrap_or(Look::Watch);
                continue;
            }
            let rows = if *careful > 0 { 1 } else { self.batch };
            *careful = careful.saturating_sub(1);
            match self.run_once(publisher, rows, fairness).await {
                Ok(turn) => {
                    backoff.reset();
                    look = match turn {
                        Turn::Full => Look::Claim,
                        Turn::Short => Look::Watch,
                        Turn::Nothing => Look::WatchOthers,
                    };
                }
                Err(TurnError::Broker(Fault::Channel(why))) => {
                    // Alone, it was the culprit and has been dealt with.
                    if rows > 1 {
                        *careful = self.batch;
                    }
                    warn!(error = why, "one message closed the channel; finding which");
                    if let Err(e) = publisher.reopen().await {
                        return Some(e.to_string());
                    }
                }
                Err(TurnError::Broker(fault)) => {
                    if let Fault::Internal(_) = fault
                        && rows > 1
                    {
                        *careful = self.batch;
                    }
                    return Some(fault.to_string());
                }
                Err(TurnError::Store(e)) => {
                    self.metrics.store_errors.inc();
                    warn!(error = %e, "the dispatcher cannot reach the store");
                    // What was published could not be settled and is sent again: one
                    // message shall find out when that works, and not a batch each time.
                    *careful = (*careful).max(1);
                    backoff.wait(cancelled).await;
                }
            }
        }
        None
    }

    /// Waits until something is due, at most the poll interval. One of all
    /// workers looks, the others wait for their turn: an idle service asks
    /// Postgres one question a poll interval.
    async fn watch(&self, look: Look) -> Look {
        let Ok(turn) = timeout(self.poll_interval, self.wake.turn.lock()).await else {
            return look;
        };
        // Intake has stored something that is due by now: no need to ask.
        if self.wake.has_come() {
            return Look::Claim;
        }
        let due = self.store.next_due().await;
        // Counted from the answer, not from the question: a claim that comes a hair
        // too early finds nothing, and takes that for rows in others' hands.
        let now = Instant::now();
        let latest = now + self.poll_interval;
        match due {
            Ok(Some(Duration::ZERO)) => {
                // Not in its turn: another may see what falls due meanwhile.
                drop(turn);
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
            // The claim says what is wrong, and backs off.
            Err(_) => Look::Claim,
        }
    }

    async fn nap(&self, nap: Duration, cancelled: &CancellationToken) {
        cancelled.run_until_cancelled(tokio::time::sleep(nap)).await;
    }

    /// Claims up to `rows` due rows, publishes them and settles what is known.
    pub async fn run_once(
        &self,
        publisher: &mut Publisher,
        rows: usize,
        fairness: &mut Fairness,
    ) -> Result<Turn, TurnError> {
        let bytes = self.batch_bytes;
        let mut claim = if fairness.asked {
            let lanes = &mut fairness.lanes;
            self.store.claim_fairly(rows, bytes, lanes).await?
        } else {
            self.store.claim(rows, bytes).await?
        };
        fairness.asked = claim.full;
        let started = Instant::now();
        let tasks = std::mem::take(&mut claim.tasks);
        if tasks.is_empty() {
            claim.settle(&[]).await?;
            return Ok(Turn::Nothing);
        }
        self.metrics.dispatch_batch.observe(tasks.len() as f64);
        let full = claim.full;

        let mut bound: Vec<Bound> = Vec::with_capacity(tasks.len());
        let mut outgoing = Vec::with_capacity(tasks.len());
        for mut task in tasks {
            let budget_counts = !Bug::BudgetIgnored.planted();
            let review = task
                .review_reason()
                .filter(|reason| budget_counts || *reason != Reason::Exhausted);
            let end = match self.address(&mut task, review) {
                Ok(_) if Bug::ReviewNotSent.planted() && review.is_some() => {
                    review.map(Settlement::Reviewed)
                }
                Ok(message) => {
                    outgoing.push(message);
                    None
                }
                Err(error) => Some(self.failed(&task, review, error)),
            };
            bound.push(Bound { task, review, end });
        }
        let (outcomes, fault) = publisher.publish(&outgoing).await;
        let culprit = match &fault {
            Some(Fault::Channel(why)) if outgoing.len() == 1 => Some(why.clone()),
            _ => None,
        };
        let suspect = match &fault {
            Some(Fault::Timeout(_)) => true,
            Some(Fault::Internal(_)) => outgoing.len() == 1,
            _ => false,
        };
        drop(outgoing);
        let mut review_is_missing = false;
        let published = bound.iter_mut().filter(|b| b.end.is_none());
        for (bound, outcome) in published.zip(&outcomes) {
            review_is_missing |= bound.review.is_some() && matches!(outcome, Outcome::Returned(_));
            bound.end = self.end(bound, outcome, culprit.as_deref());
            if suspect && *outcome == Outcome::Unknown {
                bound.end = Some(self.stand_back(&bound.task));
            }
        }
        let ends: Vec<(i64, &Settlement)> = bound
            .iter()
            .filter_map(|b| Some((b.task.id, b.end.as_ref()?)))
            .collect();
        claim.settle(&ends).await?;
        self.tell(&bound, started.elapsed());
        if review_is_missing && let Err(e) = publisher.ensure_queue(&self.review_queue).await {
            return Err(Fault::Connection(e.to_string()).into());
        }
        match fault {
            Some(fault) => Err(fault.into()),
            None if full => Ok(Turn::Full),
            None => Ok(Turn::Short),
        }
    }

    fn address(&self, task: &mut Task, review: Option<Reason>) -> Result<Outgoing, String> {
        match review {
            Some(reason) => wire::review(task, reason, &self.review_queue, self.review_format),
            None => wire::republish(task, &self.service),
        }
    }
}
