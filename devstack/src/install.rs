//! Installs missing Debian packages, without starting the services that they contain.

use std::env;
use std::fs::{self, File};
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use nix::fcntl::{Flock, FlockArg};

use crate::process;
use crate::programs;

/// Everything that needs root is in one script, so that `sudo` is asked once, and so that the
/// script's trap cleans up even if this process has ended.
///
/// While a file `policy-rc.d` says so, Debian starts no service that is installed. If the machine
/// has such a file already, it is left alone. Where there is systemd, the new services are also
/// disabled, so that they do not start with the next boot.
const SCRIPT: &str = r#"
set -eu
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 130' HUP INT TERM
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -q || echo 'apt-get update failed: trying with the lists there are'
apt-get install -y -q --no-install-recommends -o DPkg::Lock::Timeout=300 "$@"
if [ -d /run/systemd/system ]; then
    for package in "$@"; do systemctl disable "$package.service" || true; done
fi
"#;

/// A package that may have to be installed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Package {
    Postgres,
    RabbitMq,
    PgBouncer,
    Faketime,
    Mmdebstrap,
    /// The keys that Debian signs with, which Ubuntu does not have by itself.
    DebianKeys,
}

impl Package {
    fn debian(self) -> &'static str {
        match self {
            Self::Postgres => "postgresql",
            Self::RabbitMq => "rabbitmq-server",
            Self::PgBouncer => "pgbouncer",
            Self::Faketime => "faketime",
            Self::Mmdebstrap => "mmdebstrap",
            Self::DebianKeys => "debian-archive-keyring",
        }
    }

    fn homebrew(self) -> Option<&'static str> {
        match self {
            Self::Postgres => Some("postgresql@17"),
            Self::RabbitMq => Some("rabbitmq"),
            Self::PgBouncer => Some("pgbouncer"),
            Self::Faketime => Some("libfaketime"),
            Self::Mmdebstrap | Self::DebianKeys => None,
        }
    }
}

/// Installs the packages that `missing` returns. If that is not possible, the error says how to
/// install them by hand.
///
/// `missing` is called again once the lock is held, because another process may have installed
/// them while we waited for it.
pub(crate) fn install(missing: impl Fn() -> Vec<Package>) -> Result<()> {
    let Some(become_root) = way_to_root() else {
        bail!(instructions(&missing()))
    };
    let _lock = lock()?;
    let packages = missing();
    if packages.is_empty() {
        return Ok(());
    }

    let names: Vec<_> = packages.iter().map(|package| package.debian()).collect();
    let log_path = env::temp_dir().join(format!("devstack-install-{}.log", std::process::id()));
    let log = File::create(&log_path)
        .with_context(|| format!("Failed to create {}", log_path.display()))?;
    let what = format!("devstack: installing {} with apt-get", names.join(" and "));

    let mut command = match become_root {
        Root::Already => Command::new("sh"),
        Root::Sudo => {
            let mut sudo = Command::new("sudo");
            sudo.arg("sh");
            sudo
        }
    };
    command.args(["-c", SCRIPT, "sh"]).args(&names);
    command
        .stdin(Stdio::null())
        .stdout(log.try_clone()?)
        .stderr(log);
    let success = run_showing_time(&mut command, &what)?;

    let still_missing = missing();
    if !success || !still_missing.is_empty() {
        let tail = process::tail(&log_path, 20);
        bail!(
            "apt-get did not install {}:\n{tail}\n{}",
            names.join(" and "),
            instructions(&still_missing)
        );
    }
    let _ = fs::remove_file(&log_path);
    Ok(())
}

/// How the script comes to run as root.
enum Root {
    Already,
    Sudo,
}

