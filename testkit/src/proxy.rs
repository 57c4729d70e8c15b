//! A TCP proxy with faults on demand. It stands between a client and a server such as Postgres or RabbitMQ.

use std::{
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use anyhow::{Context, anyhow};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{oneshot, watch},
    time::{sleep, timeout},
};
use url::Url;

use crate::lock;

/// What a proxy does with all its connections.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Everything passes.
    Open,
    /// Each piece that was read is held back for this long before it is passed on.
    Slow(Duration),
    /// Connections stay open, and nothing passes.
    Stalled,
    /// What the client says arrives; what the server says does not.
    NoAnswers,
    /// All connections are closed, and new ones as soon as they are made.
    Down,
    /// One side of each connection gets a FIN, as if the other had finished, and nothing more. What that side sends
    /// still arrives, because the other side does not know of the FIN.
    HalfClosed {
        /// Whether the client gets the FIN; otherwise the server does.
        towards_client: bool,
    },
}

/// What happens to the bytes that run into a [`Trap`], and to their connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The bytes do not arrive, and the connection is closed.
    Cut,
    /// The server gets the bytes, and the connection is closed once it has answered. The answer does not arrive.
    LoseAnswer,
    /// The bytes do not arrive, and the connection stays open until the client closes it.
    Hold,
}

/// Waits for some bytes on any connection of a proxy. The first connection that carries them has the fault; after that,
/// the trap is gone.
///
/// The bytes are recognised only if one read gets all of them, which holds for short ones that are written at once.
#[derive(Clone, Debug)]
pub struct Trap {
    bytes: Vec<u8>,
    in_request: bool,
    fault: Fault,
    after: Option<Vec<u8>>,
}

impl Trap {
    /// A trap for bytes that the client sends.
    pub fn on_request(bytes: &[u8], fault: Fault) -> Self {
        Self {
            bytes: bytes.to_vec(),
            in_request: true,
            fault,
            after: None,
        }
    }

    /// A trap for bytes that the server sends.
    pub fn on_answer(bytes: &[u8], fault: Fault) -> Self {
        Self {
            in_request: false,
            ..Self::on_request(bytes, fault)
        }
    }

    /// Makes the trap spring only on a connection that has carried `marker`, in either direction, since the trap was
    /// set. A marker such as a message's payload tells one transaction from all others.
    pub fn after(self, marker: &[u8]) -> Self {
        Self {
            after: Some(marker.to_vec()),
            ..self
        }
    }
}

/// Tells when something has run into a trap. When it is dropped, the trap is removed.
#[derive(Debug)]
#[must_use = "the trap is removed when this is dropped"]
pub struct Sprung(oneshot::Receiver<()>);

impl Sprung {
    /// Waits until something has run into the trap; returns `false` when nothing has in time.
    pub async fn within(self, patience: Duration) -> bool {
        matches!(timeout(patience, self.0).await, Ok(Ok(())))
    }
}

/// The trap that is set, if there is one, with the sender that tells its [`Sprung`].
type Set = Option<(Trap, oneshot::Sender<()>)>;

/// Listens on a port of its own, and passes everything on to another port on 127.0.0.1, and back.
#[derive(Debug)]
pub struct Proxy {
    port: u16,
    /// The ports to try for the next connection, in this order.
    targets: Arc<Mutex<Vec<u16>>>,
    way: watch::Sender<Way>,
    trap: Arc<Mutex<Set>>,
}

impl Proxy {
    /// Starts a proxy to this port on 127.0.0.1.
    pub async fn to(port: u16) -> io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let proxy = Self {
            port: listener.local_addr()?.port(),
            targets: Arc::new(Mutex::new(vec![port])),
            way: watch::Sender::new(Way::Open),
            trap: Arc::default(),
        };
        let passage = Passage {
            way: proxy.way.subscribe(),
            trap: proxy.trap.clone(),
            seen: Seen::default(),
        };
        let targets = proxy.targets.clone();
        tokio::spawn(async move {
            loop {
                let Ok((client, _)) = listener.accept().await else {
                    continue;
                };
                let passage = passage.clone();
                let ports = {
                    let mut targets = lock(&targets);
                    targets.rotate_left(1);
                    targets.clone()
                };
                tokio::spawn(async move {
                    for port in ports {
                        if let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await {
                            let _ = client.set_nodelay(true);
                            let _ = server.set_nodelay(true);
                            return passage.pass(client, server).await;
                        }
                    }
                });
            }
        });
        Ok(proxy)
    }

    /// The same URL with the port of this proxy.
    pub fn by_way(&self, url: &str) -> anyhow::Result<String> {
        let mut url = Url::parse(url).context("the URL of what is behind a proxy")?;
        url.set_port(Some(self.port))
            .map_err(|()| anyhow!("a URL that cannot have a port"))?;
        Ok(url.into())
    }

    /// Leads new connections to another port.
    pub fn lead_to(&self, port: u16) {
        self.lead_among(&[port]);
    }

    /// Leads new connections to these ports in turn, and past those on which nobody listens, as a load balancer does.
    /// There must be at least one.
    pub fn lead_among(&self, ports: &[u16]) {
        *lock(&self.targets) = ports.to_vec();
    }

    /// Changes what happens to all connections, from now on.
    pub fn set(&self, way: Way) {
        self.way.send_replace(way);
    }

    /// Sets a trap, in place of one that is set already.
    pub fn set_trap(&self, trap: Trap) -> Sprung {
        let (sender, receiver) = oneshot::channel();
        *lock(&self.trap) = Some((trap, sender));
        Sprung(receiver)
    }
}

