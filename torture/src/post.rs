//! Producers: they report failures, and record which reports RabbitMQ confirmed.

use std::{
    collections::HashSet,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, bail};
use lapin::{BasicProperties, Channel, Confirmation, Connection, options::BasicPublishOptions};
use testkit::amqp;
use tokio::{
    sync::RwLock,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};

use crate::{
    ledger::Ledger,
    message::{INTAKE, Message},
    setup::WORK,
};

/// How long to wait for RabbitMQ before connecting again.
pub const PATIENCE: Duration = Duration::from_secs(5);

const PRODUCERS: usize = 2;

/// How many reports are published before their confirms are waited for.
const CHUNK: usize = 20;

/// A connection on which failures are reported, and which is replaced when it fails.
pub struct Post {
    url: String,
    ledger: Arc<Ledger>,
    /// Reporting takes this for reading. A fault that would lose reports takes it for writing.
    gate: Arc<RwLock<()>>,
    open: Option<(Connection, Channel)>,
}

impl Post {
    pub fn new(url: &str, ledger: &Arc<Ledger>, gate: &Arc<RwLock<()>>) -> Self {
        Self {
            url: url.to_owned(),
            ledger: ledger.clone(),
            gate: gate.clone(),
            open: None,
        }
    }

    /// Connects, unless there is a connection that is not known to have failed.
    async fn open(&mut self) -> anyhow::Result<()> {
        if self.open.is_none() {
            self.open = Some(timeout(PATIENCE, open(&self.url)).await??);
        }
        Ok(())
    }

    /// Reports failures, or publishes letters to their queues, and tells the ledger which of them RabbitMQ confirmed.
    /// It is an error if those are not all.
    pub async fn report(&mut self, messages: &[Message], error: &str) -> anyhow::Result<()> {
        let gate = self.gate.clone();
        let _passed = gate.read().await;
        self.report_behind_gate(messages, error).await
    }

    /// Does the same for a caller that has shut the gate.
    pub async fn report_behind_gate(
        &mut self,
        messages: &[Message],
        error: &str,
    ) -> anyhow::Result<()> {
        self.open().await?;
        let (connection, channel) = self.open.take().context("not open")?;
        let mut confirms = Vec::with_capacity(messages.len());
        let sent = Instant::now();
        for message in messages {
            let (exchange, key, body) = if message.is_letter() {
                (WORK, message.routing_key(), message.payload())
            } else {
                self.ledger.reported(*message);
                ("", INTAKE, message.report(error))
            };
            let mandatory = BasicPublishOptions {
                mandatory: true,
                ..BasicPublishOptions::default()
            };
            let properties = BasicProperties::default()
                .with_message_id(message.message_id().into())
                .with_correlation_id(message.number.to_string().into())
                .with_delivery_mode(2);
            let publish =
                channel.basic_publish(exchange.into(), key.into(), mandatory, &body, properties);
            match timeout(PATIENCE, publish).await {
                Ok(Ok(confirm)) => confirms.push((*message, confirm)),
                _ => break,
            }
        }
        // lapin may attach the return of one message to the confirm of another, so look at all of them first.
        let mut acked = Vec::with_capacity(confirms.len());
        let mut returned = HashSet::new();
        let deadline = sent + PATIENCE;
        for (message, confirm) in confirms {
            let Ok(Ok(answer)) = tokio::time::timeout_at(deadline, confirm).await else {
                continue;
            };
            if let Confirmation::Ack(_) = answer {
                acked.push(message);
            }
            if let Some(back) = answer.take_message() {
                let number = back.delivery.properties.correlation_id().clone();
                returned.insert(number.map(|n| n.to_string()).unwrap_or_default());
            }
        }
        acked.retain(|m| !returned.contains(&m.number.to_string()));
        for message in &acked {
            self.ledger.confirmed(*message, sent);
        }
        if acked.len() < messages.len() {
            bail!("{} of {} confirmed", acked.len(), messages.len());
        }
        self.open = Some((connection, channel));
        Ok(())
    }
}

/// Connects, and opens a channel with confirms.
pub async fn open(url: &str) -> anyhow::Result<(Connection, Channel)> {
    let connection = connect(url).await?;
    let channel = amqp::confirming_channel(&connection).await?;
    Ok((connection, channel))
}

/// Connects to RabbitMQ directly, not through a proxy.
pub async fn connect(url: &str) -> anyhow::Result<Connection> {
    amqp::connect(url, "campaign").await
}

/// Spreads the messages over the time and over the faults of a campaign.
pub struct Pace {
    pub messages: usize,
    pub begun: Instant,
    pub time: Duration,
    pub steps: usize,
    done: AtomicUsize,
}

impl Pace {
    pub fn new(messages: usize, time: Duration, steps: usize) -> Self {
        Self {
            messages,
            begun: Instant::now(),
            time,
            steps: steps + 1,
            done: AtomicUsize::new(1),
        }
    }

    /// Allows the messages that belong to the next fault to be sent.
    pub fn step(&self) {
        self.done.fetch_add(1, Ordering::Relaxed);
    }

    fn allowed(&self) -> usize {
        let by_time =
            self.messages as u128 * self.begun.elapsed().as_millis() / self.time.as_millis();
        let by_step = self.messages * self.done.load(Ordering::Relaxed) / self.steps;
        let by_time = usize::try_from(by_time).unwrap_or(usize::MAX);
        by_time.min(by_step).min(self.messages)
    }
}

/// Starts the producers.
pub fn produce_all(
    url: &str,
    ledger: &Arc<Ledger>,
    gate: &Arc<RwLock<()>>,
    pace: &Arc<Pace>,
) -> JoinSet<()> {
    let producer = |first| {
        let post = Post::new(url, ledger, gate);
        produce(post, ledger.clone(), pace.clone(), first, PRODUCERS)
    };
    (0..PRODUCERS).map(producer).collect()
}

/// Runs one of several producers, which sends every `of`th message from `first` on. A report that was not
/// confirmed is not sent again.
async fn produce(mut post: Post, ledger: Arc<Ledger>, pace: Arc<Pace>, first: usize, of: usize) {
    let mut own = (first..pace.messages).step_by(of).peekable();
    while own.peek().is_some() {
        if post.open().await.is_err() {
            sleep(Duration::from_millis(200)).await;
            continue;
        }
        let allowed = pace.allowed();
        let mut chunk = Vec::with_capacity(CHUNK);
        while let Some(number) = own.next_if(|n| *n < allowed && chunk.len() < CHUNK) {
            chunk.push(Message::usual(number));
        }
        if chunk.is_empty() {
            sleep(Duration::from_millis(20)).await;
            continue;
        }
        for message in &chunk {
            ledger.attempted(*message);
        }
        if post
            .report(&chunk, "failed for the first time")
            .await
            .is_err()
        {
            sleep(Duration::from_millis(500)).await;
        }
    }
}
