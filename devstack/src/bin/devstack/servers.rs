//! The options that choose a Postgres, a RabbitMQ and a PgBouncer of another version than the
//! machine's.

use std::path::PathBuf;

use anyhow::Result;
use devstack::{
    PGBOUNCER_ROOT, POSTGRES_ROOT, PgBouncerProgram, PostgresPrograms, RABBITMQ_ROOT,
    RabbitMqPrograms,
};

use crate::workspace::Workspace;

/// The exit code when a server that was asked for cannot be had on this machine: the one by which
/// test programs say that they were skipped.
pub(crate) const SKIPPED: u8 = 77;

#[derive(clap::Args)]
pub(crate) struct Servers {
    /// Use this version of Postgres, whichever is installed
    ///
    /// The exit code is 77 where it cannot be had.
    #[arg(long, value_name = "VERSION", value_parser = devstack::POSTGRES_VERSIONS)]
    postgres: Option<String>,
    /// Use this version of RabbitMQ, whichever is installed
    ///
    /// The exit code is 77 where it cannot be had.
    #[arg(long, value_name = "VERSION", value_parser = devstack::RABBITMQ_VERSIONS)]
    pub(crate) rabbitmq: Option<String>,
    /// Use this version of PgBouncer, whichever is installed
    ///
    /// The exit code is 77 where it cannot be had.
    #[arg(long, value_name = "VERSION", value_parser = devstack::PGBOUNCER_VERSIONS)]
    pgbouncer: Option<String>,
}

impl Servers {
    /// Makes sure that the servers are there. Returns the variables by which a program finds those
    /// that are not the machine's; `None`, after saying why, where one cannot be had.
    pub(crate) fn variables(
        &self,
        workspace: &Workspace,
    ) -> Result<Option<Vec<(&'static str, PathBuf)>>> {
        devstack::ensure_found(self.postgres.is_none(), self.rabbitmq.is_none())?;
        match self.unpacked(workspace) {
            Ok(variables) => Ok(Some(variables)),
            Err(error) => {
                eprintln!("error: {error:#}");
                Ok(None)
            }
        }
    }

    fn unpacked(&self, workspace: &Workspace) -> Result<Vec<(&'static str, PathBuf)>> {
        let under = workspace.directory();
        let mut variables = Vec::new();
        if let Some(version) = &self.postgres {
            let programs = PostgresPrograms::of_version(version, under)?;
            variables.extend(programs.root().map(|root| (POSTGRES_ROOT, root.to_owned())));
        }
        if let Some(version) = &self.rabbitmq {
            let programs = RabbitMqPrograms::of_version(version, under)?;
            variables.extend(programs.root().map(|root| (RABBITMQ_ROOT, root.to_owned())));
        }
        if let Some(version) = &self.pgbouncer {
            let program = PgBouncerProgram::of_version(version, under)?;
            variables.extend(program.root().map(|root| (PGBOUNCER_ROOT, root.to_owned())));
        }
        Ok(variables)
    }
}
