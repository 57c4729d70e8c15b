//! The head of a queue, read with AMQP frames of our own.
//!
//! The AMQP client ends its connection over a message that it cannot parse, so such a message
//! would stand at the head of its queue for ever. Here the few methods that it takes to get one
//! message at a time and to acknowledge it are spoken over a connection made for that, and the
//! message is read leniently.

use std::{io, time::Duration};

use amq_protocol::{
    auth::Credentials,
    frame::{AMQPFrame, ProtocolVersion, gen_frame},
};
use async_rs::{Runtime, Tokio, traits::Reactor};
use futures::{AsyncReadExt, AsyncWriteExt};
use lapin::{
    AsyncTcpStream,
    protocol::{AMQPClass, basic, channel, connection, constants, parse_class},
    tcp::{AMQPUriTcpExt, OwnedTLSConfig},
    types::{AMQPValue, FieldTable, ShortString},
    uri::AMQPUri,
};
use tokio::time::timeout;

use super::{Broker, BrokerError, close, short};
use crate::wire::{
    Arrived,
    lenient::{self, Lenient},
};

/// The one channel that is used.
const CHANNEL: u16 = 1;
/// A frame's type, channel and size.
const FRAME_HEAD: usize = 7;
const BASIC_GET_OK: [u8; 4] = [0, 60, 0, 71];

/// A connection that gets messages from the head of one queue.
pub struct Head {
    socket: AsyncTcpStream<<Tokio as Reactor>::TcpStream>,
    queue: ShortString,
    /// How often the broker wants to hear from us at least; zero when it does not.
    heartbeat: Duration,
    frame_max: usize,
    timeout: Duration,
}

/// A message from the head of a queue.
pub struct Got {
    /// What the broker gave.
    pub arrived: Arrived,
    /// What the AMQP client cannot read of it; empty for a message like any other.
    pub problems: Vec<String>,
    /// By what to acknowledge it.
    pub tag: Tag,
}

/// The right to acknowledge a message.
pub struct Tag(u64);

struct Frame {
    kind: u8,
    payload: Vec<u8>,
}

impl Broker {
    /// Connects to get messages from the head of `queue`, in the way that the URL says: with or
    /// without TLS, by its virtual host and its way to log in.
    pub async fn head(&self, queue: &str) -> Result<Head, BrokerError> {
        // The client's own way to connect recognises the broker.
        close(&self.connect("unreadable").await?, self.timeout).await;
        let runtime = Runtime::new(Tokio::current());
        let tls = OwnedTLSConfig::default();
        let opening = AMQPUriTcpExt::connect_with_config_async(&self.uri, tls.as_ref(), &runtime);
        let socket = match timeout(self.timeout, opening).await {
            Ok(socket) => socket.map_err(lost)?,
            Err(_) => return Err(BrokerError::Silent("a connection request", self.timeout)),
        };
        let mut head = Head {
            socket,
            queue: short(queue)?,
            heartbeat: Duration::ZERO,
            frame_max: constants::FRAME_MIN_SIZE as usize,
            timeout: self.timeout,
        };
        let mut client = FieldTable::default();
        let name = AMQPValue::LongString(self.called("unreadable"));
        client.insert("connection_name".into(), name);
        head.shake_hands(&self.uri, client).await?;
        Ok(head)
    }
}

