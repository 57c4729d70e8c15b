//! A disk for Postgres that can run full: a tmpfs whose size is reduced to what is on it.

use std::{
    ffi::OsStr,
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, ensure};
use devstack::{Postgres, Stack};
use nix::sys::statvfs::statvfs;
use tokio::time::Instant;

use crate::{chaos::Chaos, fault::Fault};

/// The size of the disk. A tmpfs takes only the memory that its files need.
const ROOM: &str = "8g";

/// The environment variable that says that this process has a mount namespace of its own.
const APART: &str = "TORTURE_APART";

/// How long Postgres may take to recover by itself, or to run out of WAL.
const PATIENCE: Duration = Duration::from_secs(10);

/// A tmpfs that is mounted at this directory, and unmounted when this is dropped.
pub struct Disk(PathBuf);

/// Starts this program again in a mount namespace of its own, if that is allowed. What is mounted there
/// disappears with the last process in it, however that ended.
pub fn set_apart() {
    let unshare = || {
        let mut unshare = Command::new("unshare");
        unshare.arg("--mount");
        unshare
    };
    let may = unshare().arg("true").stderr(Stdio::null()).status();
    if std::env::var_os(APART).is_some() || !may.is_ok_and(|status| status.success()) {
        return;
    }
    if let Ok(own) = std::env::current_exe() {
        // `exec` returns only if it fails. Then the campaign runs without a disk.
        let args = std::env::args_os().skip(1);
        let _ = unshare().arg(own).args(args).env(APART, "yes").exec();
    }
}

impl Disk {
    /// Mounts a new disk at this directory, which fails where this process may not mount.
    fn mount(at: &Path) -> anyhow::Result<Self> {
        ensure!(
            std::env::var_os(APART).is_some(),
            "no right to a mount namespace"
        );
        std::fs::create_dir_all(at)?;
        mount([
            OsStr::new("-t"),
            OsStr::new("tmpfs"),
            OsStr::new("-o"),
            OsStr::new(&format!("size={ROOM}")),
            OsStr::new("torture"),
            at.as_os_str(),
        ])?;
        Ok(Self(at.to_owned()))
    }

    /// Mounts a disk at this directory if one of the faults needs it. Where that is not possible, those faults
    /// are left out.
    pub fn for_faults(kinds: Vec<Fault>, at: &Path) -> (Vec<Fault>, Option<Self>) {
        if !kinds.iter().any(|fault| fault.fills_disk()) {
            return (kinds, None);
        }
        match Self::mount(at) {
            Ok(disk) => (kinds, Some(disk)),
            Err(e) => {
                let (full, others): (Vec<Fault>, _) =
                    kinds.into_iter().partition(|fault| fault.fills_disk());
                let names = full.iter().map(|fault| fault.name());
                let names = names.collect::<Vec<_>>().join(", ");
                println!("{names} skipped: cannot mount ({e:#})");
                (others, None)
            }
        }
    }

    /// Leaves no free space on the disk.
    fn fill(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let disk = statvfs(&self.0)?;
            let used = (disk.blocks() - disk.blocks_free()) * disk.fragment_size();
            // This fails if more was written in the meantime.
            match self.resize(&used.to_string()) {
                Err(e) if Instant::now() > deadline => return Err(e),
                Err(_) => {}
                Ok(()) => return Ok(()),
            }
        }
    }

    fn resize(&self, size: &str) -> anyhow::Result<()> {
        let size = format!("remount,size={size}");
        mount([OsStr::new("-o"), OsStr::new(&size), self.0.as_os_str()])
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("--lazy").arg(&self.0).status();
    }
}

fn mount<'a>(args: impl IntoIterator<Item = &'a OsStr>) -> anyhow::Result<()> {
    let done = Command::new("mount").args(args).output()?;
    let why = String::from_utf8_lossy(&done.stderr);
    ensure!(done.status.success(), "mount: {}", why.trim());
    Ok(())
}

impl Chaos {
    /// Keeps the disk full until an instance has noticed. Postgres may have stopped by then, and is started
    /// again once there is room.
    pub async fn fill_disk(&self, fault: Fault) -> anyhow::Result<Option<Duration>> {
        let disk = self.disk.as_ref().context("there is no disk to fill")?;
        disk.fill()?;
        let red = if fault == Fault::PgFullWal {
            self.do_to(|s| use_up_wal(&s.postgres)).await?;
            Ok(self.noticed(fault, &self.addresses).await)
        } else {
            self.met(fault).await
        };
        disk.resize(ROOM)?;
        self.do_to(|s: &Stack| get_up(&s.postgres)).await?;
        red.map(Some)
    }
}

/// Fills the WAL segments that exist already, which Postgres can write without more disk space.
fn use_up_wal(postgres: &Postgres) -> anyhow::Result<()> {
    let sql = "SELECT pg_logical_emit_message(true, 'torture', 'wal'), pg_switch_wal()";
    let deadline = Instant::now() + PATIENCE;
    while postgres.psql("postgres", sql).is_ok() {
        ensure!(Instant::now() < deadline, "there is no end to the WAL");
    }
    Ok(())
}

fn get_up(postgres: &Postgres) -> anyhow::Result<()> {
    let deadline = Instant::now() + PATIENCE;
    while Instant::now() < deadline {
        if postgres.psql("postgres", "SELECT").is_ok() {
            return Ok(());
        }
        std::thread::sleep(Duration::from_millis(100));
    }
    postgres.kill()?;
    postgres.start_again()
}
