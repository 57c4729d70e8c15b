//! Finds the programs of Postgres, RabbitMQ and PgBouncer, and has them installed if they are missing.

use std::env;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::account::Account;
use crate::install;
use crate::process;
use crate::unpacked::{self, Server};

/// Homebrew's two prefixes: Apple silicon, then Intel.
const HOMEBREW: [&str; 2] = ["/opt/homebrew", "/usr/local"];

/// A directory that contains `postgres`, `initdb` and `psql`.
#[derive(Clone, Debug)]
pub struct PostgresPrograms {
    bin: PathBuf,
    /// The root that they are unpacked in. `None` is the machine itself.
    root: Option<PathBuf>,
}

/// RabbitMQ's scripts, and Erlang's port mapper daemon `epmd`.
#[derive(Clone, Debug)]
pub struct RabbitMqPrograms {
    pub(crate) server: PathBuf,
    pub(crate) ctl: PathBuf,
    pub(crate) epmd: PathBuf,
    /// The root that they are unpacked in. `None` is the machine itself.
    root: Option<PathBuf>,
}

/// Names the root of an unpacked Postgres, which is then used instead of the installed one.
pub const POSTGRES_ROOT: &str = "DEVSTACK_POSTGRES_ROOT";

/// Names the root of an unpacked RabbitMQ, which is then used instead of the installed one.
pub const RABBITMQ_ROOT: &str = "DEVSTACK_RABBITMQ_ROOT";

/// The program `pgbouncer`.
#[derive(Clone, Debug)]
pub struct PgBouncerProgram {
    program: PathBuf,
    /// The root that it is unpacked in. `None` is the machine itself.
    root: Option<PathBuf>,
}

/// Names the root of an unpacked PgBouncer, which is then used instead of the installed one.
pub const PGBOUNCER_ROOT: &str = "DEVSTACK_PGBOUNCER_ROOT";

/// Makes sure that Postgres and RabbitMQ are on this machine. If one is missing, installs Debian's
/// package, or fails with instructions if that is not possible.
pub fn ensure_installed() -> Result<()> {
    ensure_found(true, true)
}

/// Does what [`ensure_installed`] does, for either service or for both.
pub fn ensure_found(postgres: bool, rabbitmq: bool) -> Result<()> {
    let missing = || {
        let mut missing = Vec::new();
        if postgres && PostgresPrograms::find().is_none() {
            missing.push(install::Package::Postgres);
        }
        if rabbitmq && RabbitMqPrograms::find().is_none() {
            missing.push(install::Package::RabbitMq);
        }
        missing
    };
    if missing().is_empty() {
        Ok(())
    } else {
        install::install(missing)
    }
}

/// Returns the path of libfaketime, which is installed if need be. A program that it is preloaded
/// into sees another time than the system's.
pub fn faketime() -> Result<PathBuf> {
    if find_faketime().is_none() {
        let missing = || match find_faketime() {
            Some(_) => Vec::new(),
            None => vec![install::Package::Faketime],
        };
        install::install(missing)?;
    }
    find_faketime().context("libfaketime was installed but cannot be found")
}

/// Looks in each directory of /usr/lib, since Debian puts it into the one of the machine's
/// architecture; then where other distributions put it.
fn find_faketime() -> Option<PathBuf> {
    let libraries = fs::read_dir("/usr/lib").into_iter().flatten().flatten();
    let mut places: Vec<PathBuf> = libraries.map(|entry| entry.path()).collect();
    places.extend(["/usr/lib", "/usr/lib64"].map(PathBuf::from));
    places
        .into_iter()
        .map(|library| library.join("faketime/libfaketime.so.1"))
        .find(|file| file.is_file())
}

impl PostgresPrograms {
    /// The programs of the Postgres that [`POSTGRES_ROOT`] names, or of the installed one. If there
    /// is none, installs Debian's package.
    pub fn find_or_install() -> Result<Self> {
        ensure_found(true, false)?;
        Self::find().context("Postgres was installed but cannot be found")
    }

