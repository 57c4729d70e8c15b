//! Sends a probe round a dead-letter loop, twice.
//!
//! The probe goes to a team's queue as a republish would, with the routing key that the team's
//! messages bear. We take it from there and reject it: it dies, and has to arrive in a dead
//! letter queue. Then it goes back as the service would send it, and dies once more, because a
//! loop may lose the second death alone.
//!
//! A message that lies in a dead letter queue cannot be looked at without a delivery that counts
//! against it, and against all before it. So where nobody consumes that queue it must be empty,
//! and we take the probe ourselves. Where the service consumes it, the proof is the task that it
//! stores: it is made due, the service itself sends the probe back, and after the second death the
//! task is removed, with its history. Either way the bindings of the real queue are what is
//! tried; a queue of our own, bound like it, would prove only that the exchange exists.

use std::time::Duration;

use anyhow::{Context, bail};
use tokio::time::{Instant, sleep};
use uuid::Uuid;

use super::finding::{Finding, Grade};
use crate::{
    broker::{Broker, Inspector, Outcome, Publisher, Taken},
    config::Settings,
    domain::policy::PolicyBook,
    store::{Store, inspect::ProbeRow},
    wire::{Outgoing, is_probe, probe, probe_again},
};

/// How long the probe may take for each step. The service looks for what is due at least every
/// RETRY_POLL_INTERVAL_MS, which is added.
const PATIENCE: Duration = Duration::from_secs(10);

/// How often we look.
const PAUSE: Duration = Duration::from_millis(50);

/// The most messages of others that we hold while we look for the probe.
const MOST_HELD: usize = 100;

/// What to send, and where it has to arrive.
pub(super) struct Loop<'a> {
    pub settings: &'a Settings,
    pub book: &'a PolicyBook,
    pub dead_letter_queues: &'a [String],
    pub queue: &'a str,
    pub key: &'a str,
}

/// Where the probe is after a death.
enum Arrival {
    /// In a dead letter queue that nobody consumes; we have taken it.
    Taken(Box<Taken>, String),
    /// In the store.
    Stored(ProbeRow),
}

struct Course<'a> {
    of: &'a Loop<'a>,
    id: Uuid,
    /// The producer's id, by which the store finds the probe.
    name: String,
    store: Option<&'a Store>,
    /// The newest task from before the probe.
    newest: i64,
    /// The dead letter queues that nobody consumes.
    unserved: Vec<String>,
    inspector: Inspector,
    publisher: Publisher,
    /// Messages of others that were met on the way. They go back when the connection closes.
    held: Vec<Taken>,
    row: Option<i64>,
    /// The routing key that the probe bore when it was last rejected.
    key: String,
    patience: Duration,
}

