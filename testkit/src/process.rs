//! What a program that runs instances of the binary needs: the binary, an address, memory figures, signals.

use std::{io, net::SocketAddr, path::Path, path::PathBuf};

use anyhow::{Context, ensure};
use tokio::signal::unix::{SignalKind, signal};

/// The `retry-scheduler` that cargo built into the same directory as the running program.
pub fn service_binary() -> anyhow::Result<PathBuf> {
    let binary = std::env::current_exe()?.with_file_name("retry-scheduler");
    ensure!(
        binary.is_file(),
        "{} is missing; `cargo dev` builds it",
        binary.display()
    );
    Ok(binary)
}

/// An address on the loopback interface that nobody listens on. The kernel hands out other ports before it hands out
/// the same one again, so the port stays free long enough for an instance to start there.
pub fn free_address() -> io::Result<SocketAddr> {
    std::net::TcpListener::bind("127.0.0.1:0")?.local_addr()
}

/// The memory of a process in megabytes. `field` is a name from `/proc/<pid>/status`: `VmRSS` for what the process uses
/// now, `VmHWM` for the most it has used.
pub fn memory_mb(pid: u32, field: &str) -> anyhow::Result<f64> {
    let path = Path::new("/proc").join(pid.to_string()).join("status");
    let status = std::fs::read_to_string(path)?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix(field)?.strip_prefix(':'));
    let kilobytes = line.and_then(|line| line.split_whitespace().next());
    let kilobytes: f64 = kilobytes.with_context(|| format!("no {field}"))?.parse()?;
    Ok(kilobytes * 1024.0 / 1e6)
}

/// Waits for SIGINT (which is Ctrl-C) or SIGTERM.
pub async fn interrupted() {
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        return std::future::pending().await;
    };
    tokio::select! {
        _ = terminate.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_memory() {
        let own = std::process::id();
        let (now, most) = (memory_mb(own, "VmRSS"), memory_mb(own, "VmHWM"));
        assert!(now.unwrap() > 0.1);
        assert!(most.unwrap() > 0.1);
        assert!(memory_mb(own, "VmNone").is_err());
    }
}
