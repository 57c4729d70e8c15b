//! `cargo dev upgrade`: instances of two versions on one database, under load.
//!
//! While a new version is rolled out, and when it is rolled back, instances of both work side by side on tables that the
//! new one has migrated. This does so on purpose: one instance after the other is replaced by one of the other version,
//! forward, back and forward again ([`plan`]). No message may be lost meanwhile, every instance has to stay at work, and
//! the events must show that each version has gone on with rows of the other ([`deeds`]).

mod deeds;
mod plan;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context, bail, ensure};
use devstack::Stack;
use testkit::{get, is_ready};
use tokio::{
    sync::RwLock,
    task::{JoinSet, spawn_blocking},
    time::{Instant, sleep, timeout},
};

use crate::{
    Args,
    campaign::{QUIET, SETTLING, judge, progress, say, settle},
    consumer,
    excuse::Record,
    fault::Fault,
    instance::{DATABASE, Slot},
    ledger::{Ledger, Verdict},
    post::{self, Pace},
    rows::Rows,
    setup,
};
use deeds::{Diary, idle, table};
use plan::{End, Replacement, Stage, Version, plan};

/// Within this time after a replacement all instances must be ready, the migrations included, and within this time
/// after the work of a stage again.
const RECOVERING: Duration = Duration::from_secs(30);

/// How often the instances are looked at.
const LOOK: Duration = Duration::from_millis(100);

/// The servers, the instances of both versions, and their load.
pub struct Upgrade {
    stack: Arc<Stack>,
    slots: Vec<Slot>,
    old: PathBuf,
    new: PathBuf,
    stages: Vec<Stage>,
    diary: Diary,
    ledger: Arc<Ledger>,
    rows: Rows,
    gate: Arc<RwLock<()>>,
    consumers: JoinSet<()>,
}

impl Upgrade {
    /// Starts the servers, instances of the old version, and the consumers.
    pub async fn begin(args: &Args, old: &Path, new: &Path, logs: &Path) -> anyhow::Result<Self> {
        ensure!(
            args.instances > 1,
            "one instance cannot work beside another: --instances must be 2 or more"
        );
        let stack = spawn_blocking(|| Stack::start_temporary("upgrade")).await??;
        let stack = Arc::new(stack);
        let database = stack.postgres.create_database(DATABASE)?;
        let url = stack.rabbitmq.url();
        setup::declare_all(&url).await?;
        let ledger = Arc::new(Ledger::new(args.messages));
        let gate = Arc::new(RwLock::new(()));
        // Nobody asks for a deletion here.
        let (consumers, _) = consumer::start_all(&url, &stack, &ledger, &gate, &Arc::default());
        let mut slots = Vec::new();
        for number in 0..args.instances {
            let mut slot = Slot::new(number, old, logs, &stack, &database).await?;
            slot.start_version(Version::Old.name(), old)?;
            slots.push(slot);
        }
        println!(
            "{} messages, {} instances, Postgres {}, RabbitMQ {}",
            args.messages,
            args.instances,
            stack.postgres.version()?,
            stack.rabbitmq.version()?
        );
        Ok(Self {
            diary: Diary::open(&database)?,
            rows: Rows::open(&database)?,
            stack,
            slots,
            old: old.to_owned(),
            new: new.to_owned(),
            stages: plan(args.instances),
            ledger,
            gate,
            consumers,
        })
    }

    /// Goes through all stages while messages are produced, and waits until nothing is under way. Returns the verdict,
    /// and a table of what each version has done.
    pub async fn run(&mut self, args: &Args) -> anyhow::Result<(Verdict, String)> {
        // An old version that does not even start alone is no verdict on the new one.
        self.until_ready().await?;
        let time = Duration::from_secs(args.seconds);
        let pace = Arc::new(Pace::new(args.messages, time, self.stages.len() - 1));
        let url = self.stack.rabbitmq.url();
        let mut work = post::produce_all(&url, &self.ledger, &self.gate, &pace);
        let mut watch = JoinSet::new();
        watch.spawn(progress(self.ledger.clone(), pace.begun));
        if let Err(e) = self.roll(&pace).await {
            // The rest would only fail in the same way. What has been sent still has to come back.
            self.ledger.unexpected(format!("{e:#}"));
            work.abort_all();
        }
        self.diary.close().await?;
        while let Some(ended) = work.join_next().await {
            if let Err(e) = ended
                && !e.is_cancelled()
            {
                return Err(e.into());
            }
        }
        settle(&self.ledger, &self.rows, QUIET, SETTLING).await?;
        let deeds = self.diary.deeds().await?;
        let stages = &self.stages[..self.diary.stages()];
        let mut verdict = judge(&self.ledger, &self.rows).await?;
        verdict.unexpected.extend(idle(stages, &deeds));
        Ok((verdict, table(stages, &deeds)))
    }

