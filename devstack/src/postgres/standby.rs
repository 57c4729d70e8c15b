//! Creates a standby of a private Postgres, takes it away and back, and promotes it.

use std::fs;
use std::sync::Arc;
use std::sync::atomic::AtomicU16;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{Postgres, Server, surroundings};
use crate::process;
use crate::service::Service;
use crate::unpoisoned;

/// The data directories and service names of a server and its standby. The server in use has one
/// of the two pairs, and a new standby gets the other one.
const PLACES: [(&str, &str); 2] = [("data", "postgres"), ("data.standby", "standby")];

/// How long a standby may take to become synchronous, and to be promoted.
const PATIENCE: Duration = Duration::from_secs(30);

/// A synchronous copy of a [`Postgres`]: a transaction that was committed there is in the standby's
/// WAL as well.
#[derive(Debug)]
pub struct Standby(Arc<Server>);

impl Postgres {
    /// Starts a standby and returns when it is synchronous: from then on each commit waits for it.
    pub fn standby(&self) -> Result<Standby> {
        let primary = self.primary();
        let own = self.directory.join(PLACES[0].0);
        let (data, name) = PLACES[usize::from(primary.data == own)];
        let data = self.directory.join(data);
        if data.exists() {
            fs::remove_dir_all(&data)
                .with_context(|| format!("Failed to delete {}", data.display()))?;
        }
        let mut copy = self.programs.command_as("pg_basebackup", self.account);
        copy.args(["--checkpoint=fast", "--no-sync", "--write-recovery-conf"]);
        copy.args(["-d", &primary.url("postgres")]);
        copy.arg("-D").arg(&data);
        surroundings(&mut copy, &self.directory);
        process::output(&mut copy)?;
        let server = Arc::new(Server {
            data,
            port: AtomicU16::new(0),
            service: Service::new(name, &self.directory, self.watchdog.clone()),
        });
        self.start_on_a_free_port(&server, &[self.conninfo()])?;
        let follows = self.follow();
        let standby = Standby(server);
        match follows {
            Ok(()) => Ok(standby),
            Err(error) => {
                let _ = self.dismiss(standby);
                Err(error)
            }
        }
    }

    /// Where the standby finds the primary.
    fn conninfo(&self) -> String {
        let port = self.port();
        format!(
            "primary_conninfo=host=127.0.0.1 port={port} user=postgres application_name=standby"
        )
    }

    /// Kills the standby. From then on each commit waits until it is back.
    pub fn kill_standby(&self, standby: &Standby) -> Result<()> {
        standby.0.service.kill()
    }

    /// Starts the standby again after it was killed, with the same data.
    pub fn start_standby_again(&self, standby: &Standby) -> Result<()> {
        let _ = fs::remove_file(standby.0.data.join("postmaster.pid"));
        self.serve(&standby.0, &[self.conninfo()])
    }

    /// Goes on without the standby: commits wait for nobody any longer.
    pub fn dismiss(&self, standby: Standby) -> Result<()> {
        self.wait_for_standby(None)?;
        standby.0.service.kill()
    }

    /// Makes each commit wait for the standby of this name, which need not exist; or for none.
    pub fn wait_for_standby(&self, name: Option<&str>) -> Result<()> {
        let set = match name {
            Some(name) => format!("SET synchronous_standby_names = '{name}'"),
            None => "RESET synchronous_standby_names".to_owned(),
        };
        self.psql("postgres", &format!("ALTER SYSTEM {set}"))?;
        self.psql("postgres", "SELECT pg_reload_conf()").map(drop)
    }

    /// Makes the standby synchronous and waits until it is, and until it has all that was committed
    /// before.
    fn follow(&self) -> Result<()> {
        let ask = |sql| self.psql("postgres", sql);
        self.wait_for_standby(Some("standby"))?;
        process::wait_until(PATIENCE, || {
            Ok(ask("SELECT sync_state FROM pg_stat_replication")?.trim() == "sync")
        })
        .context("The standby does not follow")?;
        ask("SELECT pg_logical_emit_message(true, 'standby', 'follows')").map(drop)
    }

    /// Makes the standby the server in use. The old primary must have been stopped. This lasts as
    /// long as the value lives; a later run begins with the first data directory again.
    pub fn promote(&self, standby: Standby) -> Result<()> {
        let url = standby.0.url("postgres");
        let seconds = PATIENCE.as_secs();
        self.psql_at(&url, &format!("SELECT pg_promote(true, {seconds})"))?;
        *unpoisoned(&self.primary) = standby.0;
        Ok(())
    }
}