impl Head {
    async fn shake_hands(
        &mut self,
        uri: &AMQPUri,
        client_properties: FieldTable,
    ) -> Result<(), BrokerError> {
        self.send(&AMQPFrame::ProtocolHeader(ProtocolVersion::amqp_0_9_1()))
            .await?;
        let credentials = Credentials::from(uri.authority.userinfo.clone());
        let mechanism = uri.query.auth_mechanism.unwrap_or_default();
        let tune = loop {
            match self.method().await? {
                AMQPClass::Connection(connection::AMQPMethod::Start(_)) => {
                    let start_ok = connection::AMQPMethod::StartOk(connection::StartOk {
                        client_properties: client_properties.clone(),
                        mechanism: mechanism.name().into(),
                        response: credentials.sasl_auth_string(mechanism),
                        locale: "en_US".into(),
                    });
                    self.say(0, AMQPClass::Connection(start_ok)).await?;
                }
                AMQPClass::Connection(connection::AMQPMethod::Secure(_)) => {
                    let secure_ok = connection::AMQPMethod::SecureOk(connection::SecureOk {
                        response: credentials.rabbit_cr_demo_answer(),
                    });
                    self.say(0, AMQPClass::Connection(secure_ok)).await?;
                }
                AMQPClass::Connection(connection::AMQPMethod::Tune(tune)) => break tune,
                other => return Err(unexpected("the handshake", &other)),
            }
        };
        let frame_max = lower(tune.frame_max, uri.query.frame_max.unwrap_or(0));
        let heartbeat = lower(
            tune.heartbeat.into(),
            uri.query.heartbeat.unwrap_or(0).into(),
        );
        let tune_ok = connection::AMQPMethod::TuneOk(connection::TuneOk {
            channel_max: tune.channel_max,
            frame_max,
            heartbeat: u16::try_from(heartbeat).unwrap_or(u16::MAX),
        });
        self.frame_max = match frame_max {
            0 => usize::MAX,
            max => usize::try_from(max).unwrap_or(usize::MAX),
        };
        self.heartbeat = Duration::from_secs(heartbeat.into());
        self.say(0, AMQPClass::Connection(tune_ok)).await?;
        let open = connection::AMQPMethod::Open(connection::Open {
            virtual_host: short(&uri.vhost)?,
        });
        self.say(0, AMQPClass::Connection(open)).await?;
        match self.method().await? {
            AMQPClass::Connection(connection::AMQPMethod::OpenOk(_)) => {}
            other => return Err(unexpected("connection.open", &other)),
        }
        let open = channel::AMQPMethod::Open(channel::Open {});
        self.say(CHANNEL, AMQPClass::Channel(open)).await?;
        match self.method().await? {
            AMQPClass::Channel(channel::AMQPMethod::OpenOk(_)) => Ok(()),
            other => Err(unexpected("channel.open", &other)),
        }
    }

    /// Gets the message at the head; none when the queue is empty.
    pub async fn get(&mut self) -> Result<Option<Got>, BrokerError> {
        let get = basic::AMQPMethod::Get(basic::Get {
            queue: self.queue.clone(),
            no_ack: false,
        });
        self.say(CHANNEL, AMQPClass::Basic(get)).await?;
        let answer = self.frame().await?;
        let Some(arguments) = answer.payload.strip_prefix(&BASIC_GET_OK[..]) else {
            return match parse(&answer)? {
                AMQPClass::Basic(basic::AMQPMethod::GetEmpty(_)) => Ok(None),
                other => Err(unexpected("basic.get", &other)),
            };
        };
        let cut = |what: &str| BrokerError::Unexpected(format!("{what} is cut off"));
        let got = lenient::get_ok(arguments).ok_or_else(|| cut("basic.get-ok"))?;
        let header = self.content(constants::FRAME_HEADER).await?;
        let (size, read) =
            lenient::content_header(&header).ok_or_else(|| cut("a content header"))?;
        let Lenient {
            properties,
            mut problems,
        } = read;
        problems.extend(got.problems);
        let mut body = Vec::new();
        while (body.len() as u64) < size {
            body.append(&mut self.content(constants::FRAME_BODY).await?);
        }
        Ok(Some(Got {
            arrived: Arrived {
                body,
                properties,
                redelivered: got.redelivered,
            },
            problems,
            tag: Tag(got.delivery_tag),
        }))
    }

    /// Acknowledges a message that is stored.
    pub async fn ack(&mut self, tag: Tag) -> Result<(), BrokerError> {
        let ack = basic::AMQPMethod::Ack(basic::Ack {
            delivery_tag: tag.0,
            multiple: false,
        });
        self.say(CHANNEL, AMQPClass::Basic(ack)).await
    }

    /// Does `work` while the broker is told now and then that we live.
    pub async fn beating<T>(
        &mut self,
        mut work: impl Future<Output = T> + Unpin,
    ) -> Result<T, BrokerError> {
        if self.heartbeat.is_zero() {
            return Ok(work.await);
        }
        loop {
            match timeout(self.heartbeat / 2, &mut work).await {
                Ok(done) => return Ok(done),
                Err(_) => self.send(&AMQPFrame::Heartbeat).await?,
            }
        }
    }

