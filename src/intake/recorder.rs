//! Recorder: a batch of arrivals becomes rows, in one transaction.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
    time::Duration,
};

use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use tracing::warn;
use uuid::Uuid;

use super::{
    Loops,
    effects::{Effect, Teller},
    keys::{self, Sorted, key_of},
};
use crate::{
    backoff::Backoff,
    dispatcher::Wake,
    domain::{
        arrival::Arrival,
        review::Reason,
        task::{NewTask, Next},
    },
    observe::{audit, metrics::Metrics, telemetry::chain},
    plant::Bug,
    store::{
        Store, StoreError,
        arrivals::{IntakeTx, Mark, Planned},
        idempotency::Key,
    },
    wire::{self, Arrived, Rules},
};

/// How long to ask after a COMMIT whose answer was lost, before giving up.
const LOST_COMMIT_PATIENCE: Duration = Duration::from_secs(5);

/// Decodes, decides and stores.
#[derive(Clone)]
pub struct Recorder {
    pub(super) store: Store,
    pub(super) rules: Arc<Rules>,
    teller: Teller,
    key_life: Duration,
}

/// What has been stored of a batch so far.
struct Progress<'t> {
    started: Instant,
    effects: Vec<Effect<'t>>,
    /// The id under which the failure of each key is stored.
    applied: Vec<(Key, Uuid)>,
}

impl Recorder {
    /// Judges arrivals by `rules`, tells `wake` when the earliest of what was stored falls
    /// due, looks out for `loops`, and remembers an idempotency key for `key_life`.
    pub fn new(
        store: Store,
        rules: Arc<Rules>,
        wake: Arc<Wake>,
        metrics: Arc<Metrics>,
        loops: Arc<Loops>,
        key_life: Duration,
    ) -> Self {
        Self {
            store,
            rules,
            teller: Teller {
                wake,
                metrics,
                loops,
                told_of_unknown: Arc::default(),
            },
            key_life,
        }
    }

    /// Stores a batch. On success each arrival is durable, as a row or as a case for
    /// review, or was so before.
    pub async fn record(&self, arrivals: Vec<Arrived>) -> Result<(), StoreError> {
        let tasks: Vec<NewTask> = arrivals
            .into_iter()
            .map(|arrived| wire::decode(arrived, &self.rules, Uuid::now_v7))
            .collect();
        match self.store_batch(&tasks).await {
            Err(e @ StoreError::Data(_)) => {
                warn!(
                    error = chain(&e),
                    "Postgres refused a batch; storing it one by one"
                );
                for task in tasks {
                    self.store_alone(task).await?;
                }
                Ok(())
            }
            other => other,
        }
    }

    /// Stores a message that the AMQP client could not read, for review.
    pub async fn record_unreadable(
        &self,
        arrived: Arrived,
        problems: &[String],
    ) -> Result<(), StoreError> {
        let task = wire::unreadable(arrived, problems, &self.rules, Uuid::now_v7);
        self.store_alone(task).await
    }

