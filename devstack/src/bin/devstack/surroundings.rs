//! What the service needs around it: a Postgres and a RabbitMQ. We start them, unless the
//! environment names others.

use std::env;
use std::fs;
use std::path::PathBuf;
use std::thread;

use anyhow::{Context, Result, anyhow};
use devstack::{Options, Postgres, RabbitMq};

use crate::workspace::Workspace;

const DATABASE_URL: &str = "DATABASE_URL";
const RABBITMQ_URL: &str = "RABBITMQ_URL";
const DATABASE: &str = "retry_scheduler";

/// The URLs of both services, and those services that we have started, which stop when this drops.
pub(crate) struct Surroundings {
    pub(crate) database_url: String,
    pub(crate) rabbitmq_url: String,
    postgres: Option<Postgres>,
    rabbitmq: Option<RabbitMq>,
    state: PathBuf,
}

impl Surroundings {
    /// Starts each service that the environment gives no URL for. The caller must hold the lock of
    /// the workspace.
    ///
    /// The URLs are written to a file, for `cargo dev send`, and so is cargo's `profile`, so that
    /// it uses the binary that is built already.
    pub(crate) fn start(workspace: &Workspace, profile: &str) -> Result<Self> {
        let given = |name| env::var(name).ok().filter(|value| !value.is_empty());
        let (database_url, rabbitmq_url) = (given(DATABASE_URL), given(RABBITMQ_URL));
        devstack::ensure_found(database_url.is_none(), rabbitmq_url.is_none())?;

        let options = |name| Options {
            dir: workspace.directory().join(name),
            durable: true,
            quiet: false,
        };
        let (postgres, rabbitmq) = thread::scope(|scope| {
            let rabbitmq = scope.spawn(|| {
                rabbitmq_url
                    .is_none()
                    .then(|| RabbitMq::start(&options("rabbitmq")))
                    .transpose()
            });
            let postgres = database_url
                .is_none()
                .then(|| Postgres::start(&options("postgres")))
                .transpose();
            let rabbitmq = rabbitmq
                .join()
                .map_err(|_| anyhow!("starting RabbitMQ panicked"))?;
            anyhow::Ok((postgres?, rabbitmq?))
        })?;
        let database_url = match (&postgres, database_url) {
            (Some(postgres), _) => postgres.create_database(DATABASE)?,
            (None, given) => given.unwrap_or_default(),
        };
        let rabbitmq_url = rabbitmq
            .as_ref()
            .map(RabbitMq::url)
            .or(rabbitmq_url)
            .unwrap_or_default();

        let state = state_path(workspace);
        let surroundings = Self {
            database_url,
            rabbitmq_url,
            postgres,
            rabbitmq,
            state,
        };
        let mut lines = format!("{profile}\n");
        for (name, value) in surroundings.variables() {
            lines.push_str(&format!("{name}={value}\n"));
        }
        fs::write(&surroundings.state, lines)
            .with_context(|| format!("Failed to write {}", surroundings.state.display()))?;
        Ok(surroundings)
    }

    /// Reads the profile and the variables that another process of this checkout has written. Fails
    /// if that process does not run.
    pub(crate) fn of_running(workspace: &Workspace) -> Result<(String, Vec<(String, String)>)> {
        let state = fs::read_to_string(state_path(workspace))
            .ok()
            .filter(|_| workspace.owner().is_some());
        let state = state.context("nothing runs in this checkout; start it first: cargo dev up")?;
        let (profile, lines) = state
            .split_once('\n')
            .context("the state of this checkout is damaged")?;
        let variables = lines.lines().filter_map(|line| line.split_once('='));
        let variables = variables
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect();
        Ok((profile.to_owned(), variables))
    }

    /// The environment variables from which a program takes the URLs.
    pub(crate) fn variables(&self) -> [(&'static str, &str); 2] {
        [
            (DATABASE_URL, &self.database_url),
            (RABBITMQ_URL, &self.rabbitmq_url),
        ]
    }

    /// The log files of the services that we have started.
    pub(crate) fn logs(&self) -> Vec<PathBuf> {
        self.postgres
            .iter()
            .map(Postgres::log)
            .chain(self.rabbitmq.iter().map(RabbitMq::log))
            .collect()
    }
}

impl Drop for Surroundings {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.state);
    }
}

/// The file with the profile and the variables. It exists while the services run.
fn state_path(workspace: &Workspace) -> PathBuf {
    workspace.directory().join("running")
}
