//! Chooses the account that Postgres runs as, and a data directory that this account can reach.

use std::ffi::OsString;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, bail};
use nix::unistd::{User, geteuid};

use crate::ports;

/// The account that Postgres runs as. Postgres refuses to run as root, so if we are root it gets
/// another account; otherwise it runs as the current user.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Account {
    /// User and group id; `None` is the current user.
    other: Option<(u32, u32)>,
}

impl Account {
    pub(crate) const CURRENT: Self = Self { other: None };

    pub(crate) fn for_postgres() -> Result<Self> {
        if !geteuid().is_root() {
            return Ok(Self::CURRENT);
        }
        for name in ["postgres", "nobody"] {
            if let Some(user) = User::from_name(name).context("Failed to look up an account")? {
                return Ok(Self {
                    other: Some((user.uid.as_raw(), user.gid.as_raw())),
                });
            }
        }
        bail!(
            "Postgres does not run as root, and there is no account `postgres` or `nobody` to run it as"
        )
    }

    /// Makes `command` run as this account.
    pub(crate) fn apply(self, command: &mut Command) {
        if let Some((uid, gid)) = self.other {
            command.uid(uid).gid(gid);
        }
    }

    /// The beginning of a command line that becomes this account and then runs what follows.
    pub(crate) fn command_line(self) -> Vec<OsString> {
        let Some((uid, gid)) = self.other else {
            return Vec::new();
        };
        let words = [
            "setpriv".to_owned(),
            format!("--reuid={uid}"),
            format!("--regid={gid}"),
            "--clear-groups".to_owned(),
            "--".to_owned(),
        ];
        words.map(OsString::from).into()
    }

    /// Creates a private directory that the account can use. This is `wanted`, unless the account
    /// may not enter a directory above it, such as /root. Then it is a directory under the system's
    /// directory for temporary files, always the same one for the same `wanted`.
    pub(crate) fn directory(self, wanted: &Path) -> Result<PathBuf> {
        let substitute = format!("devstack-{:016x}", ports::hash(&wanted.to_string_lossy()));
        let candidates = [
            wanted.to_owned(),
            std::env::temp_dir().join(&substitute),
            Path::new("/tmp").join(&substitute),
        ];
        for candidate in &candidates {
            fs::create_dir_all(candidate)
                .with_context(|| format!("Failed to create {}", candidate.display()))?;
            let owner = fs::metadata(candidate)?.uid();
            if owner != geteuid().as_raw() && Some(owner) != self.other.map(|(uid, _)| uid) {
                bail!("{} belongs to another user", candidate.display());
            }
            if let Some((uid, gid)) = self.other {
                chown(candidate, Some(uid), Some(gid))
                    .with_context(|| format!("Failed to give away {}", candidate.display()))?;
            }
            fs::set_permissions(candidate, fs::Permissions::from_mode(0o700))?;
            if self.reaches(candidate)? {
                return Ok(candidate.clone());
            }
            let _ = fs::remove_dir(candidate);
        }
        bail!(
            "Postgres's account cannot reach {}, nor a directory under /tmp",
            wanted.display()
        )
    }

    /// Whether the account can enter the directory and write to it.
    fn reaches(self, directory: &Path) -> Result<bool> {
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", r#"cd -- "$1" && test -w ."#, "sh"])
            .arg(directory);
        command
            .current_dir("/")
            .stdin(Stdio::null())
            .stderr(Stdio::null());
        self.apply(&mut command);
        Ok(command.status().context("Failed to run sh")?.success())
    }
}
