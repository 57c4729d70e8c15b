//! Handles Ctrl-C, SIGTERM and SIGHUP.

use std::process::{self, ExitStatus};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use anyhow::{Context, Result};
use devstack::Foreground;

/// While a program runs in the foreground, interrupts are passed on to it. At any other time an
/// interrupt ends this process at once, and the watchdogs stop what it has started.
pub(crate) struct Interrupts {
    /// Whether a program runs in the foreground.
    counted: Arc<AtomicBool>,
    count: Arc<AtomicUsize>,
}

impl Interrupts {
    pub(crate) fn catch() -> Result<Self> {
        let counted = Arc::new(AtomicBool::new(false));
        let count = Arc::new(AtomicUsize::new(0));
        let in_handler = (counted.clone(), count.clone());
        ctrlc::set_handler(move || {
            let (counted, count) = &in_handler;
            if !counted.load(Ordering::SeqCst) {
                process::exit(130);
            }
            count.fetch_add(1, Ordering::SeqCst);
        })
        .context("Failed to catch Ctrl-C")?;
        Ok(Self { counted, count })
    }

    /// Waits for a program in the foreground and passes interrupts on to it.
    pub(crate) fn wait(&self, program: &mut Foreground, tick: impl FnMut()) -> Result<ExitStatus> {
        self.counted.store(true, Ordering::SeqCst);
        let before = self.count.load(Ordering::SeqCst);
        let status = program.wait(|| self.count.load(Ordering::SeqCst) - before, tick);
        self.counted.store(false, Ordering::SeqCst);
        status
    }
}