/// One connection through the proxy.
#[derive(Clone)]
struct Passage {
    way: watch::Receiver<Way>,
    trap: Arc<Mutex<Set>>,
    seen: Seen,
}

impl Passage {
    async fn pass(mut self, mut client: TcpStream, mut server: TcpStream) {
        let (mut requests, mut answers) = (vec![0; 1 << 16], vec![0; 1 << 16]);
        // Whether the client (`true`) or the server (`false`) got a FIN. A FIN cannot be taken back when the way is
        // open again.
        let mut told = None;
        loop {
            let way = *self.way.borrow_and_update();
            match way {
                Way::Down => return,
                Way::HalfClosed { towards_client } if told.is_none() => {
                    let end = if towards_client {
                        &mut client
                    } else {
                        &mut server
                    };
                    if end.shutdown().await.is_err() {
                        return;
                    }
                    told = Some(towards_client);
                }
                Way::Stalled => {
                    if self.way.changed().await.is_err() {
                        return;
                    }
                    continue;
                }
                _ => {}
            }
            let (bytes, to, is_request) = tokio::select! {
                changed = self.way.changed() => {
                    if changed.is_err() { return }
                    continue;
                }
                n = client.read(&mut requests) => {
                    let Ok(n @ 1..) = n else { return };
                    (&requests[..n], &mut server, true)
                }
                n = server.read(&mut answers), if way != Way::NoAnswers => {
                    let Ok(n @ 1..) = n else { return };
                    (&answers[..n], &mut client, false)
                }
            };
            if told == Some(!is_request) {
                continue;
            }
            if let Way::Slow(delay) = way {
                sleep(delay).await;
            }
            let Some((fault, sprung)) = self.runs_into_trap(bytes, is_request) else {
                if to.write_all(bytes).await.is_err() {
                    return;
                }
                continue;
            };
            match fault {
                // A socket that is closed with unread bytes may discard what was written to it: give both sides the
                // time to read what was passed on before.
                Fault::Cut => sleep(Duration::from_millis(20)).await,
                Fault::LoseAnswer => {
                    let _ = to.write_all(bytes).await;
                    let _ = server.read(&mut answers).await;
                }
                Fault::Hold => {
                    let _ = sprung.send(());
                    while matches!(client.read(&mut requests).await, Ok(1..)) {}
                    return;
                }
            }
            let _ = sprung.send(());
            return;
        }
    }

    /// Checks bytes that are about to pass. If they run into the trap, removes it and returns its fault and sender.
    fn runs_into_trap(
        &mut self,
        bytes: &[u8],
        is_request: bool,
    ) -> Option<(Fault, oneshot::Sender<()>)> {
        let mut set = lock(&self.trap);
        let Some((trap, _)) = set.as_ref().filter(|(_, sprung)| !sprung.is_closed()) else {
            self.seen = Seen::default();
            return None;
        };
        let marked = match &trap.after {
            Some(marker) => self.seen.look_for(marker, bytes, is_request),
            None => true,
        };
        if marked && trap.in_request == is_request && contains(bytes, &trap.bytes) {
            set.take().map(|(trap, sprung)| (trap.fault, sprung))
        } else {
            None
        }
    }
}

/// What one connection has carried since the trap was set.
#[derive(Clone, Default)]
struct Seen {
    marked: bool,
    /// The last bytes of answers and of requests, because a marker may arrive in pieces.
    tails: [Vec<u8>; 2],
}

impl Seen {
    /// Adds bytes, and returns whether the marker has passed by now.
    fn look_for(&mut self, marker: &[u8], bytes: &[u8], is_request: bool) -> bool {
        let tail = &mut self.tails[usize::from(is_request)];
        tail.extend_from_slice(bytes);
        self.marked |= contains(tail, marker);
        let surplus = tail.len().saturating_sub(marker.len());
        tail.drain(..surplus);
        self.marked
    }
}

