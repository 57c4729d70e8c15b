//! A watchdog is a process that waits for the end of the process that started it, its owner, and
//! then stops what the owner has left running.

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

/// The watchdog's script. It reads from a pipe what to watch. However the owner ends, the pipe is
/// then closed; each process group that is watched gets its signal, and SIGKILL if it has not ended
/// in time.
///
/// The lines are `+ PID SIGNAL` to watch a group and `- PID` to forget it. The arguments are the
/// time until SIGKILL, in tenths of a second, and a directory to delete at last, or an empty text.
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

/// Starts a program under a watchdog. The script tells the watchdog its own process id, through its
/// stdout, which is the watchdog's pipe, and only then becomes the program with `exec`. So there is
/// no moment in which the owner can die and leave a program that the watchdog does not know.
const LAUNCH: &str = r#"
signal=$1 log=$2 pidfile=$3 marker=$4
shift 4
echo "+ $$ $signal"
echo "$$ $marker" >"$pidfile"
exec "$@" </dev/null >>"$log" 2>&1
"#;

/// How a program is started under a watchdog.
pub(crate) struct Launch<'a> {
    /// The signal with which the watchdog ends it.
    pub(crate) signal: Signal,
    /// The file that its output is appended to.
    pub(crate) log: &'a Path,
    /// The file that its process id and the marker are written to. By it the next run finds a
    /// process that is left because owner and watchdog were both killed.
    pub(crate) pidfile: &'a Path,
    /// A part of its command line, by which the next run recognises it.
    pub(crate) marker: &'a str,
}

/// The owner's handle of a watchdog.
#[derive(Debug)]
pub(crate) struct Watchdog {
    pipe: Mutex<Option<ChildStdin>>,
    child: Mutex<Child>,
}

impl Watchdog {
    /// Starts a watchdog. When everything is stopped it deletes the directory `delete`, and the
    /// parent of that if it is left empty. It holds `lock` until it ends, so that a new owner waits
    /// until the processes of the old one have ended.
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

    /// Starts a program in a process group of its own. `configure` adds the program, its arguments
    /// and its environment to the command.
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

    /// Makes the watchdog watch a process group that was not started with `launch`.
    pub(crate) fn watch(&self, pid: i32, signal: Signal) {
        self.tell(&format!("+ {pid} {}\n", short(signal)));
    }

    /// Makes the watchdog forget a process that has ended, because its id may be given to another
    /// process.
    pub(crate) fn forget(&self, pid: i32) {
        self.tell(&format!("- {pid}\n"));
    }

    fn tell(&self, line: &str) {
        // This fails only if the watchdog was killed. The owner then still stops everything itself.
        if let Some(pipe) = unpoisoned(&self.pipe).as_mut() {
            let _ = pipe.write_all(line.as_bytes());
        }
    }
}

impl Drop for Watchdog {
    /// Closes the pipe, on which the watchdog does what it does when the owner dies, and waits
    /// until it has done so.
    fn drop(&mut self) {
        drop(unpoisoned(&self.pipe).take());
        let _ = unpoisoned(&self.child).wait();
    }
}

/// The name of a signal as `kill -s` expects it: `TERM` for SIGTERM.
fn short(signal: Signal) -> &'static str {
    signal.as_str().trim_start_matches("SIG")
}
