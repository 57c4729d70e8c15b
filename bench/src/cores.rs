//! Binds Postgres to one core and everything else to the others. On one machine this comes nearest
//! to a database that has a machine of its own.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, ensure};
use url::Url;

use crate::{
    processor::{children, processes},
    scheduler::Setup,
};

/// The processes that are bound to cores. A process that they start later inherits the binding.
/// When this is dropped, they may run on all cores again.
pub struct Apart {
    processes: Vec<u32>,
    everywhere: String,
}

impl Apart {
    /// Returns `None` if there is only one core, or if the process of a service cannot be found on
    /// this machine.
    pub fn arrange(setup: &Setup) -> anyhow::Result<Option<Self>> {
        let status = fs::read_to_string("/proc/self/status")?;
        let allowed = status
            .lines()
            .find_map(|line| line.strip_prefix("Cpus_allowed_list:"))
            .context("/proc/self/status names no processors")?
            .trim();
        let [others @ .., last] = &cores(allowed)[..] else {
            return Ok(None);
        };
        let (Some(postmaster), Some(broker)) = (
            listener(&setup.database_url, 5432)?,
            listener(&setup.rabbitmq_url, 5672)?,
        ) else {
            return Ok(None);
        };
        if others.is_empty() {
            return Ok(None);
        }
        let others: Vec<String> = others.iter().map(u32::to_string).collect();
        let mut database = children(postmaster)?;
        database.push(postmaster);
        let rest = [broker, std::process::id()];
        let apart = Self {
            processes: database.iter().chain(&rest).copied().collect(),
            everywhere: allowed.to_owned(),
        };
        for process in &database {
            bind(*process, &last.to_string())?;
        }
        for process in rest {
            bind(process, &others.join(","))?;
        }
        Ok(Some(apart))
    }
}

impl Drop for Apart {
    fn drop(&mut self) {
        for process in &self.processes {
            let _ = bind(*process, &self.everywhere);
        }
    }
}

/// Binds all threads of a process. It is no error if the process has ended.
fn bind(process: u32, cores: &str) -> anyhow::Result<()> {
    let told = Command::new("taskset")
        .args(["--all-tasks", "--cpu-list", "--pid", cores])
        .arg(process.to_string())
        .output()
        .context("taskset")?;
    ensure!(
        told.status.success() || !Path::new("/proc").join(process.to_string()).exists(),
        "taskset: {}",
        String::from_utf8_lossy(&told.stderr).trim()
    );
    Ok(())
}

/// Parses the kernel's notation of a list of processors, such as `0-2,5`.
fn cores(list: &str) -> Vec<u32> {
    let ranges = list.split(',').filter_map(|range| {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        Some(first.parse().ok()?..=last.parse().ok()?)
    });
    ranges.flatten().collect()
}

/// Finds the process on this machine that listens on the port of `url`.
fn listener(url: &str, default_port: u16) -> anyhow::Result<Option<u32>> {
    let url = Url::parse(url)?;
    let here = ["localhost", "127.0.0.1", "[::1]"];
    if !url.host_str().is_some_and(|host| here.contains(&host)) {
        return Ok(None);
    }
    let port = url.port().unwrap_or(default_port);
    let mut sockets = Vec::new();
    for table in ["/proc/net/tcp", "/proc/net/tcp6"] {
        let table = fs::read_to_string(table).unwrap_or_default();
        sockets.extend(table.lines().filter_map(|line| listening(line, port)));
    }
    for process in processes()? {
        // The files of another user's process cannot be read, nor those of one that has ended.
        let Ok(files) = fs::read_dir(format!("/proc/{process}/fd")) else {
            continue;
        };
        let mut files = files
            .flatten()
            .filter_map(|file| fs::read_link(file.path()).ok());
        if files.any(|file| sockets.iter().any(|socket| file == Path::new(socket))) {
            return Ok(Some(process));
        }
    }
    Ok(None)
}

/// The socket that a line of `/proc/net/tcp` describes, if it listens on `port`, in the spelling of
/// the links in `/proc/PID/fd`.
fn listening(line: &str, port: u16) -> Option<String> {
    const LISTEN: &str = "0A";
    let fields: Vec<&str> = line.split_whitespace().collect();
    let (_, local) = fields.get(1)?.rsplit_once(':')?;
    let is_it = u16::from_str_radix(local, 16) == Ok(port) && *fields.get(3)? == LISTEN;
    is_it.then(|| format!("socket:[{}]", fields.get(9).unwrap_or(&"")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cores_are_single_or_ranges() {
        assert_eq!(cores("0-2,5"), [0, 1, 2, 5]);
        assert_eq!(cores("3"), [3]);
    }

    #[test]
    fn a_listener_is_found_by_its_port() {
        let socket = std::net::TcpListener::bind("127.0.0.1:0").expect("a socket");
        let port = socket.local_addr().expect("bound").port();
        let url = format!("postgresql://localhost:{port}/");
        assert_eq!(listener(&url, 0).expect("/proc"), Some(std::process::id()));
        drop(socket);
        assert_eq!(listener(&url, 0).expect("/proc"), None);
    }
}
