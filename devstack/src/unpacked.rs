//! Unpacks a Postgres, RabbitMQ or PgBouncer of another version than the machine's, and runs it beside that
//! one.
//!
//! The packages of another Debian or Ubuntu suite are unpacked into a directory, the root. Their
//! programs expect to be in /usr, together with the libraries of their suite, so they run in a mount
//! namespace of their own, in which the root's /usr lies over the machine's. Everything else is the
//! machine's: data directories, /proc, /etc, the network and the process ids. So these processes
//! are signalled and watched like any others, and the mount vanishes with the last of them.

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use nix::unistd::geteuid;

use crate::install::{self, Package};
use crate::process;
use crate::programs;

/// The versions of Postgres that can be unpacked. `sid` is the one that Debian sid has, whichever
/// that is.
pub const POSTGRES_VERSIONS: [&str; 5] = ["13", "14", "16", "17", SID];

/// The versions of RabbitMQ that can be unpacked.
pub const RABBITMQ_VERSIONS: [&str; 3] = ["3.12", "4.0", SID];

/// The versions of PgBouncer that can be unpacked.
pub const PGBOUNCER_VERSIONS: [&str; 1] = ["1.24"];

const SID: &str = "sid";

/// A server that can be unpacked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Server {
    Postgres,
    RabbitMq,
    PgBouncer,
}

impl Server {
    fn name(self) -> &'static str {
        match self {
            Self::Postgres => "Postgres",
            Self::RabbitMq => "RabbitMQ",
            Self::PgBouncer => "PgBouncer",
        }
    }

    fn versions(self) -> &'static [&'static str] {
        match self {
            Self::Postgres => &POSTGRES_VERSIONS,
            Self::RabbitMq => &RABBITMQ_VERSIONS,
            Self::PgBouncer => &PGBOUNCER_VERSIONS,
        }
    }

    /// The suite that has a version.
    fn suite(self, version: &str) -> Option<&'static str> {
        match (self, version) {
            (Self::Postgres, "13") => Some("bullseye"),
            (Self::Postgres, "14") => Some("jammy"),
            (Self::Postgres, "16") | (Self::RabbitMq, "3.12") => Some("noble"),
            (Self::Postgres, "17") | (Self::RabbitMq, "4.0") | (Self::PgBouncer, "1.24") => {
                Some("trixie")
            }
            (_, SID) => Some(SID),
            _ => None,
        }
    }

    /// The server, and what every Debian has so that no package depends on it: a shell and the
    /// programs that scripts call, and setpriv of util-linux, with which Postgres is run as another
    /// account than root.
    fn packages(self) -> &'static str {
        match self {
            Self::Postgres => "postgresql,dash,coreutils,sed,grep,util-linux",
            Self::RabbitMq => "rabbitmq-server,dash,coreutils,sed,grep",
            Self::PgBouncer => "pgbouncer",
        }
    }

    /// The directory of a root that holds a directory for each version, and what comes before the
    /// version in its name; PgBouncer has none.
    fn place(self) -> Option<(&'static str, &'static str)> {
        match self {
            Self::Postgres => Some(("usr/lib/postgresql", "")),
            Self::RabbitMq => Some(("usr/lib/rabbitmq/lib", "rabbitmq_server-")),
            Self::PgBouncer => None,
        }
    }
}

/// Lays a directory over /usr and becomes the program that the other arguments name. What the
/// machine sets for its own programs and libraries must not lead those of the root astray.
const ENTER: &str = r#"
mount --bind "$0" /usr || exit
unset LD_LIBRARY_PATH LD_PRELOAD
PATH=/usr/sbin:/usr/bin:/sbin:/bin exec "$@"
"#;

/// The command line that runs `program`, a command line itself, in the root. The paths in it are those
/// that hold when the root's /usr is the machine's.
pub(crate) fn command_line(root: &Path, program: Vec<OsString>) -> Vec<OsString> {
    let mut words: Vec<OsString> = ["unshare", "--mount", "sh", "-c", ENTER]
        .map(OsString::from)
        .into();
    words.push(root.join("usr").into());
    words.extend(program);
    words
}

