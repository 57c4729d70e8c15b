//! A TCP proxy with faults on demand, between one instance and one service.

use std::{
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU16, Ordering},
    },
    time::Duration,
};

use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    sync::{Notify, watch},
    time::sleep,
};

/// What the way is like.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Open,
    /// Every piece takes this long.
    Slow(Duration),
    /// Connections stay, and nothing passes.
    Stalled,
    /// Requests arrive, answers do not.
    NoAnswers,
    /// Connections break, new ones too.
    Down,
    /// One end of each connection sees the other's FIN, which says nothing more;
    /// the other does not, and what it says arrives.
    HalfClosed {
        towards_instance: bool,
    },
}

/// Waits for some bytes on any connection, and breaks it there.
#[derive(Clone, Copy, Debug)]
pub struct Trap {
    pub bytes: &'static [u8],
    /// In what the instance says, or in what it is told.
    pub in_request: bool,
    /// Whether the bytes still reach the other side.
    pub passed_on: bool,
}

/// Listens on a port of its own and passes everything on.
pub struct Proxy {
    port: u16,
    target: Arc<AtomicU16>,
    way: watch::Sender<Way>,
    trap: Arc<Mutex<Option<Trap>>>,
    sprung: Arc<Notify>,
}

impl Proxy {
    /// A proxy to this port on 127.0.0.1.
    pub async fn to(port: u16) -> std::io::Result<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let proxy = Self {
            port: listener.local_addr()?.port(),
            target: Arc::new(AtomicU16::new(port)),
            way: watch::Sender::new(Way::Open),
            trap: Arc::default(),
            sprung: Arc::default(),
        };
        let passage = Passage {
            way: proxy.way.subscribe(),
            trap: proxy.trap.clone(),
            sprung: proxy.sprung.clone(),
        };
        let target = proxy.target.clone();
        tokio::spawn(async move {
            loop {
                let Ok((client, _)) = listener.accept().await else {
                    continue;
                };
                let passage = passage.clone();
                let port = target.load(Ordering::Relaxed);
                tokio::spawn(async move {
                    if let Ok(server) = TcpStream::connect(("127.0.0.1", port)).await {
                        let _ = client.set_nodelay(true);
                        let _ = server.set_nodelay(true);
                        passage.pass(client, server).await;
                    }
                });
            }
        });
        Ok(proxy)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// From now on, a proxy to this port.
    pub fn lead_to(&self, port: u16) {
        self.target.store(port, Ordering::Relaxed);
    }

    pub fn set(&self, way: Way) {
        self.way.send_replace(way);
    }

    /// Sets a trap and waits until something has run into it; `false` when
    /// nothing has in time.
    pub async fn spring(&self, trap: Option<Trap>, patience: Duration) -> bool {
        *self.trap.lock().unwrap_or_else(PoisonError::into_inner) = trap;
        let sprung = tokio::time::timeout(patience, self.sprung.notified()).await;
        *self.trap.lock().unwrap_or_else(PoisonError::into_inner) = None;
        sprung.is_ok()
    }
}

/// One connection's way through.
#[derive(Clone)]
struct Passage {
    way: watch::Receiver<Way>,
    trap: Arc<Mutex<Option<Trap>>>,
    sprung: Arc<Notify>,
}

impl Passage {
    async fn pass(mut self, mut client: TcpStream, mut server: TcpStream) {
        let (mut requests, mut answers) = (vec![0; 1 << 16], vec![0; 1 << 16]);
        // A FIN cannot be taken back when the way is open again.
        let mut shut = None;
        loop {
            let way = *self.way.borrow_and_update();
            match way {
                Way::Down => return,
                Way::HalfClosed { towards_instance } if shut.is_none() => {
                    let end = if towards_instance {
                        &mut client
                    } else {
                        &mut server
                    };
                    if end.shutdown().await.is_err() {
                        return;
                    }
                    shut = Some(towards_instance);
                }
                Way::Stalled => {
                    if self.way.changed().await.is_err() {
                        return;
                    }
                    continue;
                }
                _ => {}
            }
            let (bytes, to, in_request) = tokio::select! {
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
            if shut == Some(!in_request) {
                continue;
            }
            if let Way::Slow(delay) = way {
                sleep(delay).await;
            }
            let caught = self.catches(bytes, in_request);
            if caught.is_none_or(|trap| trap.passed_on) && to.write_all(bytes).await.is_err() {
                return;
            }
            if caught.is_some() {
                // The other side does what it was asked before it sees the end.
                sleep(Duration::from_millis(20)).await;
                self.sprung.notify_one();
                return;
            }
        }
    }

    fn catches(&self, bytes: &[u8], in_request: bool) -> Option<Trap> {
        let mut trap = self.trap.lock().unwrap_or_else(PoisonError::into_inner);
        let found = trap.is_some_and(|t| {
            t.in_request == in_request && bytes.windows(t.bytes.len()).any(|w| w == t.bytes)
        });
        if found { trap.take() } else { None }
    }
}
