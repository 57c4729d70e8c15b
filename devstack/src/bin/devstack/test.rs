//! `cargo dev test`: runs the tests, on the servers of the machine or on others.

use anyhow::Result;
use devstack::{Foreground, exit_code};

use crate::Passed;
use crate::interrupts::Interrupts;
use crate::servers::{SKIPPED, Servers};
use crate::workspace::Workspace;

/// The tests of what any server could do otherwise: the way of a message, losses, standstills,
/// several instances, migrations and keys.
pub(crate) const CORE: [&str; 12] = [
    "--test",
    "it",
    "--",
    "pipeline::",
    "dead_letters::",
    "losing::",
    "blowing::",
    "neighbours::",
    "standing::",
    "instances::",
    "migrating::",
    "keys::",
];

#[derive(clap::Args)]
pub(crate) struct Test {
    #[command(flatten)]
    servers: Servers,
    /// Only the core of the suite
    #[arg(long, conflicts_with = "args")]
    core: bool,
    /// The core of the suite on every Postgres and RabbitMQ that can be had, and a table
    #[arg(long, conflicts_with_all = ["postgres", "rabbitmq", "pgbouncer", "core", "args"])]
    pub(crate) matrix: bool,
    #[command(flatten)]
    passed: Passed,
}

impl Test {
    pub(crate) fn run(&self, workspace: &Workspace) -> Result<u8> {
        let interrupts = Interrupts::catch()?;
        let Some(variables) = self.servers.variables(workspace)? else {
            return Ok(SKIPPED);
        };
        let mut command = workspace.cargo(&["test", "--workspace"]);
        command.envs(variables);
        if self.core {
            command.args(CORE);
        }
        let mut tests = Foreground::start(command.args(&self.passed.args), None)?;
        Ok(exit_code(interrupts.wait(&mut tests, || {})?))
    }
}
