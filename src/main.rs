//! Parses the arguments, runs the command, and turns its outcome into the exit status.

use std::process::ExitCode;

use clap::Parser;
use retry_scheduler::cli::Cli;

fn main() -> ExitCode {
    have_environment();
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

/// What the program wants to find in its environment, unless somebody has set it otherwise.
///
/// The AMQP client parses nested headers, which strangers choose, by recursion, on a
/// thread whose stack size we cannot set. The standard library reads the size for new
/// threads from RUST_MIN_STACK. Pages of a stack cost memory only once they are used.
///
/// glibc gives a block back to the system when it is freed if it is larger than this threshold, but
/// raises the threshold with every such block, up to 32 MiB. Large messages pass through many
/// buffers, and twice the memory was measured. A threshold that is set, here to what glibc begins
/// with, stays as it is.
#[cfg(unix)]
const ENVIRONMENT: [(&str, &str); 2] = [
    ("RUST_MIN_STACK", "67108864"),
    ("MALLOC_MMAP_THRESHOLD_", "131072"),
];

/// Setting a variable in a running process is unsafe, so the program executes itself again with
/// the variables set.
#[cfg(unix)]
fn have_environment() {
    use std::os::unix::process::CommandExt;
    let missing: Vec<_> = ENVIRONMENT
        .into_iter()
        .filter(|(name, _)| std::env::var_os(name).is_none())
        .collect();
    if !missing.is_empty()
        && let Ok(program) = std::env::current_exe()
    {
        let mut again = std::process::Command::new(program);
        // `exec` returns only when it has failed; then the defaults must do.
        let _ = again.args(std::env::args_os().skip(1)).envs(missing).exec();
    }
}

#[cfg(not(unix))]
fn have_environment() {}
