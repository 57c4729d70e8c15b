//! Recorder: a batch of arrivals becomes rows, in one transaction.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use sha2::{Digest, Sha256};
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::warn;
use uuid::Uuid;

use crate::{
    audit,
    backoff::Backoff,
    metrics::{IntakeOutcome, Metrics},
    plant::Bug,
    store::{
        Store, StoreError,
        idempotency::{Applied, Key},
        intake::{IntakeTx, Mark, Planned},
    },
    task::{Arrival, NewTask, Next, Reason},
    wake::Wake,
    wire::{self, Arrived, Rules},
};

/// How long to ask after a COMMIT whose answer was lost, before giving up.
const LOST_COMMIT_PATIENCE: Duration = Duration::from_secs(5);

/// Decodes, decides and stores.
#[derive(Clone)]
pub struct Recorder {
    /// Where rows go.
    pub store: Store,
    /// How arrivals are judged.
    pub rules: Arc<Rules>,
    /// Told of what falls due soon.
    pub wake: Arc<Wake>,
    /// Counts.
    pub metrics: Arc<Metrics>,
    /// How long an idempotency key is remembered.
    pub key_life: Duration,
}

/// What storing a task did, to be told once it is durable.
enum Effect<'t> {
    Planned(Planned<'t>),
    /// To review under another id, because its own is taken.
    Beside {
        task: &'t NewTask,
        stored_as: Uuid,
        reason: Reason,
    },
    Duplicate(&'t NewTask),
    Hit(&'t NewTask),
}

impl Effect<'_> {
    /// The id of the row that bears the moment of the transaction, if one does.
    fn stored_as(&self) -> Option<Uuid> {
        match self {
            Self::Planned(planned) => Some(planned.task.message_id),
            Self::Beside { stored_as, .. } => Some(*stored_as),
            Self::Duplicate(_) | Self::Hit(_) => None,
        }
    }
}

/// A batch by what its idempotency keys say.
#[derive(Default)]
struct Sorted<'t> {
    /// To be stored.
    fresh: Vec<&'t NewTask>,
    /// Applied before.
    hits: Vec<(&'t NewTask, Key)>,
    /// Other messages under a key that was applied: for people to look at.
    others: Vec<&'t NewTask>,
}

impl Recorder {
    /// Stores a batch: on success each arrival is durable, as a row or as a case
    /// for review, or was so before.
    pub async fn record(&self, arrivals: Vec<Arrived>) -> Result<(), StoreError> {
        let tasks: Vec<NewTask> = arrivals
            .into_iter()
            .map(|arrived| wire::decode(arrived, &self.rules, Uuid::now_v7))
            .collect();
        match self.store_batch(&tasks).await {
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

    /// One bad message harms only itself: refused by Postgres, it goes to review
    /// stripped to what Postgres cannot refuse.
    async fn store_alone(&self, task: NewTask) -> Result<(), StoreError> {
        match self.store_batch(std::slice::from_ref(&task)).await {
            Err(StoreError::Data(e)) => {
                let plain = NewTask {
                    producer_id: Some(task.message_id.to_string()),
                    message_id: Uuid::now_v7(),
                    queue: self.rules.intake_queue.clone(),
                    error: format!("{e} (its queue is {:?})", task.queue),
                    properties: Vec::new(),
                    labels: Default::default(),
                    idempotency_key: None,
                    not_before_ms: None,
                    first_failed_at_ms: None,
                    verdict: Some(Reason::Invalid),
                    ..task
                };
                self.store_batch(&[plain]).await
            }
            other => other,
        }
    }

    async fn store_batch(&self, tasks: &[NewTask]) -> Result<(), StoreError> {
        let started = Instant::now();
        let mut tx = self.store.begin_intake().await?;
        let mut effects = Vec::with_capacity(tasks.len());
        let Sorted {
            fresh,
            hits,
            others,
        } = self.sort_by_key(&mut tx, tasks).await?;
        let mut applied = Vec::new();
        for wave in waves(&fresh) {
            self.store_wave(&mut tx, wave, &mut applied, &mut effects)
                .await?;
        }
        if !applied.is_empty() {
            tx.attach_keys(&applied).await?;
        }
        if !others.is_empty() {
            let mut copies = Vec::with_capacity(others.len());
            for task in others {
                copies.push(beside(task, Reason::Conflict, &mut effects));
            }
            self.store_copies(&mut tx, &copies).await?;
        }
        if !hits.is_empty() {
            let (tasks, keys): (Vec<&NewTask>, Vec<Key>) = hits.into_iter().unzip();
            tx.record_hits(&keys).await?;
            effects.extend(tasks.into_iter().map(Effect::Hit));
        }
        let mark = tx.mark.clone();
        if let Err(e) = tx.commit().await {
            warn!(error = %e, "COMMIT was not answered; looking whether it took place");
            let ids: Vec<Uuid> = effects.iter().filter_map(Effect::stored_as).collect();
            if !Bug::TrustLostCommit.planted() && !self.took_place(&ids, &mark).await {
                return Err(e);
            }
        }
        for task in fresh.iter().filter(|t| t.idempotency_key.is_some()) {
            audit::idempotency_record(task);
        }
        self.tell(&effects, started);
        Ok(())
    }

    async fn took_place(&self, ids: &[Uuid], mark: &Mark) -> bool {
        let deadline = Instant::now() + LOST_COMMIT_PATIENCE;
        let mut backoff = Backoff::default();
        let never = CancellationToken::new();
        loop {
            match timeout_at(deadline, self.store.was_stored(ids, mark)).await {
                Ok(Ok(Some(stored))) => return stored,
                Ok(Ok(None) | Err(_)) if Instant::now() < deadline => backoff.wait(&never).await,
                // Delivered again, they are recognised by their ids.
                Ok(_) | Err(_) => return false,
            }
        }
    }

    /// Takes the idempotency keys of the batch.
    async fn sort_by_key<'t>(
        &self,
        tx: &mut IntakeTx,
        tasks: &'t [NewTask],
    ) -> Result<Sorted<'t>, StoreError> {
        let mut sorted = Sorted::default();
        let mut known: HashMap<Key, Applied> = HashMap::new();
        for task in tasks {
            if let Some(key) = key_of(task) {
                known.entry(key).or_insert_with(|| applied_to(task));
            }
        }
        if known.is_empty() {
            sorted.fresh = tasks.iter().collect();
            return Ok(sorted);
        }
        let mut taken = tx.take_keys(&known, self.key_life).await?;
        let theirs: Vec<&Key> = known.keys().filter(|key| !taken.contains(key)).collect();
        let theirs = tx.look_up_keys(&theirs).await?;
        known.extend(theirs);
        for task in tasks {
            let Some(key) = key_of(task) else {
                sorted.fresh.push(task);
                continue;
            };
            let before = known.get(&key).filter(|_| !taken.remove(&key));
            match before {
                // The first mention of a key that was free.
                None => sorted.fresh.push(task),
                // Provably the same failure, and nothing else may be dropped.
                Some(before) if before.digest != applied_to(task).digest => {
                    sorted.others.push(task);
                }
                Some(before) if task.retry_count > before.retry_count => sorted.fresh.push(task),
                Some(_) => sorted.hits.push((task, key)),
            }
        }
        Ok(sorted)
    }

    /// Stores tasks with distinct ids; `applied` says under which id each key is.
    async fn store_wave<'t>(
        &self,
        tx: &mut IntakeTx,
        mut rest: Vec<&'t NewTask>,
        applied: &mut Vec<(Key, Uuid)>,
        effects: &mut Vec<Effect<'t>>,
    ) -> Result<(), StoreError> {
        // A second round is needed only if a known row is removed between the
        // two statements (by retention): then its message is new after all.
        while !rest.is_empty() {
            let planned: Vec<Planned<'t>> = rest
                .iter()
                .map(|task| self.plan(task, task.retry_count))
                .collect();
            let inserted = tx.insert_new(&planned).await?;
            for planned in planned {
                let id = planned.task.message_id;
                if inserted.contains(&id) {
                    applied.extend(key_of(planned.task).map(|key| (key, id)));
                    effects.push(Effect::Planned(planned));
                }
            }
            rest.retain(|task| !inserted.contains(&task.message_id));
            if !rest.is_empty() {
                let met = self.meet_known(tx, &rest, applied, effects).await?;
                rest.retain(|task| !met.contains(&task.message_id));
            }
        }
        Ok(())
    }

    /// Applies tasks to the rows that have their ids; returns those ids.
    async fn meet_known<'t>(
        &self,
        tx: &mut IntakeTx,
        tasks: &[&'t NewTask],
        applied: &mut Vec<(Key, Uuid)>,
        effects: &mut Vec<Effect<'t>>,
    ) -> Result<HashSet<Uuid>, StoreError> {
        let by_id: HashMap<Uuid, &'t NewTask> = tasks.iter().map(|t| (t.message_id, *t)).collect();
        let rows = tx.lock_known(tasks).await?;
        let mut again = Vec::new();
        let mut duplicates = Vec::new();
        let mut copies = Vec::new();
        let mut met = HashSet::with_capacity(rows.len());
        for row in &rows {
            let Some(&task) = by_id.get(&row.message_id) else {
                continue;
            };
            met.insert(row.message_id);
            let mut stored_as = row.message_id;
            match row.meets(task) {
                Arrival::Again { retry_count } => again.push(self.plan(task, retry_count)),
                Arrival::Duplicate { retry_count } => {
                    duplicates.push((row.id, retry_count));
                    effects.push(Effect::Duplicate(task));
                }
                Arrival::Beside(reason) => {
                    let copy = beside(task, reason, effects);
                    stored_as = copy.message_id;
                    copies.push(copy);
                }
            }
            applied.extend(key_of(task).map(|key| (key, stored_as)));
        }
        if !again.is_empty() {
            tx.fail_again(&again).await?;
            effects.extend(again.into_iter().map(Effect::Planned));
        }
        if !duplicates.is_empty() {
            tx.note_duplicates(&duplicates).await?;
        }
        if !copies.is_empty() {
            self.store_copies(tx, &copies).await?;
        }
        Ok(met)
    }

    async fn store_copies(&self, tx: &mut IntakeTx, copies: &[NewTask]) -> Result<(), StoreError> {
        let planned: Vec<Planned<'_>> = copies
            .iter()
            .map(|copy| self.plan(copy, copy.retry_count))
            .collect();
        tx.insert_new(&planned).await?;
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
    fn tell(&self, effects: &[Effect<'_>], started: Instant) {
        let mut soonest: Option<Duration> = None;
        let mut due_in = |delay: Duration| {
            soonest = Some(soonest.map_or(delay, |known| known.min(delay)));
        };
        for effect in effects {
            match effect {
                Effect::Planned(planned) => {
                    let task = planned.task;
                    match planned.next {
                        Next::Retry { delay, .. } => {
                            self.metrics.scheduled(&task.queue);
                            // It may have expired on arrival: only Postgres knows.
                            let old = task.first_failed_at_ms.is_some();
                            due_in(if old { Duration::ZERO } else { delay });
                            audit::scheduled(task, planned.retry_count, delay);
                        }
                        Next::Review(reason) => {
                            self.metrics.sent_to_review(reason);
                            due_in(Duration::ZERO);
                            audit::bound_for_review(task, planned.retry_count, reason);
                        }
                    }
                }
                Effect::Beside { task, reason, .. } => {
                    self.metrics.sent_to_review(*reason);
                    due_in(Duration::ZERO);
                    audit::bound_for_review(task, task.retry_count, *reason);
                }
                Effect::Duplicate(task) => {
                    self.metrics.intake(IntakeOutcome::Duplicate);
                    audit::duplicate(task);
                }
                Effect::Hit(task) => {
                    self.metrics.intake(IntakeOutcome::IdempotencyHit);
                    audit::idempotency_hit(task);
                }
            }
        }
        if let Some(delay) = soonest {
            self.wake.at(started + delay);
        }
    }
}

/// A copy of `task` for review, because its id or its key is taken.
fn beside<'t>(task: &'t NewTask, reason: Reason, effects: &mut Vec<Effect<'t>>) -> NewTask {
    let copy = task.clone().beside(Uuid::now_v7(), reason);
    effects.push(Effect::Beside {
        task,
        stored_as: copy.message_id,
        reason,
    });
    copy
}

fn applied_to(task: &NewTask) -> Applied {
    Applied {
        retry_count: task.retry_count,
        digest: Sha256::digest(&task.payload).to_vec(),
    }
}

fn key_of(task: &NewTask) -> Option<Key> {
    task.idempotency_key.clone().map(|key| Key {
        scope: task.scope(),
        key,
    })
}

/// Splits a batch so that no id is twice in one statement, in order: the second
/// mention of an id must see what the first one did.
fn waves<'t>(tasks: &[&'t NewTask]) -> Vec<Vec<&'t NewTask>> {
    let mut waves: Vec<Vec<&NewTask>> = Vec::new();
    let mut mentions: HashMap<Uuid, usize> = HashMap::new();
    for task in tasks {
        let wave = mentions.entry(task.message_id).or_default();
        if *wave == waves.len() {
            waves.push(Vec::new());
        }
        waves[*wave].push(task);
        *wave += 1;
    }
    waves
}
