//! `cargo dev demo`: retry-scheduler at work between services that fail.
//!
//! The services and their failures are simulated, all else is real: retry-scheduler
//! runs in this process and uses RabbitMQ and Postgres. At the end the numbers of the
//! services, RabbitMQ and Postgres must agree, so the demo is an end-to-end check, too.

mod ledger;
mod rows;
mod screen;
mod services;
mod stage;

use std::process::ExitCode;

use clap::Parser;
use tokio_util::sync::CancellationToken;

use crate::stage::Stage;

/// Watch failed messages wait, come back, and end in review.
///
/// Runs retry-scheduler between a few simulated services: one fails once, one
/// fails often, one always; one refuses messages for good, one has lost its
/// queue, and now and then comes garbage. A live table shows where their
/// messages are; in the end every message must be done or in review, and the
/// numbers of the services, Postgres and RabbitMQ must agree.
#[derive(Debug, Parser)]
#[command(
    name = "cargo dev demo",
    bin_name = "cargo dev demo",
    after_help = "Exit status: 0 when all adds up or Ctrl-C ended it, 1 otherwise.\n\n\
                  The demo uses DATABASE_URL and RABBITMQ_URL, there only the schema retry_demo \
                  and the queues demo.*,\nwhich it empties when it begins and leaves for you to \
                  look at when it ends."
)]
struct Args {
    /// How long to send messages; the rest then settles within about 15 s
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u32).range(1..=3600))]
    seconds: u32,
    /// Messages sent each second
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=200))]
    rate: u32,
}

#[tokio::main]
async fn main() -> ExitCode {
    let args = Args::parse();
    let stop = CancellationToken::new();
    tokio::spawn(on_signals(stop.clone()));
    match demo(&args, &stop).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("demo: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// The first signal asks the demo to end; the second one ends the process at once.
async fn on_signals(stop: CancellationToken) {
    loop {
        testkit::interrupted().await;
        if stop.is_cancelled() {
            std::process::exit(130);
        }
        stop.cancel();
    }
}

async fn demo(args: &Args, stop: &CancellationToken) -> anyhow::Result<()> {
    let Some(stage) = stop.run_until_cancelled(Stage::set()).await else {
        return Ok(());
    };
    let mut stage = stage?;
    let played = stop.run_until_cancelled(stage.play(args)).await;
    stage.clear()?;
    let report = match played {
        Some(Ok(())) => stop.run_until_cancelled(stage.report()).await,
        Some(Err(e)) => Some(Err(e)),
        None => None,
    };
    if report.is_none() {
        stage.so_far()?;
    }
    let struck = stage.strike().await;
    report.unwrap_or(Ok(())).and(struck)
}
