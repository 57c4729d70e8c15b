//! Runs retry-scheduler as it is shipped: the release binary, as a process of its own.

use std::{
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use tokio::time::sleep;
use url::Url;

/// How long retry-scheduler may take to become ready, and to end after SIGTERM.
const PATIENCE: Duration = Duration::from_secs(30);

/// The settings of all scenarios. With a delay of a millisecond and no jitter, a message is due as
/// soon as it is stored.
const SETTINGS: [(&str, &str); 6] = [
    ("SERVICE_NAME", "retry-scheduler-bench"),
    ("HTTP_HOST", "127.0.0.1"),
    ("BASE_DELAY_MS", "1"),
    ("JITTER_MS", "0"),
    ("LOG_LEVEL", "warn"),
    ("LOG_FORMAT", "json"),
];

/// What a scheduler is started with.
#[derive(Clone, Debug)]
pub struct Setup {
    pub binary: PathBuf,
    pub database_url: String,
    pub rabbitmq_url: String,
    /// The settings given with `--set`. They override all others.
    pub settings: Vec<(String, String)>,
}

/// A running retry-scheduler, which is killed when this is dropped.
pub struct Scheduler {
    child: Child,
    /// The time from its start until `/ready` said yes.
    pub ready_after: Duration,
}

/// The memory and the processor time that a process has used.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    pub resident_mb: f64,
    pub peak_mb: f64,
    pub cpu: Duration,
}

impl Scheduler {
    /// Starts it on a schema and an intake queue, and returns when it is ready.
    pub async fn start(
        setup: &Setup,
        schema: &str,
        intake: &str,
        settings: &[(&str, &str)],
    ) -> anyhow::Result<Self> {
        let mut url = Url::parse(&setup.database_url).context("DATABASE_URL")?;
        url.query_pairs_mut()
            .append_pair("options[search_path]", schema);
        let address = testkit::free_address()?;
        let mut command = Command::new(&setup.binary);
        command
            .env_clear()
            .envs(SETTINGS)
            .env("DATABASE_URL", url.as_str())
            .env("RABBITMQ_URL", &setup.rabbitmq_url)
            .env("RETRY_QUEUE", intake)
            .env("MANUAL_REVIEW_QUEUE", format!("{intake}.review"))
            .env("HTTP_PORT", address.port().to_string())
            .envs(settings.iter().copied())
            .envs(setup.settings.iter().map(|(name, value)| (name, value)))
            .stdin(Stdio::null())
            .stdout(Stdio::null());
        let started = Instant::now();
        let child = command
            .spawn()
            .with_context(|| format!("starting {}", setup.binary.display()))?;
        let mut scheduler = Self {
            child,
            ready_after: Duration::ZERO,
        };
        while !testkit::is_ready(address).await {
            if let Some(status) = scheduler.child.try_wait()? {
                bail!("retry-scheduler ended: {status}");
            }
            ensure!(started.elapsed() < PATIENCE, "retry-scheduler is not ready");
            sleep(Duration::from_millis(2)).await;
        }
        scheduler.ready_after = started.elapsed();
        Ok(scheduler)
    }

    pub fn usage(&self) -> anyhow::Result<Usage> {
        let id = self.child.id();
        let stat = std::fs::read_to_string(format!("/proc/{id}/stat"))?;
        // The name, in parentheses, may contain spaces, so fields are counted from its end. User
        // and system time are the 14th and 15th field of the line, in hundredths of a second.
        let fields = stat.rsplit_once(')').map_or("", |(_, fields)| fields);
        let ticks: u64 = fields
            .split_whitespace()
            .skip(11)
            .take(2)
            .filter_map(|field| field.parse::<u64>().ok())
            .sum();
        Ok(Usage {
            resident_mb: testkit::memory_mb(id, "VmRSS")?,
            peak_mb: testkit::memory_mb(id, "VmHWM")?,
            cpu: Duration::from_millis(ticks * 10),
        })
    }

    /// Stops it with SIGTERM, as an operator would, and waits for its end.
    pub async fn stop(mut self) -> anyhow::Result<()> {
        let id = self.child.id().to_string();
        let told = Command::new("kill").args(["-TERM", &id]).status()?;
        ensure!(told.success(), "retry-scheduler ended early");
        let asked = Instant::now();
        while self.child.try_wait()?.is_none() {
            ensure!(asked.elapsed() < PATIENCE, "retry-scheduler does not stop");
            sleep(Duration::from_millis(10)).await;
        }
        Ok(())
    }
}

impl Drop for Scheduler {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
