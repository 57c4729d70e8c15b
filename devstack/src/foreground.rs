//! A program in the foreground, for whose sake the rest runs.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use crate::lock::Lock;
use crate::process::Group;
use crate::watchdog::Watchdog;

/// How quickly an interrupt is passed on.
const TICK: Duration = Duration::from_millis(50);

/// A program with our terminal but a process group of its own: a Ctrl-C reaches it once, as SIGTERM, from us.
#[derive(Debug)]
pub struct Foreground {
    group: Group,
    watchdog: Watchdog,
}

impl Foreground {
    /// Starts it. `lock`, if given, is held until the program and all of its group are gone.
    pub fn start(command: &mut Command, lock: Option<&Lock>) -> Result<Self> {
        let watchdog = Watchdog::start(lock.map(Lock::share).transpose()?, None)?;
        let name = command.get_program().to_string_lossy().into_owned();
        let child = command
            .process_group(0)
            .spawn()
            .with_context(|| format!("Failed to start {name}"))?;
        let group = Group::new(child);
        watchdog.watch(group.pid(), Signal::SIGTERM);
        Ok(Self { group, watchdog })
    }

    /// Waits for its end. `interrupts` counts the wishes to stop: the first one becomes a SIGTERM, the next one a SIGKILL.
    /// `tick` is called now and then meanwhile.
    pub fn wait(
        &mut self,
        interrupts: impl Fn() -> usize,
        mut tick: impl FnMut(),
    ) -> Result<ExitStatus> {
        let mut seen = 0;
        loop {
            if let Some(status) = self.group.try_wait()? {
                return Ok(status);
            }
            let wishes = interrupts();
            if wishes > seen {
                self.group.signal(if seen == 0 {
                    Signal::SIGTERM
                } else {
                    Signal::SIGKILL
                });
                seen = wishes;
            }
            tick();
            thread::sleep(TICK);
        }
    }
}

impl Drop for Foreground {
    fn drop(&mut self) {
        // What the program itself started and left in its group ends with it.
        self.group.signal(Signal::SIGTERM);
        self.watchdog.forget(self.group.pid());
    }
}
