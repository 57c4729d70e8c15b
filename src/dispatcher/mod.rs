//! Dispatcher: due tasks go back to their queues, spent ones to review.
//!
//! This file is the loop: connect, take turns, wait. `turn` is one turn, from claim
//! to settlement; `judge` says what follows from the broker's answer; `watch`
//! waits for the next due moment, and `wake` lets intake cut that short.

mod dry_run;
mod judge;
mod turn;
mod wake;
mod watch;

use std::{sync::Arc, time::Duration};

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::warn;

pub use dry_run::DryRun;
pub use wake::Wake;

use crate::{
    backoff::Backoff,
    broker::{Broker, Fault, Publisher},
    domain::policy::PolicyBook,
    observe::{health::Part, metrics::Metrics, telemetry::chain},
    store::{Store, dispatch::LaneCursor},
    wire::ReviewFormat,
};
use turn::{Turn, TurnError};
use watch::{Look, Nap};

/// A worker that publishes what is due. Several may run, on several instances.
#[allow(missing_docs)] // fields without a comment are the parts it works with
pub struct Dispatcher {
    pub broker: Broker,
    pub store: Store,
    pub book: PolicyBook,
    /// Told by intake when the earliest of what it stored falls due.
    pub wake: Arc<Wake>,
    pub metrics: Arc<Metrics>,
    pub part: Part,
    /// The service's name, for the headers of what is published.
    pub service: String,
    /// The queue where people look.
    pub review_queue: String,
    pub review_format: ReviewFormat,
    /// The most rows in one transaction.
    pub batch: usize,
    /// The most payload bytes in one transaction.
    pub batch_bytes: usize,
    /// The longest sleep.
    pub poll_interval: Duration,
}

/// A worker's connection, and what it remembers from turn to turn.
struct Session {
    publisher: Publisher,
    memory: Memory,
}

/// What a worker remembers, also from one connection to the next.
#[derive(Default)]
struct Memory {
    backoff: Backoff,
    /// How many turns still take one row only, to find the message that the broker chokes
    /// on. Kept across connections, because the search may cost some.
    careful: usize,
    /// Whether the next claim must be fair. Only a full claim can leave other lanes
    /// waiting, and a fair claim costs a little more.
    fair: bool,
    /// Where the next fair claim goes on.
    lanes: LaneCursor,
    /// How long to wait when others hold what is due.
    nap: Nap,
}

impl Dispatcher {
    /// Runs until cancelled; a batch in hand is finished first.
    pub async fn run(self, cancelled: CancellationToken) {
        let mut memory = Memory::default();
        let mut connected_before = false;
        while !cancelled.is_cancelled() {
            match self.broker.publisher(&self.review_queue).await {
                Ok(publisher) => {
                    if connected_before {
                        self.metrics
                            .reconnects
                            .with_label_values(&["dispatch"])
                            .inc();
                    }
                    connected_before = true;
                    self.part.up("connected");
                    let mut session = Session { publisher, memory };
                    match self.serve(&mut session, &cancelled).await {
                        None => self.part.down("stopped"),
                        Some(why) => {
                            self.part.down(&why);
                            warn!(error = why, "the dispatcher lost its connection");
                        }
                    }
                    memory = session.memory;
                    session.publisher.close().await;
                }
                Err(e) => {
                    self.part.down(chain(&e));
                    warn!(error = chain(&e), "the dispatcher cannot connect yet");
                }
            }
            memory.backoff.wait(&cancelled).await;
        }
    }

    /// Takes turns on one connection until it cannot be used any more (and says why),
    /// or until cancelled.
    async fn serve(&self, session: &mut Session, cancelled: &CancellationToken) -> Option<String> {
        let mut look = Look::Claim;
        // Whether the last turn could not be settled: then only a good one says otherwise.
        let mut store_failed = false;
        while !cancelled.is_cancelled() {
            if let Err(why) = session.publisher.usable() {
                if !session.publisher.blocked() {
                    return Some(why.to_owned());
                }
                // An alarm passes, so the connection is kept and nothing is published until
                // the next look.
                self.part.down(why);
                cancelled
                    .run_until_cancelled(tokio::time::sleep(self.poll_interval))
                    .await;
                continue;
            }
            if !store_failed {
                self.part.up(self.broker.describe());
            }
            if look != Look::Claim {
                let watch = async {
                    let look = self.watch(look, &mut session.memory.nap).await;
                    if look == Look::Claim {
                        self.wake.let_gather().await;
                    }
                    look
                };
                let watched = cancelled.run_until_cancelled(watch);
                look = watched.await.unwrap_or(Look::Watch);
                continue;
            }
            let memory = &mut session.memory;
            let rows = if memory.careful > 0 { 1 } else { self.batch };
            memory.careful = memory.careful.saturating_sub(1);
            let began = Instant::now();
            match self.turn(session, rows).await {
                Ok(turn) => {
                    store_failed = false;
                    session.memory.backoff.reset();
                    if turn != Turn::Nothing {
                        session.memory.nap = Nap::after_turn(began.elapsed());
                    }
                    look = match turn {
                        Turn::Full => Look::Claim,
                        Turn::Short(None) => Look::Watch,
                        Turn::Short(Some(next)) => Look::WatchUntil(next),
                        Turn::Nothing => Look::WatchAfter(began),
                    };
                }
                Err(TurnError::Broker {
                    fault,
                    one_of_several,
                }) => {
                    if let Some(why) = self.survive(session, fault, one_of_several).await {
                        return Some(why);
                    }
                }
                Err(TurnError::Store(e)) => {
                    store_failed = true;
                    self.part.down(chain(&e));
                    self.metrics.store_errors.inc();
                    warn!(error = chain(&e), "the dispatcher cannot reach the store");
                    // What was published could not be settled and will be sent again:
                    // let one message find out when that works, and not a whole batch.
                    session.memory.careful = session.memory.careful.max(1);
                    session.memory.backoff.wait(cancelled).await;
                }
            }
        }
        None
    }

    /// Goes on after a fault of the broker on the same connection, if that is possible;
    /// else says why it is not. A message that was published alone has been judged
    /// already; one of several has to be found, so the next turns take one row each.
    async fn survive(
        &self,
        session: &mut Session,
        fault: Fault,
        one_of_several: bool,
    ) -> Option<String> {
        let over_content = matches!(fault, Fault::Channel(_) | Fault::Internal(_));
        if over_content && one_of_several {
            session.memory.careful = self.batch;
        }
        let Fault::Channel(why) = fault else {
            return Some(fault.to_string());
        };
        warn!(error = why, "one of several messages closed the channel");
        let reopened = session.publisher.reopen().await;
        reopened.err().map(|e| chain(&e))
    }
}
