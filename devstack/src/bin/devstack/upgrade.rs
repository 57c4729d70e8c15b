//! `cargo dev upgrade`: do the version of a revision and the one of this tree work side by side?

use std::path::PathBuf;

use anyhow::Result;
use devstack::{Foreground, exit_code};

use crate::interrupts::Interrupts;
use crate::servers::{SKIPPED, Servers};
use crate::versions::Versions;
use crate::workspace::Workspace;

pub(crate) const AFTER_HELP: &str = "\
Exit status: 0 when nothing was lost, unexpected or over its bound, 1 otherwise. It is unexpected,
too, when an instance ends by itself or does not become ready again, and when a version does not
store and settle messages, its own and the other's, while it runs.

The version of this tree, whatever is not committed included, beside that of the last commit:
  cargo dev upgrade --from HEAD
The same with a migration that the last commit does not know:
  cargo dev upgrade --from HEAD \\
    --migration torture/migrations/9000_what_only_the_next_version_knows.sql
One that must fail, because the migration breaks the version before:
  cargo dev upgrade --from HEAD --seconds 40 --messages 4000 \\
    --migration torture/migrations/9001_a_column_that_the_version_before_does_not_fill.sql";

#[derive(clap::Args)]
pub(crate) struct Upgrade {
    /// The revision whose version is upgraded from, as git names it
    #[arg(long, value_name = "REVISION")]
    from: String,
    /// Add this migration to the version of this tree; may be given more than once
    #[arg(long, value_name = "FILE")]
    migration: Vec<PathBuf>,
    /// Messages to send [default: 20000]
    #[arg(long)]
    messages: Option<usize>,
    /// Over how long to spread messages and replacements, at least [default: 120]
    #[arg(long)]
    seconds: Option<u64>,
    /// Instances of the service, two or more [default: 3]
    #[arg(long)]
    instances: Option<usize>,
    #[command(flatten)]
    servers: Servers,
}

impl Upgrade {
    /// Builds both versions, and lets the torture campaign replace instances of one by instances of
    /// the other.
    pub(crate) fn run(&self, workspace: &Workspace) -> Result<u8> {
        let interrupts = Interrupts::catch()?;
        let Some(variables) = self.servers.variables(workspace)? else {
            return Ok(SKIPPED);
        };
        let versions = Versions::new(workspace, &interrupts)?;
        let (old, commit) = versions.of_revision(&self.from)?;
        let new = versions.of_checkout(&self.migration)?;
        let Some(old) = versions.build(&old, &format!("the service of {commit}"))? else {
            return Ok(1);
        };
        let Some(new) = versions.build(&new, "the service of this tree")? else {
            return Ok(1);
        };
        versions.keep([&old, &new])?;
        println!("old is {commit}, new is this tree{}", self.added());
        // The feature is the one of `cargo dev torture`, so that cargo does not build it twice.
        let mut command = workspace.cargo(&["run", "--quiet", "--package", "torture"]);
        command.args(["--features=plant", "--", "--upgrade-from"]);
        command.arg(old).arg("--upgrade-to").arg(new);
        command.args(self.passed_on()).envs(variables);
        let mut campaign = Foreground::start(&mut command, None)?;
        Ok(exit_code(interrupts.wait(&mut campaign, || {})?))
    }

    /// The migrations that were added, in words.
    fn added(&self) -> String {
        let names = self.migration.iter().filter_map(|path| path.file_stem());
        let names: Vec<_> = names.map(|name| name.to_string_lossy()).collect();
        match names.is_empty() {
            true => String::new(),
            false => format!(" and {}", names.join(", ")),
        }
    }

    /// The options that are the campaign's. It has the defaults.
    fn passed_on(&self) -> Vec<String> {
        let options = [
            ("messages", self.messages.map(|n| n.to_string())),
            ("seconds", self.seconds.map(|n| n.to_string())),
            ("instances", self.instances.map(|n| n.to_string())),
        ];
        let given = options.into_iter();
        given
            .filter_map(|(name, value)| Some(format!("--{name}={}", value?)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        upgrade: Upgrade,
    }

    fn parse(line: &str) -> Result<Upgrade, clap::Error> {
        Line::try_parse_from(line.split_whitespace()).map(|line| line.upgrade)
    }

    #[test]
    fn only_what_was_asked_for_is_passed_on_to_the_campaign() {
        let upgrade = parse("upgrade --from HEAD").expect("enough");
        assert_eq!(upgrade.passed_on(), [""; 0]);
        assert_eq!(upgrade.added(), "");
        let line = "upgrade --from v1 --seconds 40 --migration a/9000_b.sql --migration 9001_c.sql";
        let upgrade = parse(line).expect("an upgrade");
        assert_eq!(upgrade.passed_on(), ["--seconds=40"]);
        assert_eq!(upgrade.added(), " and 9000_b, 9001_c");
    }

    #[test]
    fn a_revision_must_be_named() {
        let refused = parse("upgrade --messages 10").err().expect("refused");
        assert!(refused.to_string().contains("--from"), "{refused}");
    }
}
