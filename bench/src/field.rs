//! What all scenarios share: the connections to both services, the queues and schemas, and the way
//! to send a load and measure its rate.

use std::{
    cell::Cell,
    io::{IsTerminal, Write},
    time::{Duration, Instant},
};

use anyhow::Context;
use lapin::{Channel, Connection, options::QueueDeleteOptions, types::FieldTable};
use testkit::amqp;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};
use url::Url;

use crate::{
    inbox::{Arrived, Inbox},
    processor::{Clock, Cost},
    producer::{Load, Producer, Shape},
    rows::Rows,
    scheduler::{Scheduler, Setup},
};

/// The queue that the relay consumes.
pub const RELAY: &str = "bench.relay";

/// The queue whose messages expire into the first target queue.
pub const DELAY: &str = "bench.delay";

/// The name of a target queue: a queue that messages go back to.
pub fn target(number: u32) -> String {
    format!("bench.target.{number}")
}

/// A database schema and an intake queue. Instances that share them work on the same messages.
#[derive(Clone, Debug)]
pub struct Lane {
    pub schema: String,
    pub intake: String,
}

impl Lane {
    pub fn named(name: &str) -> Self {
        Self {
            schema: format!("bench_{name}"),
            intake: format!("bench.intake.{name}"),
        }
    }
}

/// A way that messages take from the producer to the inbox: through the service or through a floor.
pub struct Way {
    /// The queue that messages are published to.
    pub entry: String,
    pub shape: Shape,
    /// Set if the way leads through the service. A run is then over only when its rows are settled,
    /// too.
    pub lane: Option<Lane>,
}

impl Way {
    pub fn through(lane: &Lane) -> Self {
        Self {
            entry: lane.intake.clone(),
            shape: Shape::RetryMessage,
            lane: Some(lane.clone()),
        }
    }

    pub fn relay() -> Self {
        Self {
            entry: RELAY.into(),
            shape: Shape::RetryMessage,
            lane: None,
        }
    }

    pub fn delay_queue() -> Self {
        Self {
            entry: DELAY.into(),
            shape: Shape::Payload,
            lane: None,
        }
    }
}

/// What was measured on one way, one value a round.
#[derive(Clone, Debug, Default)]
pub struct Raced {
    /// Messages a second.
    pub rates: Vec<f64>,
    pub costs: Vec<Cost>,
}

/// Everything a scenario needs.
pub struct Field {
    pub full: bool,
    rounds: Option<usize>,
    pub setup: Setup,
    pub rows: Rows,
    pub producer: Producer,
    /// Declares and deletes queues. Nothing else uses it, because the broker closes a channel on
    /// which something fails.
    pub channel: Channel,
    /// The name and version of the broker, for the report.
    pub broker: String,
    sending: Connection,
    receiving: Connection,
    runs: Cell<u32>,
    queues: Vec<String>,
    schemas: Vec<String>,
}

impl Field {
    /// Connects to both services. `rounds` overrides the number of rounds of every scenario.
    pub async fn open(setup: Setup, full: bool, rounds: Option<usize>) -> anyhow::Result<Self> {
        let sending = connect(&setup.rabbitmq_url).await?;
        let receiving = connect(&setup.rabbitmq_url).await?;
        Ok(Self {
            full,
            rounds,
            rows: Rows::open(&setup.database_url).await?,
            producer: Producer::open(&sending).await?,
            channel: sending.create_channel().await?,
            broker: broker_version(&setup.rabbitmq_url).await?,
            setup,
            sending,
            receiving,
            runs: Cell::new(0),
            queues: Vec::new(),
            schemas: Vec::new(),
        })
    }

    /// The number of rounds: what `--rounds` says, else `quick` in the quick form and 7 in the full
    /// one.
    pub fn rounds(&self, quick: usize) -> usize {
        let default = if self.full { 7 } else { quick };
        self.rounds.unwrap_or(default).max(1)
    }

    /// Returns the value that is meant for the form that runs.
    pub fn pick<T>(&self, quick: T, full: T) -> T {
        if self.full { full } else { quick }
    }

    /// Creates an empty schema, an empty intake queue and an empty review queue.
    pub async fn lane(&mut self, name: &str) -> anyhow::Result<Lane> {
        let lane = Lane::named(name);
        self.rows.empty_schema(&lane.schema).await?;
        self.schemas.push(lane.schema.clone());
        self.queue(&lane.intake, FieldTable::default()).await?;
        self.queue(&format!("{}.review", lane.intake), FieldTable::default())
            .await?;
        Ok(lane)
    }

    /// Creates an empty queue. A queue of the same name is deleted first.
    pub async fn queue(&mut self, name: &str, arguments: FieldTable) -> anyhow::Result<()> {
        delete(&self.channel, name).await?;
        self.queues.push(name.to_owned());
        declare(&self.channel, name, arguments).await
    }

    /// Creates the first `count` target queues, empty, and consumes them.
    pub async fn inbox(&mut self, count: u32) -> anyhow::Result<Inbox> {
        self.inbox_of(0..count).await
    }