impl Loop<'_> {
    /// Tries the loop; a finding either way.
    pub(super) async fn run(&self, broker: &Broker, store: &Store) -> Finding {
        let subject = format!("dead-letter loop of {:?}", self.queue);
        match self.refusal(broker).await {
            Ok(None) => {}
            Ok(Some((fact, cure))) => {
                return Finding::new(Grade::Unknown, subject, format!("not tried: {fact}"), cure);
            }
            Err(e) => {
                let fact = format!("not tried: {e:#}");
                return Finding::new(Grade::Unknown, subject, fact, "see RABBITMQ_URL");
            }
        }
        let tried = match self.course(broker, store).await {
            Ok(mut course) => {
                let outcome = course.twice().await;
                let tidied = Box::pin(course.tidy()).await;
                outcome.and_then(|outcome| tidied.map(|()| outcome))
            }
            Err(e) => Err(e),
        };
        match tried {
            Ok(Ok(fact)) => Finding::ok(subject, fact),
            Ok(Err((fact, cure))) => Finding::new(Grade::Problem, subject, fact, cure),
            Err(e) => Finding::new(
                Grade::Unknown,
                subject,
                format!("the probe was broken off: {e:#}"),
                format!(
                    "try again; a message with the header x-retry-doctor-probe in {:?} may be deleted",
                    self.queue
                ),
            ),
        }
    }

    /// Why the loop cannot be tried, and what to do about it.
    async fn refusal(&self, broker: &Broker) -> anyhow::Result<Refusal> {
        let because = |fact: String, cure: &str| Ok(Some((fact, cure.to_owned())));
        if self.dead_letter_queues.is_empty() {
            let cure = "set it to the queue that dead letters go to";
            return because("DEAD_LETTER_QUEUE is empty".into(), cure);
        }
        if let Some(why) = self.settings.allowed_queues.refusal(self.queue) {
            let cure = "choose another, or allow it: what dies in it goes to review";
            return because(format!("nothing may go back to this queue: {why}"), cure);
        }
        if self.book.choose("", self.queue).max_retries < 1 {
            let cure = "choose a queue whose messages are retried";
            return because(
                "its policy allows no retry, so the probe would go to review".into(),
                cure,
            );
        }
        let mut inspector = broker.inspector().await?;
        let refusal = self.refusal_by_queues(&mut inspector).await;
        inspector.close().await;
        refusal
    }

    async fn refusal_by_queues(&self, inspector: &mut Inspector) -> anyhow::Result<Refusal> {
        let because = |fact: String, cure: &str| Ok(Some((fact, cure.to_owned())));
        match inspector.look(self.queue).await? {
            None => return because("there is no such queue".into(), "name one that exists"),
            Some(seen) if seen.consumers > 0 => {
                let fact = format!(
                    "the queue has {} consumers, who would get the probe",
                    seen.consumers
                );
                let cure =
                    "stop them, or make a queue with the same arguments and bindings and name that";
                return because(fact, cure);
            }
            Some(seen) if seen.messages > 0 => {
                let fact = format!(
                    "{} messages wait in the queue, before the probe",
                    seen.messages
                );
                let cure = "work them off, or make a queue with the same arguments and bindings and name that";
                return because(fact, cure);
            }
            Some(_) => {}
        }
        for queue in self.dead_letter_queues {
            match inspector.look(queue).await? {
                None => {
                    let cure = "declare it, or start the service, which does";
                    return because(format!("there is no queue {queue:?}"), cure);
                }
                Some(seen) if seen.consumers == 0 && seen.messages > 0 => {
                    let fact = format!(
                        "{} messages wait in {queue:?} and nobody consumes it; looking for the probe among them would count against them",
                        seen.messages
                    );
                    return because(fact, "start the service, and try again beside it");
                }
                Some(_) => {}
            }
        }
        Ok(None)
    }

    async fn course<'a>(&'a self, broker: &Broker, store: &'a Store) -> anyhow::Result<Course<'a>> {
        let mut inspector = broker.inspector().await?;
        let mut unserved = Vec::new();
        for queue in self.dead_letter_queues {
            match inspector.look(queue).await? {
                Some(seen) if seen.consumers > 0 => {}
                _ => unserved.push(queue.clone()),
            }
        }
        // Without a database the probe can still be taken from queues that nobody consumes.
        let (store, newest) = match store.newest_task().await {
            Ok(newest) => (Some(store), newest),
            Err(_) if unserved.len() == self.dead_letter_queues.len() => (None, 0),
            Err(e) => return Err(e).context("somebody consumes the dead letter queue"),
        };
        let id = Uuid::new_v4();
        Ok(Course {
            of: self,
            id,
            name: format!("doctor-{id}"),
            store,
            newest,
            unserved,
            inspector,
            publisher: broker.publisher(&self.settings.manual_review_queue).await?,
            held: Vec::new(),
            row: None,
            key: self.key.to_owned(),
            patience: PATIENCE + self.settings.retry_poll_interval * 2,
        })
    }
}

/// Why a loop cannot be tried, and what to do about it.
type Refusal = Option<(String, String)>;

/// What was found out: that it works, or what is wrong and its cure.
type Verdict = Result<String, (String, String)>;

