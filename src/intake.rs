//! Intake: the broker's deliveries become rows, and only then are acknowledged.

use std::{sync::Arc, time::Duration};

use lapin::message::Delivery;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::{
    backoff::Backoff,
    broker::{Broker, BrokerError, Subscription},
    health::Part,
    metrics::Metrics,
    plant::Bug,
    recorder::Recorder,
    store::StoreError,
    wire::Arrived,
};

/// A batch is closed early at this many bytes, to bound memory and statements.
/// Measured with messages of 256 KiB: a fifth faster than with 16 MiB, and 1 MiB
/// is no faster.
const BATCH_BYTES: usize = 4 << 20;

/// The loop that stores arriving failures.
pub struct Intake {
    /// Where deliveries come from.
    pub broker: Broker,
    /// What makes them durable.
    pub recorder: Recorder,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// Says whether we are subscribed.
    pub part: Part,
    /// Most unacknowledged deliveries.
    pub prefetch: u16,
    /// Most deliveries in a transaction.
    pub batch: usize,
    /// How long a batch waits for more.
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
    /// Runs until cancelled. Subscribes only while the store can make writes
    /// durable: deliveries taken and handed back in a loop would use up a
    /// quorum queue's delivery limit, and then the broker drops them.
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
                        Err(e) => self.part.down(e.to_string()),
                    }
                    subscription.close().await;
                    if let Err(e) = ended {
                        self.count(&e);
                        warn!(error = %e, "intake stopped; deliveries in hand go back to the queue");
                    }
                }
                Err(e) => {
                    self.part.down(e.to_string());
                    self.count(&e);
                    warn!(error = %e, "intake cannot subscribe yet");
                }
            }
            backoff.wait(&cancelled).await;
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
        Ok(self.broker.subscribe(queue, self.prefetch).await?)
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

    /// What has arrived by now, or within the linger time of the first.
    async fn gather(
        &self,
        first: Delivery,
        subscription: &mut Subscription,
    ) -> (Vec<Delivery>, Option<BrokerError>) {
        let deadline = Instant::now() + self.linger;
        let mut bytes = first.data.len();
        let mut deliveries = vec![first];
        while deliveries.len() < self.batch && bytes < BATCH_BYTES {
            match timeout_at(deadline, subscription.next()).await {
                Ok(Ok(delivery)) => {
                    bytes += delivery.data.len();
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
        mut deliveries: Vec<Delivery>,
        subscription: &Subscription,
    ) -> Result<(), Ended> {
        self.metrics.intake_batch.observe(deliveries.len() as f64);
        let arrivals: Vec<Arrived> = deliveries
            .iter_mut()
            .map(|d| Arrived {
                body: std::mem::take(&mut d.data),
                properties: std::mem::take(&mut d.properties),
            })
            .collect();
        if Bug::AckBeforeCommit.planted()
            && let Some(last) = deliveries.last()
        {
            subscription.ack_through(last).await?;
            return Ok(self.recorder.record(arrivals).await?);
        }
        self.recorder.record(arrivals).await?;
        if let Some(last) = deliveries.last() {
            subscription.ack_through(last).await?;
        }
        Ok(())
    }
}
