//! `cargo dev fuzz`: builds the decoders with libFuzzer and runs them.

use std::fs;

use anyhow::{Context, Result};
use devstack::{Foreground, exit_code};

use crate::interrupts::Interrupts;
use crate::workspace::Workspace;

/// Makes the compiler record coverage in the form that libFuzzer reads. These are the flags that
/// cargo-fuzz uses without a sanitizer; stable Rust has all of them.
const FLAGS: &str = "--cfg libfuzzer \
    -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table \
    -Cllvm-args=-sanitizer-coverage-trace-compares";

/// The decoder that is fed.
#[derive(Clone, Copy, clap::ValueEnum)]
pub(crate) enum Target {
    /// RetryMessages in protobuf
    Protobuf,
    /// RetryMessages in JSON
    Json,
    /// Raw dead letters with their headers
    DeadLetter,
}

impl Target {
    pub(crate) const ALL: [Self; 3] = [Self::Protobuf, Self::Json, Self::DeadLetter];

    /// The name of its binary, and of the directory of its seeds.
    fn name(self) -> &'static str {
        match self {
            Self::Protobuf => "protobuf",
            Self::Json => "json",
            Self::DeadLetter => "dead-letter",
        }
    }
}

/// Runs one target after the other until one fails. The inputs that reached new code are kept under
/// target/fuzz, and the next run begins with them.
pub(crate) fn run(
    workspace: &Workspace,
    targets: &[Target],
    runs: u64,
    args: &[String],
) -> Result<u8> {
    let interrupts = Interrupts::catch()?;
    let host = host()?;
    let directory = workspace.root().join("target/fuzz");
    let sources = workspace.root().join("fuzz");
    for target in targets.iter().map(|target| target.name()) {
        let corpus = directory.join("corpus").join(target);
        fs::create_dir_all(&corpus)
            .with_context(|| format!("Failed to create {}", corpus.display()))?;
        let mut command = workspace.cargo(&["run", "--quiet", "--profile", "fuzz"]);
        // With `--target`, cargo does not use RUSTFLAGS for build scripts and macros. They must not
        // be instrumented, since they are not linked with libFuzzer.
        command.args(["--package", "fuzz", "--bin", target, "--target", &host]);
        command.arg("--target-dir").arg(&directory).arg("--");
        command.arg(corpus).arg(sources.join("seeds").join(target));
        let dictionary = sources.join(target).with_extension("dict");
        if dictionary.is_file() {
            command.arg(format!("-dict={}", dictionary.display()));
        }
        command.arg(format!(
            "-artifact_prefix={}/{target}-",
            directory.display()
        ));
        command.arg(format!("-runs={runs}")).args(args);
        command
            .env_remove("CARGO_ENCODED_RUSTFLAGS")
            .env("RUSTFLAGS", FLAGS);
        eprintln!("devstack: {target}");
        let mut program = Foreground::start(&mut command, None)?;
        let status = interrupts.wait(&mut program, || {})?;
        if !status.success() {
            return Ok(exit_code(status));
        }
    }
    Ok(0)
}

/// The target triple of the machine that the compiler runs on.
fn host() -> Result<String> {
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = std::process::Command::new(rustc).arg("-vV").output();
    let output = output.context("Failed to run rustc")?.stdout;
    let host = String::from_utf8_lossy(&output)
        .lines()
        .find_map(|line| line.strip_prefix("host: ").map(str::to_owned));
    host.context("rustc does not say what it runs on")
}
