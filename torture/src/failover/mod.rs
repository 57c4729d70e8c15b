//! `--cluster` and `--promotion`: a server is killed under load, and others take its place.
//!
//! The campaign shows what happens when the only Postgres or the only RabbitMQ is away for a while. Here there is
//! another one, as where they run for others: the clients reach whichever lives, by a proxy that does what a load
//! balancer or a moved address does, and go on.

mod cluster;
mod promotion;

use std::{
    io::{IsTerminal, Write},
    net::SocketAddr,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use devstack::Stack;
use fastrand::Rng;
use testkit::{Proxy, is_ready};
use tokio::{
    sync::RwLock,
    task::{JoinSet, spawn_blocking},
    time::{Instant, sleep, sleep_until, timeout},
};

use crate::{
    Args,
    campaign::judge,
    consumer,
    excuse::Record,
    fault::Fault,
    instance::{DATABASE, Slot, until_ready},
    ledger::{Ledger, Verdict},
    post::{self, Pace},
    rows::Rows,
    setup,
};
use cluster::Cluster;
use promotion::Promotion;

/// Within this time after a server was killed, all instances must be ready and messages come back.
const RECOVERING: Duration = Duration::from_secs(60);

/// When nothing has come back for this long, nothing more will.
const QUIET: Duration = Duration::from_secs(30);

/// What runs beside what else.
enum Site {
    Cluster(Cluster),
    Promotion(Promotion),
}

impl Site {
    fn stack(&self) -> &Arc<Stack> {
        match self {
            Self::Cluster(site) => &site.stack,
            Self::Promotion(site) => &site.stack,
        }
    }

    /// The ports of all nodes of RabbitMQ.
    fn brokers(&self) -> Vec<u16> {
        match self {
            Self::Cluster(site) => site.nodes().iter().map(|node| node.port()).collect(),
            Self::Promotion(site) => vec![site.stack.rabbitmq.port()],
        }
    }

    /// The fault of the campaign that explains the same duplicates.
    fn fault(&self) -> Fault {
        match self {
            Self::Cluster(_) => Fault::MqKill,
            Self::Promotion(_) => Fault::PgPromote,
        }
    }

    /// Kills a server. If another one has to be told to take its place, that is done, too.
    fn kill(&self, node: usize) -> anyhow::Result<()> {
        match self {
            Self::Cluster(site) => site.nodes()[node].kill(),
            Self::Promotion(site) => site.fail_over(),
        }
    }

    /// Makes the servers as many as before.
    fn restore(&self, node: usize) -> anyhow::Result<()> {
        match self {
            Self::Cluster(site) => site.nodes()[node].start_again(),
            Self::Promotion(site) => site.follow(),
        }
    }

    fn describe(&self) -> anyhow::Result<String> {
        let stack = self.stack();
        let (postgres, rabbitmq) = (stack.postgres.version()?, stack.rabbitmq.version()?);
        Ok(match self {
            Self::Cluster(_) => format!("three nodes of RabbitMQ {rabbitmq}, Postgres {postgres}"),
            Self::Promotion(_) => {
                format!("Postgres {postgres} with a synchronous standby, RabbitMQ {rabbitmq}")
            }
        })
    }
}

/// Two servers or more, the service on them, and its load.
pub struct Failover {
    site: Arc<Site>,
    slots: Vec<Slot>,
    addresses: Vec<SocketAddr>,
    /// The ways of our own connections, which follow the servers as those of the instances do.
    postgres: Proxy,
    _rabbitmq: Proxy,
    rabbitmq_url: String,
    ledger: Arc<Ledger>,
    rows: Rows,
    gate: Arc<RwLock<()>>,
    consumers: JoinSet<()>,
    random: Rng,
}

impl Failover {
    /// Starts the servers, the instances and the consumers.
    pub async fn begin(args: &Args, logs: &Path) -> anyhow::Result<Self> {
        let binary = testkit::service_binary()?;
        let is_cluster = args.cluster;
        let site = spawn_blocking(move || {
            anyhow::Ok(if is_cluster {
                Site::Cluster(Cluster::start()?)
            } else {
                Site::Promotion(Promotion::start()?)
            })
        })
        .await??;
        let stack = site.stack();
        let database = stack.postgres.create_database(DATABASE)?;
        let postgres = Proxy::to(stack.postgres.port()).await?;
        let rabbitmq = Proxy::to(stack.rabbitmq.port()).await?;
        rabbitmq.lead_among(&site.brokers());
        let url = rabbitmq.by_way(&stack.rabbitmq.url())?;

        setup::declare_all(&url).await?;
        let ledger = Arc::new(Ledger::new(args.messages));
        let gate = Arc::new(RwLock::new(()));
        // Nobody asks for a deletion here.
        let (consumers, _) = consumer::start_all(&url, stack, &ledger, &gate, &Arc::default());
        let mut slots = Vec::new();
        let mut addresses = Vec::new();
        for number in 0..args.instances {
            let mut slot = Slot::new(number, &binary, logs, stack, &database).await?;
            // Instances begin with different nodes.
            let mut brokers = site.brokers();
            let nodes = brokers.len();
            brokers.rotate_left(number % nodes);
            slot.rabbitmq.lead_among(&brokers);
            slot.start()?;
            addresses.push(slot.address());
            slots.push(slot);
        }
        until_ready(&addresses, logs).await?;
        println!(
            "seed {}: {}, {} instances, {} messages, {} kills",
            args.seed,
            site.describe()?,
            args.instances,
            args.messages,
            args.faults
        );
        Ok(Self {
            rows: Rows::open(&postgres.by_way(&database)?)?,
            site: Arc::new(site),
            slots,
            addresses,
            postgres,
            _rabbitmq: rabbitmq,
            rabbitmq_url: url,
            ledger,
            gate,
            consumers,
            random: Rng::with_seed(args.seed),
        })
    }

    /// Kills a server as often as was asked for while messages are produced, and waits until nothing is under way.
    /// Returns the verdict, and the longest time in which nothing came back.
    pub async fn run(&mut self, args: &Args) -> anyhow::Result<(Verdict, Duration)> {
        let time = Duration::from_secs(args.seconds);
        let pace = Arc::new(Pace::new(args.messages, time, args.faults));
        let mut work = post::produce_all(&self.rabbitmq_url, &self.ledger, &self.gate, &pace);
        let mut watch = JoinSet::new();
        let still = Arc::new(AtomicU64::new(0));
        watch.spawn(progress(self.ledger.clone(), still.clone()));
        let spread = time / u32::try_from(args.faults + 1)?;
        // Each node in its turn, in an order of the seed.
        let mut turns: Vec<usize> = (0..self.site.brokers().len()).collect();
        self.random.shuffle(&mut turns);
        for n in 0..args.faults {
            sleep_until(pace.begun + spread * u32::try_from(n + 1)?).await;
            sleep(Duration::from_millis(self.random.u64(..1000))).await;
            pace.step();
            self.strike(turns[n % turns.len()]).await?;
        }
        while let Some(ended) = work.join_next().await {
            ended?;
        }
        let still = Duration::from_millis(still.load(Ordering::Relaxed));
        self.settle().await?;
        if let Site::Cluster(cluster) = &*self.site
            && let Err(e) = cluster.ensure_quorum()
        {
            self.ledger.unexpected(e.to_string());
        }
        let verdict = judge(&self.ledger, &self.rows).await?;
        Ok((verdict, still))
    }

    /// Kills a server, waits until the service works with those that are left, and makes them as many as before.
    async fn strike(&mut self, node: usize) -> anyhow::Result<()> {
        let begun = Instant::now();
        self.on_site(move |site| site.kill(node)).await?;
        let port = self.site.stack().postgres.port();
        self.postgres.lead_to(port);
        for slot in &self.slots {
            slot.postgres.lead_to(port);
        }
        self.recovered().await;
        self.ledger.fault(Record {
            fault: self.site.fault(),
            whom: None,
            begun,
            ended: Instant::now(),
        });
        sleep(Duration::from_millis(self.random.u64(1000..4000))).await;
        self.on_site(move |site| site.restore(node)).await?;
        for slot in &mut self.slots {
            if let Err(e) = slot.ensure_alive() {
                self.ledger.unexpected(e.to_string());
                slot.start()?;
            }
        }
        Ok(())
    }

    /// Does something that blocks.
    async fn on_site(
        &self,
        act: impl FnOnce(&Site) -> anyhow::Result<()> + Send + 'static,
    ) -> anyhow::Result<()> {
        let site = self.site.clone();
        spawn_blocking(move || act(&site)).await?
    }

    /// Waits until all instances are ready and messages come back.
    async fn recovered(&self) {
        let before = self.ledger.arrivals();
        let working = async {
            for address in &self.addresses {
                while !is_ready(*address).await {
                    sleep(Duration::from_millis(50)).await;
                }
            }
            while self.ledger.arrivals() == before && !self.ledger.under_way().is_empty() {
                sleep(Duration::from_millis(20)).await;
            }
        };
        if timeout(RECOVERING, working).await.is_err() {
            self.ledger
                .unexpected("the service did not recover".to_owned());
        }
    }

    /// Waits until no row is pending and no message is under way, or until nothing has moved for too long.
    async fn settle(&self) -> anyhow::Result<()> {
        let mut seen = (self.ledger.arrivals(), Instant::now());
        loop {
            sleep(Duration::from_millis(250)).await;
            let arrivals = self.ledger.arrivals();
            if arrivals != seen.0 {
                seen = (arrivals, Instant::now());
            }
            let waiting = self.rows.waiting().await?;
            let done = waiting == 0 && self.ledger.under_way().is_empty();
            // A duplicate may arrive a moment after the original.
            if done && seen.1.elapsed() > Duration::from_secs(3) {
                return Ok(());
            }
            if seen.1.elapsed() > QUIET {
                if waiting > 0 {
                    self.ledger
                        .unexpected(format!("{waiting} rows wait, and there is no end to it"));
                }
                return Ok(());
            }
        }
    }

    /// Stops everything.
    pub async fn end(mut self) {
        self.consumers.shutdown().await;
        for slot in &mut self.slots {
            let _ = slot.kill().await;
        }
        // Dropping the servers stops them, which blocks.
        let _ = spawn_blocking(move || drop(self.site)).await;
    }
}

/// Prints how far it is: a line that is overwritten on a terminal, else a line now and then. Keeps the longest time in
/// milliseconds in which nothing came back.
async fn progress(ledger: Arc<Ledger>, longest: Arc<AtomicU64>) {
    let in_place = std::io::stderr().is_terminal();
    let every = Duration::from_millis(if in_place { 500 } else { 10_000 });
    let begun = Instant::now();
    let (mut seen, mut since, mut told) = (ledger.arrivals(), None, begun);
    loop {
        sleep(Duration::from_millis(20)).await;
        let arrivals = ledger.arrivals();
        if arrivals != seen {
            seen = arrivals;
            since = Some(Instant::now());
        }
        // Before the first one there was nothing to stand still.
        if let Some(since) = since {
            let still = u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX);
            longest.fetch_max(still, Ordering::Relaxed);
        }
        if told.elapsed() < every {
            continue;
        }
        told = Instant::now();
        let (attempted, confirmed) = ledger.counts();
        let line = format!(
            "{:6.1} s  attempted {attempted}, confirmed {confirmed}, arrivals {arrivals}",
            begun.elapsed().as_secs_f64()
        );
        if in_place {
            let _ = write!(std::io::stderr(), "\r\x1b[K{line}");
        } else {
            eprintln!("{line}");
        }
    }
}