    /// The programs of one of the [`POSTGRES_VERSIONS`](crate::POSTGRES_VERSIONS), whichever version
    /// is installed. They are unpacked into the directory `under` once, which takes root rights and
    /// a download of some 80 MB.
    pub fn of_version(version: &str, under: &Path) -> Result<Self> {
        let root = unpacked::root(Server::Postgres, version, under)?;
        Self::unpacked_in(root).context("The unpacked Postgres is not complete")
    }

    /// The root that they are unpacked in, unless they are installed on the machine.
    pub fn root(&self) -> Option<&Path> {
        self.root.as_deref()
    }

    fn unpacked_in(root: PathBuf) -> Option<Self> {
        let place = root.join("usr/lib/postgresql");
        let bin = newest_first(&place.to_string_lossy(), "", "bin").into_iter();
        let bin = bin.map(|bin| Some(Path::new("/").join(bin.strip_prefix(&root).ok()?)));
        Some(Self {
            bin: bin.flatten().next()?,
            root: Some(root),
        })
    }

    /// The first installation found: `DEVSTACK_POSTGRES_BIN`, with which another version can be
    /// tried, then `PATH`, then the places where distributions put Postgres.
    fn find() -> Option<Self> {
        match env::var_os(POSTGRES_ROOT) {
            Some(root) => Self::unpacked_in(root.into()),
            None => Self::installed().into_iter().next(),
        }
    }

    /// The installed programs of one major version, which are needed to use data that this version
    /// has written.
    pub(crate) fn installed_of_major(major: &str) -> Option<Self> {
        Self::installed()
            .into_iter()
            .find(|found| found.major().is_ok_and(|it| it == major))
    }

    fn installed() -> Vec<Self> {
        let mut places: Vec<PathBuf> = env::var_os("DEVSTACK_POSTGRES_BIN")
            .map(PathBuf::from)
            .into_iter()
            .collect();
        places.extend(path_directories());
        places.extend(newest_first("/usr/lib/postgresql", "", "bin"));
        places.extend(newest_first("/usr", "pgsql-", "bin"));
        for prefix in HOMEBREW {
            places.extend(newest_first(&format!("{prefix}/opt"), "postgresql@", "bin"));
            places.push(Path::new(prefix).join("bin"));
        }
        places.retain(|bin| {
            ["postgres", "initdb", "psql"]
                .iter()
                .all(|name| bin.join(name).is_file())
        });
        let installed = |bin| Self { bin, root: None };
        places.into_iter().map(installed).collect()
    }

    /// A command that runs one of these programs as the current user.
    pub(crate) fn command(&self, name: &str) -> Command {
        self.command_as(name, Account::CURRENT)
    }

    /// A command that runs one of these programs as `account`.
    pub(crate) fn command_as(&self, name: &str, account: Account) -> Command {
        let words = self.command_line(name, account);
        let mut command = Command::new(&words[0]);
        command.args(&words[1..]);
        self.become_account(&mut command, account);
        command
    }

    /// The words of a command line that runs one of these programs. It becomes `account` by itself
    /// only if it must be root before that, to enter the root that they are unpacked in;
    /// [`PostgresPrograms::become_account`] does it otherwise.
    pub(crate) fn command_line(&self, name: &str, account: Account) -> Vec<OsString> {
        let program = self.bin.join(name).into_os_string();
        match &self.root {
            Some(root) => {
                let mut words = account.command_line();
                words.push(program);
                unpacked::command_line(root, words)
            }
            None => vec![program],
        }
    }

    /// Makes a command with a [`PostgresPrograms::command_line`] run as `account`.
    pub(crate) fn become_account(&self, command: &mut Command, account: Account) {
        if self.root.is_none() {
            account.apply(command);
        }
    }