/// Returns the root of a server of this version, in the directory `under`. It is made unless it is
/// there. Fails where it cannot be made, or where its programs could not be run.
pub(crate) fn root(server: Server, version: &str, under: &Path) -> Result<PathBuf> {
    let name = server.name();
    let Some(suite) = server.suite(version) else {
        bail!(
            "{name} {version} cannot be unpacked; these can: {}",
            server.versions().join(", ")
        )
    };
    may_mount().with_context(|| format!("{name} {version} cannot run beside the machine's"))?;
    fs::create_dir_all(under).with_context(|| format!("Failed to create {}", under.display()))?;
    let under = fs::canonicalize(under)?;
    let root = under.join(format!("{}-{version}", name.to_lowercase()));
    if !root.exists() {
        ensure_mmdebstrap()
            .and_then(|()| keys(suite, &under))
            .and_then(|keys| make(suite, server.packages(), keys.as_deref(), &root))
            .with_context(|| format!("{name} {version} cannot be unpacked"))?;
    }
    check(server, version, &root)?;
    Ok(root)
}

/// The directory of the keys that the suite is signed with, unless mmdebstrap finds them by itself.
/// Debian 12 has no package of Ubuntu's keys, and Debian 13 does.
fn keys(suite: &str, under: &Path) -> Result<Option<PathBuf>> {
    let keyrings = "usr/share/keyrings";
    let ubuntu = ["jammy", "noble"].contains(&suite);
    let installed = Path::new("/").join(keyrings);
    if !ubuntu || installed.join("ubuntu-archive-keyring.gpg").exists() {
        return Ok(None);
    }
    let root = under.join("ubuntu-keys");
    if !root.exists() {
        make("trixie", "ubuntu-archive-keyring", None, &root)?;
    }
    Ok(Some(root.join(keyrings)))
}

/// Fails unless a directory can be laid over /usr here. In many containers not even root may do so.
fn may_mount() -> Result<()> {
    if !geteuid().is_root() {
        bail!("only root may lay its files over /usr");
    }
    // Where /bin is not a link into /usr, the programs would find the machine's libraries.
    if !fs::symlink_metadata("/bin").is_ok_and(|bin| bin.is_symlink()) {
        bail!("/bin is not a link into /usr on this machine");
    }
    let enter = command_line(Path::new("/"), vec!["true".into()]);
    let tried = Command::new("unshare").args(&enter[1..]).output();
    let tried = tried.context("unshare of util-linux is missing: apt-get install util-linux")?;
    if !tried.status.success() {
        let why = String::from_utf8_lossy(&tried.stderr);
        bail!("nothing can be laid over /usr here: {}", why.trim());
    }
    Ok(())
}

/// Makes sure that mmdebstrap can be run, and can check the signatures of the packages.
fn ensure_mmdebstrap() -> Result<()> {
    let missing = || {
        let mut missing = Vec::new();
        if !programs::on_path("mmdebstrap") {
            missing.push(Package::Mmdebstrap);
        }
        let keys = Path::new("/usr/share/keyrings/debian-archive-keyring");
        if !["gpg", "pgp"]
            .iter()
            .any(|end| keys.with_extension(end).exists())
        {
            missing.push(Package::DebianKeys);
        }
        missing
    };
    if missing().is_empty() {
        return Ok(());
    }
    if !programs::on_path("apt-get") {
        bail!("install the packages mmdebstrap and debian-archive-keyring");
    }
    install::install(missing)
}

