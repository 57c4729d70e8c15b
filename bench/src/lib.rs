//! What `cargo dev bench` is made of. The comparison with other queues (`bench/peers`) uses it, too,
//! so that all are measured by the same means.
//!
//! In reading order: [`field`] holds what all scenarios share; [`scheduler`] and [`floor`] start
//! what is measured, each as a process of its own; [`producer`] publishes messages and [`inbox`]
//! receives them; [`rows`] queries Postgres; [`processor`] reads processor time, [`usage`] what a
//! process uses, and [`cores`] binds processes to cores; [`scenarios`] measure; [`finding`],
//! [`report`] and [`plot`] show results.
#![allow(
    missing_docs,
    reason = "only the two benchmark programs use this library"
)]

pub mod cores;
pub mod field;
pub mod finding;
pub mod floor;
pub mod inbox;
pub mod plot;
pub mod processor;
pub mod producer;
pub mod report;
pub mod rows;
pub mod scenarios;
pub mod scheduler;
pub mod usage;

use std::{path::Path, process::ExitCode};

use anyhow::Context;

/// Tells what went wrong, and returns the exit code.
pub fn exit(ended: anyhow::Result<()>) -> ExitCode {
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("bench: {e:#}");
            ExitCode::FAILURE
        }
    }
}

/// Writes a result to a file that the command line names.
pub fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::write(path, text).with_context(|| format!("writing {}", path.display()))
}
