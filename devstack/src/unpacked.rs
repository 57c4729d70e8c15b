//! Unpacks a RabbitMQ or PgBouncer of another version than the machine's, and runs it beside that
//! one.
//!
//! The packages of another Debian suite are unpacked into a directory, the root. Their programs
//! expect to be in /usr, together with the libraries of their suite, so they run in a mount
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

/// The versions of RabbitMQ that can be unpacked.
pub const RABBITMQ_VERSIONS: [&str; 1] = ["4.0"];

/// The versions of PgBouncer that can be unpacked.
pub const PGBOUNCER_VERSIONS: [&str; 1] = ["1.24"];

/// What is unpacked.
struct Edition<'a> {
    name: &'static str,
    version: &'a str,
    /// The Debian suite that has this version.
    suite: &'static str,
    packages: &'static str,
}

/// RabbitMQ depends on Erlang, but not on what every Debian has: a shell and the programs that the
/// scripts of both call.
const RABBITMQ_PACKAGES: &str = "rabbitmq-server,dash,coreutils,sed,grep";

/// Lays a directory over /usr and becomes the program that the other arguments name. What the
/// machine sets for its own programs and libraries must not lead those of the root astray.
const ENTER: &str = r#"
mount --bind "$0" /usr || exit
unset LD_LIBRARY_PATH LD_PRELOAD
PATH=/usr/sbin:/usr/bin:/sbin:/bin exec "$@"
"#;

/// The command line that runs a program of the root. The program's path is the one that it has when
/// the root's /usr is the machine's.
pub(crate) fn command_line(root: &Path, program: &Path) -> Vec<OsString> {
    let mut words: Vec<OsString> = ["unshare", "--mount", "sh", "-c", ENTER]
        .map(OsString::from)
        .into();
    words.extend([root.join("usr").into(), program.into()]);
    words
}

/// Returns the root of a RabbitMQ of this version, in the directory `under`. It is made unless it is
/// there. Fails where it cannot be made, or where its programs could not be run.
pub(crate) fn rabbitmq(version: &str, under: &Path) -> Result<PathBuf> {
    let suite = match version {
        "4.0" => "trixie",
        _ => bail!(
            "RabbitMQ {version} cannot be unpacked; these can: {}",
            RABBITMQ_VERSIONS.join(", ")
        ),
    };
    let edition = Edition {
        name: "RabbitMQ",
        version,
        suite,
        packages: RABBITMQ_PACKAGES,
    };
    let root = edition.unpack(under)?;
    check(version, &root)?;
    Ok(root)
}

/// Returns the root of a PgBouncer of this version, in the directory `under`, as [`rabbitmq`] does.
pub(crate) fn pgbouncer(version: &str, under: &Path) -> Result<PathBuf> {
    let suite = match version {
        "1.24" => "trixie",
        _ => bail!(
            "PgBouncer {version} cannot be unpacked; these can: {}",
            PGBOUNCER_VERSIONS.join(", ")
        ),
    };
    let edition = Edition {
        name: "PgBouncer",
        version,
        suite,
        packages: "pgbouncer",
    };
    edition.unpack(under)
}

impl Edition<'_> {
    fn unpack(&self, under: &Path) -> Result<PathBuf> {
        let Self { name, version, .. } = self;
        may_mount().with_context(|| format!("{name} {version} cannot run beside the machine's"))?;
        fs::create_dir_all(under)
            .with_context(|| format!("Failed to create {}", under.display()))?;
        let directory = format!("{}-{version}", name.to_ascii_lowercase());
        let root = fs::canonicalize(under)?.join(directory);
        if !root.exists() {
            ensure_mmdebstrap()
                .and_then(|()| self.make(&root))
                .with_context(|| format!("{name} {version} cannot be unpacked"))?;
        }
        Ok(root)
    }

    /// Unpacks the packages. The root gets its name only when it is complete; one that was left half
    /// made is made again.
    fn make(&self, root: &Path) -> Result<()> {
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
        command.arg(format!("--include={}", self.packages));
        command.arg(self.suite).arg(&half_made);
        command
            // mmdebstrap shares the lock, so that nobody begins anew while it works, even if we die.
            .stdin(Stdio::from(lock.try_clone()?))
            .stdout(log.try_clone()?)
            .stderr(log);
        let what = format!("devstack: unpacking {} of Debian {}", self.name, self.suite);
        if !install::run_showing_time(&mut command, &what)? {
            bail!(
                "mmdebstrap failed: {}",
                process::tail(&log_path, 5).replace('\n', "; ")
            );
        }
        fs::rename(&half_made, root)
            .with_context(|| format!("Failed to make {}", root.display()))?;
        let _ = fs::remove_file(&log_path);
        Ok(())
    }
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
    let enter = command_line(Path::new("/"), Path::new("true"));
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

/// Fails if the root holds another version, which is so when the suite has moved on.
fn check(version: &str, root: &Path) -> Result<()> {
    let library = root.join("usr/lib/rabbitmq/lib");
    let wanted = format!("rabbitmq_server-{version}.");
    let found: Vec<String> = fs::read_dir(&library)
        .with_context(|| format!("{} is damaged; delete it", root.display()))?
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    if !found.iter().any(|name| name.starts_with(&wanted)) {
        bail!(
            "{} should hold RabbitMQ {version} and holds {}; delete it",
            root.display(),
            found.join(", ")
        );
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_root_that_holds_another_version_or_nothing_is_refused() {
        let root = std::env::temp_dir().join(format!("devstack-root-{}", std::process::id()));
        let nothing = check("4.0", &root).unwrap_err().to_string();
        fs::create_dir_all(root.join("usr/lib/rabbitmq/lib/rabbitmq_server-4.01.2")).unwrap();
        let other = check("4.0", &root).unwrap_err().to_string();
        fs::create_dir_all(root.join("usr/lib/rabbitmq/lib/rabbitmq_server-4.0.5")).unwrap();
        let right = check("4.0", &root);
        fs::remove_dir_all(&root).unwrap();
        assert!(nothing.contains("is damaged; delete it"), "{nothing}");
        assert!(other.contains("holds rabbitmq_server-4.01.2"), "{other}");
        right.unwrap();
    }

    #[test]
    fn a_version_that_cannot_be_unpacked_is_answered_with_those_that_can() {
        let refused = rabbitmq("1.0", Path::new("/nowhere")).unwrap_err();
        assert!(refused.to_string().ends_with("these can: 4.0"), "{refused}");
    }
}