/// Unpacks the packages. The root gets its name only when it is complete; one that was left half
/// made is made again.
fn make(suite: &str, packages: &str, keys: Option<&Path>, root: &Path) -> Result<()> {
    let beside = |what: &str| PathBuf::from(format!("{}-{what}", root.display()));
    let (half_made, log_path) = (beside("half-made"), beside("log"));
    let lock = install::lock()?;
    if root.exists() {
        // Another process has made it while we waited for the lock.
        return Ok(());
    }
    if half_made.exists() {
        fs::remove_dir_all(&half_made)
            .with_context(|| format!("Failed to delete {}", half_made.display()))?;
    }
    let log = File::create(&log_path)
        .with_context(|| format!("Failed to create {}", log_path.display()))?;

    // What mmdebstrap mounts in the root is mounted in a namespace of its own and so never stays
    // behind, where deleting a half-made root would delete files of the machine.
    let mut command = Command::new("unshare");
    command.args(["--mount", "mmdebstrap", "--variant=extract"]);
    // In an older suite, some files are in /lib that belong over /usr/lib.
    command.arg("--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr");
    command.arg(format!("--include={packages}"));
    if let Some(keys) = keys {
        command.arg(format!("--keyring={}", keys.display()));
    }
    if suite == SID {
        // What sid signs is valid for a week, and a mirror may be behind.
        command.arg("--aptopt=Acquire::Check-Valid-Until \"false\"");
    }
    command.arg(suite).arg(&half_made);
    command
        // mmdebstrap shares the lock, so that nobody begins anew while it works, even if we die.
        .stdin(Stdio::from(lock.try_clone()?))
        .stdout(log.try_clone()?)
        .stderr(log);
    let package = packages.split(',').next().unwrap_or_default();
    let what = format!("devstack: unpacking {package} of {suite}");
    if !install::run_showing_time(&mut command, &what)? {
        bail!(
            "mmdebstrap failed: {}",
            process::tail(&log_path, 5).replace('\n', "; ")
        );
    }
    fs::rename(&half_made, root).with_context(|| format!("Failed to make {}", root.display()))?;
    let _ = fs::remove_file(&log_path);
    Ok(())
}

/// Fails if the root holds another version, which is so when the suite has moved on.
fn check(server: Server, version: &str, root: &Path) -> Result<()> {
    let Some((library, prefix)) = server.place() else {
        return Ok(());
    };
    let found: Vec<String> = fs::read_dir(root.join(library))
        .with_context(|| format!("{} is damaged; delete it", root.display()))?
        .flatten()
        .filter_map(|entry| Some(entry.file_name().to_str()?.strip_prefix(prefix)?.to_owned()))
        .collect();
    let is_wanted = |found: &String| {
        version == SID || found == version || found.starts_with(&format!("{version}."))
    };
    if !found.iter().any(is_wanted) {
        bail!(
            "{} should hold {} {version} and holds {}; delete it",
            root.display(),
            server.name(),
            found.join(", ")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_version_has_a_suite() {
        for server in [Server::Postgres, Server::RabbitMq] {
            for version in server.versions() {
                assert!(server.suite(version).is_some(), "{server:?} {version}");
            }
        }
    }

    #[test]
    fn a_root_that_holds_another_version_or_nothing_is_refused() {
        let root = std::env::temp_dir().join(format!("devstack-root-{}", std::process::id()));
        let check = |version| check(Server::RabbitMq, version, &root);
        let nothing = check("4.0").unwrap_err().to_string();
        fs::create_dir_all(root.join("usr/lib/rabbitmq/lib/rabbitmq_server-4.01.2")).unwrap();
        let other = check("4.0").unwrap_err().to_string();
        let any = check(SID);
        fs::create_dir_all(root.join("usr/lib/rabbitmq/lib/rabbitmq_server-4.0.5")).unwrap();
        let right = check("4.0");
        fs::remove_dir_all(&root).unwrap();
        assert!(nothing.contains("is damaged; delete it"), "{nothing}");
        assert!(
            other.contains("should hold RabbitMQ 4.0 and holds 4.01.2"),
            "{other}"
        );
        any.unwrap();
        right.unwrap();
    }

    #[test]
    fn a_version_that_cannot_be_unpacked_is_answered_with_those_that_can() {
        let refused = root(Server::RabbitMq, "1.0", Path::new("/nowhere")).unwrap_err();
        assert!(
            refused.to_string().ends_with("these can: 3.12, 4.0, sid"),
            "{refused}"
        );
    }
}
