//! `--steady`: hours of ordinary work. Does anything grow?
//!
//! Instances of the real binary get a mix of every kind of message at a constant rate, and nothing disturbs them.
//! Because the retention is so short that rows and events are removed all the time, memory, connections and tables must
//! not grow. Every message must come back exactly as often as its [`Fate`](parcel::Fate) says.

mod load;
mod oracle;
mod parcel;
mod sample;

use std::{
    io::{IsTerminal, Write},
    path::Path,
    sync::Arc,
    time::Duration,
};

use devstack::Stack;
use tokio::{
    sync::Mutex,
    task::{JoinSet, spawn_blocking},
    time::{Instant, sleep},
};

use crate::{
    Args,
    instance::{DATABASE, POOL, Slot, until_ready},
    ledger::Verdict,
    message::{REVIEW, TARGETS},
    rows::Rows,
};
use load::{consume, produce};
use oracle::Oracle;
use parcel::{LETTERS, LONGEST_MS};
use sample::Samples;

/// How long the last messages may take to come back. No producer asks for a wait of more than a minute.
const SETTLING: Duration = Duration::from_secs(180);

/// The result of a steady load: the verdict on the messages, and on the figures that were measured.
pub struct Outcome {
    pub verdict: Verdict,
    pub figures: Vec<String>,
    pub growing: usize,
}

impl Outcome {
    pub fn is_good(&self) -> bool {
        self.verdict.is_good() && self.growing == 0
    }
}

/// A steady load, and everything that runs for it.
pub struct Steady {
    stack: Arc<Stack>,
    slots: Vec<Mutex<Slot>>,
    rows: Rows,
    oracle: Arc<Oracle>,
    work: JoinSet<anyhow::Result<()>>,
    time: Duration,
    rate: u32,
}

impl Steady {
    /// Starts the services, the instances and the consumers.
    pub async fn begin(args: &Args, time: Duration, logs: &Path) -> anyhow::Result<Self> {
        let binary = testkit::service_binary()?;
        let stack = spawn_blocking(|| Stack::start_temporary("steady")).await??;
        let database = stack.postgres.create_database(DATABASE)?;
        let stack = Arc::new(stack);
        let oracle = Arc::new(Oracle::default());
        let url = stack.rabbitmq.url();
        let mut work = JoinSet::new();
        for queue in TARGETS.into_iter().chain([LETTERS, REVIEW]) {
            work.spawn(consume(url.clone(), queue, oracle.clone()));
        }
        let mut slots = Vec::new();
        let mut addresses = Vec::new();
        for number in 0..args.instances {
            let mut slot = Slot::new(number, &binary, logs, &stack, &database).await?;
            slot.settings = settings(time);
            slot.start()?;
            addresses.push(slot.address());
            slots.push(Mutex::new(slot));
        }
        until_ready(&addresses, logs).await?;
        Ok(Self {
            rows: Rows::open(&database)?,
            stack,
            slots,
            oracle,
            work,
            time,
            rate: args.rate,
        })
    }

    /// Produces and measures until the time is over and every message has come back.
    pub async fn run(&mut self) -> anyhow::Result<Outcome> {
        let mut samples = Samples::new(self.slots.len(), POOL);
        let url = self.stack.rabbitmq.url();
        let producing = produce(url, self.oracle.clone(), self.rate, self.time);
        self.work.spawn(producing);
        let begun = Instant::now();
        let every = (self.time / 60).clamp(Duration::from_secs(5), Duration::from_secs(60));
        println!("      s     sent  {}", samples.heading());
        let mut next = begun + every;
        while begun.elapsed() < self.time {
            self.pause(begun, next.min(begun + self.time)).await?;
            let line = samples.take(&self.slots, &self.stack, &self.rows).await?;
            let sent = self.oracle.count();
            say(&format!(
                "{:>7.0}  {sent:>7}  {line}",
                begun.elapsed().as_secs_f64()
            ));
            next += every;
        }
        self.settle().await?;
        let mut verdict = self.oracle.judge();
        self.rows.judge(&mut verdict, false).await?;
        let warm = warm_up(self.time).as_millis().div_ceil(every.as_millis());
        let (figures, growing) = samples.judge(usize::try_from(warm)?);
        Ok(Outcome {
            verdict,
            figures,
            growing,
        })
    }