    /// Closes the connection. When this has worked, the broker has seen all acknowledgements.
    pub async fn close(mut self) -> Result<(), BrokerError> {
        let close = connection::AMQPMethod::Close(connection::Close {
            reply_code: constants::REPLY_SUCCESS,
            reply_text: "goodbye".into(),
            class_id: 0,
            method_id: 0,
        });
        self.say(0, AMQPClass::Connection(close)).await?;
        match self.method().await? {
            AMQPClass::Connection(connection::AMQPMethod::CloseOk(_)) => Ok(()),
            other => Err(unexpected("connection.close", &other)),
        }
    }

    async fn say(&mut self, channel: u16, method: AMQPClass) -> Result<(), BrokerError> {
        self.send(&AMQPFrame::Method(channel, method)).await
    }

    async fn send(&mut self, frame: &AMQPFrame) -> Result<(), BrokerError> {
        let (bytes, _) = gen_frame(frame)(Vec::new().into())
            .map_err(|e| BrokerError::Unusable(e.to_string()))?
            .into_inner();
        let sending = async {
            self.socket.write_all(&bytes).await?;
            self.socket.flush().await
        };
        match timeout(self.timeout, sending).await {
            Ok(sent) => sent.map_err(lost),
            Err(_) => Err(BrokerError::Silent("a frame", self.timeout)),
        }
    }

    async fn method(&mut self) -> Result<AMQPClass, BrokerError> {
        parse(&self.frame().await?)
    }

    async fn content(&mut self, kind: u8) -> Result<Vec<u8>, BrokerError> {
        let frame = self.frame().await?;
        if frame.kind == kind {
            Ok(frame.payload)
        } else {
            Err(unexpected("basic.get", &parse(&frame)?))
        }
    }

    /// The next frame that is no heartbeat. The deadline holds for each frame, so that a large
    /// message may take as long as it takes.
    async fn frame(&mut self) -> Result<Frame, BrokerError> {
        loop {
            let frame = match timeout(self.timeout, self.read_frame()).await {
                Ok(frame) => frame?,
                Err(_) => return Err(BrokerError::Silent("a frame", self.timeout)),
            };
            if frame.kind != constants::FRAME_HEARTBEAT {
                return Ok(frame);
            }
        }
    }

    async fn read_frame(&mut self) -> Result<Frame, BrokerError> {
        let mut head = [0; FRAME_HEAD];
        self.socket.read_exact(&mut head).await.map_err(lost)?;
        let [kind, _, _, size @ ..] = head;
        let size = usize::try_from(u32::from_be_bytes(size)).unwrap_or(usize::MAX);
        // The end of a frame is not counted in its size.
        if size.saturating_add(FRAME_HEAD + 1) > self.frame_max {
            return Err(BrokerError::Unexpected(format!("a frame of {size} bytes")));
        }
        let mut payload = vec![0; size + 1];
        self.socket.read_exact(&mut payload).await.map_err(lost)?;
        if payload.pop() != Some(constants::FRAME_END) {
            return Err(BrokerError::Unexpected("a frame without an end".into()));
        }
        Ok(Frame { kind, payload })
    }
}

/// The lower of two limits, of which 0 means none.
fn lower(theirs: u32, ours: u32) -> u32 {
    match (theirs, ours) {
        (0, only) | (only, 0) => only,
        (theirs, ours) => theirs.min(ours),
    }
}

fn parse(frame: &Frame) -> Result<AMQPClass, BrokerError> {
    match parse_class(&frame.payload[..]) {
        Ok((_, method)) if frame.kind == constants::FRAME_METHOD => Ok(method),
        _ => {
            let kind = frame.kind;
            Err(BrokerError::Unexpected(format!("a frame of type {kind}")))
        }
    }
}

/// What the broker said instead of an answer; when it closes, its reason.
fn unexpected(to: &str, method: &AMQPClass) -> BrokerError {
    BrokerError::Unexpected(match method {
        AMQPClass::Connection(connection::AMQPMethod::Close(close)) => {
            format!("{} {} (to {to})", close.reply_code, close.reply_text)
        }
        AMQPClass::Channel(channel::AMQPMethod::Close(close)) => {
            format!("{} {} (to {to})", close.reply_code, close.reply_text)
        }
        other => format!("an unexpected answer to {to}: {other:?}"),
    })
}

fn lost(error: io::Error) -> BrokerError {
    BrokerError::Failed(error.into())
}
