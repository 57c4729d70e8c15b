//! The campaign: starts everything, disturbs it, waits until nothing moves any more, and judges what is left.

use std::{
    collections::BTreeMap,
    io::{IsTerminal, Write},
    path::Path,
    sync::Arc,
    time::Duration,
};

use devstack::Stack;
use fastrand::Rng;
use testkit::Proxy;
use tokio::{
    sync::{Mutex, RwLock},
    task::{JoinSet, spawn_blocking},
    time::{Instant, sleep},
};

use crate::{
    Args,
    chaos::{Chaos, Told},
    consumer::{self, Tricks},
    disk::Disk,
    fault::{Fault, Planned, plan},
    instance::{DATABASE, Slot, until_ready},
    ledger::{Ledger, Verdict},
    post::{self, Pace},
    rows::Rows,
    setup,
};

/// When nothing has come back for this long, nothing more will.
pub const QUIET: Duration = Duration::from_secs(25);

/// When messages still come back after this long, there is no end to them.
pub const SETTLING: Duration = Duration::from_secs(120);

/// The same two for a campaign with `--brief`.
const BRIEFLY: (Duration, Duration) = (Duration::from_secs(6), Duration::from_secs(12));

pub struct Campaign {
    /// The version of RabbitMQ.
    pub rabbitmq: String,
    faults: Vec<Planned>,
    chaos: Arc<Chaos>,
    ledger: Arc<Ledger>,
    rows: Arc<Rows>,
    tricks: Arc<Tricks>,
    gate: Arc<RwLock<()>>,
    consumers: JoinSet<()>,
    begun: Instant,
    told: Vec<(Fault, Told)>,
}

impl Campaign {
    /// Starts the services, the instances and the consumers.
    pub async fn begin(args: &Args, logs: &Path) -> anyhow::Result<Self> {
        let binary = testkit::service_binary()?;
        let place = logs.join("stack");
        let (kinds, disk) = Disk::for_faults(args.kinds(), &place.join("postgres"));
        let faults = plan(args.seed, &kinds, args.faults);
        if faults.iter().any(|f| f.fault == Fault::ClockSkew) {
            // The library may have to be installed, which must not take from the campaign's time.
            spawn_blocking(devstack::faketime).await??;
        }
        setup::configure(&place.join("rabbitmq"))?;
        let stack = spawn_blocking(|| Stack::start_temporary_in(place)).await??;
        let database = stack.postgres.create_database(DATABASE)?;
        let own = Proxy::to(stack.postgres.port()).await?;
        let stack = Arc::new(stack);
        let ledger = Arc::new(Ledger::new(args.messages));
        let gate = Arc::new(RwLock::new(()));
        let tricks = Arc::new(Tricks::default());
        let url = stack.rabbitmq.url();
        setup::declare_all(&url).await?;

        let (consumers, deletions) = consumer::start_all(&url, &stack, &ledger, &gate, &tricks);
        let mut slots = Vec::new();
        let mut addresses = Vec::new();
        for number in 0..args.instances {
            let mut slot = Slot::new(number, &binary, logs, &stack, &database).await?;
            slot.start()?;
            addresses.push(slot.address());
            slots.push(Mutex::new(slot));
        }
        let asked = stack.clone();
        let version = spawn_blocking(move || asked.rabbitmq.ctl(&["version"]));
        until_ready(&addresses, logs).await?;
        let rows = Arc::new(Rows::open(&own.by_way(&database)?)?);
        Ok(Self {
            rabbitmq: version.await??.trim().to_owned(),
            faults,
            chaos: Arc::new(Chaos {
                disk,
                stack,
                slots,
                own,
                addresses,
                deletions,
                gate: gate.clone(),
                ledger: ledger.clone(),
                rows: rows.clone(),
            }),
            rows,
            ledger,
            tricks,
            gate,
            consumers,
            begun: Instant::now(),
            told: Vec::new(),
        })
    }

    /// Produces messages while faults happen, until both are over.
    pub async fn run(&mut self, args: &Args) -> anyhow::Result<()> {
        let faults = self.faults.clone();
        let steps = args.faults + args.kills;
        let time = Duration::from_secs(args.seconds);
        let pace = Arc::new(Pace::new(args.messages, time, steps));
        let url = self.chaos.stack.rabbitmq.url();
        let mut work = post::produce_all(&url, &self.ledger, &self.gate, &pace);
        work.spawn(kills(
            self.chaos.clone(),
            pace.clone(),
            args.seed,
            args.kills,
            time,
        ));
        if let Some(plant) = args.plant {
            work.spawn(plant.grow(self.rows.clone(), self.tricks.clone()));
        }
        let mut watch = JoinSet::new();
        watch.spawn(progress(self.ledger.clone(), self.begun));
        let spread = time / u32::try_from(args.faults.max(1)).unwrap_or(u32::MAX);
        for (n, planned) in faults.iter().enumerate() {
            let due = pace.begun + spread * u32::try_from(n).unwrap_or(u32::MAX);
            tokio::time::sleep_until(due).await;
            sleep(Duration::from_millis(planned.pause)).await;
            // Some faults wait for an instance at work, so allow the producers to send more first.
            pace.step();
            let told = self.chaos.inflict(planned.fault, planned.whom).await?;
            self.tell(planned.fault, &told);
            self.told.push((planned.fault, told));
        }
        while let Some(ended) = work.join_next().await {
            ended?;
        }
        let (quiet, settling) = if args.brief {
            BRIEFLY
        } else {
            (QUIET, SETTLING)
        };
        settle(&self.ledger, &self.rows, quiet, settling).await
    }

