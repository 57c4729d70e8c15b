//! `probe`: asks a running service on this machine whether it is ready. For container
//! health checks: the image has neither a shell nor an HTTP client.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    time::Duration,
};

use anyhow::{Context, bail, ensure};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::config::Settings;

/// How long to wait: less than the time-out of the image's health check, so that the
/// reason is told.
const DEADLINE: Duration = Duration::from_secs(4);

/// The most bytes to read: more than any answer of `/ready`, and a bound should another
/// program listen there.
const LONGEST_ANSWER: u64 = 64 * 1024;

/// Fails, naming what is down, unless the service answers that it is ready.
pub async fn run(settings: &Settings) -> anyhow::Result<()> {
    let address = address(settings)?;
    let answer = tokio::time::timeout(DEADLINE, get_ready(address))
        .await
        .with_context(|| format!("no answer from {address} in {DEADLINE:?}"))?
        .with_context(|| format!("asking {address}"))?;
    let (head, body) = answer.split_once("\r\n\r\n").unwrap_or((&answer, ""));
    if head.split(' ').nth(1) == Some("200") {
        println!("ready");
        return Ok(());
    }
    let body: serde_json::Value = serde_json::from_str(body).unwrap_or_default();
    match &body["down"] {
        serde_json::Value::Null => bail!("not ready: {:?}", head.lines().next().unwrap_or("")),
        down => bail!("not ready: {down}"),
    }
}

/// The address at which a process on the same machine reaches the service with these
/// settings.
fn address(settings: &Settings) -> anyhow::Result<SocketAddr> {
    ensure!(
        settings.http_port != 0,
        "HTTP_PORT: 0 takes any free port; a probe needs a fixed one"
    );
    let host = match settings.http_host {
        IpAddr::V4(host) if host.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
        IpAddr::V6(host) if host.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
        host => host,
    };
    Ok((host, settings.http_port).into())
}

async fn get_ready(address: SocketAddr) -> std::io::Result<String> {
    let mut stream = TcpStream::connect(address).await?;
    let request = format!("GET /ready HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream
        .take(LONGEST_ANSWER)
        .read_to_string(&mut answer)
        .await?;
    Ok(answer)
}
