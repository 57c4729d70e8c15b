//! Starts and stops a private Postgres.

mod standby;

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::Signal;

use crate::account::Account;
use crate::lock::Lock;
use crate::ports;
use crate::process;
use crate::programs::PostgresPrograms;
use crate::service::Service;
use crate::watchdog::Watchdog;
use crate::{ATTEMPTS, Options, temporary_directory, unpoisoned};

pub use standby::Standby;

/// How long the start may take. After a crash Postgres may have to replay a lot of WAL.
const START: Duration = Duration::from_secs(60);

/// How long a stop may take before the processes are killed.
const STOP: Duration = Duration::from_secs(20);

/// A Postgres of our own on the loopback interface. It is stopped when this value is dropped, or by
/// a watchdog when this process ends.
#[derive(Debug)]
pub struct Postgres {
    programs: PostgresPrograms,
    account: Account,
    directory: PathBuf,
    durable: bool,
    temporary: bool,
    watchdog: Arc<Watchdog>,
    /// The server that is in use. Promoting a standby replaces it.
    primary: Mutex<Arc<Server>>,
    // The last field, so that the lock is released after everything else is stopped.
    _lock: Lock,
}

/// A data directory, and the Postgres process that serves it.
#[derive(Debug)]
struct Server {
    data: PathBuf,
    /// Chosen at the first start and kept when the server is started again.
    port: AtomicU16,
    service: Service,
}

impl Server {
    fn port(&self) -> u16 {
        self.port.load(Ordering::Relaxed)
    }

    fn url(&self, database: &str) -> String {
        format!("postgresql://postgres@127.0.0.1:{}/{database}", self.port())
    }
}

impl Postgres {
    /// Starts Postgres with its data in `options.dir`, which is created if need be.
    pub fn start(options: &Options) -> Result<Self> {
        Self::start_in(options, false)
    }

    /// Starts an empty Postgres. Its directory is temporary and deleted when it has stopped.
    pub fn start_temporary(name: &str) -> Result<Self> {
        Self::start_temporary_with(name, false, PostgresPrograms::find_or_install()?)
    }

    /// Does what [`Postgres::start_temporary`] does, with the settings of a server whose data must
    /// survive a crash of the machine.
    pub fn start_temporary_durable(name: &str) -> Result<Self> {
        Self::start_temporary_with(name, true, PostgresPrograms::find_or_install()?)
    }

    /// Does what [`Postgres::start_temporary`] does, with these programs.
    pub fn start_temporary_of(name: &str, programs: PostgresPrograms) -> Result<Self> {
        Self::start_temporary_with(name, false, programs)
    }

    fn start_temporary_with(name: &str, durable: bool, programs: PostgresPrograms) -> Result<Self> {
        let dir = temporary_directory(name).join("postgres");
        let options = Options {
            dir,
            durable,
            quiet: true,
        };
        Self::start_with(&options, true, programs)
    }

    pub(crate) fn start_in(options: &Options, temporary: bool) -> Result<Self> {
        Self::start_with(options, temporary, PostgresPrograms::find_or_install()?)
    }

    fn start_with(
        options: &Options,
        temporary: bool,
        mut programs: PostgresPrograms,
    ) -> Result<Self> {
        let started = Instant::now();
        let account = Account::for_postgres()?;
        let directory = account.directory(&options.dir)?;
        let lock = Lock::acquire(
            &directory.join("lock"),
            &format!("The Postgres in {}", directory.display()),
        )?;
        let watchdog = Arc::new(Watchdog::start(
            Some(lock.share()?),
            temporary.then_some(directory.as_path()),
        )?);
        let service = Service::new("postgres", &directory, watchdog.clone());
        service.end_leftover(Signal::SIGQUIT)?;
        let _ = fs::remove_file(service.log());

        let data = directory.join("data");
        match fs::read_to_string(data.join("PG_VERSION")) {
            Err(_) => initialise(&programs, account, &directory, options.durable)?,
            Ok(version) => programs = programs_for_data(programs, version.trim(), &directory)?,
        }
        // We have the lock, so the postmaster that wrote this file is dead. Postgres itself would
        // think that it lives if another process has its id, as may happen after a reboot.
        let _ = fs::remove_file(data.join("postmaster.pid"));

        let server = Server {
            data,
            port: AtomicU16::new(0),
            service,
        };
        let postgres = Self {
            programs,
            account,
            directory,
            durable: options.durable,
            temporary,
            watchdog,
            primary: Mutex::new(Arc::new(server)),
            _lock: lock,
        };
        postgres.start_on_a_free_port(&postgres.primary(), &[])?;
        if !options.quiet {
            let seconds = started.elapsed().as_secs_f32();
            eprintln!(
                "devstack: Postgres is ready on port {} after {seconds:.1} s",
                postgres.port()
            );
        }
        Ok(postgres)
    }