    fn tell(&self, fault: Fault, told: &Told) {
        if told.missed {
            return say(&format!(
                "{:6.1} s  {:<24} came to nothing",
                self.begun.elapsed().as_secs_f64(),
                fault.name()
            ));
        }
        let red = told.red.map_or(String::new(), |red| {
            format!("red after {:.1} s, ", red.as_secs_f64())
        });
        say(&format!(
            "{:6.1} s  {:<24} {red}recovered in {:.1} s",
            self.begun.elapsed().as_secs_f64(),
            fault.name(),
            told.recovery.as_secs_f64()
        ));
    }

    /// Comes to a verdict.
    pub async fn judge(&self) -> anyhow::Result<Verdict> {
        judge(&self.ledger, &self.rows).await
    }

    /// What RabbitMQ still holds, which tells whether a message was dropped, or is only held up.
    pub async fn queues(&self) -> anyhow::Result<String> {
        let columns = [
            "name",
            "messages_ready",
            "messages_unacknowledged",
            "consumers",
        ];
        let list = move |s: &Stack| s.rabbitmq.ctl(&[&["list_queues"], &columns[..]].concat());
        self.chaos.do_to(list).await
    }

    /// For each fault, how often it happened and the longest recovery from it; and the 95th percentile of all
    /// recoveries.
    pub fn summary(&self, kills: usize) -> (String, Duration) {
        let mut kinds: BTreeMap<String, (usize, Duration)> = BTreeMap::new();
        let mut all = Vec::new();
        let mut missed = 0;
        for (fault, told) in &self.told {
            if told.missed {
                missed += 1;
                continue;
            }
            let kind = kinds.entry(fault.name()).or_default();
            kind.0 += 1;
            kind.1 = kind.1.max(told.recovery);
            all.push(told.recovery);
        }
        all.sort_unstable();
        let p95 = all.get((all.len() * 95).div_ceil(100).saturating_sub(1));
        let mut lines: Vec<String> = kinds
            .iter()
            .map(|(name, (n, worst))| format!("{name} {n} ({:.1} s)", worst.as_secs_f64()))
            .collect();
        if kills > 0 {
            lines.push(format!("kill at random {kills}"));
        }
        if missed > 0 {
            lines.push(format!("{missed} that came to nothing"));
        }
        (lines.join(", "), p95.copied().unwrap_or_default())
    }

    /// Stops everything.
    pub async fn end(mut self) {
        self.consumers.shutdown().await;
        for slot in &self.chaos.slots {
            let mut slot = slot.lock().await;
            if slot.runs() {
                let _ = slot.kill().await;
            }
        }
        // Dropping the stack stops Postgres and RabbitMQ, which blocks.
        let _ = spawn_blocking(move || drop(self.chaos)).await;
    }
}

/// Waits until no row is pending and no message is under way, or until nothing has moved for too long.
pub async fn settle(
    ledger: &Ledger,
    rows: &Rows,
    quiet: Duration,
    settling: Duration,
) -> anyhow::Result<()> {
    let begun = Instant::now();
    let mut seen = (ledger.arrivals(), begun);
    loop {
        sleep(Duration::from_millis(250)).await;
        let arrivals = ledger.arrivals();
        if arrivals != seen.0 {
            seen = (arrivals, Instant::now());
        }
        let still = seen.1.elapsed();
        let waiting = rows.waiting().await?;
        let done = waiting == 0 && ledger.under_way().is_empty();
        if done && still > Duration::from_secs(3) {
            return Ok(());
        }
        if still > quiet || begun.elapsed() > settling {
            if waiting > 0 {
                ledger.unexpected(format!("{waiting} rows wait, and there is no end to it"));
            }
            return Ok(());
        }
    }
}

/// Compares what producers and consumers saw with what Postgres holds.
pub async fn judge(ledger: &Ledger, rows: &Rows) -> anyhow::Result<Verdict> {
    let live = rows.live().await?;
    let unconfirmed = rows.unconfirmed().await?;
    let mut verdict = ledger.judge(&live, &unconfirmed);
    rows.judge(&mut verdict, true).await?;
    Ok(verdict)
}

/// Kills instances at random moments over the whole time, beside the other faults.
async fn kills(chaos: Arc<Chaos>, pace: Arc<Pace>, seed: u64, kills: usize, time: Duration) {
    let mut random = Rng::with_seed(seed ^ 0x6b69_6c6c);
    let time = u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let mean = time / kills.max(1) as u64;
    for _ in 0..kills {
        sleep(Duration::from_millis(random.u64(0..=2 * mean))).await;
        if let Err(e) = chaos.kill(random.usize(..1 << 16)).await {
            chaos.ledger.unexpected(format!("a kill failed: {e:#}"));
        }
        pace.step();
    }
}

/// Prints how far the campaign is: a line that is overwritten on a terminal, else a line now and then.
pub async fn progress(ledger: Arc<Ledger>, begun: Instant) {
    let in_place = std::io::stderr().is_terminal();
    loop {
        sleep(Duration::from_millis(if in_place { 500 } else { 10_000 })).await;
        let (attempted, confirmed) = ledger.counts();
        let line = format!(
            "{:6.1} s  attempted {attempted}, confirmed {confirmed}, under way {}, arrivals {}",
            begun.elapsed().as_secs_f64(),
            ledger.under_way().len(),
            ledger.arrivals()
        );
        if in_place {
            let _ = write!(std::io::stderr(), "\r\x1b[K{line}");
        } else {
            eprintln!("{line}");
        }
    }
}

pub fn say(line: &str) {
    let clear = if std::io::stderr().is_terminal() {
        "\r\x1b[K"
    } else {
        ""
    };
    eprintln!("{clear}{line}");
}