fn contains(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes
        .windows(wanted.len().max(1))
        .any(|window| window == wanted)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    /// Starts a server that sends all bytes back, and connects to it through a proxy.
    async fn echo() -> (Proxy, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let proxy = Proxy::to(listener.local_addr().unwrap().port())
            .await
            .unwrap();
        tokio::spawn(async move {
            while let Ok((mut stream, _)) = listener.accept().await {
                tokio::spawn(async move {
                    let (mut read, mut write) = stream.split();
                    let _ = tokio::io::copy(&mut read, &mut write).await;
                });
            }
        });
        let client = TcpStream::connect(("127.0.0.1", proxy.port)).await.unwrap();
        (proxy, client)
    }

    async fn ask(client: &mut TcpStream, bytes: &[u8]) -> io::Result<Vec<u8>> {
        client.write_all(bytes).await?;
        let mut answer = vec![0; 64];
        let n = timeout(PATIENCE, client.read(&mut answer)).await??;
        answer.truncate(n);
        Ok(answer)
    }

    /// Whether the connection was closed, in whatever way.
    fn ended(answer: io::Result<Vec<u8>>) -> bool {
        answer.map_or_else(|e| e.kind() != io::ErrorKind::TimedOut, |a| a.is_empty())
    }

    #[tokio::test]
    async fn a_trap_springs_once_and_only_after_its_marker() {
        let (proxy, mut client) = echo().await;
        let trap = Trap::on_request(b"COMMIT", Fault::LoseAnswer).after(b"marker");
        let sprung = proxy.set_trap(trap);
        assert_eq!(ask(&mut client, b"COMMIT").await.unwrap(), b"COMMIT");
        // The marker arrives in pieces.
        assert_eq!(
            ask(&mut client, b"INSERT mar").await.unwrap(),
            b"INSERT mar"
        );
        assert_eq!(ask(&mut client, b"ker").await.unwrap(), b"ker");
        assert!(ended(ask(&mut client, b"COMMIT").await));
        assert!(sprung.within(PATIENCE).await);

        let mut again = TcpStream::connect(("127.0.0.1", proxy.port)).await.unwrap();
        assert_eq!(ask(&mut again, b"marker").await.unwrap(), b"marker");
        assert_eq!(ask(&mut again, b"COMMIT").await.unwrap(), b"COMMIT");
    }

    #[tokio::test]
    async fn a_trap_for_answers_lets_requests_pass() {
        let (proxy, mut client) = echo().await;
        let sprung = proxy.set_trap(Trap::on_answer(b"ack", Fault::Cut));
        assert!(ended(ask(&mut client, b"ack").await));
        assert!(sprung.within(PATIENCE).await);
    }

    #[tokio::test]
    async fn a_trap_is_removed_when_nobody_waits_for_it() {
        let (proxy, mut client) = echo().await;
        let sprung = proxy.set_trap(Trap::on_request(b"COMMIT", Fault::Cut));
        assert!(!sprung.within(Duration::from_millis(1)).await);
        assert_eq!(ask(&mut client, b"COMMIT").await.unwrap(), b"COMMIT");
    }

    #[tokio::test]
    async fn a_proxy_that_goes_down_ends_its_connections_and_comes_back() {
        let (proxy, mut client) = echo().await;
        assert_eq!(ask(&mut client, b"one").await.unwrap(), b"one");
        proxy.set(Way::Down);
        assert!(ended(ask(&mut client, b"two").await));
        proxy.set(Way::Open);
        let mut again = TcpStream::connect(("127.0.0.1", proxy.port)).await.unwrap();
        assert_eq!(ask(&mut again, b"three").await.unwrap(), b"three");
    }

    #[test]
    fn a_url_leads_by_way_of_the_proxy_with_all_else_as_it_was() {
        let proxy = Proxy {
            port: 7,
            targets: Arc::default(),
            way: watch::Sender::new(Way::Open),
            trap: Arc::default(),
        };
        let url = |url| proxy.by_way(url).unwrap();
        assert_eq!(
            url("postgresql://postgres@127.0.0.1:5432/a?b=c"),
            "postgresql://postgres@127.0.0.1:7/a?b=c"
        );
        assert_eq!(
            url("amqp://guest:guest@127.0.0.1:5672/%2f"),
            "amqp://guest:guest@127.0.0.1:7/%2f"
        );
    }

    #[tokio::test]
    async fn connections_go_to_each_server_in_turn_and_past_those_that_are_gone() {
        let mut ports = Vec::new();
        for name in [b"a", b"b"] {
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            ports.push(listener.local_addr().unwrap().port());
            tokio::spawn(async move {
                while let Ok((mut stream, _)) = listener.accept().await {
                    let _ = stream.write_all(name).await;
                }
            });
        }
        let gone = TcpListener::bind("127.0.0.1:0").await.unwrap();
        ports.push(gone.local_addr().unwrap().port());
        drop(gone);
        let proxy = Proxy::to(ports[0]).await.unwrap();
        proxy.lead_among(&ports);
        let mut answers = Vec::new();
        for _ in 0..6 {
            let mut client = TcpStream::connect(("127.0.0.1", proxy.port)).await.unwrap();
            let mut answer = [0];
            client.read_exact(&mut answer).await.unwrap();
            answers.extend(answer);
        }
        // The third of each three would be for the one that is gone, and goes to the one after it.
        assert_eq!(answers, b"baabaa");
    }
}
