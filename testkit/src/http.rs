//! HTTP without an HTTP client: one request on one connection.

use std::{io, net::SocketAddr, time::Duration};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// How long [`is_ready`] waits. An instance that works answers within two seconds, even when Postgres does not.
const ANSWERING: Duration = Duration::from_secs(5);

/// Sends `GET path`, and returns the status and the body of the answer. There is no deadline.
pub async fn get(address: SocketAddr, path: &str) -> io::Result<(u16, String)> {
    let mut stream = TcpStream::connect(address).await?;
    // The request is of HTTP/1.0, so the server closes the connection after its answer and sends no chunks.
    let request = format!("GET {path} HTTP/1.0\r\nHost: {address}\r\n\r\n");
    stream.write_all(request.as_bytes()).await?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await?;
    parse(&answer).ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, "this is no HTTP"))
}

fn parse(answer: &str) -> Option<(u16, String)> {
    let (head, body) = answer.split_once("\r\n\r\n")?;
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some((status, body.to_owned()))
}

/// Whether the `/ready` page of an instance answers with 200. An instance that does not answer is not ready.
pub async fn is_ready(address: SocketAddr) -> bool {
    matches!(
        timeout(ANSWERING, get(address, "/ready")).await,
        Ok(Ok((200, _)))
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_has_a_status_and_a_body() {
        let answer = "HTTP/1.0 503 Service Unavailable\r\ncontent-length: 6\r\n\r\nno\r\n\r\n";
        assert_eq!(parse(answer), Some((503, "no\r\n\r\n".to_owned())));
    }

    #[test]
    fn half_an_answer_is_none() {
        assert_eq!(parse("HTTP/1.0 200 OK\r\ncontent-le"), None);
    }
}
