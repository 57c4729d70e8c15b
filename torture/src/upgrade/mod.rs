//! `cargo dev upgrade`: instances of two versions on one database, under load.
//!
//! While a new version is rolled out, and when it is rolled back, instances of both work side by side on tables that the
//! new one has migrated. This does so on purpose: one instance after the other is replaced by one of the other version,
//! forward, back and forward again ([`plan`](mod@plan)). No message may be lost meanwhile, every instance has to stay
//! at work, and the events must show that each version has gone on with rows of the other ([`deeds`]).

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

/// The messages of a stage are sent in so many parts. The first one may be sent while the instance is replaced, and the
/// others wait for the stage: however long a migration takes, both versions get some of them.
const PARTS: usize = 4;

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
        let parts = self.stages.len() * PARTS;
        let pace = Arc::new(Pace::new(args.messages, time, parts - 1));
        let url = self.stack.rabbitmq.url();
        let mut work = post::produce_all(&url, &self.ledger, &self.gate, &pace);
        let mut watch = JoinSet::new();
        watch.spawn(progress(self.ledger.clone(), pace.begun));
        let rolled = self.roll(&pace).await;
        if rolled.is_err() {
            // What has been sent still has to come back, but there is no use in sending more.
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
        let stayed = match rolled {
            Ok(()) => self.until_ready().await,
            Err(e) => Err(e),
        };
        if let Err(e) = stayed {
            self.ledger.unexpected(format!("{e:#}"));
        }
        let deeds = self.diary.deeds().await?;
        let stages = &self.stages[..self.diary.stages()];
        let verdict = judge(&self.ledger, &self.rows).await?;
        Ok((verdict, table(stages, &deeds)))
    }

    /// Goes through all stages, up to the first in which something is wrong.
    async fn roll(&mut self, pace: &Pace) -> anyhow::Result<()> {
        for n in 0..self.stages.len() {
            self.pass(n, pace).await.with_context(|| {
                let Stage { phase, .. } = self.stages[n];
                format!("stage {} ({phase})", n + 1)
            })?;
        }
        Ok(())
    }

    /// Replaces an instance, and lets all work for their share of the time. It is an error if one of them ends by itself,
    /// does not stop cleanly or is not ready in time, or if a version does not do its part.
    async fn pass(&mut self, n: usize, pace: &Pace) -> anyhow::Result<()> {
        let stage = self.stages[n].clone();
        let spread = pace.time / u32::try_from(self.stages.len())?;
        let due = pace.begun + spread * u32::try_from(n + 1)?;
        if let Some(replacement) = stage.replacement {
            pace.step();
            self.replace(replacement).await?;
        }
        self.diary.note().await?;
        (1..PARTS).for_each(|_| pace.step());
        // A replacement that took long must not leave the stage without time.
        let due = due.max(Instant::now() + spread / 2);
        while Instant::now() < due {
            self.ensure_alive()?;
            sleep(LOOK).await;
        }
        self.until_ready().await?;
        self.diary.note().await?;
        let idle = idle(n, &stage, &self.diary.deeds().await?);
        ensure!(idle.is_empty(), "{}", idle.join("; "));
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

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[test]
    fn an_upgrade_needs_both_versions_and_has_defaults_of_its_own() {
        let parse = |line: &str| Args::try_parse_from(line.split_whitespace());
        let args = parse("torture --upgrade-from a --upgrade-to b").expect("both");
        assert_eq!(
            (args.messages, args.seconds, args.instances),
            (20_000, 120, 3)
        );
        let args = parse("torture --upgrade-from a --upgrade-to b --messages 7").expect("both");
        assert_eq!(args.messages, 7);
        for wrong in [
            "torture --upgrade-from a",
            "torture --upgrade-to b",
            "torture --upgrade-from a --upgrade-to b --kills 3",
            "torture --upgrade-from a --upgrade-to b --cluster",
        ] {
            parse(wrong).expect_err(wrong);
        }
    }
}