    /// The major version, as `PG_VERSION` in a data directory spells it.
    pub(crate) fn major(&self) -> Result<String> {
        let output = process::output(self.command("postgres").arg("--version"))?;
        // For example "postgres (PostgreSQL) 15.13 (Debian …)" or "postgres (PostgreSQL) 18beta1".
        let version = output.split_whitespace().nth(2).unwrap_or_default();
        Ok(version.chars().take_while(char::is_ascii_digit).collect())
    }
}

impl RabbitMqPrograms {
    /// The programs of the RabbitMQ that [`RABBITMQ_ROOT`] names, or of the installed one. If there
    /// is none, installs Debian's package.
    pub fn find_or_install() -> Result<Self> {
        ensure_found(false, true)?;
        Self::find().context("RabbitMQ was installed but cannot be found")
    }

    /// The programs of one of the [`RABBITMQ_VERSIONS`](crate::RABBITMQ_VERSIONS), whichever version
    /// is installed. They are unpacked into the directory `under` once, which takes root rights and
    /// a download of some 60 MB.
    pub fn of_version(version: &str, under: &Path) -> Result<Self> {
        unpacked::root(Server::RabbitMq, version, under).map(Self::unpacked_in)
    }

    /// The root that they are unpacked in, unless they are installed on the machine.
    pub fn root(&self) -> Option<&Path> {
        self.root.as_deref()
    }

    /// The words of a command line that runs one of these programs.
    pub(crate) fn command_line(&self, program: &Path) -> Vec<OsString> {
        match &self.root {
            Some(root) => unpacked::command_line(root, vec![program.into()]),
            None => vec![program.into()],
        }
    }

    fn unpacked_in(root: PathBuf) -> Self {
        let bin = Path::new("/usr/lib/rabbitmq/bin");
        Self {
            server: bin.join("rabbitmq-server"),
            ctl: bin.join("rabbitmqctl"),
            epmd: PathBuf::from("/usr/bin/epmd"),
            root: Some(root),
        }
    }

    fn find() -> Option<Self> {
        if let Some(root) = env::var_os(RABBITMQ_ROOT) {
            return Some(Self::unpacked_in(root.into()));
        }
        // Debian's directory of the real scripts comes before PATH. The scripts in /usr/sbin, which
        // PATH leads to, switch to the user `rabbitmq` or refuse to run.
        let mut places = vec![PathBuf::from("/usr/lib/rabbitmq/bin")];
        for prefix in HOMEBREW {
            places.push(Path::new(prefix).join("opt/rabbitmq/sbin"));
            places.push(Path::new(prefix).join("sbin"));
        }
        places.extend(path_directories());
        places.push(PathBuf::from("/usr/sbin"));
        let bin = places.into_iter().find(|bin| {
            ["rabbitmq-server", "rabbitmqctl"]
                .iter()
                .all(|name| bin.join(name).is_file())
        })?;
        Some(Self {
            server: bin.join("rabbitmq-server"),
            ctl: bin.join("rabbitmqctl"),
            epmd: find_epmd()?,
            root: None,
        })
    }
}

impl PgBouncerProgram {
    /// The PgBouncer that [`PGBOUNCER_ROOT`] names, or the installed one. If there is none, installs
    /// Debian's package.
    pub fn find_or_install() -> Result<Self> {
        if Self::find().is_none() {
            let missing = || match Self::find() {
                Some(_) => Vec::new(),
                None => vec![install::Package::PgBouncer],
            };
            install::install(missing)?;
        }
        Self::find().context("PgBouncer was installed but cannot be found")
    }

    /// One of the [`PGBOUNCER_VERSIONS`](crate::PGBOUNCER_VERSIONS), whichever version is installed.
    /// It is unpacked into the directory `under` once, which takes root rights and a download.
    pub fn of_version(version: &str, under: &Path) -> Result<Self> {
        unpacked::root(Server::PgBouncer, version, under).map(Self::unpacked_in)
    }

    /// The root that it is unpacked in, unless it is installed on the machine.
    pub fn root(&self) -> Option<&Path> {
        self.root.as_deref()
    }

