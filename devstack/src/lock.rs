//! A lock file, so that a directory is used by one process at a time.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::process;

/// How long a new owner waits for the watchdog of an owner that has died, until it has stopped the
/// processes that are left.
const HANDOVER: Duration = Duration::from_secs(30);

/// A locked file that contains the id of the process that locked it. Processes that were started
/// with a shared handle hold the lock as well; the system releases it when all of them have ended.
#[derive(Debug)]
pub struct Lock {
    file: Flock<File>,
}

impl Lock {
    /// Locks `path`. If a living process holds the lock, the error names that process, in a
    /// sentence that begins with `what`.
    pub fn acquire(path: &Path, what: &str) -> Result<Self> {
        let deadline = Instant::now() + HANDOVER;
        let mut lock = loop {
            match Self::attempt(path)? {
                Ok(lock) => break lock,
                Err(Some(owner)) if process::alive(owner) => {
                    bail!("{what} is in use by process {owner}")
                }
                Err(_) if Instant::now() > deadline => bail!("{what} is still being stopped"),
                // The owner is dead. Its watchdog still holds the lock and will soon be done.
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        };
        lock.write_owner()?;
        Ok(lock)
    }

    /// The process that has locked `path`, if there is one and it lives.
    pub fn owner(path: &Path) -> Option<i32> {
        if !path.exists() {
            return None;
        }
        Self::attempt(path)
            .ok()?
            .err()?
            .filter(|&pid| process::alive(pid))
    }

    /// Tries to lock the file. The inner error means that it is locked: by which process, if known.
    fn attempt(path: &Path) -> Result<std::result::Result<Self, Option<i32>>> {
        let file = File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(path)
            .with_context(|| format!("Failed to open {}", path.display()))?;
        match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
            Ok(file) => Ok(Ok(Self { file })),
            Err((mut file, Errno::EWOULDBLOCK)) => {
                let mut text = String::new();
                file.read_to_string(&mut text)?;
                Ok(Err(text.trim().parse().ok()))
            }
            Err((_, error)) => Err(error).context("flock failed"),
        }
    }

    fn write_owner(&mut self) -> Result<()> {
        self.file.set_len(0)?;
        self.file.rewind()?;
        writeln!(self.file, "{}", std::process::id())?;
        Ok(())
    }

    /// Another handle of the locked file. A child that inherits it holds the lock as well.
    pub(crate) fn share(&self) -> Result<File> {
        self.file.try_clone().context("Failed to share a lock")
    }
}
