//! Runs retry-scheduler as it is shipped: the release binary, as a process of its own.

use std::{
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, bail, ensure};
use tokio::time::sleep;
use url::Url;

use crate::usage::Usage;

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

impl Setup {
    /// Takes the services from the environment, and the scheduler from `binary` or else from the
    /// directory of this program. Each of `settings` is `NAME=VALUE`.
    pub fn from_environment(binary: Option<&Path>, settings: &[String]) -> anyhow::Result<Self> {
        let given = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
        let missing = "DATABASE_URL and RABBITMQ_URL say where to run; `cargo dev bench` sets them";
        let binary = match binary {
            Some(path) => path.to_owned(),
            None => testkit::service_binary()?,
        };
        ensure!(binary.is_file(), "{} is not there", binary.display());
        Ok(Self {
            binary,
            database_url: given("DATABASE_URL").context(missing)?,
            rabbitmq_url: given("RABBITMQ_URL").context(missing)?,
            settings: settings
                .iter()
                .map(|pair| setting(pair))
                .collect::<Result<_, _>>()?,
        })
    }
}

fn setting(pair: &str) -> anyhow::Result<(String, String)> {
    let (name, value) = pair.split_once('=').context("--set wants NAME=VALUE")?;
    Ok((name.to_owned(), value.to_owned()))
}

/// A running retry-scheduler, which is killed when this is dropped.
pub struct Scheduler {
    child: Child,
    /// The time from its start until `/ready` said yes.
    pub ready_after: Duration,
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

    /// The id of its process.
    pub fn id(&self) -> u32 {
        self.child.id()
    }

    pub fn usage(&self) -> anyhow::Result<Usage> {
        Usage::of(self.id())
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
