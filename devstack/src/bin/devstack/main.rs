//! `cargo dev …`: runs the service, its tests and its tools with the services they need.

mod fuzz;
mod interrupts;
mod matrix;
mod servers;
mod surroundings;
mod test;
mod up;
mod upgrade;
mod versions;
mod workspace;

use std::env;
use std::os::unix::process::CommandExt;
use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::{Parser, Subcommand};
use devstack::{Foreground, exit_code};

use crate::interrupts::Interrupts;
use crate::servers::{SKIPPED, Servers};
use crate::surroundings::Surroundings;
use crate::workspace::Workspace;

/// Runs retry-scheduler with a Postgres and a RabbitMQ of its own.
///
/// Both are found on this machine, or installed from Debian's packages. They run as private
/// processes on free ports of the loopback interface, beside any others, and are stopped when the
/// command ends, however it ends.
#[derive(Parser)]
#[command(name = "cargo dev", bin_name = "cargo dev", after_help = AFTER_HELP)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

const AFTER_HELP: &str = "\
Environment:
  DEVSTACK_DIR           where data and logs are kept [default: .devstack in the workspace]
  DATABASE_URL           use this Postgres instead of starting one (up, demo, bench)
  RABBITMQ_URL           use this RabbitMQ instead of starting one (up, demo, bench)
  HTTP_PORT              the port of the service [default: 8086, or a free one]
  DEVSTACK_POSTGRES_BIN  the directory of the Postgres programs to use
  DEVSTACK_POSTGRES_ROOT the root that another Postgres is unpacked in, such as .devstack/postgres-17
  DEVSTACK_RABBITMQ_ROOT the root that another RabbitMQ is unpacked in, such as .devstack/rabbitmq-4.0
  DEVSTACK_PGBOUNCER_ROOT the same for PgBouncer, such as .devstack/pgbouncer-1.24

Delete .devstack to begin with an empty database and an empty broker.";

#[derive(Subcommand)]
enum Command {
    /// Build and run the service in the foreground until Ctrl-C
    Up {
        /// Build with optimisations
        #[arg(long)]
        release: bool,
        /// More arguments for `retry-scheduler serve`
        #[arg(last = true)]
        args: Vec<String>,
    },
    /// Send a message through the service that `cargo dev up` runs
    Send(Passed),
    /// Run all tests; each test program starts and stops services of its own
    ///
    /// The options that are passed on are those of `cargo test`. Another version of Postgres or
    /// RabbitMQ is unpacked into .devstack from another suite of Debian or Ubuntu, which takes root
    /// rights; `sid` is the newest one that Debian has. Delete it there to unpack it anew.
    Test(test::Test),
    /// Show the service at work
    Demo(Passed),
    /// Measure the service against what the broker can do without it, or with --peers beside other queues
    Bench(Passed),
    /// Run the service through kills, freezes and outages, and see whether a message is lost
    #[command(disable_help_flag = true)]
    Torture {
        #[command(flatten)]
        servers: Servers,
        #[command(flatten)]
        passed: Passed,
    },
    /// Replace instances of another revision by those of this tree under load, and the other way round
    ///
    /// First the old version runs alone. Then one instance after the other is replaced by one of the
    /// new version, the first of which migrates the database, until the new version runs alone. Then
    /// all of that backwards, on the migrated database, and forward again. Half of the instances that
    /// are replaced leave, the others are killed.
    #[command(after_help = upgrade::AFTER_HELP)]
    Upgrade(upgrade::Upgrade),
    /// Feed mutated inputs to the decoders, guided by the code they reach
    ///
    /// Needs a C++ compiler, which libFuzzer is built with. An input that fails is written to
    /// target/fuzz; give its path after `--` to run it again.
    Fuzz {
        /// The decoders to feed; all of them if none is named
        #[arg(value_enum, default_values_t = fuzz::Target::ALL)]
        targets: Vec<fuzz::Target>,
        /// Inputs for each decoder
        #[arg(long, default_value_t = 100_000)]
        runs: u64,
        /// More arguments for libFuzzer; `-help=1` lists them
        #[arg(last = true)]
        args: Vec<String>,
    },
}

// The arguments of a subcommand that passes all of them on, `--help` included.
#[derive(clap::Args)]
#[command(disable_help_flag = true)]
struct Passed {
    /// Arguments that are passed on
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<String>,
}

