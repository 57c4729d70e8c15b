//! Instances of the real binary, each with proxies of its own to Postgres and RabbitMQ.

use std::{
    fs::File,
    net::SocketAddr,
    os::unix::process::ExitStatusExt,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use anyhow::{Context, ensure};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use retry_scheduler::plant::Point;
use testkit::{Proxy, is_ready};
use tokio::{
    process::{Child, Command},
    time::{sleep, timeout},
};

use crate::message::{DEAD_LETTERS, INTAKE, REVIEW};

/// The database that all instances share.
pub const DATABASE: &str = "torture";

/// The `SERVICE_NAME` of an instance is this and its number, and then its version where there are two.
pub const SERVICE: &str = "torture-";

/// The settings of all instances. The time-outs are so short that a fault can outlast each of them.
const SETTINGS: [(&str, &str); 12] = [
    ("HTTP_HOST", "127.0.0.1"),
    ("RETRY_QUEUE", INTAKE),
    ("DEAD_LETTER_QUEUE", DEAD_LETTERS),
    ("MANUAL_REVIEW_QUEUE", REVIEW),
    ("JITTER_MS", "200"),
    ("DATABASE_TIMEOUT_MS", "2000"),
    ("CONFIRM_TIMEOUT_MS", "2000"),
    ("BROKER_TIMEOUT_MS", "2000"),
    ("BROKER_HEARTBEAT_SECONDS", "2"),
    ("SHUTDOWN_TIMEOUT_MS", "5000"),
    ("INTAKE_PREFETCH", "200"),
    ("LOG_FORMAT", "json"),
];

/// The `DATABASE_POOL_SIZE` of each instance.
pub const POOL: u32 = 8;

/// The wait before the first retry, which doubles with each further one up to [`MAX_DELAY`]. Jitter only adds
/// to it.
pub const BASE_DELAY: Duration = Duration::from_millis(300);
pub const MAX_DELAY: Duration = Duration::from_secs(2);

/// No transaction that publishes is open for longer than this: waiting for confirms, the statement that
/// settles, and COMMIT have a time-out of 2 s each.
pub const LONGEST_TURN: Duration = Duration::from_secs(6);

/// Longer than any of the time-outs of 2 s, and than the sum of any two.
pub const PAST_TIMEOUTS: Duration = Duration::from_millis(4500);

/// How long instances may take to become ready, the migrations included.
const STARTING: Duration = Duration::from_secs(60);

/// How long a clean stop may take: `SHUTDOWN_TIMEOUT_MS` and some time for the machine.
const LEAVING: Duration = Duration::from_secs(10);

/// A place for an instance. The process in it is replaced whenever it dies; its proxies, address and log stay.
pub struct Slot {
    pub postgres: Proxy,
    pub rabbitmq: Proxy,
    /// Settings that replace or complement the usual ones.
    pub settings: Vec<(&'static str, String)>,
    database_url: String,
    rabbitmq_url: String,
    number: usize,
    version: Option<&'static str>,
    binary: PathBuf,
    log: PathBuf,
    /// The file in which the instance is told at which failpoint to kill itself.
    order: PathBuf,
    address: SocketAddr,
    child: Option<Child>,
}

impl Slot {
    pub async fn new(
        number: usize,
        binary: &Path,
        logs: &Path,
        stack: &devstack::Stack,
        database_url: &str,
    ) -> anyhow::Result<Self> {
        let postgres = Proxy::to(stack.postgres.port()).await?;
        let rabbitmq = Proxy::to(stack.rabbitmq.port()).await?;
        Ok(Self {
            database_url: postgres.by_way(database_url)?,
            rabbitmq_url: rabbitmq.by_way(&stack.rabbitmq.url())?,
            postgres,
            rabbitmq,
            settings: Vec::new(),
            number,
            version: None,
            binary: binary.to_owned(),
            log: logs.join(format!("instance-{number}.log")),
            order: logs.join(format!("die-{number}")),
            address: testkit::free_address()?,
            child: None,
        })
    }

    pub fn start(&mut self) -> anyhow::Result<()> {
        self.launch([])
    }

    /// Starts an instance of another version, which its name tells.
    pub fn start_version(&mut self, name: &'static str, binary: &Path) -> anyhow::Result<()> {
        self.version = Some(name);
        binary.clone_into(&mut self.binary);
        self.start()
    }

    /// The `SERVICE_NAME` of its instances.
    pub fn name(&self) -> String {
        let version = self.version.map(|name| format!("-{name}"));
        format!("{SERVICE}{}{}", self.number, version.unwrap_or_default())
    }

    /// Starts an instance whose time of day is off by `offset`, in the notation of libfaketime. Its timers are
    /// not affected.
    pub fn start_with_clock(&mut self, library: &Path, offset: &str) -> anyhow::Result<()> {
        let library = library.to_str().context("the path of libfaketime")?;
        self.launch([
            ("LD_PRELOAD", library),
            ("FAKETIME", offset),
            ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
        ])
    }

    fn launch<const N: usize>(&mut self, more: [(&str, &str); N]) -> anyhow::Result<()> {
        let log = File::options().create(true).append(true).open(&self.log)?;
        let child = Command::new(&self.binary)
            .arg("serve")
            .env_clear()
            .envs(SETTINGS)
            .envs(self.settings.iter().cloned())
            .envs(std::env::var("RETRY_PLANT").map(|bug| ("RETRY_PLANT", bug)))
            // When coverage is measured, an instance that is killed would leave a damaged profile behind.
            .env("LLVM_PROFILE_FILE", "/dev/null")
            .env("RETRY_DIE_AT", &self.order)
            .env("SERVICE_NAME", self.name())
            .env("DATABASE_POOL_SIZE", POOL.to_string())
            .env("BASE_DELAY_MS", BASE_DELAY.as_millis().to_string())
            .env("MAX_DELAY_MS", MAX_DELAY.as_millis().to_string())
            .env("DATABASE_URL", &self.database_url)
            .env("RABBITMQ_URL", &self.rabbitmq_url)
            .env("HTTP_PORT", self.address.port().to_string())
            .envs(more)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("starting {}", self.binary.display()))?;
        self.child = Some(child);
        Ok(())
    }

    /// SIGKILL.
    pub async fn kill(&mut self) -> anyhow::Result<()> {
        if let Some(mut child) = self.child.take() {
            child.kill().await?;
        }
        Ok(())
    }

    /// Tells the instance to kill itself when it passes a failpoint for the given time, and waits until it has.
    /// Returns `false` if it does not get there in time.
    pub async fn die_at(
        &mut self,
        point: Point,
        passing: usize,
        patience: Duration,
    ) -> anyhow::Result<bool> {
        let child = self.child.as_mut();
        let child = child.with_context(|| format!("instance {} does not run", self.number))?;
        // The instance may read the file at any time, so it must appear complete: write another, then rename
        // it.
        let draft = self.order.with_extension("draft");
        std::fs::write(&draft, format!("{point:?} {passing}"))?;
        std::fs::rename(&draft, &self.order)?;
        let ended = timeout(patience, child.wait()).await;
        std::fs::remove_file(&self.order)?;
        let Ok(status) = ended else {
            return Ok(false);
        };
        let status = status?;
        self.child = None;
        ensure!(
            status.signal() == Some(Signal::SIGKILL as i32),
            "instance {} was to die at {point:?}, and ended with {status}",
            self.number
        );
        Ok(true)
    }

    /// Sends SIGTERM, after which the instance must stop cleanly and in time.
    pub async fn leave(&mut self) -> anyhow::Result<()> {
        self.signal(Signal::SIGTERM)?;
        if let Some(mut child) = self.child.take() {
            let status = timeout(LEAVING, child.wait())
                .await
                .with_context(|| format!("instance {} does not stop", self.number))??;
            ensure!(
                status.success(),
                "instance {} stopped with {status}",
                self.number
            );
        }
        Ok(())
    }

    pub fn freeze(&self) -> anyhow::Result<()> {
        self.signal(Signal::SIGSTOP)
    }

    pub fn thaw(&self) -> anyhow::Result<()> {
        self.signal(Signal::SIGCONT)
    }

    fn signal(&self, signal: Signal) -> anyhow::Result<()> {
        Ok(kill(Pid::from_raw(i32::try_from(self.pid()?)?), signal)?)
    }

    /// The process id of the running instance.
    pub fn pid(&self) -> anyhow::Result<u32> {
        let pid = self.child.as_ref().and_then(Child::id);
        pid.with_context(|| format!("instance {} does not run", self.number))
    }

    /// The most memory that the running instance has had at once, in MB.
    pub fn most_memory(&self) -> anyhow::Result<usize> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid()?))?;
        let most = status.lines().find_map(|line| line.strip_prefix("VmHWM:"));
        let kilobytes = most.and_then(|most| most.trim().strip_suffix(" kB"));
        let kilobytes: usize = kilobytes.context("no VmHWM")?.parse()?;
        Ok(kilobytes / 1000)
    }

    /// Fails if the instance has ended by itself, which no fault may make it do.
    pub fn ensure_alive(&mut self) -> anyhow::Result<()> {
        if let Some(child) = &mut self.child
            && let Some(status) = child.try_wait()?
        {
            self.child = None;
            anyhow::bail!("instance {} ended by itself: {status}", self.number);
        }
        Ok(())
    }

    pub fn runs(&self) -> bool {
        self.child.is_some()
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

/// Waits until the instances at all these addresses are ready for the first time.
pub async fn until_ready(addresses: &[SocketAddr], logs: &Path) -> anyhow::Result<()> {
    let ready = async {
        for address in addresses {
            while !is_ready(*address).await {
                sleep(Duration::from_millis(50)).await;
            }
        }
    };
    timeout(STARTING, ready)
        .await
        .with_context(|| format!("the instances do not start, see {}", logs.display()))
}
