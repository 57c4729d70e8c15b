//! Parses the arguments, runs the command, and turns its outcome into the exit status.

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
        Ok(status) => status,
        Err(e) => {
            eprintln!("retry-scheduler: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// The AMQP client parses nested headers, which strangers choose, by recursion, on a
/// thread whose stack size we cannot set. The standard library reads the size for new
/// threads from RUST_MIN_STACK. Setting a variable in a running process is unsafe, so the
/// program executes itself again with the variable set. Pages of a stack cost memory only
/// once they are used.
#[cfg(unix)]
fn have_deep_stacks() {
    use std::os::unix::process::CommandExt;
    const SETTING: &str = "RUST_MIN_STACK";
    const BYTES: &str = "67108864";
    if std::env::var_os(SETTING).is_none()
        && let Ok(program) = std::env::current_exe()
    {
        let mut again = std::process::Command::new(program);
        // `exec` returns only when it has failed; then the default stacks must do.
        let _ = again
            .args(std::env::args_os().skip(1))
            .env(SETTING, BYTES)
            .exec();
    }
}

#[cfg(not(unix))]
fn have_deep_stacks() {}
