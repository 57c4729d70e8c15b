//! The command line: the arguments, and one file a command.

mod check_config;
mod doctor;
mod idempotency;
mod probe;
mod send;
mod serve;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

use crate::{app, config::Settings, observe::telemetry, store::Store};

/// Durable retries for RabbitMQ: a failed message waits in Postgres as long as
/// its policy says, goes back to its queue, and when its retries are spent goes
/// to people.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Settings come from the environment (RABBITMQ_URL, DATABASE_URL, HTTP_PORT, ...) \
                  and from the file given by --config. `check-config` shows what is in force.\n\n\
                  Exit status: 0 when it worked, 1 when it did not and one line on standard error \
                  says why, 2 when the arguments cannot be used."
)]
pub struct Cli {
    /// A TOML file of settings; the environment wins over it.
    #[arg(long, env = "CONFIG_FILE", global = true, value_name = "FILE")]
    config: Option<PathBuf>,

    #[command(subcommand)]
    command: Option<Command>,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run the service (the default).
    Serve {
        /// Only say what would be sent now: consume, publish and change nothing.
        #[arg(long)]
        dry_run: bool,
    },
    /// Apply the database migrations and exit.
    Migrate,
    /// Check the settings and the policies, and print them, passwords hidden.
    CheckConfig,
    /// Tell whether this set-up of RabbitMQ and Postgres can lose messages, and what to do about it.
    Doctor(doctor::Doctor),
    /// Ask the service running on this machine whether it is ready; exit 1 and say what is down if it is not.
    Probe,
    /// Publish one RetryMessage to the intake queue, as a dead-letter handler would.
    Send(Box<send::Send>),
    /// Compute an idempotency key, look it up, or make the service forget it.
    #[command(subcommand)]
    Idempotency(idempotency::Idempotency),
}

impl Cli {
    /// Reads the settings and does what was asked.
    pub async fn run(self) -> anyhow::Result<ExitCode> {
        let settings = Settings::load(self.config.as_deref(), |name| std::env::var(name).ok());
        match self.command.unwrap_or(Command::Serve { dry_run: false }) {
            // It has an exit status of its own for settings that cannot be used.
            Command::Doctor(doctor) => return Ok(doctor.run(settings).await),
            Command::Serve { dry_run } => serve::run(settings?, dry_run).await?,
            Command::Migrate => migrate(&settings?).await?,
            Command::CheckConfig => check_config::run(&settings?)?,
            Command::Probe => probe::run(&settings?).await?,
            Command::Send(send) => send.run(&settings?).await?,
            Command::Idempotency(idempotency) => idempotency.run(&settings?).await?,
        }
        Ok(ExitCode::SUCCESS)
    }
}

async fn migrate(settings: &Settings) -> anyhow::Result<()> {
    let instance = app::instance_name(settings);
    telemetry::start(settings, &instance)?;
    Store::open(settings, &instance)?.migrate().await?;
    println!("The database is up to date.");
    Ok(())
}
