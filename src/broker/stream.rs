//! The stream below the AMQP client: the client's own, over TLS if the URI says so, but that
//! the broker's greeting is overheard and that a gate may decide how far it is read. The client
//! takes the type of its stream from the runtime that it is given, so there is a reactor
//! here, too.

use std::{
    fmt, io,
    io::{IoSlice, Read, Write},
    net::SocketAddr,
    os::fd::{AsFd, AsRawFd},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use async_rs::{Runtime, Tokio, traits::Reactor, util::RuntimeParts};
use futures::{
    Stream,
    io::{AsyncRead, AsyncWrite},
};
use lapin::{
    AsyncTcpStream, Connection, ConnectionProperties,
    tcp::{AMQPUriTcpExt, OwnedTLSConfig},
    uri::AMQPUri,
};

use super::{
    greeting::{Ear, Greeting, Heard},
    throttle::{Gate, Throttle},
};

/// Connects, and returns the broker's greeting too. With a gate, the connection is read as far
/// as that allows.
pub(super) async fn connect(
    uri: AMQPUri,
    properties: ConnectionProperties,
    gate: Option<Arc<Gate>>,
) -> lapin::Result<(Connection, Greeting)> {
    let heard = Heard::default();
    let reactor = Watching {
        tokio: Tokio::current(),
        heard: heard.clone(),
        gate,
    };
    let opener = reactor.clone();
    let open = async move |uri: AMQPUri, _: Runtime<RuntimeParts<Tokio, Watching>>| {
        let tls = OwnedTLSConfig::default();
        let runtime = Runtime::new(opener.tokio.clone());
        let socket = AMQPUriTcpExt::connect_with_config_async(&uri, tls.as_ref(), &runtime).await?;
        Ok(AsyncTcpStream::Plain(opener.watch(socket)))
    };
    let runtime = Runtime::new(RuntimeParts::new(Tokio::current(), reactor));
    let connection = Connection::connector(uri, runtime, open, properties).await?;
    Ok((connection, heard.get().cloned().unwrap_or_default()))
}

type Socket = AsyncTcpStream<<Tokio as Reactor>::TcpStream>;

/// Tokio, with streams that are watched.
#[derive(Clone)]
struct Watching {
    tokio: Tokio,
    heard: Heard,
    gate: Option<Arc<Gate>>,
}

impl Watching {
    fn watch(&self, socket: Socket) -> Watched {
        Watched {
            socket,
            ear: Ear::new(self.heard.clone()),
            throttle: self.gate.clone().map(Throttle::new),
        }
    }
}

impl fmt::Debug for Watching {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watching").finish_non_exhaustive()
    }
}

impl Reactor for Watching {
    type TcpStream = Watched;
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
        let (this, socket) = (self.clone(), self.tokio.tcp_connect_addr(address));
        async move { Ok(this.watch(AsyncTcpStream::Plain(socket.await?))) }
    }
}

/// A socket, plain or with TLS. What watches it sees AMQP frames, so it stands on this side of
/// TLS.
struct Watched {
    socket: Socket,
    ear: Ear,
    throttle: Option<Throttle>,
}

impl AsyncRead for Watched {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut [u8],
    ) -> Poll<io::Result<usize>> {
        let this = &mut *self;
        let room = match &mut this.throttle {
            Some(throttle) => ready!(throttle.poll_room(cx)),
            None => buffer.len(),
        };
        let most = room.min(buffer.len());
        let read = ready!(Pin::new(&mut this.socket).poll_read(cx, &mut buffer[..most]))?;
        let bytes = buffer.get(..read).unwrap_or_default();
        this.ear.hear(bytes);
        if let Some(throttle) = &mut this.throttle {
            throttle.has_read(bytes);
        }
        Poll::Ready(Ok(read))
    }
}

impl AsyncWrite for Watched {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, buffer)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffers: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(cx, buffers)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_close(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_close(cx)
    }
}
