//! A standby of a private Postgres, and its promotion.

use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicU16;
use std::time::Duration;

use anyhow::{Context, Result};

use super::{Postgres, Server, surroundings};
use crate::process;
use crate::service::Service;
use crate::unpoisoned;

/// The two places of a server and its standby; who is promoted leaves the other one free.
const PLACES: [(&str, &str); 2] = [("data", "postgres"), ("data.standby", "standby")];

/// How long a standby may take to catch up, and to become a primary.
const PATIENCE: Duration = Duration::from_secs(30);

/// A copy that follows a [`Postgres`]: what is committed there is on its disk as well.
#[derive(Debug)]
pub struct Standby(Arc<Server>);

impl Postgres {
    /// Makes a standby, and returns when it is a synchronous one: from then on no commit is confirmed without it.
    pub fn standby(&self) -> Result<Standby> {
        let primary = self.primary();
        let own = self.directory.join(PLACES[0].0);
        let (data, name) = PLACES[usize::from(primary.data == own)];
        let data = self.directory.join(data);
        if data.exists() {
            fs::remove_dir_all(&data)
                .with_context(|| format!("Failed to delete {}", data.display()))?;
        }
        let mut copy = Command::new(self.programs.program("pg_basebackup"));
        copy.args(["--checkpoint=fast", "--no-sync", "--write-recovery-conf"]);
        copy.args(["-d", &primary.url("postgres")]);
        copy.arg("-D").arg(&data);
        surroundings(&mut copy, self.account, &self.directory);
        process::output(&mut copy)?;
        let server = Arc::new(Server {
            data,
            port: AtomicU16::new(0),
            service: Service::new(name, &self.directory, self.watchdog.clone()),
        });
        let port = primary.port();
        let from = format!(
            "primary_conninfo=host=127.0.0.1 port={port} user=postgres application_name=standby"
        );
        self.start_on_a_free_port(&server, &[from])?;
        let follows = self.follow();
        if follows.is_err() {
            let _ = server.service.kill();
            let alone = "ALTER SYSTEM RESET synchronous_standby_names";
            let _ = self.psql("postgres", alone);
            let _ = self.psql("postgres", "SELECT pg_reload_conf()");
        }
        follows.map(|()| Standby(server))
    }

    /// Waits for it, and for all that was committed before.
    fn follow(&self) -> Result<()> {
        let ask = |sql| self.psql("postgres", sql);
        ask("ALTER SYSTEM SET synchronous_standby_names = 'standby'")?;
        ask("SELECT pg_reload_conf()")?;
        process::wait_until(PATIENCE, || {
            Ok(ask("SELECT sync_state FROM pg_stat_replication")?.trim() == "sync")
        })
        .context("The standby does not follow")?;
        ask("SELECT pg_logical_emit_message(true, 'standby', 'follows')").map(drop)
    }

    /// Lets the standby take the place of the primary, which has to be stopped; for as long as this value lives.
    pub fn promote(&self, standby: Standby) -> Result<()> {
        let url = standby.0.url("postgres");
        let seconds = PATIENCE.as_secs();
        self.psql_at(&url, &format!("SELECT pg_promote(true, {seconds})"))?;
        *unpoisoned(&self.primary) = standby.0;
        Ok(())
    }
}
