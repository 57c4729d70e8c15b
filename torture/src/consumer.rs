//! Consumers: they take the messages that come back, fail some of them again, and read the review queue.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, bail};
use devstack::Stack;
use futures::StreamExt;
use lapin::{
    Channel,
    message::Delivery,
    options::{
        BasicAckOptions, BasicCancelOptions, BasicNackOptions, BasicPublishOptions,
        BasicQosOptions, QueueDeleteOptions,
    },
    types::ShortString,
};
use prost::Message as _;
use retry_scheduler::wire::proto::ReviewMessage;
use testkit::amqp;
use tokio::{
    sync::{RwLock, mpsc, oneshot},
    task::{JoinSet, spawn_blocking},
    time::{Instant, sleep, timeout},
};

use crate::{
    instance::SERVICE,
    ledger::Ledger,
    message::{INTAKE, Message, REVIEW, TARGETS},
    post::{PATIENCE, Post, connect},
    setup,
};

const PREFETCH: u16 = 100;

/// When nothing has come for this long, nothing is on its way.
const STILL: Duration = Duration::from_millis(200);

/// The error of a failure that is not the first.
const AGAIN: &str = "failed again";

/// How many sessions may find a queue not empty before a deletion is given up.
const TRIES: usize = 5;

/// Asks a consumer to delete its queue once it is empty, and to declare it again after a while. Whoever asks
/// makes sure that the service sends nothing more to it.
pub struct Deletion {
    pub gone_for: Duration,
    /// Told when the queue is deleted; dropped when it was never empty.
    pub gone: oneshot::Sender<()>,
    /// Told when the queue is declared again.
    pub back: oneshot::Sender<()>,
}

/// How many messages the consumers are to treat wrongly, to show that the campaign notices.
#[derive(Default)]
pub struct Tricks {
    /// Messages that are taken and not recorded as arrived.
    pub steal: AtomicUsize,
    /// Messages that are published to their queue once more.
    pub copy: AtomicUsize,
    /// Messages that are done, and are reported as failed all the same.
    pub repeat: AtomicUsize,
}

/// Whether this consumer has shut the gate through which failures are reported.
enum Gate {
    Open,
    Shut,
}

/// The consumer of one queue, which connects again whenever its connection fails.
struct Consumer {
    queue: &'static str,
    url: String,
    stack: Arc<Stack>,
    post: Post,
    /// See [`Post`].
    gate: Arc<RwLock<()>>,
    ledger: Arc<Ledger>,
    deletions: mpsc::Receiver<Deletion>,
    tricks: Arc<Tricks>,
}

/// Starts the consumers of all queues. Returns them, and for each target the way to ask for its deletion.
pub fn start_all(
    url: &str,
    stack: &Arc<Stack>,
    ledger: &Arc<Ledger>,
    gate: &Arc<RwLock<()>>,
    tricks: &Arc<Tricks>,
) -> (JoinSet<()>, Vec<mpsc::Sender<Deletion>>) {
    let mut consumers = JoinSet::new();
    let mut deletions = Vec::new();
    for queue in TARGETS.into_iter().chain([REVIEW]) {
        let (sender, receiver) = mpsc::channel(1);
        if queue != REVIEW {
            deletions.push(sender.clone());
        }
        let consumer = Consumer {
            queue,
            url: url.to_owned(),
            stack: stack.clone(),
            post: Post::new(url, ledger, gate),
            gate: gate.clone(),
            ledger: ledger.clone(),
            deletions: receiver,
            tricks: tricks.clone(),
        };
        consumers.spawn(async move {
            // If all senders were dropped, the consumer's wait for a deletion would end at once.
            let _kept = sender;
            consumer.run().await;
        });
    }
    (consumers, deletions)
}

impl Consumer {
    async fn run(mut self) {
        let mut asked: Option<(Deletion, usize)> = None;
        loop {
            let _ = self.session(&mut asked).await;
            if let Some((_, tries)) = &mut asked {
                *tries += 1;
            }
            asked.take_if(|(_, tries)| *tries > TRIES);
            sleep(Duration::from_millis(100)).await;
        }
    }

