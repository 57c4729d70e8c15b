//! The checkout of retry-scheduler that `cargo dev` works in.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, anyhow};
use devstack::Lock;

/// The root of the checkout, and the directory for data and logs of what runs in it.
#[derive(Clone)]
pub(crate) struct Workspace {
    root: PathBuf,
    directory: PathBuf,
}

impl Workspace {
    /// Finds the root: cargo tells where this package is. If we were not started by cargo, the
    /// current directory or one above it must be the root.
    pub(crate) fn find() -> Result<Self> {
        let here = env::current_dir().context("There is no current directory")?;
        let from_cargo = env::var_os("CARGO_MANIFEST_DIR").map(PathBuf::from);
        let root = from_cargo
            .as_deref()
            .and_then(Path::parent)
            .or_else(|| {
                here.ancestors()
                    .find(|above| above.join("devstack/Cargo.toml").is_file())
            })
            .context("This is not a checkout of retry-scheduler")?
            .to_owned();
        let directory = match env::var_os("DEVSTACK_DIR") {
            Some(directory) => here.join(directory),
            None => root.join(".devstack"),
        };
        Ok(Self { root, directory })
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    fn lock_path(&self) -> PathBuf {
        self.directory.join("lock")
    }

    /// Takes the lock of the checkout: only one command at a time may run services in it.
    pub(crate) fn lock(&self) -> Result<Lock> {
        fs::create_dir_all(&self.directory)
            .with_context(|| format!("Failed to create {}", self.directory.display()))?;
        Lock::acquire(&self.lock_path(), "The stack of this checkout").map_err(|error| {
            anyhow!("{error:#}; stop that one first, or set DEVSTACK_DIR to another directory")
        })
    }

    /// The process that holds the lock, if there is one.
    pub(crate) fn owner(&self) -> Option<i32> {
        Lock::owner(&self.lock_path())
    }

    /// Returns a command that runs cargo in the root. The variables that `cargo run` has set for
    /// this process are removed, so that cargo behaves as if it were called by hand.
    pub(crate) fn cargo(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
        for (name, _) in env::vars_os() {
            let text = name.to_string_lossy();
            if ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_"]
                .iter()
                .any(|prefix| text.starts_with(prefix))
            {
                command.env_remove(name);
            }
        }
        command.current_dir(&self.root).args(args);
        command
    }
}