impl Course<'_> {
    async fn twice(&mut self) -> anyhow::Result<Verdict> {
        let (queue, key) = (self.of.queue, self.of.key);
        let first = probe(self.id, &self.name, queue, key).map_err(anyhow::Error::msg)?;
        self.send(first).await?;
        self.kill().await?;
        let Some(arrival) = self.arrival(|row| row.status == "pending").await? else {
            let hint = "; if the queue's producers use another key, name it with --routing-key";
            let hint = if key == queue { hint } else { "" };
            return Ok(Err(self.lost("this death", hint)));
        };
        match &arrival {
            Arrival::Taken(taken, _) => {
                self.inspector.remove(taken).await?;
                let again = probe_again(&taken.arrived, self.id).map_err(anyhow::Error::msg)?;
                self.send(again).await?;
            }
            Arrival::Stored(row) => {
                if let Some(store) = self.store {
                    store.hurry_probe(row.id, &self.name).await?;
                }
            }
        }
        self.kill().await?;
        let sent_once = |row: &ProbeRow| row.status == "pending" && row.retry_count > 0;
        let Some(arrival) = self.arrival(sent_once).await? else {
            return Ok(Err(self.lost("this second death, after a republish,", "")));
        };
        let proof = match arrival {
            Arrival::Taken(taken, dead_letters) => {
                self.inspector.remove(&taken).await?;
                format!("taken from {dead_letters:?}, which nobody consumes now")
            }
            Arrival::Stored(_) => "stored by the running service, and removed".to_owned(),
        };
        Ok(Ok(format!(
            "a probe with the routing key {key:?} was rejected, sent back and rejected again; both deaths arrived ({proof})"
        )))
    }

    fn lost(&self, what: &str, hint: &str) -> (String, String) {
        let (key, targets) = (&self.key, self.of.dead_letter_queues.join(", "));
        let fact = format!(
            "a probe with the routing key {key:?} was rejected, and {what} did not arrive in {targets} within {:?}",
            self.patience
        );
        let cure = format!(
            "let the queue's dead-letter exchange lead there by {key:?}{hint}; or see whether another program consumes {targets}"
        );
        (fact, cure)
    }

    async fn send(&mut self, message: Outgoing) -> anyhow::Result<()> {
        let (outcomes, fault) = self.publisher.publish(&[message]).await;
        match (outcomes.first(), fault) {
            (Some(Outcome::Confirmed), _) => Ok(()),
            (_, Some(fault)) => Err(fault.into()),
            (outcome, None) => bail!("the broker did not take the probe: {outcome:?}"),
        }
    }

    /// Waits for the probe in the team's queue, and rejects it.
    async fn kill(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + self.patience;
        loop {
            if let Some(taken) = self.take(self.of.queue).await? {
                self.inspector.reject(&taken).await?;
                self.key = taken.routing_key;
                return Ok(());
            }
            if Instant::now() > deadline {
                bail!(
                    "it did not come to the queue within {:?}; was it consumed by somebody?",
                    self.patience
                );
            }
            sleep(PAUSE).await;
        }
    }

    /// Waits until the probe has arrived, in the store in a state that `is_new`.
    async fn arrival(
        &mut self,
        is_new: impl Fn(&ProbeRow) -> bool,
    ) -> anyhow::Result<Option<Arrival>> {
        let deadline = Instant::now() + self.patience;
        loop {
            for queue in self.unserved.clone() {
                if let Some(taken) = self.take(&queue).await? {
                    return Ok(Some(Arrival::Taken(Box::new(taken), queue)));
                }
            }
            // The service may have been started meanwhile, so the store is asked in any case.
            if let Some(store) = self.store
                && let Some(row) = store.find_probe(self.newest, &self.name).await?
            {
                self.row = Some(row.id);
                if is_new(&row) {
                    return Ok(Some(Arrival::Stored(row)));
                }
            }
            if Instant::now() > deadline {
                return Ok(None);
            }
            sleep(PAUSE).await;
        }
    }

    /// Takes the probe from a queue, if it is there. Messages of others are held, because one
    /// that is put back would be the first again.
    async fn take(&mut self, queue: &str) -> anyhow::Result<Option<Taken>> {
        while let Some(taken) = self.inspector.take(queue).await? {
            if is_probe(&taken.arrived, self.id) {
                return Ok(Some(taken));
            }
            self.held.push(taken);
            if self.held.len() > MOST_HELD {
                bail!("too many other messages came to {queue:?} meanwhile");
            }
        }
        Ok(None)
    }

    /// Removes what is left of the probe: first its task, so that nobody sends it any more, then
    /// what lies in the queue.
    async fn tidy(mut self) -> anyhow::Result<()> {
        if let (Some(store), Some(row)) = (self.store, self.row) {
            store
                .remove_probe(row, &self.name)
                .await
                .context("its task could not be removed")?;
        }
        if let Some(left) = self.take(self.of.queue).await? {
            self.inspector.remove(&left).await?;
        }
        self.publisher.close().await;
        self.inspector.close().await;
        Ok(())
    }
}
