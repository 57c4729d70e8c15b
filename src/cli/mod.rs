//! The command line: the arguments, and one file a command.

mod check_config;
mod doctor;
mod idempotency;
mod import;
mod move_place;
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
    /// Give the database to another broker, virtual host or intake queue.
    ///
    /// A database belongs to the place of the first instance that started on it: the broker and the virtual host of
    /// RABBITMQ_URL, and RETRY_QUEUE. Instances elsewhere refuse to start, because messages that wait go back to queues by
    /// name, and every virtual host may have queues of these names.
    ///
    /// To move it, stop all instances, see that the queues exist at the new place, and run this with the settings of the
    /// new place. It prints from where to where. An instance that is still running at the old place ends within seconds.
    Move(move_place::Move),
    /// Take over the messages that wait in another scheduler's table.
    ///
    /// Stop the other scheduler first: a message that it has in hand would be sent by both. The table is in the same
    /// database, and has the columns id, message_id, original_payload, original_queue, next_retry_at and status; where it
    /// has error_reason, retry_count, max_retries and created_at, they are taken over too.
    ///
    /// Rows whose status is `pending` become tasks with the same id, budget and due time. In the same transaction their
    /// status in the old table becomes `imported`, so that a second run takes nothing twice. What cannot be sent back, such
    /// as a message for a queue that is not allowed, goes to review. A row whose id is here already is left as it is, and
    /// named; then the exit status is 1.
    Import(import::From),
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
            Command::Move(to) => to.run(&settings?).await?,
            Command::Import(from) => from.run(&settings?).await?,
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

/// The operator's name for what is recorded: the login name, marked as coming from the
/// command line.
fn actor() -> String {
    let user = std::env::var("USER").or_else(|_| std::env::var("LOGNAME"));
    format!("command line: {}", user.as_deref().unwrap_or("unknown"))
}
