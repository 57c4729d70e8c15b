//! Starts and stops a private PgBouncer.

use std::fs;
use std::net::{Ipv4Addr, TcpStream};
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;
use nix::unistd::geteuid;

use crate::ports;
use crate::postgres::Postgres;
use crate::programs::PgBouncerProgram;
use crate::service::Service;
use crate::watchdog::Watchdog;
use crate::{ATTEMPTS, temporary_directory};

/// How long the start may take.
const START: Duration = Duration::from_secs(20);

/// A PgBouncer of our own on the loopback interface, in front of a [`Postgres`]. It is stopped when
/// this value is dropped, or by a watchdog when this process ends.
#[derive(Debug)]
pub struct PgBouncer {
    program: PgBouncerProgram,
    directory: PathBuf,
    port: u16,
    service: Service,
}

impl PgBouncer {
    /// Starts a PgBouncer that leads to all databases of `postgres`, with these lines in the section
    /// `[pgbouncer]` of its configuration besides those that every installation has to write.
    pub fn start_temporary(postgres: &Postgres, settings: &[&str]) -> Result<Self> {
        let program = PgBouncerProgram::find_or_install()?;
        let directory = temporary_directory("pgbouncer").join("pgbouncer");
        fs::create_dir_all(&directory)
            .with_context(|| format!("Failed to create {}", directory.display()))?;
        let watchdog = Arc::new(Watchdog::start(None, Some(&directory))?);
        let service = Service::new("pgbouncer", &directory, watchdog);
        let seed = ports::hash(&directory.to_string_lossy());
        let mut bouncer = Self {
            program,
            directory,
            port: 0,
            service,
        };
        for attempt in 0..ATTEMPTS {
            let [port] = ports::free(seed.wrapping_add(attempt * 7))?;
            bouncer.port = port;
            match bouncer.serve(postgres.port(), settings) {
                Err(_) if !ports::is_free(port) && attempt + 1 < ATTEMPTS => {}
                result => return result.map(|()| bouncer),
            }
        }
        Ok(bouncer)
    }

    fn serve(&self, postgres: u16, settings: &[&str]) -> Result<()> {
        let at = |name: &str| self.directory.join(name);
        let (users, configuration) = (at("users"), at("pgbouncer.ini"));
        fs::write(&users, "\"postgres\" \"\"\n").context("Failed to write the users")?;
        let text = format!(
            "[databases]\n* = host=127.0.0.1 port={postgres}\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {}\nunix_socket_dir =\n\
             auth_type = trust\nauth_file = {}\n{}\n",
            self.port,
            users.display(),
            settings.join("\n")
        );
        fs::write(&configuration, text).context("Failed to write pgbouncer.ini")?;
        let marker = configuration.to_string_lossy().into_owned();
        let configure = |command: &mut Command| {
            command
                .args(self.program.command_line())
                .arg(&configuration);
            // It refuses to run as root, and takes another account once it has read its files.
            if geteuid().is_root() {
                command.args(["-u", "nobody"]);
            }
            command.current_dir(&self.directory);
        };
        let answers = |_| TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)).is_ok();
        self.service
            .start(Signal::SIGKILL, &marker, configure, START, answers)
    }

    /// Ends it with all its connections, and starts it again on the same port with other settings.
    pub fn start_anew(&self, postgres: &Postgres, settings: &[&str]) -> Result<()> {
        self.service.kill()?;
        self.serve(postgres.port(), settings)
    }

    /// The URL of a database behind it.
    pub fn url(&self, database: &str) -> String {
        format!("postgresql://postgres@127.0.0.1:{}/{database}", self.port)
    }
}

impl Drop for PgBouncer {
    fn drop(&mut self) {
        if let Err(error) = self.service.kill() {
            eprintln!("devstack: {error:#}");
        }
    }
}
