//! `cargo dev test`: runs the tests, on the servers of the machine or on others.

use anyhow::Result;
use devstack::{
    Foreground, POSTGRES_ROOT, PostgresPrograms, RABBITMQ_ROOT, RabbitMqPrograms, exit_code,
};

use crate::Passed;
use crate::interrupts::Interrupts;
use crate::workspace::Workspace;

/// The exit code when a server that was asked for cannot be had on this machine: the one by which
/// test programs say that they were skipped.
const SKIPPED: u8 = 77;

/// The tests of what any server could do otherwise: the way of a message, losses, standstills,
/// several instances, migrations and keys.
pub(crate) const CORE: [&str; 10] = [
    "--test",
    "it",
    "--",
    "pipeline::",
    "dead_letters::",
    "losing::",
    "standing::",
    "instances::",
    "migrating::",
    "keys::",
];

#[derive(clap::Args)]
pub(crate) struct Test {
    /// Test with this version of Postgres, whichever is installed
    ///
    /// The exit code is 77 where it cannot be had.
    #[arg(long, value_name = "VERSION", value_parser = devstack::POSTGRES_VERSIONS)]
    postgres: Option<String>,
    /// Test with this version of RabbitMQ, whichever is installed
    ///
    /// The exit code is 77 where it cannot be had.
    #[arg(long, value_name = "VERSION", value_parser = devstack::RABBITMQ_VERSIONS)]
    rabbitmq: Option<String>,
    /// Only the core of the suite
    #[arg(long, conflicts_with = "args")]
    core: bool,
    /// The core of the suite on every Postgres and RabbitMQ that can be had, and a table
    #[arg(long, conflicts_with_all = ["postgres", "rabbitmq", "core", "args"])]
    pub(crate) matrix: bool,
    #[command(flatten)]
    passed: Passed,
}

impl Test {
    pub(crate) fn run(&self, workspace: &Workspace) -> Result<u8> {
        let interrupts = Interrupts::catch()?;
        devstack::ensure_found(self.postgres.is_none(), self.rabbitmq.is_none())?;
        let mut command = workspace.cargo(&["test", "--workspace"]);
        let under = workspace.directory();
        let postgres = self.postgres.as_deref();
        let postgres = postgres.map(|it| PostgresPrograms::of_version(it, under));
        let rabbitmq = self.rabbitmq.as_deref();
        let rabbitmq = rabbitmq.map(|it| RabbitMqPrograms::of_version(it, under));
        let (postgres, rabbitmq) = match (postgres.transpose(), rabbitmq.transpose()) {
            (Ok(postgres), Ok(rabbitmq)) => (postgres, rabbitmq),
            (Err(error), _) | (_, Err(error)) => {
                eprintln!("error: {error:#}");
                return Ok(SKIPPED);
            }
        };
        let postgres = postgres.as_ref().and_then(PostgresPrograms::root);
        command.envs(postgres.map(|root| (POSTGRES_ROOT, root)));
        let rabbitmq = rabbitmq.as_ref().and_then(RabbitMqPrograms::root);
        command.envs(rabbitmq.map(|root| (RABBITMQ_ROOT, root)));
        if self.core {
            command.args(CORE);
        }
        let mut tests = Foreground::start(command.args(&self.passed.args), None)?;
        Ok(exit_code(interrupts.wait(&mut tests, || {})?))
    }
}
