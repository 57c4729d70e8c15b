//! Finds processes, signals them, and waits for them with a deadline.

use std::fs;
use std::io;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

/// How often a condition is looked at while waiting for it.
const POLL: Duration = Duration::from_millis(10);

/// A child that leads a process group of its own.
#[derive(Debug)]
pub(crate) struct Group {
    child: Child,
}

impl Group {
    /// `child` must have been started with `process_group(0)`.
    pub(crate) fn new(child: Child) -> Self {
        Self { child }
    }

    pub(crate) fn pid(&self) -> i32 {
        self.child.id().cast_signed()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        // This fails only if the group has ended, and then there is nothing to signal.
        let _ = killpg(Pid::from_raw(self.pid()), signal);
    }

    /// The ids of the leader and all its descendants. They are found by their parents and not by
    /// the process group, because each backend of Postgres has a session of its own.
    pub(crate) fn tree(&self) -> Result<Vec<i32>> {
        let all = snapshot()?;
        let mut tree = vec![self.pid()];
        let mut next = 0;
        while let Some(&parent) = tree.get(next) {
            tree.extend(all.iter().filter(|it| it.parent == parent).map(|it| it.pid));
            next += 1;
        }
        Ok(tree)
    }

    /// Stops the whole tree with SIGSTOP. Parents come first, and the search is repeated until it
    /// finds nothing new, so that no process can be started unnoticed. Returns all ids.
    pub(crate) fn freeze(&self) -> Result<Vec<i32>> {
        let mut frozen: Vec<i32> = Vec::new();
        loop {
            let tree = self.tree()?;
            let new: Vec<i32> = tree
                .into_iter()
                .filter(|pid| !frozen.contains(pid))
                .collect();
            if new.is_empty() {
                return Ok(frozen);
            }
            for &pid in &new {
                signal_one(pid, Signal::SIGSTOP);
            }
            frozen.extend(new);
        }
    }

    /// Kills the whole tree with SIGKILL, and returns when all of it is dead.
    pub(crate) fn kill_tree(&mut self) -> Result<()> {
        let tree = self.freeze()?;
        self.signal(Signal::SIGKILL);
        for &pid in &tree {
            signal_one(pid, Signal::SIGKILL);
        }
        self.child
            .wait()
            .context("Failed to wait for a killed process")?;
        wait_until(Duration::from_secs(10), || {
            Ok(!tree.iter().any(|&pid| alive(pid)))
        })
        .context("Processes survived SIGKILL")
    }

    pub(crate) fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        self.child
            .try_wait()
            .context("Failed to wait for a process")
    }

    /// Sends `signal` to the group, and kills the tree if the leader has not ended in time.
    pub(crate) fn stop(&mut self, signal: Signal, within: Duration) -> Result<()> {
        for pid in self.tree()? {
            signal_one(pid, Signal::SIGCONT);
        }
        self.signal(signal);
        let ended = wait_until(within, || Ok(self.child.try_wait()?.is_some()));
        if ended.is_err() {
            self.kill_tree()
        } else {
            Ok(())
        }
    }
}

/// Sends a signal to one process. It is no error if the process has ended.
pub(crate) fn signal_one(pid: i32, signal: Signal) {
    let _ = kill(Pid::from_raw(pid), signal);
}

/// Whether the process exists and is not a zombie.
pub(crate) fn alive(pid: i32) -> bool {
    match kill(Pid::from_raw(pid), None) {
        Err(nix::errno::Errno::ESRCH) => false,
        _ => !snapshot().is_ok_and(|all| all.iter().any(|it| it.pid == pid && it.zombie)),
    }
}

/// Whether the process exists and has `marker` in its command line. Its id alone would not do: it
/// may meanwhile belong to another process.
pub(crate) fn is_ours(pid: i32, marker: &str) -> bool {
    if !alive(pid) {
        return false;
    }
    let command_line = match fs::read(format!("/proc/{pid}/cmdline")) {
        Ok(bytes) => String::from_utf8_lossy(&bytes).replace('\0', " "),
        Err(_) => output(Command::new("ps").args(["-ww", "-o", "args=", "-p", &pid.to_string()]))
            .unwrap_or_default(),
    };
    command_line.contains(marker)
}

struct Entry {
    pid: i32,
    parent: i32,
    zombie: bool,
}

/// Lists all processes, from /proc or, on systems without it, from `ps`.
fn snapshot() -> Result<Vec<Entry>> {
    if !Path::new("/proc/self/stat").exists() {
        let lines = output(Command::new("ps").args(["-A", "-o", "pid=,ppid=,stat="]))?;
        return Ok(lines
            .lines()
            .filter_map(|line| entry(line.split_whitespace()))
            .collect());
    }
    let mut all = Vec::new();
    for directory in fs::read_dir("/proc")
        .context("Failed to read /proc")?
        .flatten()
    {
        let pid = directory.file_name();
        let Some(pid) = pid
            .to_str()
            .filter(|name| name.bytes().all(|byte| byte.is_ascii_digit()))
        else {
            continue;
        };
        // The process may have ended since it was listed.
        let Ok(stat) = fs::read_to_string(directory.path().join("stat")) else {
            continue;
        };
        // The line is "PID (name) STATE PARENT …", and the name may contain parentheses.
        let Some((_, rest)) = stat.rsplit_once(')') else {
            continue;
        };
        let mut fields = rest.split_whitespace();
        if let (Some(state), Some(parent)) = (fields.next(), fields.next()) {
            all.extend(entry([pid, parent, state].into_iter()));
        }
    }
    Ok(all)
}

/// Reads the fields process id, parent and state.
fn entry<'a>(mut fields: impl Iterator<Item = &'a str>) -> Option<Entry> {
    let pid = fields.next()?.parse().ok()?;
    let parent = fields.next()?.parse().ok()?;
    Some(Entry {
        pid,
        parent,
        zombie: fields.next()?.starts_with('Z'),
    })
}

/// Polls `condition` until it holds. Fails if it does not hold in time.
pub(crate) fn wait_until(
    within: Duration,
    mut condition: impl FnMut() -> Result<bool>,
) -> Result<()> {
    let deadline = Instant::now() + within;
    while !condition()? {
        if Instant::now() >= deadline {
            bail!("nothing within {} s", within.as_secs());
        }
        thread::sleep(POLL);
    }
    Ok(())
}

/// Runs a program to its end and returns what it wrote to stdout. If it fails, the error contains
/// what it wrote to stderr and stdout.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let name = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .with_context(|| format!("Failed to run {name}"))?;
    let stdout = String::from_utf8_lossy(&output.stdout);
    if !output.status.success() {
        let stderr = String::from_utf8_lossy(&output.stderr);
        bail!(
            "{name} failed with {}:\n{}{}",
            output.status,
            stderr,
            stdout
        );
    }
    Ok(stdout.trim_end().to_owned())
}

/// The exit code that a shell would show: that of the program, or 128 and the number of the signal
/// that ended it.
pub fn exit_code(status: ExitStatus) -> u8 {
    let code = status
        .code()
        .or_else(|| status.signal().map(|signal| 128 + signal))
        .unwrap_or(1);
    u8::try_from(code).unwrap_or(1)
}

/// The last lines of a log file, to be shown with an error.
pub(crate) fn tail(log: &Path, lines: usize) -> String {
    let text = fs::read(log).map_err(|error: io::Error| error.to_string());
    let text = match &text {
        Ok(bytes) => String::from_utf8_lossy(bytes).into_owned(),
        Err(error) => error.clone(),
    };
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}