/// Returns `None` where there is no apt-get, and where we are not root and cannot use sudo: because
/// it is not there, or because it asks for a password and there is no terminal to ask on.
fn way_to_root() -> Option<Root> {
    if !programs::on_path("apt-get") {
        return None;
    }
    if nix::unistd::geteuid().is_root() {
        return Some(Root::Already);
    }
    if !programs::on_path("sudo") {
        return None;
    }
    let sudo = |arguments: &[&str], stderr: Stdio| {
        let status = Command::new("sudo").args(arguments).stderr(stderr).status();
        status.is_ok_and(|status| status.success())
    };
    if sudo(&["-n", "true"], Stdio::null()) {
        return Some(Root::Sudo);
    }
    if io::stdin().is_terminal() && io::stderr().is_terminal() {
        eprintln!("devstack: a package is missing; sudo may ask for your password to install it");
        if sudo(&["true"], Stdio::inherit()) {
            return Some(Root::Sudo);
        }
    }
    None
}

fn instructions(missing: &[Package]) -> String {
    let debian: Vec<_> = missing.iter().map(|package| package.debian()).collect();
    let homebrew: Option<Vec<_>> = missing.iter().map(|package| package.homebrew()).collect();
    let mut text = format!(
        "Install what is missing, then try again:\n  Debian, Ubuntu:  sudo apt-get install {}",
        debian.join(" ")
    );
    if let Some(homebrew) = homebrew {
        text.push_str(&format!(
            "\n  macOS:           brew install {}",
            homebrew.join(" ")
        ));
    }
    text
}

/// Allows one installation at a time on this machine: apt-get would refuse a second one.
pub(crate) fn lock() -> Result<Flock<File>> {
    let path = Path::new("/tmp/devstack-install.lock");
    // Open it for reading, which is enough to lock it: the file may belong to another user.
    let file = match File::open(path) {
        Ok(file) => file,
        Err(_) => {
            let created = File::options()
                .write(true)
                .create_new(true)
                .mode(0o644)
                .open(path);
            match created {
                Ok(file) => {
                    fs::set_permissions(path, fs::Permissions::from_mode(0o644))?;
                    file
                }
                Err(_) => File::open(path)
                    .with_context(|| format!("Failed to open {}", path.display()))?,
            }
        }
    };
    match Flock::lock(file, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(lock),
        Err((file, _)) => {
            eprintln!("devstack: waiting for another process that is installing");
            Flock::lock(file, FlockArg::LockExclusive)
                .map_err(|(_, error)| error)
                .with_context(|| format!("Failed to lock {}", path.display()))
        }
    }
}

/// Runs the command and shows how many seconds have passed: on a terminal in one line that is
/// overwritten, elsewhere in a new line every 30 seconds. Returns whether it succeeded.
pub(crate) fn run_showing_time(command: &mut Command, what: &str) -> Result<bool> {
    let program = command.get_program().to_string_lossy().into_owned();
    let mut child = command
        .spawn()
        .with_context(|| format!("Failed to start {program}"))?;
    let started = Instant::now();
    let terminal = io::stderr().is_terminal();
    let mut next = Duration::from_secs(30);
    eprint!("{what} …{}", if terminal { "" } else { "\n" });
    loop {
        let seconds = started.elapsed().as_secs();
        if let Some(status) = child.try_wait()? {
            let outcome = if status.success() { "done" } else { "failed" };
            eprintln!(
                "{}{what}: {outcome} after {seconds} s",
                if terminal { "\r" } else { "" }
            );
            return Ok(status.success());
        }
        if terminal {
            eprint!("\r{what} … {seconds} s");
            let _ = io::stderr().flush();
        } else if started.elapsed() >= next {
            eprintln!("{what} … {seconds} s");
            next += Duration::from_secs(30);
        }
        thread::sleep(Duration::from_millis(200));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_instructions_are_commands_to_copy() {
        let text = instructions(&[Package::Postgres, Package::RabbitMq]);
        assert!(
            text.contains("sudo apt-get install postgresql rabbitmq-server\n"),
            "{text}"
        );
        assert!(
            text.ends_with("brew install postgresql@17 rabbitmq"),
            "{text}"
        );
    }
}
