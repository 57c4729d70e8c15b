//! `retry-scheduler`: parse, run, exit.

use std::process::ExitCode;

use clap::Parser;
use retry_scheduler::cli::Cli;

#[tokio::main]
async fn main() -> ExitCode {
    match Cli::parse().run().await {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("retry-scheduler: {e:#}");
            ExitCode::FAILURE
        }
    }
}
