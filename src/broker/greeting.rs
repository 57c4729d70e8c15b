//! Connects, and learns which broker it is.
//!
//! A broker introduces itself in its first frame, `connection.start`, with its version and the
//! name of its cluster. lapin reads that frame and keeps nothing of it. So lapin gets a stream that
//! copies the first frame as it is read. Asking on a connection of its own would be simpler,
//! but behind one address that connection may reach another broker than the next.

use std::{
    io::{self, IoSlice, IoSliceMut, Read, Write},
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd},
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use async_rs::{Runtime, Tokio, TokioRuntime, traits::Reactor, util::RuntimeParts};
use futures::{AsyncRead, AsyncWrite, Stream};
use lapin::{
    AsyncTcpStream, Connection, ConnectionProperties,
    protocol::{AMQPClass, connection::AMQPMethod, parse_class},
    tcp::{AMQPUriTcpExt, TLSConfig},
    uri::AMQPUri,
};

/// A frame is a type, a channel and a size in this many bytes, then its payload and one byte
/// more.
const FRAME_HEADER: usize = 7;

/// Should the first frame be longer than this, it is no broker's.
const LONGEST_GREETING: usize = 128 * 1024;

/// What a broker says of itself; what it does not say is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Greeting {
    /// The name of the software, `RabbitMQ` as a rule.
    pub product: String,
    /// Its version.
    pub version: String,
    /// The name of the cluster.
    pub cluster: String,
}

/// The greeting, once it was heard.
type Heard = Arc<OnceLock<Greeting>>;

/// Connects, and returns the broker's greeting too.
pub(super) async fn connect(
    uri: AMQPUri,
    properties: ConnectionProperties,
) -> lapin::Result<(Connection, Greeting)> {
    let heard = Heard::default();
    let reactor = Overhearing {
        tokio: Tokio::current(),
        heard: heard.clone(),
    };
    let runtime = Runtime::new(RuntimeParts::new(Tokio::current(), reactor));
    let overheard = heard.clone();
    let connection = Connection::connector(
        uri,
        runtime,
        async move |uri: AMQPUri, _: Runtime<_>| {
            // With TLS, the copy has to be made of what was decrypted, so the stream is made
            // first and wrapped then.
            let tokio = TokioRuntime::tokio_current();
            let stream = uri.connect_with_config_async(TLSConfig::default(), &tokio);
            let stream = Overheard::new(stream.await?, overheard.clone());
            Ok(AsyncTcpStream::Plain(stream))
        },
        properties,
    )
    .await?;
    let greeting = heard.get().cloned().unwrap_or_default();
    Ok((connection, greeting))
}

/// The reactor that lapin's connection runs on: tokio's, with streams that are overheard.
#[derive(Clone, Debug)]
struct Overhearing {
    tokio: Tokio,
    heard: Heard,
}

impl Reactor for Overhearing {
    type TcpStream = Overheard;
    type Sleep = <Tokio as Reactor>::Sleep;

    fn register<H: Read + Write + AsFd + AsRawFd + Send + 'static>(
        &self,
        socket: H,
    ) -> io::Result<impl AsyncRead + AsyncWrite + Send + Unpin + 'static> {
        self.tokio.register(socket)
    }

    fn sleep(&self, duration: Duration) -> Self::Sleep {
        self.tokio.sleep(duration)
    }

    fn interval(&self, duration: Duration) -> impl Stream<Item = Instant> + Send + 'static {
        self.tokio.interval(duration)
    }

    fn tcp_connect_addr(
        &self,
        address: SocketAddr,
    ) -> impl Future<Output = io::Result<Self::TcpStream>> + Send + 'static {
        let (stream, heard) = (self.tokio.tcp_connect_addr(address), self.heard.clone());
        async move { Ok(Overheard::new(AsyncTcpStream::Plain(stream.await?), heard)) }
    }
}

/// A stream, and a copy of the first frame that is read from it, until that is complete.
struct Overheard {
    stream: AsyncTcpStream<<Tokio as Reactor>::TcpStream>,
    greeting: Option<Vec<u8>>,
    heard: Heard,
}

impl Overheard {
    fn new(stream: AsyncTcpStream<<Tokio as Reactor>::TcpStream>, heard: Heard) -> Self {
        Self {
            stream,
            greeting: Some(Vec::new()),
            heard,
        }
    }

    fn hear(&mut self, bytes: &[u8]) {
        let Some(greeting) = &mut self.greeting else {
            return;
        };
        greeting.extend_from_slice(bytes);
        match first_frame(greeting) {
            Some(payload) => {
                let _ = self.heard.set(greeting_in(payload).unwrap_or_default());
                self.greeting = None;
            }
            None if greeting.len() > LONGEST_GREETING => self.greeting = None,
            None => {}
        }
    }
}

/// The payload of the first frame, once all of it is there.
fn first_frame(bytes: &[u8]) -> Option<&[u8]> {
    let size = bytes.get(3..FRAME_HEADER)?.try_into().ok()?;
    let size = usize::try_from(u32::from_be_bytes(size)).ok()?;
    bytes.get(FRAME_HEADER..FRAME_HEADER.checked_add(size)?)
}

/// The greeting, if this is a `connection.start`.
fn greeting_in(payload: &[u8]) -> Option<Greeting> {
    let Ok((_, AMQPClass::Connection(AMQPMethod::Start(start)))) = parse_class(payload) else {
        return None;
    };
    let properties = start.server_properties;
    let text = |name| {
        let value = properties.inner().get(name);
        value
            .and_then(|value| value.as_long_string())
            .map_or_else(String::new, ToString::to_string)
    };
    Some(Greeting {
        product: text("product"),
        version: text("version"),
        cluster: text("cluster_name"),
    })
}

impl AsyncRead for Overheard {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        let read = ready!(Pin::new(&mut self.stream).poll_read(cx, buffer))?;
        self.hear(buffer.get(..read).unwrap_or_default());
        Poll::Ready(Ok(read))
    }

    fn poll_read_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &mut [IoSliceMut<'_>],
    ) -> Poll<io::Result<usize>> {
        if self.greeting.is_none() {
            return Pin::new(&mut self.stream).poll_read_vectored(cx, buffers);
        }
        match buffers.iter_mut().find(|buffer| !buffer.is_empty()) {
            Some(buffer) => self.poll_read(cx, buffer),
            None => Poll::Ready(Ok(0)),
        }
    }
}

impl AsyncWrite for Overheard {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buffer)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write_vectored(cx, buffers)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_close(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_complete_when_all_of_its_payload_is_there() {
        let frame = [1, 0, 0, 0, 0, 0, 2, 10, 11, 0xCE];
        for cut in 0..FRAME_HEADER + 2 {
            assert_eq!(first_frame(&frame[..cut]), None, "{cut}");
        }
        assert_eq!(first_frame(&frame), Some(&[10, 11][..]));
        // A size that no machine has memory for.
        assert_eq!(first_frame(&[0xFF; 64]), None);
    }

    #[test]
    fn what_is_no_greeting_says_nothing() {
        for payload in [&b""[..], b"\0\x0a\0\x0a", b"\0\x0a\0\x32junk", &[0xFF; 40]] {
            assert_eq!(greeting_in(payload), None);
        }
    }
}