    /// The words of a command line that runs it.
    pub(crate) fn command_line(&self) -> Vec<OsString> {
        match &self.root {
            Some(root) => unpacked::command_line(root, vec![self.program.clone().into()]),
            None => vec![self.program.clone().into()],
        }
    }

    /// The major and the minor number of its version.
    pub fn version(&self) -> Result<(u32, u32)> {
        let words = self.command_line();
        let output = crate::process::output(
            std::process::Command::new(&words[0])
                .args(&words[1..])
                .arg("--version"),
        )?;
        // The first line is for example "PgBouncer 1.18.0".
        let version = output.lines().next().unwrap_or_default();
        let mut numbers = version
            .trim_start_matches(|c: char| !c.is_ascii_digit())
            .split('.')
            .map(str::parse);
        match (numbers.next(), numbers.next()) {
            (Some(Ok(major)), Some(Ok(minor))) => Ok((major, minor)),
            _ => bail!("{version:?} is no version of PgBouncer"),
        }
    }

    fn unpacked_in(root: PathBuf) -> Self {
        Self {
            program: PathBuf::from("/usr/sbin/pgbouncer"),
            root: Some(root),
        }
    }

    fn find() -> Option<Self> {
        if let Some(root) = env::var_os(PGBOUNCER_ROOT) {
            return Some(Self::unpacked_in(root.into()));
        }
        let mut places = path_directories();
        places.push(PathBuf::from("/usr/sbin"));
        places.extend(HOMEBREW.map(|prefix| Path::new(prefix).join("bin")));
        places
            .into_iter()
            .map(|bin| bin.join("pgbouncer"))
            .find(|program| program.is_file())
            .map(|program| Self {
                program,
                root: None,
            })
    }
}

fn find_epmd() -> Option<PathBuf> {
    let mut places = path_directories();
    places.push(PathBuf::from("/usr/bin"));
    places.extend(newest_first("/usr/lib/erlang", "erts-", "bin"));
    for prefix in HOMEBREW {
        places.push(Path::new(prefix).join("bin"));
        places.extend(newest_first(
            &format!("{prefix}/opt/erlang/lib/erlang"),
            "erts-",
            "bin",
        ));
    }
    places
        .into_iter()
        .map(|bin| bin.join("epmd"))
        .find(|program| program.is_file())
}

/// Whether `PATH` leads to this program.
pub(crate) fn on_path(name: &str) -> bool {
    path_directories()
        .iter()
        .any(|bin| bin.join(name).is_file())
}

pub(crate) fn path_directories() -> Vec<PathBuf> {
    env::var_os("PATH")
        .map(|path| env::split_paths(&path).collect())
        .unwrap_or_default()
}

/// The paths `<parent>/<prefix><version>/<inside>` of all versions that exist, newest first.
fn newest_first(parent: &str, prefix: &str, inside: &str) -> Vec<PathBuf> {
    let mut found: Vec<(Vec<u32>, PathBuf)> = fs::read_dir(parent)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let version = name.strip_prefix(prefix)?;
            let version: Option<Vec<u32>> =
                version.split('.').map(|part| part.parse().ok()).collect();
            Some((version?, entry.path().join(inside)))
        })
        .collect();
    found.sort_by(|a, b| b.0.cmp(&a.0));
    found.into_iter().map(|(_, path)| path).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn version_ten_is_newer_than_version_nine() {
        let parent = env::temp_dir().join(format!("devstack-versions-{}", std::process::id()));
        for name in ["v9", "v10", "v9.6", "other"] {
            fs::create_dir_all(parent.join(name)).unwrap();
        }
        let found = newest_first(parent.to_str().unwrap(), "v", "bin");
        fs::remove_dir_all(&parent).unwrap();
        let expected: Vec<_> = ["v10", "v9.6", "v9"]
            .iter()
            .map(|name| parent.join(name).join("bin"))
            .collect();
        assert_eq!(found, expected);
    }
}
