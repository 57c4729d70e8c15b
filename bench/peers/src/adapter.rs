//! What stands between RabbitMQ and a peer. It does what retry-scheduler does, with the same pieces
//! and the same numbers, so that only the queue in between differs.

use std::{sync::Arc, time::Duration};

use anyhow::{Context, bail};
use bench::floor::{decoded, next_batch, pass_on};
use lapin::{
    Channel,
    options::{BasicAckOptions, BasicQosOptions},
};
use retry_scheduler::wire::proto::RetryMessage;
use testkit::amqp;
use tokio::{sync::watch, task::JoinSet, time::timeout};

use crate::peer::Peer;

/// retry-scheduler's defaults.
const PREFETCH: u16 = 1000;
const BATCH: usize = 500;
const LINGER: Duration = Duration::from_millis(20);
const WORKERS: usize = 2;

/// Wakes the workers before their naps are over.
#[derive(Clone)]
pub struct Wake(watch::Sender<()>);

impl Wake {
    pub fn all(&self) {
        self.0.send_replace(());
    }
}

/// Runs as the adapter of a peer until the process is killed. Each batch that is done with is told
/// on stdout, as a line with its size.
pub async fn run<P: Peer>(intake: &str) -> anyhow::Result<()> {
    let given = |name| std::env::var(name).context(name);
    let (database_url, rabbitmq_url) = (given("DATABASE_URL")?, given("RABBITMQ_URL")?);
    let wake = Wake(watch::Sender::new(()));
    let peer = Arc::new(P::open(&database_url, wake.clone()).await?);
    let outgoing = amqp::connect(&rabbitmq_url, "peer").await?;
    let mut tasks = JoinSet::new();
    for _ in 0..WORKERS {
        let publisher = amqp::confirming_channel(&outgoing).await?;
        tasks.spawn(dispatch(peer.clone(), publisher, wake.0.subscribe()));
    }
    let incoming = amqp::connect(&rabbitmq_url, "peer").await?;
    let channel = incoming.create_channel().await?;
    tasks.spawn(take_in(peer, channel, intake.to_owned(), wake));
    match tasks.join_next().await {
        Some(ended) => ended?,
        None => bail!("there is nothing to do"),
    }
}

/// Takes messages from RabbitMQ into the peer.
async fn take_in<P: Peer>(
    peer: Arc<P>,
    channel: Channel,
    queue: String,
    wake: Wake,
) -> anyhow::Result<()> {
    channel
        .basic_qos(PREFETCH, BasicQosOptions::default())
        .await?;
    let mut deliveries = amqp::subscribe(&channel, &queue).await?;
    while let Some(batch) = next_batch(&mut deliveries, BATCH, LINGER).await? {
        let messages = decoded(&batch)?;
        let is_due = |message: &RetryMessage| message.next_retry_at_ms == 0;
        let any_due = messages.iter().any(is_due);
        peer.enqueue(messages).await.context("enqueueing")?;
        // Both sides are one process, so no peer has to wait for its next poll to see what is due
        // already. What becomes due later is left to the peer.
        if any_due {
            wake.all();
        }
        if let Some(last) = batch.last() {
            last.ack(BasicAckOptions { multiple: true }).await?;
        }
    }
    bail!("RabbitMQ ended the subscription")
}

/// Gives back to RabbitMQ what the peer says is due.
async fn dispatch<P: Peer>(
    peer: Arc<P>,
    publisher: Channel,
    mut woken: watch::Receiver<()>,
) -> anyhow::Result<()> {
    loop {
        woken.borrow_and_update();
        let (messages, handles): (Vec<_>, Vec<_>) = peer
            .fetch(BATCH)
            .await
            .context("fetching")?
            .into_iter()
            .unzip();
        let count = messages.len();
        if count > 0 {
            pass_on(&publisher, &messages).await?;
            peer.done(handles).await.context("completing")?;
            println!("{count}");
        }
        if count < BATCH {
            // Whether it was woken or has slept long enough, it has to look.
            let _ = timeout(P::NAP, woken.changed()).await;
        }
    }
}
