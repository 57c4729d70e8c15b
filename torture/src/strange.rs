//! Faults that lie in the messages themselves, or in what others have set up: they wait in great number or size, nobody
//! can read them, or the standby that Postgres waits for is away.

use std::time::Duration;

use anyhow::{Context, ensure};
use devstack::Stack;
use fastrand::Rng;
use futures::future::join_all;
use retry_scheduler::plant::Point;
use tokio::{
    sync::{Mutex, MutexGuard},
    time::{Instant, sleep, timeout},
};

use crate::{
    ambush::{DYING, Missed},
    chaos::Chaos,
    fault::Fault,
    instance::{POOL, Slot},
    message::{Kind, Message},
    post::{PATIENCE, Post},
    unreadable,
};

/// How many messages wait while an instance dies again and again: as many as `INTAKE_PREFETCH` lets it hold.
const WAITING: usize = 200;

/// How often it dies while it holds deliveries: more often than a message may be delivered again.
const DEATHS: usize = 22;

/// How often it is killed at a random moment after its start.
const EARLY_DEATHS: usize = 3;

/// How many large messages wait. An instance that takes them all at once needs more memory than [`MOST_MEMORY`].
const LARGE: usize = 64;

/// The memory of the container that an instance must do with, in MB.
const MOST_MEMORY: usize = 256;

/// How long instances may take to store what waits.
const TAKING_IN: Duration = Duration::from_secs(60);

/// How long the standby is away after that was noticed.
const AWAY: Duration = Duration::from_secs(7);

impl Chaos {
    /// Lets messages wait, and an only instance die again and again over them. Each time it stores one and is at the
    /// next one when it dies. So a message is delivered more often than its queue allows only if the instance holds
    /// many for no purpose.
    pub async fn crash_again_and_again(&self, whom: usize) -> anyhow::Result<()> {
        let mut slots = self.all_leave().await?;
        self.send(Kind::Waiting, WAITING, 20).await;
        let slot = &mut slots[whom % self.slots.len()];
        // The loop of the dead letters would come to the failpoint as well, and it would not be known which did.
        slot.settings = vec![
            ("INTAKE_BATCH", "1".into()),
            ("DEAD_LETTER_QUEUE", String::new()),
        ];
        let mut random = Rng::with_seed(whom as u64);
        for _ in 0..EARLY_DEATHS {
            slot.start()?;
            sleep(Duration::from_millis(random.u64(..500))).await;
            slot.kill().await?;
        }
        let mut deaths = 0;
        while deaths < DEATHS {
            slot.start()?;
            if !slot.die_at(Point::BeforeIntakeCommit, 2, DYING).await? {
                break;
            }
            deaths += 1;
        }
        slot.kill().await?;
        slot.settings.clear();
        slots.iter_mut().try_for_each(|slot| slot.start())?;
        ensure!(deaths == DEATHS, Missed);
        Ok(())
    }

    /// Makes every COMMIT wait for a standby that is not there. Nobody may give one up and begin another.
    pub async fn send_standby_away(&self, fault: Fault) -> anyhow::Result<Option<Duration>> {
        let begun = Instant::now();
        let wait = "ALTER SYSTEM SET synchronous_standby_names = 'nobody'";
        self.do_to(move |s| change(s, wait)).await?;
        let red = self.met(fault).await;
        let (noticed, mut most) = (Instant::now(), 0.0_f64);
        while red.is_ok() && noticed.elapsed() < AWAY {
            most = most.max(self.rows.connections().await?);
            sleep(Duration::from_millis(200)).await;
        }
        // The backends of an instance that was killed stay as long as their COMMIT waits.
        let instances = self.slots.len() + self.ledger.deaths_since(begun);
        if most > f64::from(POOL) * instances as f64 {
            let what = format!("{most} backends for {} instances", self.slots.len());
            self.ledger.unexpected(what);
        }
        let go_on = "ALTER SYSTEM RESET synchronous_standby_names";
        self.do_to(move |s| change(s, go_on)).await?;
        red.map(Some)
    }

    /// Puts a message into the intake queue that the AMQP client of the instances cannot read, and waits until
    /// it is stored all the same.
    pub async fn send_unreadable(&self) -> anyhow::Result<()> {
        let message = self.ledger.add(Kind::Unreadable);
        let (port, sent) = (self.stack.rabbitmq.port(), Instant::now());
        self.ledger.reported(message);
        let publish = unreadable::publish(port, message.payload());
        timeout(PATIENCE, publish).await.context("no confirm")??;
        self.ledger.confirmed(message, sent);
        self.until_taken_in(&[message]).await
    }

    /// Publishes a letter of the size that RabbitMQ takes at most. Its envelope would be larger.
    pub async fn send_oversized(&self) -> anyhow::Result<()> {
        let sent = self.send(Kind::Oversized, 1, 1).await;
        ensure!(!sent.is_empty(), Missed);
        Ok(())
    }

    /// Lets large messages wait for an only instance, which must not take more of them than it has memory for.
    pub async fn send_large(&self, whom: usize) -> anyhow::Result<()> {
        let mut slots = self.all_leave().await?;
        let sent = self.send(Kind::Large, LARGE, 4).await;
        let slot = &mut slots[whom % self.slots.len()];
        slot.start()?;
        self.until_taken_in(&sent).await?;
        let most = slot.most_memory()?;
        if most > MOST_MEMORY {
            let what = format!("an instance took {most} MB of memory for large messages");
            self.ledger.unexpected(what);
        }
        for slot in slots.iter_mut().filter(|slot| !slot.runs()) {
            slot.start()?;
        }
        Ok(())
    }

    /// Has all instances leave. While their slots are locked, no other fault is done to them.
    async fn all_leave(&self) -> anyhow::Result<Vec<MutexGuard<'_, Slot>>> {
        let mut slots = join_all(self.slots.iter().map(Mutex::lock)).await;
        for slot in &mut slots {
            slot.leave().await?;
        }
        Ok(slots)
    }

    /// Sends so many messages, a few at once, and returns those that RabbitMQ confirmed.
    async fn send(&self, kind: Kind, count: usize, at_once: usize) -> Vec<Message> {
        let mut post = Post::new(&self.stack.rabbitmq.url(), &self.ledger, &self.gate);
        let messages: Vec<Message> = (0..count).map(|_| self.ledger.add(kind)).collect();
        let mut sent = Vec::with_capacity(count);
        for messages in messages.chunks(at_once) {
            if post.report(messages, "failed").await.is_ok() {
                sent.extend_from_slice(messages);
            }
        }
        sent
    }

    /// Waits until all these messages are in a row, or have come back.
    async fn until_taken_in(&self, messages: &[Message]) -> anyhow::Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < TAKING_IN {
            let mut open = self.ledger.under_way();
            let live = self.rows.live().await?;
            open.retain(|message| messages.contains(message) && !live.contains(&message.number));
            if open.is_empty() {
                return Ok(());
            }
            sleep(Duration::from_millis(100)).await;
        }
        self.ledger
            .unexpected("messages were not taken in after they had waited".into());
        Ok(())
    }
}

fn change(stack: &Stack, sql: &str) -> anyhow::Result<()> {
    stack.postgres.psql("postgres", sql)?;
    stack.postgres.psql("postgres", "SELECT pg_reload_conf()")?;
    Ok(())
}
