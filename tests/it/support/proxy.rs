//! A TCP proxy with faults on demand, to stand between the service and Postgres.

use std::sync::{Arc, Mutex};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Semaphore, watch},
};

/// What the way is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Open,
    /// Requests arrive, answers do not.
    NoAnswers,
    /// Connections break, new ones too.
    Down,
}

/// What happens to the request a trap waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The server does it, and its answer is lost with the connection.
    LoseAnswer,
    /// The server never sees it: the connection is held as it is until the
    /// client goes away.
    Hold,
}

/// Waits for `request` on a connection that `marker` has passed in either
/// direction: the marker, a payload for example, tells one transaction from
/// all others.
struct Trap {
    marker: Vec<u8>,
    request: Vec<u8>,
    fault: Fault,
}

/// Listens on a port of its own and passes everything on.
pub struct Proxy {
    port: u16,
    way: watch::Sender<Way>,
    trap: Arc<Mutex<Option<Trap>>>,
    sprung: Arc<Semaphore>,
}

impl Proxy {
    /// A proxy to this port on 127.0.0.1.
    pub async fn to(port: u16) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
        let proxy = Self {
            port: listener.local_addr().expect("an address").port(),
            way: watch::Sender::new(Way::Open),
            trap: Arc::default(),
            sprung: Arc::new(Semaphore::new(0)),
        };
        let (way, trap, sprung) = (
            proxy.way.subscribe(),
            proxy.trap.clone(),
            proxy.sprung.clone(),
        );
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let passage = Passage {
                    way: way.clone(),
                    trap: trap.clone(),
                    sprung: sprung.clone(),
                };
                tokio::spawn(async move {
                    if let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await {
                        passage.pass(client, server).await;
                    }
                });
            }
        });
        proxy
    }

    /// The same address by way of this proxy.
    pub fn by_way(&self, url: &str) -> String {
        let mut url = url::Url::parse(url).expect("a URL");
        url.set_port(Some(self.port)).expect("a URL with a port");
        url.to_string()
    }

    /// Swallows the server's words from now on.
    pub fn swallow_answers(&self) {
        self.way.send_replace(Way::NoAnswers);
    }

    /// Breaks all connections, and new ones, from now on.
    pub fn go_down(&self) {
        self.way.send_replace(Way::Down);
    }

    /// Lets all through again.
    pub fn open(&self) {
        self.way.send_replace(Way::Open);
    }

    /// Sets a trap for one `request` that follows `marker`.
    pub fn set_trap(&self, marker: &[u8], request: &str, fault: Fault) {
        *self.trap.lock().unwrap() = Some(Trap {
            marker: marker.to_vec(),
            request: request.as_bytes().to_vec(),
            fault,
        });
    }

    /// Waits until the trap has caught its request.
    pub async fn until_sprung(&self) {
        tokio::time::timeout(super::PATIENCE, self.sprung.acquire())
            .await
            .expect("the trap catches something")
            .expect("open")
            .forget();
    }
}

/// One connection's way through.
struct Passage {
    way: watch::Receiver<Way>,
    trap: Arc<Mutex<Option<Trap>>>,
    sprung: Arc<Semaphore>,
}

impl Passage {
    async fn pass(mut self, mut client: TcpStream, mut server: TcpStream) {
        let (mut requests, mut answers) = (vec![0; 1 << 16], vec![0; 1 << 16]);
        let mut seen = Seen::default();
        loop {
            let way = *self.way.borrow_and_update();
            if way == Way::Down {
                return;
            }
            tokio::select! {
                changed = self.way.changed() => if changed.is_err() { return },
                n = client.read(&mut requests) => {
                    let Ok(n @ 1..) = n else { return };
                    let caught = self.catches(&mut seen, &requests[..n], true);
                    if caught == Some(Fault::Hold) {
                        self.sprung.add_permits(1);
                        while matches!(client.read(&mut requests).await, Ok(1..)) {}
                        return;
                    }
                    if server.write_all(&requests[..n]).await.is_err() {
                        return;
                    }
                    if caught == Some(Fault::LoseAnswer) {
                        let _ = server.read(&mut answers).await;
                        self.sprung.add_permits(1);
                        return;
                    }
                }
                n = server.read(&mut answers), if way != Way::NoAnswers => {
                    let Ok(n @ 1..) = n else { return };
                    self.catches(&mut seen, &answers[..n], false);
                    if client.write_all(&answers[..n]).await.is_err() {
                        return;
                    }
                }
            }
        }
    }

    /// Looks at what passes; takes the trap when it is this connection's.
    fn catches(&self, seen: &mut Seen, bytes: &[u8], is_request: bool) -> Option<Fault> {
        let mut trap = self.trap.lock().unwrap();
        let Some(set) = &*trap else {
            *seen = Seen::default();
            return None;
        };
        seen.marked |= seen.tail[usize::from(is_request)].finds(&set.marker, bytes);
        if !is_request || !seen.marked || !contains(bytes, &set.request) {
            return None;
        }
        trap.take().map(|t| t.fault)
    }
}

/// What one connection has carried since the trap was set.
#[derive(Default)]
struct Seen {
    marked: bool,
    tail: [Tail; 2],
}

/// The end of what came before, as a marker may arrive in pieces.
#[derive(Default)]
struct Tail(Vec<u8>);

impl Tail {
    fn finds(&mut self, marker: &[u8], bytes: &[u8]) -> bool {
        self.0.extend_from_slice(bytes);
        let found = contains(&self.0, marker);
        let surplus = self.0.len().saturating_sub(marker.len());
        self.0.drain(..surplus);
        found
    }
}

fn contains(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.windows(wanted.len()).any(|w| w == wanted)
}
