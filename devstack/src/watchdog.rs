//! The process that outlives its owner and stops what the owner started.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::Mutex;

use anyhow::{Context, Result};
use nix::sys::signal::Signal;

use crate::process::Group;
use crate::unpoisoned;

/// Reads what to watch from a pipe that only the owner can write to. However the owner ends, the pipe ends with it; then
/// each process group that is left gets its signal, and SIGKILL when it does not obey.
///
/// Lines are `+ PID SIGNAL` and `- PID`. The arguments are the patience in tenths of a second, and a directory to delete
/// in the end, or nothing.
const WATCH: &str = r#"
trap '' HUP INT QUIT TERM
patience=$1 directory=$2 watched=
while read -r verb pid signal; do
    case $verb in
    +) watched="$watched $pid:$signal" ;;
    -)
        kept=
        for it in $watched; do [ "${it%%:*}" = "$pid" ] || kept="$kept $it"; done
        watched=$kept
        ;;
    esac
done
alive() { kill -0 "$1" && ! grep -qs '^State:[[:space:]]*Z' "/proc/$1/status"; }
any_alive() {
    for it in $watched; do alive "${it%%:*}" && return 0; done
    return 1
}
for it in $watched; do
    kill -s "${it##*:}" -- "-${it%%:*}"
    kill -s CONT -- "-${it%%:*}"
done
while any_alive && [ "$patience" -gt 0 ]; do
    sleep 0.1
    patience=$((patience - 1))
done
for it in $watched; do
    if alive "${it%%:*}"; then kill -s KILL -- "-${it%%:*}"; fi
done
if [ -n "$directory" ]; then
    for attempt in 1 2 3; do rm -rf -- "$directory" && break || sleep 0.2; done
    rmdir -- "$(dirname "$directory")"
fi
exit 0
"#;

/// Tells the watchdog its own id before it becomes the program: there is no moment in which the owner can die and leave a
/// process that nobody knows of. Its stdout is the watchdog's pipe until `exec`.
const LAUNCH: &str = r#"
signal=$1 log=$2 pidfile=$3 marker=$4
shift 4
echo "+ $$ $signal"
echo "$$ $marker" >"$pidfile"
exec "$@" </dev/null >>"$log" 2>&1
"#;

/// How a process is started under a watchdog.
pub(crate) struct Launch<'a> {
    /// What the watchdog sends to end it.
    pub(crate) signal: Signal,
    /// Where its output goes.
    pub(crate) log: &'a Path,
    /// Where its id and the marker are written, for the next run to find it if all else failed.
    pub(crate) pidfile: &'a Path,
    /// What its command line is known by.
    pub(crate) marker: &'a str,
}

/// The owner's end of it.
#[derive(Debug)]
pub(crate) struct Watchdog {
    pipe: Mutex<Option<ChildStdin>>,
    child: Mutex<Child>,
}

impl Watchdog {
    /// `lock` is a lock to hold on to, so that a new owner waits until the old one's processes are gone. `delete` is
    /// removed when the owner is done or gone, and its parent if that leaves it empty.
    pub(crate) fn start(lock: Option<File>, delete: Option<&Path>) -> Result<Self> {
        let mut child = Command::new("/bin/sh")
            .args(["-c", WATCH, "devstack-watchdog", "100"])
            .arg(delete.unwrap_or(Path::new("")))
            .current_dir("/")
            .process_group(0)
            .stdin(Stdio::piped())
            .stdout(lock.map_or_else(Stdio::null, Stdio::from))
            .stderr(Stdio::null())
            .spawn()
            .context("Failed to start a watchdog")?;
        let pipe = Mutex::new(child.stdin.take());
        Ok(Self {
            pipe,
            child: Mutex::new(child),
        })
    }

    /// Starts a process in a group of its own; `configure` adds the program, its arguments and its surroundings.
    pub(crate) fn launch(
        &self,
        launch: &Launch,
        configure: impl FnOnce(&mut Command),
    ) -> Result<Group> {
        let pipe: OwnedFd = {
            let pipe = unpoisoned(&self.pipe);
            pipe.as_ref()
                .context("the watchdog is gone")?
                .as_fd()
                .try_clone_to_owned()?
        };
        let mut command = Command::new("/bin/sh");
        command.args(["-c", LAUNCH, "devstack-launch", short(launch.signal)]);
        command
            .args([launch.log, launch.pidfile])
            .arg(launch.marker);
        configure(&mut command);
        let child = command
            .process_group(0)
            .stdin(Stdio::null())
            .stdout(pipe)
            .stderr(Stdio::null())
            .spawn()
            .with_context(|| format!("Failed to start {}", launch.marker))?;
        Ok(Group::new(child))
    }

    /// Adds a process group that the owner found rather than started.
    pub(crate) fn watch(&self, pid: i32, signal: Signal) {
        self.tell(&format!("+ {pid} {}\n", short(signal)));
    }

    /// A process that ended must be forgotten: its id may be given to someone else.
    pub(crate) fn forget(&self, pid: i32) {
        self.tell(&format!("- {pid}\n"));
    }

    fn tell(&self, line: &str) {
        // It fails only if someone killed the watchdog; the owner still stops everything itself.
        if let Some(pipe) = unpoisoned(&self.pipe).as_mut() {
            let _ = pipe.write_all(line.as_bytes());
        }
    }
}

impl Drop for Watchdog {
    /// Lets it do what it does for a dead owner, and waits for that.
    fn drop(&mut self) {
        drop(unpoisoned(&self.pipe).take());
        let _ = unpoisoned(&self.child).wait();
    }
}

/// `TERM` for SIGTERM, as `kill -s` wants it.
fn short(signal: Signal) -> &'static str {
    signal.as_str().trim_start_matches("SIG")
}
