//! Intake: the broker's deliveries become rows, and only then are acknowledged.

mod effects;
mod import;
mod keys;
mod loops;
mod recorder;
mod unreadable;

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

pub use import::{Import, Imported};
pub use loops::Loops;
pub use recorder::Recorder;

use crate::{
    backoff::Backoff,
    broker::{Broker, BrokerError, Delivery, Subscription},
    domain::window::Window,
    observe::{health::Part, metrics::Metrics, telemetry::chain},
    plant::Bug,
    store::StoreError,
    wire::Arrived,
};

/// A batch is closed early at this many bytes, to bound memory and statements. With
/// messages of 256 KiB this was measured to be a fifth faster than 16 MiB; 1 MiB was no
/// faster again.
const BATCH_BYTES: usize = 4 << 20;

/// The loop that stores the failures arriving on one queue.
#[allow(missing_docs)] // fields without a comment are the parts it works with
pub struct Intake {
    pub broker: Broker,
    pub recorder: Recorder,
    pub metrics: Arc<Metrics>,
    pub part: Part,
    /// Where messages go that the broker gives up on.
    pub review_queue: String,
    /// The most unacknowledged deliveries that the broker may hand us.
    pub prefetch: u16,
    /// The most bytes of deliveries to hold; one delivery may be larger.
    pub memory: usize,
    /// The most deliveries in one transaction.
    pub batch: usize,
    /// How long a batch waits for more deliveries once it has its first.
    pub linger: Duration,
}

/// Why a subscription ended.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error(transparent)]
    Broker(#[from] BrokerError),
    #[error(transparent)]
    Store(#[from] StoreError),
}

impl Intake {
    /// Runs until cancelled. It subscribes only while the store can make writes
    /// durable: deliveries that are taken and handed back in a loop use up a quorum
    /// queue's delivery limit, and then the broker drops them.
    pub async fn run(self, cancelled: CancellationToken) {
        let mut backoff = Backoff::default();
        let mut subscribed_before = false;
        while !cancelled.is_cancelled() {
            match self.subscribe().await {
                Ok(mut subscription) => {
                    if subscribed_before {
                        self.metrics.reconnects.with_label_values(&["intake"]).inc();
                    }
                    subscribed_before = true;
                    self.part.up("subscribed");
                    info!(
                        queue = self.recorder.rules.intake_queue,
                        "intake is subscribed"
                    );
                    let ended = self
                        .serve(&mut subscription, &cancelled, &mut backoff)
                        .await;
                    match &ended {
                        Ok(()) => self.part.down("stopped"),
                        Err(e) => self.part.down(chain(e)),
                    }
                    subscription.close().await;
                    if let Err(e) = ended {
                        self.count(&e);
                        warn!(
                            error = chain(&e),
                            "intake stopped; deliveries in hand go back to the queue"
                        );
                        if let Ended::Broker(BrokerError::Unreadable { held, .. }) = e {
                            self.make_readable(held, &cancelled, &mut backoff).await;
                        }
                    }
                }
                Err(e) => {
                    self.part.down(chain(&e));
                    self.count(&e);
                    warn!(error = chain(&e), "intake cannot subscribe yet");
                }
            }
            backoff.wait(&cancelled).await;
        }
    }

    async fn make_readable(&self, held: u16, cancelled: &CancellationToken, backoff: &mut Backoff) {
        match Box::pin(self.take_unreadable(held, cancelled)).await {
            Ok(()) => backoff.reset(),
            Err(e) => {
                self.count(&e);
                warn!(
                    error = chain(&e),
                    "the message that cannot be read is still in its queue"
                );
            }
        }
    }

    fn count(&self, ended: &Ended) {
        if let Ended::Store(_) = ended {
            self.metrics.store_errors.inc();
        }
    }

    async fn subscribe(&self) -> Result<Subscription, Ended> {
        self.recorder.store.prove_durable().await?;
        let queue = &self.recorder.rules.intake_queue;
        let window = if Bug::FullWindowAtOnce.planted() {
            Window::full(self.prefetch)
        } else {
            Window::opening(self.prefetch)
        };
        let subscribing = self
            .broker
            .subscribe(queue, &self.review_queue, window, self.memory);
        Ok(subscribing.await?)
    }

    async fn serve(
        &self,
        subscription: &mut Subscription,
        cancelled: &CancellationToken,
        backoff: &mut Backoff,
    ) -> Result<(), Ended> {
        loop {
            let Some(first) = cancelled.run_until_cancelled(subscription.next()).await else {
                return Ok(());
            };
            let (deliveries, ended) = self.gather(first?, subscription).await;
            self.store_and_ack(deliveries, subscription).await?;
            backoff.reset();
            if let Some(ended) = ended {
                return Err(ended.into());
            }
        }
    }

    /// Gathers what arrives within the linger time of the first delivery, up to a full
    /// batch, or to as many as may come before they are acknowledged. When the subscription ends meanwhile, what has arrived is still stored.
    async fn gather(
        &self,
        first: Delivery,
        subscription: &mut Subscription,
    ) -> (Vec<Delivery>, Option<BrokerError>) {
        let deadline = Instant::now() + self.linger;
        let mut bytes = first.arrived.body.len();
        let mut deliveries = vec![first];
        while deliveries.len() < self.batch
            && bytes < BATCH_BYTES
            && !subscription.is_full(deliveries.len())
        {
            match timeout_at(deadline, subscription.next()).await {
                Ok(Ok(delivery)) => {
                    bytes += delivery.arrived.body.len();
                    deliveries.push(delivery);
                }
                Ok(Err(e)) => return (deliveries, Some(e)),
                Err(_) => break,
            }
        }
        (deliveries, None)
    }

    async fn store_and_ack(
        &self,
        deliveries: Vec<Delivery>,
        subscription: &mut Subscription,
    ) -> Result<(), Ended> {
        let count = deliveries.len();
        self.metrics.intake_batch.observe(count as f64);
        let mut last = None;
        let mut arrivals: Vec<Arrived> = Vec::with_capacity(count);
        for delivery in deliveries {
            arrivals.push(delivery.arrived);
            last = Some(delivery.receipt);
        }
        let Some(last) = last else { return Ok(()) };
        if Bug::AckBeforeCommit.planted() {
            subscription.ack_through(&last, count).await?;
            return Ok(self.recorder.record(arrivals).await?);
        }
        self.recorder.record(arrivals).await?;
        subscription.ack_through(&last, count).await?;
        Ok(())
    }
}