    /// Consumes until the connection fails, or until a deletion that was asked for was done or found the queue
    /// not empty.
    async fn session(&mut self, asked: &mut Option<(Deletion, usize)>) -> anyhow::Result<()> {
        let connection = timeout(PATIENCE, connect(&self.url)).await??;
        let channel = timeout(PATIENCE, connection.create_channel()).await??;
        self.declare(&channel).await?;
        let qos = channel.basic_qos(PREFETCH, BasicQosOptions::default());
        timeout(PATIENCE, qos).await??;
        let consumer = timeout(PATIENCE, amqp::subscribe(&channel, self.queue)).await??;
        let tag = consumer.tag();
        let mut chunks = consumer.ready_chunks(usize::from(PREFETCH));
        while asked.is_none() {
            tokio::select! {
                chunk = chunks.next() => {
                    let chunk = chunk.context("the subscription ended")?;
                    self.take(&channel, chunk, Gate::Open).await?;
                }
                deletion = self.deletions.recv() => {
                    *asked = Some((deletion.context("the campaign is over")?, 0));
                }
            }
        }
        let gate = self.gate.clone();
        let shut = gate.write().await;
        while let Ok(Some(chunk)) = timeout(STILL, chunks.next()).await {
            self.take(&channel, chunk, Gate::Shut).await?;
        }
        let cancel = channel.basic_cancel(tag, BasicCancelOptions::default());
        timeout(PATIENCE, cancel).await??;
        while let Ok(Some(chunk)) = timeout(STILL, chunks.next()).await {
            self.take(&channel, chunk, Gate::Shut).await?;
        }
        self.until_empty().await?;
        let delete = channel.queue_delete(self.queue.into(), QueueDeleteOptions::default());
        timeout(PATIENCE, delete).await??;
        drop(shut);
        if let Some((deletion, _)) = asked.take() {
            let _ = deletion.gone.send(());
            sleep(deletion.gone_for).await;
            let made = self.declare(&channel).await;
            let _ = deletion.back.send(());
            made?;
        }
        let _ = timeout(PATIENCE, connection.close(200, "anew".into())).await;
        Ok(())
    }

    async fn declare(&self, channel: &Channel) -> anyhow::Result<()> {
        timeout(PATIENCE, setup::declare(channel, self.queue)).await??;
        Ok(())
    }

    /// Waits until the queue holds nothing. What was rejected leaves it only when it is in another queue.
    async fn until_empty(&self) -> anyhow::Result<()> {
        let begun = Instant::now();
        while begun.elapsed() < PATIENCE {
            let (stack, queue) = (self.stack.clone(), self.queue);
            if spawn_blocking(move || setup::is_empty(&stack, queue)).await?? {
                return Ok(());
            }
        }
        bail!("{} is not empty", self.queue)
    }

    /// Records what came, reports or rejects what fails, and only then acknowledges the rest.
    async fn take(
        &mut self,
        channel: &Channel,
        chunk: Vec<lapin::Result<Delivery>>,
        gate: Gate,
    ) -> anyhow::Result<()> {
        let deliveries: Vec<Delivery> = chunk.into_iter().collect::<Result<_, _>>()?;
        let mut report = Vec::new();
        let mut reject = Vec::new();
        let mut last = None;
        for delivery in &deliveries {
            let failed = if self.queue == REVIEW {
                self.reviewed(delivery);
                None
            } else {
                self.came_back(channel, delivery).await
            };
            match failed {
                Some(message) if message.is_letter() => reject.push((message, delivery)),
                failed => {
                    report.extend(failed);
                    last = Some(delivery);
                }
            }
        }
        match gate {
            _ if report.is_empty() => {}
            Gate::Open => self.post.report(&report, AGAIN).await?,
            Gate::Shut => self.post.report_behind_gate(&report, AGAIN).await?,
        }
        for (message, delivery) in reject {
            // From here on RabbitMQ has to see to it. If it does not hear of this, it delivers the message again.
            self.ledger.reported(message);
            self.ledger.confirmed(message, Instant::now());
            let to_dead_letters = BasicNackOptions {
                requeue: false,
                ..BasicNackOptions::default()
            };
            timeout(PATIENCE, delivery.nack(to_dead_letters)).await??;
        }
        if let Some(last) = last {
            let ack = last.ack(BasicAckOptions { multiple: true });
            timeout(PATIENCE, ack).await??;
        }
        Ok(())
    }

