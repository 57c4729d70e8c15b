//! Runs the program that the services were started for, such as the service itself or its tests.

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitStatus};
use std::thread;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use crate::lock::Lock;
use crate::process::Group;
use crate::watchdog::Watchdog;

/// How often the end of the program and new interrupts are looked for.
const TICK: Duration = Duration::from_millis(50);

/// A program that uses our terminal but has a process group of its own. So the terminal's Ctrl-C
/// reaches only us, and we pass it on, once, as SIGTERM.
#[derive(Debug)]
pub struct Foreground {
    group: Group,
    watchdog: Watchdog,
}

impl Foreground {
    /// Starts the program. If this process dies, `lock` stays held until the watchdog has stopped
    /// the program.
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

    /// Waits for the end of the program. `interrupts` returns how often the user has asked to stop:
    /// the first time the program gets SIGTERM, the second time SIGKILL. `tick` is called at short
    /// intervals meanwhile.
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
        // End what the program has started and left running in its process group.
        self.group.signal(Signal::SIGTERM);
        self.watchdog.forget(self.group.pid());
    }
}