    /// Goes through all stages. It is an error if an instance ends by itself, does not stop cleanly, or is not ready
    /// in time.
    async fn roll(&mut self, pace: &Pace) -> anyhow::Result<()> {
        let spread = pace.time / u32::try_from(self.stages.len())?;
        for (n, stage) in self.stages.clone().iter().enumerate() {
            if let Some(replacement) = stage.replacement {
                pace.step();
                self.replace(replacement)
                    .await
                    .with_context(|| format!("{} ({})", stage.phase, stage.instances()))?;
            }
            self.diary.note().await?;
            // A replacement that took long must not leave the stage without time.
            let due = pace.begun + spread * u32::try_from(n + 1)?;
            let until = due.max(Instant::now() + spread / 2);
            self.work_until(until)
                .await
                .with_context(|| format!("{} ({})", stage.phase, stage.instances()))?;
            self.diary.note().await?;
        }
        Ok(())
    }

    /// Ends an instance and starts one of the other version in its place, which must become ready, as must the others.
    async fn replace(&mut self, replacement: Replacement) -> anyhow::Result<()> {
        let Replacement {
            slot: number,
            end,
            by,
        } = replacement;
        let slot = &mut self.slots[number];
        let gone = slot.name();
        match end {
            End::Leave => slot.leave().await?,
            End::Kill => {
                slot.kill().await?;
                self.ledger.fault(Record::of_death(Fault::Kill, number));
            }
        }
        let begun = Instant::now();
        match by {
            Version::Old => slot.start_version(by.name(), &self.old)?,
            Version::New => slot.start_version(by.name(), &self.new)?,
        }
        let new = slot.name();
        self.until_ready().await?;
        if by == Version::New && self.diary.stages() == 1 {
            // The first one migrates, which locks the tables as this fault does, perhaps for longer than the others'
            // time-outs.
            self.ledger.fault(Record {
                fault: Fault::PgLock,
                whom: None,
                begun,
                ended: Instant::now(),
            });
        }
        let how = match end {
            End::Leave => "left",
            End::Kill => "was killed",
        };
        say(&format!(
            "{gone} {how}, {new} is ready after {:.1} s",
            begun.elapsed().as_secs_f64()
        ));
        Ok(())
    }

    /// Lets the instances work until this moment, after which all must be ready.
    async fn work_until(&mut self, until: Instant) -> anyhow::Result<()> {
        while Instant::now() < until {
            self.ensure_alive()?;
            sleep(LOOK).await;
        }
        self.until_ready().await
    }

    /// Waits until all instances are ready.
    async fn until_ready(&mut self) -> anyhow::Result<()> {
        let deadline = Instant::now() + RECOVERING;
        for n in 0..self.slots.len() {
            while !is_ready(self.slots[n].address()).await {
                self.ensure_alive()?;
                if Instant::now() > deadline {
                    let slot = &self.slots[n];
                    let page = timeout(RECOVERING, get(slot.address(), "/ready")).await;
                    let (_, why) = page
                        .context("no answer")
                        .and_then(|page| Ok(page?))
                        .with_context(|| format!("{} is not ready", slot.name()))?;
                    bail!("{} is not ready: {why}", slot.name());
                }
                sleep(LOOK).await;
            }
        }
        Ok(())
    }

    fn ensure_alive(&mut self) -> anyhow::Result<()> {
        for slot in &mut self.slots {
            slot.ensure_alive().with_context(|| slot.name())?;
        }
        Ok(())
    }

    /// Stops everything.
    pub async fn end(mut self) {
        self.consumers.shutdown().await;
        for slot in &mut self.slots {
            let _ = slot.kill().await;
        }
        // Dropping the stack stops Postgres and RabbitMQ, which blocks.
        let _ = spawn_blocking(move || drop(self.stack)).await;
    }
}