    /// Creates the target queues of these numbers, empty, and consumes them.
    pub async fn inbox_of(&mut self, numbers: std::ops::Range<u32>) -> anyhow::Result<Inbox> {
        let queues: Vec<String> = numbers.map(target).collect();
        for queue in &queues {
            self.queue(queue, FieldTable::default()).await?;
        }
        Inbox::open(&self.receiving, &queues).await
    }

    /// Starts a scheduler on a lane and waits until it is ready.
    pub async fn scheduler(
        &self,
        lane: &Lane,
        settings: &[(&str, &str)],
    ) -> anyhow::Result<Scheduler> {
        Scheduler::start(&self.setup, &lane.schema, &lane.intake, settings).await
    }

    /// Returns a new number, by which the messages of one run are told from those of another.
    pub fn run(&self) -> u32 {
        self.runs.update(|runs| runs + 1);
        self.runs.get()
    }

    /// Sends a load one way and returns messages a second, from the first publish to the last
    /// arrival.
    pub async fn race(&self, way: &Way, load: Load, inbox: &mut Inbox) -> anyhow::Result<f64> {
        let run = self.run();
        let started = Instant::now();
        let ((), Arrived { last, .. }) = tokio::try_join!(
            self.producer.send(&way.entry, way.shape, run, load),
            inbox.collect(run, load.count)
        )?;
        let seconds = last.duration_since(started).as_secs_f64();
        if let Some(lane) = &way.lane {
            self.rows.until_settled(&lane.schema).await?;
        }
        inbox.nothing_more()?;
        Ok(f64::from(load.count) / seconds)
    }

    /// Sends a load each way in turn, for several rounds, after a warm-up. Each round begins with
    /// another way, so that none has the advantage of its place.
    pub async fn races(
        &self,
        name: &str,
        ways: &[Way],
        load: Load,
        rounds: usize,
        inbox: &mut Inbox,
    ) -> anyhow::Result<Vec<Raced>> {
        let warm_up = Load {
            count: (load.count / 10).max(1),
            ..load
        };
        for way in ways {
            self.race(way, warm_up, inbox).await?;
        }
        let mut raced = vec![Raced::default(); ways.len()];
        for round in 0..rounds {
            progress(&format!("{name}: round {} of {rounds}", round + 1));
            for turn in 0..ways.len() {
                let index = (turn + round) % ways.len();
                let before = Clock::read()?;
                let rate = self.race(&ways[index], load, inbox).await?;
                raced[index].rates.push(rate);
                let cost = before.until(&Clock::read()?, load.count);
                raced[index].costs.push(cost);
            }
        }
        Ok(raced)
    }

    /// Deletes the queues and schemas that were created, and closes the connections.
    pub async fn close(mut self) -> anyhow::Result<()> {
        progress("");
        for queue in std::mem::take(&mut self.queues) {
            delete(&self.channel, &queue).await?;
        }
        for schema in std::mem::take(&mut self.schemas) {
            self.rows.drop_schema(&schema).await?;
        }
        let goodbye = async {
            let _ = self.receiving.close(200, "measured".into()).await;
            let _ = self.sending.close(200, "measured".into()).await;
        };
        let _ = tokio::time::timeout(Duration::from_secs(2), goodbye).await;
        Ok(())
    }
}

async fn connect(url: &str) -> anyhow::Result<Connection> {
    amqp::connect(url, "bench").await.context("RABBITMQ_URL")
}

/// The broker names its version in its first frame, before any login. Over TLS it cannot be read
/// this way, and is left out.
async fn broker_version(url: &str) -> anyhow::Result<String> {
    const KEY: &[u8] = b"\x07versionS\0\0\0";
    let url = Url::parse(url).context("RABBITMQ_URL")?;
    let host = url.host_str().unwrap_or("localhost");
    let mut stream = TcpStream::connect((host, url.port().unwrap_or(5672))).await?;
    stream.write_all(b"AMQP\0\0\x09\x01").await?;
    let mut frame = vec![0; 4096];
    let read = tokio::time::timeout(Duration::from_secs(5), stream.read(&mut frame)).await??;
    let frame = &frame[..read];
    let version = frame
        .windows(KEY.len())
        .position(|at| at == KEY)
        .and_then(|at| {
            let (length, text) = frame[at + KEY.len()..].split_first()?;
            text.get(..usize::from(*length))
        });
    let version = String::from_utf8_lossy(version.unwrap_or_default());
    Ok(format!("RabbitMQ {version}"))
}

async fn declare(channel: &Channel, name: &str, arguments: FieldTable) -> anyhow::Result<()> {
    amqp::declare(channel, name, arguments)
        .await
        .with_context(|| format!("declaring {name}"))?;
    Ok(())
}

async fn delete(channel: &Channel, name: &str) -> anyhow::Result<()> {
    let deleted = channel.queue_delete(name.into(), QueueDeleteOptions::default());
    deleted.await.with_context(|| format!("deleting {name}"))?;
    Ok(())
}

/// Shows on stderr what is being measured: on a terminal in one line that is overwritten, elsewhere
/// as a new line. An empty text clears the line of the terminal.
pub fn progress(text: &str) {
    let mut to = std::io::stderr();
    let _ = match (to.is_terminal(), text) {
        (true, _) => write!(to, "\r\x1b[2K{text}"),
        (false, "") => Ok(()),
        (false, _) => writeln!(to, "{text}"),
    };
    let _ = to.flush();
}
