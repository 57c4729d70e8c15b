//! One owner for a directory.

use std::fs::File;
use std::io::{Read, Seek, Write};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::errno::Errno;
use nix::fcntl::{Flock, FlockArg};

use crate::process;

/// How long a new owner waits for the watchdog of a dead one to stop what is left.
const HANDOVER: Duration = Duration::from_secs(30);

/// A locked file with the id of the process that locked it. The system unlocks it when all holders are gone.
#[derive(Debug)]
pub struct Lock {
    file: Flock<File>,
}

impl Lock {
    /// Locks `path`, or says which process has it. `what` begins that sentence.
    pub fn acquire(path: &Path, what: &str) -> Result<Self> {
        let deadline = Instant::now() + HANDOVER;
        let mut lock = loop {
            match Self::attempt(path)? {
                Ok(lock) => break lock,
                Err(Some(owner)) if process::alive(owner) => {
                    bail!("{what} is in use by process {owner}")
                }
                Err(_) if Instant::now() > deadline => bail!("{what} is still being stopped"),
                // A dead owner: its watchdog still holds the lock, and is about to be done.
                Err(_) => thread::sleep(Duration::from_millis(20)),
            }
        };
        lock.write_owner()?;
        Ok(lock)
    }

    /// The process that holds the lock at `path`, if one does.
    pub fn owner(path: &Path) -> Option<i32> {
        if !path.exists() {
            return None;
        }
        Self::attempt(path)
            .ok()?
            .err()?
            .filter(|&pid| process::alive(pid))
    }

    /// The inner error is the owner's id, as far as it can be read.
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

    /// Another handle that keeps the lock held, for a child to inherit.
    pub(crate) fn share(&self) -> Result<File> {
        self.file.try_clone().context("Failed to share a lock")
    }
}
