//! `cargo dev test --matrix`: the core of the suite on every Postgres and RabbitMQ that can be had.
//!
//! Not each with each: every Postgres with the machine's RabbitMQ, every RabbitMQ with the machine's
//! Postgres, and the newest with the newest.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use devstack::{
    Foreground, POSTGRES_ROOT, POSTGRES_VERSIONS, Postgres, PostgresPrograms, RABBITMQ_ROOT,
    RABBITMQ_VERSIONS, RabbitMq, RabbitMqPrograms, exit_code,
};

use crate::interrupts::Interrupts;
use crate::test::CORE;
use crate::workspace::Workspace;

/// How often the line that tells how far a run is changes on a terminal.
const REFRESH: Duration = Duration::from_secs(1);

/// A server of one version.
struct Server {
    /// The version that the server itself tells, or the one that was asked for if it cannot be had.
    version: String,
    /// The root that it is unpacked in. `None` is the machine's.
    root: Option<PathBuf>,
    /// Why it cannot be had.
    missing: Option<String>,
}

impl Server {
    /// Starts a server for a moment and lets it tell its version. `asked` is `None` for the one of
    /// this machine.
    fn look(asked: Option<&str>, tell: impl FnOnce() -> Result<(String, Option<PathBuf>)>) -> Self {
        match tell() {
            Ok((version, root)) => Self {
                version,
                root,
                missing: None,
            },
            Err(error) => Self {
                version: asked.unwrap_or("of this machine").to_owned(),
                root: None,
                missing: Some(format!("{error:#}")),
            },
        }
    }

    fn postgres(asked: Option<&str>, under: &Path) -> Self {
        looking("Postgres", asked);
        Self::look(asked, || {
            let programs = match asked {
                Some(version) => PostgresPrograms::of_version(version, under)?,
                None => PostgresPrograms::find_or_install()?,
            };
            let root = programs.root().map(Path::to_owned);
            let server = Postgres::start_temporary_of("matrix", programs)?;
            Ok((server.version()?, root))
        })
    }

    fn rabbitmq(asked: Option<&str>, under: &Path) -> Self {
        looking("RabbitMQ", asked);
        Self::look(asked, || {
            let programs = match asked {
                Some(version) => RabbitMqPrograms::of_version(version, under)?,
                None => RabbitMqPrograms::find_or_install()?,
            };
            let root = programs.root().map(Path::to_owned);
            let server = RabbitMq::start_temporary_with("matrix", programs)?;
            Ok((server.version()?, root))
        })
    }
}

enum Outcome {
    Passed(usize),
    /// How many passed, and which failed; none if the test program did not come to its end.
    Failed(usize, Vec<String>),
    Skipped(String),
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Passed(passed) => write!(f, "{passed} passed"),
            Self::Failed(passed, failed) if failed.is_empty() => {
                write!(f, "FAILED: {passed} passed, then it ended")
            }
            Self::Failed(passed, failed) => {
                write!(f, "FAILED: {}; {passed} passed", failed.join(", "))
            }
            Self::Skipped(why) => write!(f, "skipped: {}", why.replace('\n', " ")),
        }
    }
}

/// Runs the matrix and prints its table. The exit code is 1 if a test failed anywhere.
pub(crate) fn run(workspace: &Workspace) -> Result<u8> {
    let interrupts = Interrupts::catch()?;
    let mut build = workspace.cargo(&["test", "--workspace", "--no-run", "--quiet"]);
    let mut build = Foreground::start(build.args(&CORE[..2]), None)?;
    let built = interrupts.wait(&mut build, || {})?;
    if !built.success() {
        return Ok(exit_code(built));
    }

    let under = workspace.directory();
    let asked = |versions: &'static [&str]| {
        let others = versions.iter().copied().map(Some);
        [None].into_iter().chain(others)
    };
    let postgres: Vec<Server> = asked(&POSTGRES_VERSIONS)
        .map(|version| Server::postgres(version, under))
        .collect();
    let rabbitmq: Vec<Server> = asked(&RABBITMQ_VERSIONS)
        .map(|version| Server::rabbitmq(version, under))
        .collect();

    let logs = under.join("matrix");
    fs::create_dir_all(&logs).with_context(|| format!("Failed to create {}", logs.display()))?;
    let pairs = pairs(&postgres, &rabbitmq);
    let mut table = String::from("| Postgres | RabbitMQ | result | seconds |\n|---|---|---|---|\n");
    let mut failed = false;
    for (index, &(postgres, rabbitmq)) in pairs.iter().enumerate() {
        let name = format!(
            "Postgres {}, RabbitMQ {}",
            postgres.version, rabbitmq.version
        );
        let log = logs.join(format!("{}-{}.log", postgres.version, rabbitmq.version));
        let title = format!("{} of {}: {name}", index + 1, pairs.len());
        let begun = Instant::now();
        let why = postgres.missing.as_ref().or(rabbitmq.missing.as_ref());
        let outcome = match why {
            Some(why) => Outcome::Skipped(why.clone()),
            None => {
                let Some(outcome) =
                    core(workspace, &interrupts, (postgres, rabbitmq), &title, &log)?
                else {
                    return Ok(130);
                };
                outcome
            }
        };
        let seconds = begun.elapsed().as_secs();
        say(&format!("{title}: {outcome}, {seconds} s\n"));
        if let Outcome::Failed(..) = outcome {
            failed = true;
            eprintln!("  its log is {}", log.display());
        }
        let (postgres, rabbitmq) = (&postgres.version, &rabbitmq.version);
        table.push_str(&format!(
            "| {postgres} | {rabbitmq} | {outcome} | {seconds} |\n"
        ));
    }
    print!("\n{table}");
    Ok(u8::from(failed))
}

