//! The command line: arguments and commands.

mod probe;

use std::{io::Read, path::PathBuf};

use anyhow::{Context, bail};
use clap::{Args, Parser, Subcommand};
use prost::Message;
use uuid::Uuid;

use crate::{
    app::App,
    broker::{self, Broker, Outcome},
    config::Settings,
    idempotency,
    store::Store,
    telemetry,
    wire::{Outgoing, proto::RetryMessage},
};

/// Durable retries for RabbitMQ: a failed message waits in Postgres as long as
/// its policy says, goes back to its queue, and when its retries are spent goes
/// to people.
#[derive(Debug, Parser)]
#[command(
    version,
    after_help = "Settings come from the environment (RABBITMQ_URL, DATABASE_URL, HTTP_PORT, ...) \
                  and from the file given by --config. `check-config` shows what is in force."
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
    /// Print the settings in force, passwords hidden, and exit.
    CheckConfig,
    /// Ask the service running on this machine whether it is ready; exit 1 and say what is down if it is not.
    Probe,
    /// Publish one RetryMessage to the intake queue, as a dead-letter handler would.
    Send(Send),
    /// Print the deterministic idempotency key of an operation.
    IdempotencyKey(IdempotencyKey),
}

#[derive(Debug, Args)]
struct IdempotencyKey {
    /// What was attempted.
    #[arg(long)]
    operation: String,
    /// For whom.
    #[arg(long, default_value = "")]
    tenant_id: String,
    /// In which course of events.
    #[arg(long, default_value = "")]
    correlation_id: String,
    /// Further parameters, as a JSON object; their order does not matter.
    #[arg(long, default_value = "{}", value_name = "JSON")]
    parameters: String,
}

#[derive(Debug, Args)]
struct Send {
    /// The queue the message goes back to.
    #[arg(long)]
    queue: String,
    /// The body of the message; `-` reads standard input.
    #[arg(long)]
    payload: String,
    /// Why it failed.
    #[arg(long, default_value = "sent by hand")]
    error: String,
    /// Its identity; a new one when left out.
    #[arg(long)]
    message_id: Option<String>,
    /// Retries already made.
    #[arg(long, default_value_t = 0)]
    retry_count: i32,
    /// Retries allowed; 0 leaves it to the policy.
    #[arg(long, default_value_t = 0)]
    max_retries: i32,
    /// Create the target queue (durable) if it does not exist.
    #[arg(long)]
    declare: bool,
}

impl Cli {
    /// Reads the settings and does what was asked.
    pub async fn run(self) -> anyhow::Result<()> {
        let settings = Settings::load(self.config.as_deref(), |name| std::env::var(name).ok())?;
        match self.command.unwrap_or(Command::Serve { dry_run: false }) {
            Command::Serve { dry_run } => serve(settings, dry_run).await,
            Command::Migrate => migrate(&settings).await,
            Command::CheckConfig => {
                print!("{}", settings.describe());
                Ok(())
            }
            Command::Probe => probe::run(&settings).await,
            Command::Send(send) => send.run(&settings).await,
            Command::IdempotencyKey(of) => {
                let parameters = serde_json::from_str(&of.parameters)
                    .context("--parameters must be a JSON object")?;
                let (tenant, correlation) = (&of.tenant_id, &of.correlation_id);
                let key = idempotency::key(&of.operation, tenant, correlation, &parameters);
                println!("{key}");
                Ok(())
            }
        }
    }
}

async fn serve(settings: Settings, dry_run: bool) -> anyhow::Result<()> {
    telemetry::start(&settings)?;
    let app = App::new(settings).await?;
    tracing::info!(address = %app.address()?, "listening");
    if dry_run {
        return app.dry_run(asked_to_stop()).await;
    }
    app.run(asked_to_stop()).await
}

async fn migrate(settings: &Settings) -> anyhow::Result<()> {
    telemetry::start(settings)?;
    let store = Store::open(settings, "migrate")?;
    store.migrate().await?;
    println!("The database is up to date.");
    Ok(())
}

/// SIGTERM or Ctrl-C. A second one ends the process at once.
async fn asked_to_stop() {
    signalled().await;
    tokio::spawn(async {
        signalled().await;
        tracing::warn!("asked twice: leaving at once");
        std::process::exit(1);
    });
}

async fn signalled() {
    use tokio::signal::unix::{SignalKind, signal};
    match signal(SignalKind::terminate()) {
        Ok(mut terminate) => {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = tokio::signal::ctrl_c() => {}
            }
        }
        Err(_) => {
            let _ = tokio::signal::ctrl_c().await;
        }
    }
}

impl Send {
    async fn run(self, settings: &Settings) -> anyhow::Result<()> {
        let mut payload = self.payload.into_bytes();
        if payload == b"-" {
            payload.clear();
            std::io::stdin()
                .read_to_end(&mut payload)
                .context("reading the payload")?;
        }
        let message_id = self
            .message_id
            .unwrap_or_else(|| Uuid::now_v7().to_string());
        let message = RetryMessage {
            message_id: message_id.clone(),
            original_payload: payload,
            original_queue: self.queue.clone(),
            error_reason: self.error,
            retry_count: self.retry_count,
            max_retries: self.max_retries,
            ..RetryMessage::default()
        };
        let broker = Broker::new(settings)?;
        if self.declare {
            broker.declare(&self.queue).await?;
        }
        broker.declare(&settings.retry_queue).await?;
        let mut publisher = broker.publisher(&settings.manual_review_queue).await?;
        let outgoing = Outgoing {
            message_id: Uuid::now_v7(),
            queue: broker::short(&settings.retry_queue)?,
            properties: lapin::BasicProperties::default()
                .with_content_type("application/x-protobuf".into())
                .with_delivery_mode(2),
            body: message.encode_to_vec(),
        };
        let (outcomes, fault) = publisher.publish(&[outgoing]).await;
        publisher.close().await;
        if let Some(fault) = fault {
            return Err(fault.into());
        }
        match outcomes.first() {
            Some(Outcome::Confirmed) => {
                println!("{message_id} is on {}", settings.retry_queue);
                Ok(())
            }
            other => bail!("RabbitMQ did not take the message: {other:?}"),
        }
    }
}
