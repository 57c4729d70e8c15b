//! `cargo dev up`: runs the service in the foreground.

use std::env;
use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use devstack::{Foreground, exit_code};

use crate::interrupts::Interrupts;
use crate::surroundings::Surroundings;
use crate::workspace::Workspace;

const DEFAULT_PORT: u16 = 8086;

/// Builds the service while Postgres and RabbitMQ start, runs it, and prints its addresses when it
/// is ready.
pub(crate) fn run(workspace: &Workspace, release: bool, args: &[String]) -> Result<u8> {
    let interrupts = Interrupts::catch()?;
    let lock = workspace.lock()?;
    let profile = if release { "release" } else { "dev" };

    // If the build fails, the thread is not waited for: this process ends, and the watchdogs stop
    // what was started so far.
    let starting = thread::spawn({
        let workspace = workspace.clone();
        move || Surroundings::start(&workspace, profile)
    });
    let mut build = workspace.cargo(&[
        "build",
        "--package",
        "retry-scheduler",
        "--profile",
        profile,
    ]);
    let mut build = Foreground::start(&mut build, Some(&lock))?;
    let status = interrupts.wait(&mut build, || {})?;
    if !status.success() {
        return Ok(exit_code(status));
    }
    let surroundings = starting
        .join()
        .map_err(|_| anyhow!("starting the services panicked"))??;

    let wanted = match env::var("HTTP_PORT") {
        Ok(port) => port.parse().context("HTTP_PORT is not a port")?,
        Err(_) => DEFAULT_PORT,
    };
    let port = devstack::free_or_other(wanted)?;
    if port != wanted {
        eprintln!("devstack: port {wanted} is taken; the service gets {port}");
    }

    let mut command = workspace.cargo(&["run", "--quiet", "--package", "retry-scheduler"]);
    command
        .args(["--profile", profile, "--", "serve"])
        .args(args);
    command
        .envs(surroundings.variables())
        .env("HTTP_PORT", port.to_string());
    let mut service = Foreground::start(&mut command, Some(&lock))?;
    let mut announcement = Some(Instant::now());
    let status = interrupts.wait(&mut service, || {
        if announcement
            .is_some_and(|since| is_ready(port) || since.elapsed() > Duration::from_secs(60))
        {
            announcement = None;
            announce(&surroundings, port);
        }
    })?;
    Ok(exit_code(status))
}

fn is_ready(port: u16) -> bool {
    let attempt = || -> std::io::Result<bool> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        stream.write_all(b"GET /ready HTTP/1.0\r\nHost: localhost\r\n\r\n")?;
        let mut status = [0; 12];
        stream.read_exact(&mut status)?;
        Ok(status.ends_with(b" 200"))
    };
    attempt().unwrap_or(false)
}

fn announce(surroundings: &Surroundings, port: u16) {
    let state = if is_ready(port) {
        "is ready"
    } else {
        "is not ready yet; see its output and"
    };
    let logs = surroundings.logs();
    let logs: String = logs
        .iter()
        .map(|log| format!("\n  log       {}", log.display()))
        .collect();
    eprintln!(
        "
retry-scheduler {state}
  ready     http://127.0.0.1:{port}/ready
  metrics   http://127.0.0.1:{port}/metrics
  Postgres  psql {}
  RabbitMQ  {}{logs}

Send a first message from another terminal:
  cargo dev send --queue demo --payload hello --declare

Ctrl-C stops everything; the data stays.
",
        surroundings.database_url, surroundings.rabbitmq_url
    );
}
