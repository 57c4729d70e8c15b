//! One turn: claim, address, publish, judge, settle.

use std::time::Duration;

use tokio::time::Instant;

use super::{Dispatcher, Session, judge::judge};
use crate::{
    broker::{Fault, Outcome},
    domain::{policy::Policy, review::Reason, settlement::Settlement, task::Task},
    observe::audit,
    plant::Bug,
    store::{StoreError, dispatch::Claim},
    wire::{self, Envelope, LeftOut, Outgoing},
};

/// What one turn found.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// As many rows as were asked for: there may be more.
    Full,
    /// Fewer rows: all that was due. The next row falls due at this moment, as far as is
    /// known.
    Short(Option<Instant>),
    /// No due row was free: nothing is due, or others hold it.
    Nothing,
}

/// Why a turn failed. Its rows are as they were, or settled as far as is known.
#[derive(Debug, thiserror::Error)]
pub(super) enum TurnError {
    /// The publisher's channel or connection failed.
    #[error("{fault}")]
    Broker {
        fault: Fault,
        /// Whether one of several messages may be at fault, so that it has to be found.
        one_of_several: bool,
    },
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A claimed task, where it goes, and how it ends.
pub(super) struct Bound<'b> {
    pub task: Task,
    pub policy: &'b Policy,
    /// Why it goes to review; none when it goes back to its queue.
    pub review: Option<Reason>,
    /// What the envelope for review does not say.
    pub left_out: LeftOut,
    /// How it ends; none leaves it as it was, for another turn.
    pub end: Option<Settlement>,
}

impl Dispatcher {
    /// Claims up to `rows` due rows, publishes them and settles what is known of them.
    pub(super) async fn turn(&self, session: &mut Session, rows: usize) -> Result<Turn, TurnError> {
        let mut claim = self.claim(session, rows).await?;
        let started = Instant::now();
        let next = claim.next.map(|time| started + time);
        let tasks = std::mem::take(&mut claim.tasks);
        if tasks.is_empty() {
            claim.settle(&[]).await?;
            return Ok(Turn::Nothing);
        }
        self.metrics.dispatch_batch.observe(tasks.len() as f64);
        let full = claim.full;
        let _emptied = match full {
            true => None,
            false => self.wake.emptied.try_lock().ok(),
        };

        let (mut bound, outgoing) = self.address(tasks);
        let (outcomes, fault) = session.publisher.publish(&outgoing).await;
        drop(outgoing);
        let review_is_missing = judge(&mut bound, &outcomes);
        let one_of_several = outcomes.contains(&Outcome::Unknown);
        settle(claim, &bound).await?;
        self.tell(&bound, started.elapsed());

        if review_is_missing
            && let Err(e) = session.publisher.ensure_review(&self.review_queue).await
        {
            let fault = Fault::Connection(e.to_string());
            return Err(TurnError::Broker {
                fault,
                one_of_several,
            });
        }
        match fault {
            Some(fault) => Err(TurnError::Broker {
                fault,
                one_of_several,
            }),
            None if full => Ok(Turn::Full),
            None => Ok(Turn::Short(next)),
        }
    }

    async fn claim(&self, session: &mut Session, rows: usize) -> Result<Claim, StoreError> {
        let (memory, bytes) = (&mut session.memory, self.batch_bytes);
        let claim = if memory.fair {
            let lanes = &mut memory.lanes;
            self.store.claim_fairly(rows, bytes, lanes).await?
        } else {
            self.store.claim(rows, bytes).await?
        };
        memory.fair = claim.full;
        Ok(claim)
    }

    /// Decides where each task goes, and makes its message. A task whose message cannot
    /// be made ends here; all others have a message, in the same order.
    fn address(&self, tasks: Vec<Task>) -> (Vec<Bound<'_>>, Vec<Outgoing>) {
        let mut bound = Vec::with_capacity(tasks.len());
        let mut outgoing = Vec::with_capacity(tasks.len());
        for mut task in tasks {
            let budget_counts = !Bug::BudgetIgnored.planted();
            let review = task
                .review_reason()
                .filter(|reason| budget_counts || *reason != Reason::Exhausted);
            let mut left_out = LeftOut::Nothing;
            let message = match review {
                Some(reason) => self.envelope(&mut task, reason).map(|envelope| {
                    left_out = envelope.left_out;
                    envelope.message
                }),
                None => wire::republish(&mut task, &self.service),
            };
            let mut going = Bound {
                policy: self.book.named(task.policy.as_deref()),
                task,
                review,
                left_out,
                end: None,
            };
            match message {
                Ok(_) if Bug::ReviewNotSent.planted() && review.is_some() => {
                    going.end = review.map(Settlement::Reviewed);
                }
                Ok(message) => outgoing.push(message),
                Err(error) => going.end = Some(going.returned(error)),
            }
            bound.push(going);
        }
        (bound, outgoing)
    }

    fn envelope(&self, task: &mut Task, reason: Reason) -> Result<Envelope, String> {
        let too_large = self.broker.refused_size();
        let (queue, format) = (&self.review_queue, self.review_format);
        let table = self.store.task_table();
        wire::review(task, reason, queue, format, too_large, &table)
    }

    /// Metrics and logs, once the batch is durable.
    fn tell(&self, bound: &[Bound<'_>], took: Duration) {
        self.metrics.dispatch_seconds.observe(took.as_secs_f64());
        for bound in bound {
            let Bound { task, end, .. } = bound;
            let Some(end) = end else { continue };
            match end {
                Settlement::SentBack { .. } => {
                    self.metrics.sent_back(&task.queue, task.late + took);
                    audit::sent_back(task);
                }
                Settlement::Reviewed(reason) => {
                    self.metrics.reviewed(&task.queue, *reason);
                    audit::reviewed(task, *reason, bound.left_out);
                }
                Settlement::Returned { delay, error, .. } => {
                    self.metrics.returned(&task.queue);
                    audit::returned(task, *delay, error);
                }
                Settlement::Deferred { delay } => {
                    self.metrics.deferred.inc();
                    audit::deferred(task, *delay);
                }
            }
        }
    }
}

async fn settle(claim: Claim, bound: &[Bound<'_>]) -> Result<(), StoreError> {
    let ends: Vec<(&Task, &Settlement)> = bound
        .iter()
        .filter_map(|b| Some((&b.task, b.end.as_ref()?)))
        .collect();
    claim.settle(&ends).await
}