    /// Starts Postgres after a stop, with the same port and data. Returns when it accepts
    /// connections.
    pub fn start_again(&self) -> Result<()> {
        self.serve(&self.primary(), &[])
    }

    fn start_on_a_free_port(&self, server: &Server, more: &[String]) -> Result<()> {
        let seed = ports::hash(&server.data.to_string_lossy());
        for attempt in 0..ATTEMPTS {
            let [port] = ports::free(seed.wrapping_add(attempt * 7))?;
            server.port.store(port, Ordering::Relaxed);
            match self.serve(server, more) {
                Err(_) if !ports::is_free(port) && attempt + 1 < ATTEMPTS => {}
                result => return result,
            }
        }
        Ok(())
    }

    /// Starts the process of a server, with `more` settings besides the usual ones.
    fn serve(&self, server: &Server, more: &[String]) -> Result<()> {
        let data = &server.data;
        let marker = data.to_string_lossy().into_owned();
        let settings = self.settings(server.port());
        let configure = |command: &mut Command| {
            command.args(self.programs.command_line("postgres", self.account));
            self.programs.become_account(command, self.account);
            command.arg("-D").arg(data);
            let settings = settings.iter().chain(more);
            command.args(settings.flat_map(|setting| ["-c", setting]));
            surroundings(command, &self.directory);
        };
        let signal = if self.temporary {
            Signal::SIGQUIT
        } else {
            Signal::SIGINT
        };
        server
            .service
            .start(signal, &marker, configure, START, |pid| is_ready(data, pid))
    }

    fn settings(&self, port: u16) -> Vec<String> {
        // synchronous_commit is on in either case. Without fsync a commit is then still written to
        // the system's cache, and lost only if the machine itself crashes.
        let safe = if self.durable { "on" } else { "off" };
        vec![
            format!("port={port}"),
            "listen_addresses=127.0.0.1".to_owned(),
            "unix_socket_directories=".to_owned(),
            "max_connections=300".to_owned(),
            "timezone=UTC".to_owned(),
            "log_timezone=UTC".to_owned(),
            "log_line_prefix=%m [%p] %a ".to_owned(),
            format!("fsync={safe}"),
            format!("full_page_writes={safe}"),
        ]
    }

    /// Stops Postgres as `pg_ctl stop -m fast` does: it ends all sessions and flushes its data.
    pub fn stop(&self) -> Result<()> {
        self.primary().service.stop(Signal::SIGINT, STOP)
    }

    /// Stops Postgres as `pg_ctl stop -m immediate` does: it ends at once, and recovers from its
    /// WAL at the next start.
    pub fn stop_immediate(&self) -> Result<()> {
        self.primary().service.stop(Signal::SIGQUIT, STOP)
    }

    /// Kills the postmaster and all backends with SIGKILL.
    pub fn kill(&self) -> Result<()> {
        self.primary().service.kill()
    }

    /// Stops the postmaster and all backends with SIGSTOP: connections stay open, but nothing
    /// answers.
    pub fn pause(&self) -> Result<()> {
        self.primary().service.pause()
    }

    /// Lets the processes run again after [`Postgres::pause`].
    pub fn resume(&self) -> Result<()> {
        self.primary().service.resume()
    }

    /// The URL of a database, which need not exist.
    pub fn url(&self, database: &str) -> String {
        self.primary().url(database)
    }

    /// Creates a database unless it exists, and returns its URL.
    pub fn create_database(&self, name: &str) -> Result<String> {
        let literal = name.replace('\'', "''");
        let exists = || {
            self.psql(
                "postgres",
                &format!("SELECT 1 FROM pg_database WHERE datname = '{literal}'"),
            )
        };
        if exists()?.is_empty() {
            let created = self.psql(
                "postgres",
                &format!("CREATE DATABASE \"{}\"", name.replace('"', "\"\"")),
            );
            // Another process may have created it after we looked.
            if created.is_err() && exists()?.is_empty() {
                created.with_context(|| format!("Failed to create the database {name}"))?;
            }
        }
        Ok(self.url(name))
    }