/// The pairs to test. The first of each list is the machine's own, and the last one is the newest.
fn pairs<'a>(postgres: &'a [Server], rabbitmq: &'a [Server]) -> Vec<(&'a Server, &'a Server)> {
    let mut pairs: Vec<_> = postgres.iter().map(|it| (it, &rabbitmq[0])).collect();
    pairs.extend(rabbitmq[1..].iter().map(|it| (&postgres[0], it)));
    let newest = |servers: &'a [Server]| servers.iter().rfind(|it| it.missing.is_none());
    if let (Some(postgres), Some(rabbitmq)) = (newest(postgres), newest(rabbitmq))
        && postgres.root.is_some()
        && rabbitmq.root.is_some()
    {
        pairs.push((postgres, rabbitmq));
    }
    pairs
}

/// Runs the core of the suite on two servers. Returns `None` if it was interrupted.
fn core(
    workspace: &Workspace,
    interrupts: &Interrupts,
    (postgres, rabbitmq): (&Server, &Server),
    title: &str,
    log: &Path,
) -> Result<Option<Outcome>> {
    let output =
        File::create(log).with_context(|| format!("Failed to create {}", log.display()))?;
    let mut command = workspace.cargo(&["test", "--workspace"]);
    command.args(CORE);
    command.envs(postgres.root.as_ref().map(|root| (POSTGRES_ROOT, root)));
    command.envs(rabbitmq.root.as_ref().map(|root| (RABBITMQ_ROOT, root)));
    command.stdin(Stdio::null());
    command.stdout(output.try_clone()?).stderr(output);
    let begun = Instant::now();
    let mut told = begun;
    let mut tests = Foreground::start(&mut command, None)?;
    let status = interrupts.wait(&mut tests, || {
        if io::stderr().is_terminal() && told.elapsed() >= REFRESH {
            told = Instant::now();
            let done = results(log, "ok").len();
            say(&format!(
                "{title}: {done} passed, {} s",
                begun.elapsed().as_secs()
            ));
        }
    })?;
    if status.code().is_none() {
        return Ok(None);
    }
    let passed = results(log, "ok").len();
    Ok(Some(if status.success() {
        Outcome::Passed(passed)
    } else {
        Outcome::Failed(passed, results(log, "FAILED"))
    }))
}

/// The names of the tests that have this result, so far.
fn results(log: &Path, result: &str) -> Vec<String> {
    let log = fs::read(log).unwrap_or_default();
    let log = String::from_utf8_lossy(&log);
    let name = |line: &str| {
        let (name, found) = line.strip_prefix("test ")?.split_once(" ... ")?;
        (found == result).then(|| name.to_owned())
    };
    log.lines().filter_map(name).collect()
}

/// Says on a terminal which server is being started to tell its version.
fn looking(name: &str, asked: Option<&str>) {
    if io::stderr().is_terminal() {
        say(&format!("{name} {} …", asked.unwrap_or("of this machine")));
    }
}

/// Writes to stderr; on a terminal over the line that is there.
fn say(text: &str) {
    let clear = if io::stderr().is_terminal() {
        "\r\x1b[K"
    } else {
        ""
    };
    eprint!("{clear}{text}");
    let _ = io::stderr().flush();
}