    /// Records a message that came back, and returns it if it is to fail. A letter comes for the first time without
    /// having been away, and always fails then.
    async fn came_back(&self, channel: &Channel, delivery: &Delivery) -> Option<Message> {
        let header = |name: &str| {
            let headers = delivery.properties.headers().as_ref()?;
            headers.inner().get(name)
        };
        let from = header("x-retry-scheduler").and_then(|name| name.as_long_string());
        let from = from.and_then(|name| instance(&name.to_string()));
        let count = header("x-retry-count").and_then(|count| count.as_long_int());
        let id = delivery.properties.message_id().as_ref();
        let id = id.map(|id| id.to_string()).unwrap_or_default();
        let key = delivery.routing_key.as_str();
        let Some(message) = Message::of_payload(&delivery.data) else {
            let what = format!("{} got something strange with id {id:?}", self.queue);
            self.ledger.unexpected(what);
            return None;
        };
        let as_sent = (message.queue(), message.message_id(), message.routing_key());
        if (self.queue, id.clone(), key) != as_sent {
            let what = format!("{message:?} came to {} with id {id:?} by {key}", self.queue);
            self.ledger.unexpected(what);
        }
        let Some(count) = count else {
            if !message.is_letter() {
                let what = format!("{message:?} came to {} without a count", self.queue);
                self.ledger.unexpected(what);
            }
            return message.is_letter().then_some(message);
        };
        if taken(&self.tricks.steal) {
            return None;
        }
        if !message.is_letter() && taken(&self.tricks.copy) {
            let _ = copy(channel, self.queue, &delivery.data, delivery).await;
        }
        if !message.is_letter() && !message.fails(count) && taken(&self.tricks.repeat) {
            let report = message.report("it did not fail");
            let _ = copy(channel, INTAKE, &report, delivery).await;
        }
        self.ledger
            .arrived(message, Some(count), from, delivery.redelivered);
        message.fails(count).then_some(message)
    }

    fn reviewed(&self, delivery: &Delivery) {
        let found = self.in_review(delivery);
        if let Err(e) = found {
            self.ledger.unexpected(format!("in review: {e:#}"));
        }
    }

    fn in_review(&self, delivery: &Delivery) -> anyhow::Result<()> {
        let kind = delivery.properties.content_type().as_ref();
        let review = match kind.map(ShortString::as_str) {
            Some("application/x-protobuf") => ReviewMessage::decode(delivery.data.as_slice())?,
            _ => serde_json::from_slice(&delivery.data)?,
        };
        let message = if review.original_payload.is_empty() {
            Message::of_producers_id(&review.producer_id)
        } else {
            Message::of_payload(&review.original_payload)
        };
        let message =
            message.with_context(|| format!("{} is not what was sent", review.message_id))?;
        self.ledger
            .arrived(message, None, None, delivery.redelivered);
        match review.reason.as_str() {
            "exhausted" | "unroutable" | "invalid" | "late" => Ok(()),
            other => bail!("{message:?} is there as {other}: {}", review.error),
        }
    }
}

/// The number in the name of an instance, which its version may follow.
fn instance(name: &str) -> Option<usize> {
    name.strip_prefix(SERVICE)?.split('-').next()?.parse().ok()
}

fn taken(counter: &AtomicUsize) -> bool {
    let less = |n: usize| n.checked_sub(1);
    counter
        .fetch_update(Ordering::Relaxed, Ordering::Relaxed, less)
        .is_ok()
}

async fn copy(
    channel: &Channel,
    queue: &str,
    body: &[u8],
    delivery: &Delivery,
) -> lapin::Result<()> {
    let properties = delivery.properties.clone();
    let options = BasicPublishOptions::default();
    let publish = channel.basic_publish("".into(), queue.into(), options, body, properties);
    publish.await?.await?;
    Ok(())
}
