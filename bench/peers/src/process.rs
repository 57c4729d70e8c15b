//! The process that one peer and its adapter run in.

use std::{
    io::{BufRead, BufReader},
    process::{Child, Command, Stdio},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use bench::field::Field;
use clap::ValueEnum;
use testkit::amqp;
use tokio::time::sleep;

use crate::{
    adapter,
    peer::{apalis::Apalis, awa::Awa, pg_boss::PgBoss, pgmq::Pgmq},
};

/// How long a peer may take to start, and to settle what has been delivered.
const PATIENCE: Duration = Duration::from_secs(60);

/// The peers that run in processes of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    Pgmq,
    PgBoss,
    Apalis,
    Awa,
}

impl Kind {
    pub fn name(self) -> String {
        let value = self.to_possible_value();
        value.map_or(String::new(), |value| value.get_name().to_owned())
    }

    /// The queue from which its adapter takes messages.
    pub fn intake(self) -> String {
        format!("bench.intake.{}", self.name())
    }

    /// Runs as this peer until the process is killed.
    pub async fn serve(self) -> anyhow::Result<()> {
        let intake = self.intake();
        match self {
            Self::Pgmq => adapter::run::<Pgmq>(&intake).await,
            Self::PgBoss => adapter::run::<PgBoss>(&intake).await,
            Self::Apalis => adapter::run::<Apalis>(&intake).await,
            Self::Awa => adapter::run::<Awa>(&intake).await,
        }
    }
}

/// A running peer, which is killed when this is dropped.
pub struct Process {
    child: Child,
    settled: Arc<AtomicU32>,
}

impl Process {
    /// Starts a peer and returns when its adapter has subscribed.
    pub async fn start(kind: Kind, field: &Field) -> anyhow::Result<Self> {
        let mut child = Command::new(std::env::current_exe()?)
            .args(["--serve", &kind.name()])
            .env("DATABASE_URL", &field.setup.database_url)
            .env("RABBITMQ_URL", &field.setup.rabbitmq_url)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .with_context(|| format!("starting {}", kind.name()))?;
        let told = child.stdout.take().context("no stdout")?;
        let settled = Arc::new(AtomicU32::new(0));
        let mut process = Self {
            child,
            settled: settled.clone(),
        };
        std::thread::spawn(move || {
            for line in BufReader::new(told).lines().map_while(Result::ok) {
                settled.fetch_add(line.parse().unwrap_or(0), Ordering::Relaxed);
            }
        });
        let started = Instant::now();
        while amqp::inspect(&field.channel, &kind.intake())
            .await?
            .consumer_count()
            == 0
        {
            process.check(started)?;
            sleep(Duration::from_millis(10)).await;
        }
        Ok(process)
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits until the peer has been told of all messages that they are published: so many since it
    /// was started.
    pub async fn until_settled(&mut self, count: u32) -> anyhow::Result<()> {
        let started = Instant::now();
        while self.settled.load(Ordering::Relaxed) < count {
            self.check(started)?;
            sleep(Duration::from_millis(2)).await;
        }
        Ok(())
    }

    fn check(&mut self, waited: Instant) -> anyhow::Result<()> {
        if let Some(status) = self.child.try_wait()? {
            bail!("it has ended: {status}");
        }
        ensure!(waited.elapsed() < PATIENCE, "it takes too long");
        Ok(())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