    /// Stores one message on its own, so that a bad one harms only itself. When
    /// Postgres refuses it, it goes to review stripped to what Postgres cannot refuse.
    async fn store_alone(&self, task: NewTask) -> Result<(), StoreError> {
        match self.store_batch(std::slice::from_ref(&task)).await {
            Err(e @ StoreError::Data(_)) => {
                let plain = NewTask {
                    producer_id: Some(task.message_id.to_string()),
                    message_id: Uuid::now_v7(),
                    queue: self.rules.intake_queue.clone(),
                    error: format!("{} (its queue is {:?})", chain(&e), task.queue),
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
        let Sorted {
            fresh,
            hits,
            others,
        } = keys::sort(&mut tx, tasks, self.key_life).await?;
        let mut progress = Progress {
            started,
            effects: Vec::with_capacity(tasks.len()),
            applied: Vec::new(),
        };
        for wave in waves(&fresh) {
            self.store_wave(&mut tx, wave, &mut progress).await?;
        }
        if !progress.applied.is_empty() {
            tx.attach_keys(&progress.applied).await?;
        }
        let mut effects = progress.effects;
        if !others.is_empty() {
            let mut copies = Vec::with_capacity(others.len());
            for (task, reason) in others {
                copies.push(beside(task, reason, &mut effects));
            }
            self.store_copies(&mut tx, &copies).await?;
        }
        if !hits.is_empty() {
            let keys: Vec<Key> = hits.iter().map(|(_, key)| key.clone()).collect();
            let messages = tx.record_hits(&keys).await?;
            effects.extend(hits.into_iter().map(|(task, key)| Effect::Hit {
                task,
                applied_to: messages.get(&key).copied(),
            }));
        }
        let mark = tx.mark();
        if let Err(e) = tx.commit().await {
            warn!(
                error = chain(&e),
                "COMMIT was not answered; looking whether it took place"
            );
            let ids: Vec<Uuid> = effects.iter().filter_map(Effect::stored_as).collect();
            if !Bug::TrustLostCommit.planted() && !self.took_place(&ids, &mark).await {
                return Err(e);
            }
        }
        for task in fresh.iter().filter(|t| t.idempotency_key.is_some()) {
            audit::key_recorded(task);
        }
        self.teller.tell(&effects, started);
        Ok(())
    }

    /// Whether a COMMIT that was not answered took place. When that cannot be found
    /// out the answer is no: delivered again, failures with an id are recognised by it;
    /// those without one, and cases for review, may be stored twice.
    async fn took_place(&self, ids: &[Uuid], mark: &Mark) -> bool {
        let deadline = Instant::now() + LOST_COMMIT_PATIENCE;
        let mut backoff = Backoff::default();
        let never = CancellationToken::new();
        loop {
            match timeout_at(deadline, self.store.was_stored(ids, mark)).await {
                Ok(Ok(Some(stored))) => return stored,
                Ok(Ok(None) | Err(_)) if Instant::now() < deadline => backoff.wait(&never).await,
                Ok(_) | Err(_) => return false,
            }
        }
    }

    /// Stores tasks with distinct ids.
    async fn store_wave<'t>(
        &self,
        tx: &mut IntakeTx,
        mut rest: Vec<&'t NewTask>,
        progress: &mut Progress<'t>,
    ) -> Result<(), StoreError> {
        // A second round is needed only when retention removes a known row between the
        // two statements: then its message is new after all.
        while !rest.is_empty() {
            let cases: HashMap<Uuid, NewTask> = rest
                .iter()
                .filter_map(|task| self.teller.loops.case(task, progress.started))
                .map(|case| (case.message_id, case))
                .collect();
            let planned: Vec<Planned<'_>> = rest
                .iter()
                .map(|task| cases.get(&task.message_id).unwrap_or(task))
                .map(|task| plan(task, task.budget.retry_count))
                .collect();
            let inserted = tx.insert_new(&planned).await?;
            for (&task, planned) in rest.iter().zip(&planned) {
                let id = task.message_id;
                if let Some(&delay) = inserted.get(&id) {
                    let key = key_of(task).map(|key| (key, id));
                    progress.applied.extend(key);
                    progress.effects.push(Effect::Stored {
                        planned: Planned { task, ..*planned },
                        delay,
                        new: true,
                    });
                }
            }
            rest.retain(|task| !inserted.contains_key(&task.message_id));
            if !rest.is_empty() {
                let met = self.meet_known(tx, &rest, progress).await?;
                rest.retain(|task| !met.contains(&task.message_id));
            }
        }
        Ok(())
    }

    /// Applies tasks to the rows that have their ids, and returns those ids.
    async fn meet_known<'t>(
        &self,
        tx: &mut IntakeTx,
        tasks: &[&'t NewTask],
        progress: &mut Progress<'t>,
    ) -> Result<HashSet<Uuid>, StoreError> {
        let Progress {
            effects, applied, ..
        } = progress;
        let by_id: HashMap<Uuid, &'t NewTask> = tasks.iter().map(|t| (t.message_id, *t)).collect();
        let rows = tx.lock_known(tasks).await?;
        let doubtful: Vec<(i64, Uuid, &NewTask)> = rows
            .iter()
            .filter_map(|row| {
                let task = *by_id.get(&row.message_id)?;
                Some((row.id, row.names_another_attempt(task)?, task))
            })
            .collect();
        let outdated = match doubtful.is_empty() {
            true => HashSet::new(),
            false => tx.note_outdated(&doubtful).await?,
        };
        let mut again = Vec::new();
        let mut duplicates = Vec::new();
        let mut copies = Vec::new();
        let mut apart = Vec::new();
        let mut met = HashSet::with_capacity(rows.len());
        for row in &rows {
            let Some(&task) = by_id.get(&row.message_id) else {
                continue;
            };
            met.insert(row.message_id);
            let mut stored_as = row.message_id;
            let mut case = |reason| {
                let copy = beside(task, reason, effects);
                stored_as = copy.message_id;
                copies.push(copy);
            };
            match row.meets(task) {
                _ if outdated.contains(&row.message_id) => effects.push(Effect::Outdated(task)),
                Arrival::Again { retry_count } => again.push(plan(task, retry_count)),
                Arrival::Duplicate(budget) => {
                    duplicates.push((row.id, budget));
                    effects.push(Effect::Duplicate(task));
                }
                Arrival::Apart => {
                    let mut own = task.clone();
                    own.message_id = Uuid::now_v7();
                    stored_as = own.message_id;
                    apart.push(own);
                }
                Arrival::Beside(reason) => case(reason),
                Arrival::BesideUnknown(reason, text) => {
                    self.teller.tell_of_unknown(row.id, &text);
                    case(reason);
                }
            }
            applied.extend(key_of(task).map(|key| (key, stored_as)));
        }
        if !again.is_empty() {
            let delays = tx.fail_again(&again).await?;
            effects.extend(again.into_iter().map(|planned| {
                Effect::Stored {
                    delay: delays
                        .get(&planned.task.message_id)
                        .copied()
                        .unwrap_or_default(),
                    planned,
                    new: false,
                }
            }));
        }
        if !duplicates.is_empty() {
            tx.note_duplicates(&duplicates).await?;
        }
        if !copies.is_empty() {
            self.store_copies(tx, &copies).await?;
        }
        if !apart.is_empty() {
            let planned: Vec<Planned<'_>> = apart
                .iter()
                .map(|task| plan(task, task.budget.retry_count))
                .collect();
            let delays = tx.insert_new(&planned).await?;
            let nexts: Vec<Next> = planned.iter().map(|planned| planned.next).collect();
            effects.extend(apart.into_iter().zip(nexts).map(|(task, next)| {
                let delay = delays.get(&task.message_id).copied().unwrap_or_default();
                let task = Box::new(task);
                Effect::Apart { task, next, delay }
            }));
        }
        Ok(met)
    }

    async fn store_copies(&self, tx: &mut IntakeTx, copies: &[NewTask]) -> Result<(), StoreError> {
        let planned: Vec<Planned<'_>> = copies
            .iter()
            .map(|copy| plan(copy, copy.budget.retry_count))
            .collect();
        tx.insert_new(&planned).await?;
        Ok(())
    }
}

fn plan(task: &NewTask, retry_count: i32) -> Planned<'_> {
    Planned {
        task,
        retry_count,
        next: task.next(retry_count, fastrand::f64()),
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

/// Splits a batch so that no id is twice in one statement, and keeps the order: the
/// second mention of an id must see what the first one did.
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