    /// Waits until this moment. Fails if an instance, a producer or a consumer ends before.
    async fn pause(&mut self, begun: Instant, until: Instant) -> anyhow::Result<()> {
        while Instant::now() < until {
            for slot in &self.slots {
                slot.lock().await.ensure_alive()?;
            }
            if let Some(ended) = self.work.try_join_next() {
                ended??;
            }
            bar(begun.elapsed(), self.time);
            tokio::time::sleep_until(until.min(Instant::now() + Duration::from_millis(500))).await;
        }
        Ok(())
    }

    /// Waits until every message has come back; then the instances must stop cleanly.
    async fn settle(&mut self) -> anyhow::Result<()> {
        let begun = Instant::now();
        while self.oracle.open() > 0 && begun.elapsed() < SETTLING {
            self.pause(begun, Instant::now() + Duration::from_secs(1))
                .await?;
        }
        // A duplicate may arrive a moment after the original.
        sleep(Duration::from_secs(3)).await;
        let waiting = self.rows.waiting().await?;
        if waiting > 0 {
            self.oracle
                .unexpected(format!("{waiting} rows wait, and there is no end to it"));
        }
        for slot in &self.slots {
            slot.lock().await.leave().await?;
        }
        Ok(())
    }

    /// Stops everything.
    pub async fn end(mut self) {
        self.work.shutdown().await;
        drop(self.slots);
        // Dropping the stack stops Postgres and RabbitMQ, which blocks.
        let _ = spawn_blocking(move || drop(self.stack)).await;
    }
}

/// How long rows are kept after their end: a twentieth of the time.
fn retention(time: Duration) -> Duration {
    (time / 20).clamp(Duration::from_secs(10), Duration::from_secs(600))
}

/// How long events are kept: longer than any row that they are about.
fn retention_of_events(time: Duration) -> Duration {
    2 * retention(time) + Duration::from_millis(LONGEST_MS)
}

/// How long the tables grow, because nothing in them is old enough to be removed.
fn warm_up(time: Duration) -> Duration {
    retention_of_events(time) + Duration::from_secs(10)
}

/// The settings of a steady load. Its time-outs are the defaults, because a busy machine is no fault here.
fn settings(time: Duration) -> Vec<(&'static str, String)> {
    let hours = |time: Duration| (time.as_secs_f64() / 3600.0).to_string();
    vec![
        ("DATABASE_TIMEOUT_MS", "15000".into()),
        ("CONFIRM_TIMEOUT_MS", "10000".into()),
        ("BROKER_TIMEOUT_MS", "5000".into()),
        ("BROKER_HEARTBEAT_SECONDS", "10".into()),
        ("SHUTDOWN_TIMEOUT_MS", "20000".into()),
        ("LOG_LEVEL", "warn".into()),
        ("RETAIN_RETRIED_HOURS", hours(retention(time))),
        ("RETAIN_REVIEWED_HOURS", hours(retention(time))),
        ("IDEMPOTENCY_KEY_HOURS", hours(retention(time))),
        ("RETAIN_EVENTS_HOURS", hours(retention_of_events(time))),
    ]
}

/// Draws how much of the time has passed, if stderr is a terminal.
fn bar(elapsed: Duration, whole: Duration) {
    if std::io::stderr().is_terminal() {
        let percent = elapsed.min(whole).as_millis() * 100 / whole.as_millis();
        let done: String = (0..percent / 2).map(|_| '#').collect();
        let _ = write!(std::io::stderr(), "\r\x1b[K[{done:<50}] {percent:3} %");
    }
}

fn say(line: &str) {
    if std::io::stderr().is_terminal() {
        let _ = write!(std::io::stderr(), "\r\x1b[K");
    }
    println!("{line}");
}
