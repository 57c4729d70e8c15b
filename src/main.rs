//! `retry-scheduler`: parse, run, exit.

use std::process::ExitCode;

use clap::Parser;
use retry_scheduler::cli::Cli;

fn main() -> ExitCode {
    have_deep_stacks();
    let cli = Cli::parse();
    let outcome = tokio::runtime::Builder::new_multi_thread()
        .enable_all()
        .build()
        .map_err(Into::into)
        .and_then(|runtime| runtime.block_on(cli.run()));
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("retry-scheduler: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// The AMQP client parses a stranger's nested headers by recursion on a thread
/// whose stack we cannot size; the standard library takes the size from the
/// environment, which is safe to set only for a new program: so become one.
/// The memory is touched only when it is needed.
#[cfg(unix)]
fn have_deep_stacks() {
    use std::os::unix::process::CommandExt;
    const SETTING: &str = "RUST_MIN_STACK";
    const BYTES: &str = "67108864";
    if std::env::var_os(SETTING).is_none()
        && let Ok(program) = std::env::current_exe()
    {
        let mut again = std::process::Command::new(program);
        // Returns only if it failed; then the usual stacks must do.
        let _ = again
            .args(std::env::args_os().skip(1))
            .env(SETTING, BYTES)
            .exec();
    }
}

#[cfg(not(unix))]
fn have_deep_stacks() {}
