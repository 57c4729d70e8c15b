//! Intake: the broker's deliveries become rows, and only then are acknowledged.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use lapin::message::Delivery;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};
use uuid::Uuid;

use crate::{
    backoff::Backoff,
    broker::{Broker, BrokerError, Subscription},
    health::Part,
    metrics::{IntakeOutcome, Metrics},
    store::{Store, StoreError, intake::Planned},
    task::{Arrival, NewTask, Next, Reason},
    wake::Wake,
    wire::{self, Arrived, Rules},
};

/// A batch is closed early at this many bytes, to bound memory and statements.
const BATCH_BYTES: usize = 16 << 20;

/// How long to ask after a COMMIT whose answer was lost, before handing the
/// deliveries back.
const LOST_COMMIT_PATIENCE: Duration = Duration::from_secs(5);

/// The loop that stores arriving failures.
pub struct Intake {
    /// Where deliveries come from.
    pub broker: Broker,
    /// Where they go.
    pub store: Store,
    /// How they are judged.
    pub rules: Arc<Rules>,
    /// Told of what falls due soon.
    pub wake: Arc<Wake>,
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
                    info!(queue = self.rules.intake_queue, "intake is subscribed");
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
        self.store.prove_durable().await?;
        let queue = &self.rules.intake_queue;
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
        self.store_all(arrivals).await?;
        if let Some(last) = deliveries.last() {
            subscription.ack_through(last).await?;
        }
        Ok(())
    }

    /// Stores a batch of arrivals: on return each is durable.
    pub async fn store_all(&self, arrivals: Vec<Arrived>) -> Result<(), StoreError> {
        let tasks: Vec<NewTask> = arrivals
            .into_iter()
            .map(|arrived| wire::decode(arrived, &self.rules, Uuid::now_v7()))
            .collect();
        match self.store_tasks(&tasks).await {
            Err(StoreError::Data(e)) => {
                warn!(error = %e, "Postgres refused a batch; storing it one by one");
                for task in tasks {
                    self.store_alone(task).await?;
                }
                Ok(())
            }
            other => other,
        }
    }

    /// One bad message harms only itself: refused by Postgres, it goes to
    /// review stripped to what Postgres cannot refuse.
    async fn store_alone(&self, task: NewTask) -> Result<(), StoreError> {
        match self.store_tasks(std::slice::from_ref(&task)).await {
            Err(StoreError::Data(e)) => {
                let plain = NewTask {
                    producer_id: Some(task.message_id.to_string()),
                    message_id: Uuid::now_v7(),
                    queue: self.rules.intake_queue.clone(),
                    error: e,
                    properties: Vec::new(),
                    labels: Default::default(),
                    not_before_ms: None,
                    first_failed_at_ms: None,
                    verdict: Some(Reason::Invalid),
                    ..task
                };
                self.store_tasks(&[plain]).await
            }
            other => other,
        }
    }

    async fn store_tasks(&self, tasks: &[NewTask]) -> Result<(), StoreError> {
        let started = Instant::now();
        let mut tx = self.store.begin_intake().await?;
        let mut effects = Vec::with_capacity(tasks.len());
        for wave in waves(tasks) {
            self.store_wave(&mut tx, wave, &mut effects).await?;
        }
        let at = tx.at;
        if let Err(e) = tx.commit().await {
            warn!(error = %e, "COMMIT was not answered; looking whether it took place");
            let ids: Vec<Uuid> = tasks.iter().map(|t| t.message_id).collect();
            if !self.took_place(&ids, at).await {
                return Err(e);
            }
        }
        self.tell(effects, started);
        Ok(())
    }

    async fn took_place(&self, ids: &[Uuid], at: chrono::DateTime<chrono::Utc>) -> bool {
        let deadline = Instant::now() + LOST_COMMIT_PATIENCE;
        let mut backoff = Backoff::default();
        let never = CancellationToken::new();
        loop {
            match timeout_at(deadline, self.store.was_stored(ids, at)).await {
                Ok(Ok(stored)) => return stored,
                Ok(Err(_)) if Instant::now() < deadline => backoff.wait(&never).await,
                // Handed back, they are stored twice at worst, and recognised.
                Ok(Err(_)) | Err(_) => return false,
            }
        }
    }

    /// Stores tasks with distinct ids.
    async fn store_wave<'t>(
        &self,
        tx: &mut crate::store::intake::IntakeTx,
        wave: Vec<&'t NewTask>,
        effects: &mut Vec<Effect<'t>>,
    ) -> Result<(), StoreError> {
        let planned: Vec<Planned<'_>> = wave
            .iter()
            .map(|task| self.plan(task, task.retry_count))
            .collect();
        let inserted = tx.insert_new(&planned).await?;
        for p in &planned {
            if inserted.contains(&p.task.message_id) {
                effects.push(Effect::new(p));
            }
        }
        let mut known: HashMap<Uuid, &NewTask> = wave
            .into_iter()
            .filter(|t| !inserted.contains(&t.message_id))
            .map(|t| (t.message_id, t))
            .collect();
        while !known.is_empty() {
            let tasks: Vec<&NewTask> = known.values().copied().collect();
            self.meet_known(tx, &tasks, &mut known, effects).await?;
            // A row can vanish between the two statements (retention): its
            // message is new after all.
            if !known.is_empty() {
                let planned: Vec<Planned<'_>> = known
                    .values()
                    .map(|task| self.plan(task, task.retry_count))
                    .collect();
                let inserted = tx.insert_new(&planned).await?;
                for p in &planned {
                    if inserted.contains(&p.task.message_id) {
                        effects.push(Effect::new(p));
                    }
                }
                known.retain(|id, _| !inserted.contains(id));
            }
        }
        Ok(())
    }

    async fn meet_known<'t>(
        &self,
        tx: &mut crate::store::intake::IntakeTx,
        tasks: &[&'t NewTask],
        unmet: &mut HashMap<Uuid, &'t NewTask>,
        effects: &mut Vec<Effect<'t>>,
    ) -> Result<(), StoreError> {
        let rows = tx.lock_known(tasks).await?;
        let mut again = Vec::new();
        let mut duplicates = Vec::new();
        let mut beside = Vec::new();
        for row in rows {
            let Some(task) = unmet.remove(&row.message_id) else {
                continue;
            };
            match row.meets(task) {
                Arrival::Again { retry_count } => again.push(self.plan(task, retry_count)),
                Arrival::Duplicate { retry_count } => {
                    duplicates.push((row.id, retry_count));
                    effects.push(Effect::Duplicate(task));
                }
                Arrival::Beside(reason) => {
                    beside.push((task, task.clone().beside(Uuid::now_v7(), reason)));
                }
            }
        }
        if !again.is_empty() {
            tx.fail_again(&again).await?;
            effects.extend(again.iter().map(Effect::new));
        }
        if !duplicates.is_empty() {
            tx.note_duplicates(&duplicates).await?;
        }
        if !beside.is_empty() {
            let planned: Vec<Planned<'_>> = beside
                .iter()
                .map(|(_, copy)| self.plan(copy, copy.retry_count))
                .collect();
            tx.insert_new(&planned).await?;
            for ((task, _), p) in beside.iter().zip(&planned) {
                effects.push(Effect::Planned {
                    task,
                    retry_count: p.retry_count,
                    next: p.next,
                });
            }
        }
        Ok(())
    }

    fn plan<'t>(&self, task: &'t NewTask, retry_count: i32) -> Planned<'t> {
        let policy = self.rules.book.named(&task.policy);
        Planned {
            task,
            retry_count,
            next: task.next(policy, retry_count, fastrand::f64()),
        }
    }

    /// Metrics, logs and the dispatcher's alarm, once the batch is durable.
    fn tell(&self, effects: Vec<Effect<'_>>, started: Instant) {
        let mut soonest: Option<Duration> = None;
        for effect in effects {
            match effect {
                Effect::Duplicate(task) => {
                    self.metrics.duplicates.inc();
                    self.metrics.intake(IntakeOutcome::Duplicate);
                    debug!(
                        message_id = %task.message_id,
                        queue = task.queue,
                        "already waiting; nothing changes"
                    );
                }
                Effect::Planned {
                    task,
                    retry_count,
                    next: Next::Retry { delay, .. },
                } => {
                    self.metrics.scheduled(&task.queue);
                    soonest = Some(soonest.map_or(delay, |s| s.min(delay)));
                    info!(
                        event_type = "scheduled",
                        message_id = %task.message_id,
                        queue = task.queue,
                        attempt = retry_count,
                        max_retries = task.max_retries,
                        delay_ms = delay.as_millis() as u64,
                        "retry scheduled"
                    );
                }
                Effect::Planned {
                    task,
                    retry_count,
                    next: Next::Review(reason),
                } => {
                    self.metrics.intake(IntakeOutcome::Review);
                    if reason == Reason::Invalid {
                        self.metrics.invalid.inc();
                    }
                    soonest = Some(Duration::ZERO);
                    warn!(
                        event_type = "scheduled",
                        message_id = %task.message_id,
                        queue = task.queue,
                        attempt = retry_count,
                        reason = reason.as_str(),
                        error = %crate::telemetry::one_line(&task.error),
                        "goes to review"
                    );
                }
            }
        }
        if let Some(delay) = soonest {
            self.wake.at(started + delay);
        }
    }
}

/// What storing a task did, to be told once it is durable.
enum Effect<'t> {
    Planned {
        task: &'t NewTask,
        retry_count: i32,
        next: Next,
    },
    Duplicate(&'t NewTask),
}

impl<'t> Effect<'t> {
    fn new(planned: &Planned<'t>) -> Self {
        Self::Planned {
            task: planned.task,
            retry_count: planned.retry_count,
            next: planned.next,
        }
    }
}

/// Splits a batch so that no id is twice in one statement, in order: the second
/// mention of an id must see what the first one did.
fn waves(tasks: &[NewTask]) -> Vec<Vec<&NewTask>> {
    let mut waves: Vec<(HashSet<Uuid>, Vec<&NewTask>)> = Vec::new();
    for task in tasks {
        let free = waves
            .iter()
            .position(|(ids, _)| !ids.contains(&task.message_id));
        let index = free.unwrap_or_else(|| {
            waves.push(Default::default());
            waves.len() - 1
        });
        let (ids, wave) = &mut waves[index];
        ids.insert(task.message_id);
        wave.push(task);
    }
    waves.into_iter().map(|(_, wave)| wave).collect()
}