fn main() -> ExitCode {
    match run(Arguments::parse().command) {
        Ok(code) => ExitCode::from(code),
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<u8> {
    let workspace = Workspace::find()?;
    match command {
        Command::Up { release, args } => up::run(&workspace, release, &args),
        Command::Send(passed) => send(&workspace, &passed.args),
        Command::Test(test) if test.matrix => matrix::run(&workspace),
        Command::Test(test) => test.run(&workspace),
        Command::Demo(passed) => {
            let demo = ["--package", "retry-scheduler", "--example", "demo"];
            with_services(&workspace, "dev", &demo, &passed.args)
        }
        Command::Bench(passed) => bench(&workspace, passed.args),
        Command::Torture { servers, passed } => torture(&workspace, servers, &passed.args),
        Command::Upgrade(upgrade) => upgrade.run(&workspace),
        Command::Fuzz {
            targets,
            runs,
            args,
        } => fuzz::run(&workspace, &targets, runs, &args),
    }
}

/// Replaces this process with `retry-scheduler send`, which can then read our stdin.
fn send(workspace: &Workspace, args: &[String]) -> Result<u8> {
    let (profile, variables) = Surroundings::of_running(workspace)?;
    let mut command = workspace.cargo(&["run", "--quiet", "--package", "retry-scheduler"]);
    command.args(["--profile", &profile, "--", "send"]);
    Err(command.args(args).envs(variables).exec()).context("Failed to run cargo")
}

/// Builds the service by itself before the benchmark: built together with other packages, its
/// dependencies might get features that it is not shipped with.
///
/// The comparison with other queues is a workspace of its own. It shares the target directory,
/// because it looks for the service beside itself. A peer checks its SQL while it is compiled, against
/// what it is shipped with unless it is kept from asking our database instead.
fn bench(workspace: &Workspace, mut args: Vec<String>) -> Result<u8> {
    if !asks_for_help(&args) {
        let mut build = workspace.cargo(&["build", "--release", "--package", "retry-scheduler"]);
        let built = build.args(["--bin", "retry-scheduler"]).status();
        let built = built.context("Failed to run cargo")?;
        if !built.success() {
            return Ok(exit_code(built));
        }
    }
    let given = args.len();
    args.retain(|arg| arg != "--peers");
    if args.len() == given {
        return with_services(workspace, "release", &["--package", "bench"], &args);
    }
    let target = env::var_os("CARGO_TARGET_DIR").unwrap_or_else(|| "target".into());
    let target = target.to_string_lossy();
    #[rustfmt::skip]
    let peers = [
        "--manifest-path", "bench/peers/Cargo.toml", "--locked", "--target-dir", &target,
        "--config", "env.SQLX_OFFLINE='true'",
    ];
    with_services(workspace, "release", &peers, &args)
}

fn asks_for_help(args: &[String]) -> bool {
    args.iter().any(|arg| arg == "--help" || arg == "-h")
}

/// Builds the torture campaign together with the binary that it starts instances of, and runs it.
/// The campaign starts services of its own.
///
/// With the feature `plant` the binary can be made to die at a named place, or to have the bug that
/// `RETRY_PLANT` names. A steady load measures a release build without that feature instead.
///
/// A cluster is one of RabbitMQ 4.0 unless another version is asked for.
fn torture(workspace: &Workspace, mut servers: Servers, args: &[String]) -> Result<u8> {
    let interrupts = Interrupts::catch()?;
    if servers.rabbitmq.is_none() && args.iter().any(|arg| arg == "--cluster") {
        servers.rabbitmq = Some("4.0".to_owned());
    }
    let Some(variables) = servers.variables(workspace)? else {
        return Ok(SKIPPED);
    };
    let steady = args.iter().any(|arg| arg.starts_with("--steady"));
    let kind: &[&str] = if steady {
        &["--release"]
    } else {
        &["--features=plant"]
    };
    let cargo = |words: &[&str]| {
        let mut command = workspace.cargo(words);
        command.args(["--quiet", "--package", "torture"]).args(kind);
        command
    };
    let mut build = cargo(&["build", "--package", "retry-scheduler", "--bins"]);
    let status = interrupts.wait(&mut Foreground::start(&mut build, None)?, || {})?;
    if !status.success() {
        return Ok(exit_code(status));
    }
    let mut campaign = cargo(&["run"]);
    campaign.arg("--").args(args).envs(variables);
    let mut campaign = Foreground::start(&mut campaign, None)?;
    Ok(exit_code(interrupts.wait(&mut campaign, || {})?))
}

/// Runs the program that `cargo run <target>` names, with the URLs of both services in its
/// environment. If only its help is asked for, the services are not started.
fn with_services(
    workspace: &Workspace,
    profile: &str,
    target: &[&str],
    args: &[String],
) -> Result<u8> {
    let mut command = workspace.cargo(&["run", "--profile", profile]);
    command.args(target).arg("--").args(args);
    if asks_for_help(args) {
        return Err(command.exec()).context("Failed to run cargo");
    }
    let interrupts = Interrupts::catch()?;
    let lock = workspace.lock()?;
    let surroundings = Surroundings::start(workspace, profile)?;
    command.envs(surroundings.variables());
    let mut program = Foreground::start(&mut command, Some(&lock))?;
    Ok(exit_code(interrupts.wait(&mut program, || {})?))
}