    /// Runs a statement with `psql -At` and returns what it prints: a line for each row, with `|`
    /// between the columns.
    pub fn psql(&self, database: &str, sql: &str) -> Result<String> {
        self.psql_at(&self.url(database), sql)
    }

    fn psql_at(&self, url: &str, sql: &str) -> Result<String> {
        let mut command = self.programs.command("psql");
        command.args([
            "-X",
            "-q",
            "-At",
            "-v",
            "ON_ERROR_STOP=1",
            "-d",
            url,
            "-c",
            sql,
        ]);
        forget_postgres_variables(&mut command);
        process::output(&mut command)
    }

    /// The version that the server tells, for example "17.6".
    pub fn version(&self) -> Result<String> {
        let version = self.psql("postgres", "SHOW server_version")?;
        // A distribution adds its own: "17.6 (Debian 17.6-0+deb13u1)".
        Ok(version.split(' ').next().unwrap_or_default().to_owned())
    }

    /// The port on 127.0.0.1. [`Postgres::start_again`] keeps it, [`Postgres::promote`] changes it.
    pub fn port(&self) -> u16 {
        self.primary().port()
    }

    /// The data directory of the server that is in use.
    pub fn data_dir(&self) -> PathBuf {
        self.primary().data.clone()
    }

    fn primary(&self) -> Arc<Server> {
        unpoisoned(&self.primary).clone()
    }

    /// The file that Postgres writes its log to.
    pub fn log(&self) -> PathBuf {
        self.primary().service.log()
    }
}

impl Drop for Postgres {
    fn drop(&mut self) {
        let result = if self.temporary {
            self.stop_immediate()
        } else {
            self.stop()
        };
        if let Err(error) = result {
            eprintln!("devstack: {error:#}");
        }
    }
}

/// Creates the data directory. It gets its name only when it is complete, so that an interrupted
/// initdb leaves nothing that looks like one.
fn initialise(
    programs: &PostgresPrograms,
    account: Account,
    directory: &Path,
    durable: bool,
) -> Result<()> {
    let unfinished = directory.join("data.new");
    if unfinished.exists() {
        fs::remove_dir_all(&unfinished)
            .with_context(|| format!("Failed to delete {}", unfinished.display()))?;
    }
    let mut command = programs.command_as("initdb", account);
    command
        .args([
            "--username=postgres",
            "--auth=trust",
            "--encoding=UTF8",
            "--locale=C",
            "-D",
        ])
        .arg(&unfinished);
    if !durable {
        command.arg("--no-sync");
    }
    surroundings(&mut command, directory);
    process::output(&mut command)?;
    fs::rename(&unfinished, directory.join("data"))
        .context("Failed to move the new cluster into place")
}

/// Only the major version of Postgres that created a data directory can use it. Returns the
/// programs of that version.
fn programs_for_data(
    found: PostgresPrograms,
    version: &str,
    directory: &Path,
) -> Result<PostgresPrograms> {
    if found.major()? == version {
        return Ok(found);
    }
    match PostgresPrograms::installed_of_major(version) {
        Some(programs) => Ok(programs),
        None => bail!(
            "{} was made by Postgres {version}, and Postgres {} is what is installed: delete that directory to begin anew",
            directory.display(),
            found.major()?
        ),
    }
}

/// Whether the postmaster accepts connections. It writes its state into the eighth line of its pid
/// file, where `pg_ctl` looks for it, too.
fn is_ready(data: &Path, pid: i32) -> bool {
    let text = fs::read_to_string(data.join("postmaster.pid")).unwrap_or_default();
    let mut lines = text.lines();
    let same = lines.next().and_then(|line| line.trim().parse().ok()) == Some(pid);
    same && lines.nth(6).is_some_and(|state| state.trim() == "ready")
}

/// Sets the directory and the environment of a Postgres program.
fn surroundings(command: &mut Command, directory: &Path) {
    command.current_dir(directory).env("LC_ALL", "C");
    forget_postgres_variables(command);
}

/// Removes PGDATA, PGHOST, PGOPTIONS and the like, which are meant for some other Postgres.
fn forget_postgres_variables(command: &mut Command) {
    let variables = env::vars_os().map(|(name, _)| name);
    for name in variables.filter(|name: &OsString| name.to_string_lossy().starts_with("PG")) {
        command.env_remove(name);
    }
}
