//! A supervised process: what the handling of Postgres, RabbitMQ and epmd has in common.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use anyhow::{Context, Result, anyhow, bail};
use nix::sys::signal::Signal;

use crate::process::{self, Group};
use crate::unpoisoned;
use crate::watchdog::{Launch, Watchdog};

/// A process that can be started, stopped, killed, paused and started again, from any thread.
#[derive(Debug)]
pub(crate) struct Service {
    name: &'static str,
    directory: PathBuf,
    watchdog: Arc<Watchdog>,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    running: Option<Group>,
    /// The processes that a pause has stopped.
    frozen: Vec<i32>,
}

impl Service {
    pub(crate) fn new(name: &'static str, directory: &Path, watchdog: Arc<Watchdog>) -> Self {
        Self {
            name,
            directory: directory.to_owned(),
            watchdog,
            state: Mutex::default(),
        }
    }

    pub(crate) fn log(&self) -> PathBuf {
        self.directory.join(format!("{}.log", self.name))
    }

    fn pidfile(&self) -> PathBuf {
        self.directory.join(format!("{}.pid", self.name))
    }

    /// Ends the process of an earlier run that is still running. There is one only if both its
    /// owner and the owner's watchdog were killed.
    pub(crate) fn end_leftover(&self, signal: Signal) -> Result<()> {
        let Ok(text) = fs::read_to_string(self.pidfile()) else {
            return Ok(());
        };
        let Some((pid, marker)) = text.trim().split_once(' ') else {
            return Ok(());
        };
        let pid: i32 = pid
            .parse()
            .with_context(|| format!("{} is damaged", self.pidfile().display()))?;
        if !marker.is_empty() && process::is_ours(pid, marker) {
            process::signal_one(pid, Signal::SIGCONT);
            process::signal_one(pid, signal);
            let ended = |within| process::wait_until(within, || Ok(!process::is_ours(pid, marker)));
            if ended(Duration::from_secs(10)).is_err() {
                process::signal_one(pid, Signal::SIGKILL);
                ended(Duration::from_secs(5))
                    .with_context(|| format!("Process {pid} of an earlier run cannot be ended"))?;
            }
        }
        let _ = fs::remove_file(self.pidfile());
        Ok(())
    }

    /// Starts the process and waits until `ready`, which gets its process id, returns true.
    /// `signal` is what the watchdog ends it with, and `marker` a part of its command line.
    pub(crate) fn start(
        &self,
        signal: Signal,
        marker: &str,
        configure: impl FnOnce(&mut Command),
        within: Duration,
        mut ready: impl FnMut(i32) -> bool,
    ) -> Result<()> {
        let mut state = unpoisoned(&self.state);
        if state.running.is_some() {
            bail!("{} is running already", self.name);
        }
        let launch = Launch {
            signal,
            log: &self.log(),
            pidfile: &self.pidfile(),
            marker,
        };
        let mut group = self.watchdog.launch(&launch, configure)?;
        let mut exited = None;
        let waited = process::wait_until(within, || {
            exited = group.try_wait()?;
            Ok(exited.is_some() || ready(group.pid()))
        });
        if let (Ok(()), None) = (&waited, exited) {
            state.running = Some(group);
            return Ok(());
        }
        let pid = group.pid();
        if exited.is_none() {
            group.kill_tree()?;
        }
        self.watchdog.forget(pid);
        let reason = match exited {
            Some(status) => format!("ended with {status}"),
            None => format!("was not ready within {} s", within.as_secs()),
        };
        Err(anyhow!(
            "{} {reason}; {} ends with:\n{}",
            self.name,
            self.log().display(),
            process::tail(&self.log(), 15)
        ))
    }

    /// Stops the process with `signal`, and with SIGKILL if that takes too long. It is no error if
    /// the process does not run.
    pub(crate) fn stop(&self, signal: Signal, within: Duration) -> Result<()> {
        self.end(|group| group.stop(signal, within))
    }

    /// Kills the process and its descendants with SIGKILL.
    pub(crate) fn kill(&self) -> Result<()> {
        self.end(Group::kill_tree)
    }

    fn end(&self, how: impl FnOnce(&mut Group) -> Result<()>) -> Result<()> {
        let mut state = unpoisoned(&self.state);
        let Some(mut group) = state.running.take() else {
            return Ok(());
        };
        let result = how(&mut group).with_context(|| format!("Failed to stop {}", self.name));
        for pid in state.frozen.drain(..) {
            self.watchdog.forget(pid);
        }
        self.watchdog.forget(group.pid());
        let _ = fs::remove_file(self.pidfile());
        result
    }

    /// Stops the process and its descendants with SIGSTOP.
    pub(crate) fn pause(&self) -> Result<()> {
        let mut state = unpoisoned(&self.state);
        let group = state
            .running
            .as_ref()
            .with_context(|| format!("{} is not running", self.name))?;
        let leader = group.pid();
        let frozen = group.freeze()?;
        // A stopped process does not notice that its parent has died, so the watchdog has to end
        // each of them.
        for &pid in frozen.iter().filter(|&&pid| pid != leader) {
            self.watchdog.watch(pid, Signal::SIGKILL);
        }
        state.frozen = frozen;
        Ok(())
    }

    /// Lets the processes run again that `pause` has stopped.
    pub(crate) fn resume(&self) -> Result<()> {
        let mut state = unpoisoned(&self.state);
        let group = state
            .running
            .as_ref()
            .with_context(|| format!("{} is not running", self.name))?;
        let leader = group.pid();
        for pid in std::mem::take(&mut state.frozen) {
            process::signal_one(pid, Signal::SIGCONT);
            if pid != leader {
                self.watchdog.forget(pid);
            }
        }
        Ok(())
    }
}
