//! Consumes the target queues and checks that each message arrives, and arrives once.

use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, bail, ensure};
use futures::{StreamExt, stream::select_all};
use lapin::{Connection, options::BasicConsumeOptions, types::FieldTable};
use tokio::{sync::mpsc, task::JoinHandle, time::timeout};

use crate::producer::identity;

/// If nothing arrives for so long, the messages that are missing count as lost.
const PATIENCE: Duration = Duration::from_secs(30);

struct Arrival {
    run: u32,
    number: u32,
    at: Instant,
    wall: SystemTime,
}

/// The consumer of some target queues.
pub struct Inbox {
    arrivals: mpsc::UnboundedReceiver<Arrival>,
    reader: JoinHandle<()>,
}

/// When the messages of a run arrived: each of them, in order of its number, and the last one.
pub struct Arrived {
    pub wall: Vec<SystemTime>,
    pub last: Instant,
}

impl Inbox {
    /// Subscribes to all `queues` on one channel.
    pub async fn open(connection: &Connection, queues: &[String]) -> anyhow::Result<Self> {
        let channel = connection.create_channel().await?;
        let mut consumers = Vec::with_capacity(queues.len());
        for queue in queues {
            // Consume without acknowledgements: the consumer is not what is measured, and should
            // cost as little as possible.
            let options = BasicConsumeOptions {
                no_ack: true,
                ..BasicConsumeOptions::default()
            };
            let consumer = channel.basic_consume(
                queue.as_str().into(),
                "".into(),
                options,
                FieldTable::default(),
            );
            consumers.push(consumer.await?);
        }
        let (sender, arrivals) = mpsc::unbounded_channel();
        let reader = tokio::spawn(async move {
            let mut deliveries = select_all(consumers);
            while let Some(Ok(delivery)) = deliveries.next().await {
                let (at, wall) = (Instant::now(), SystemTime::now());
                let Some((run, number)) = identity(&delivery.data) else {
                    continue;
                };
                let arrival = Arrival {
                    run,
                    number,
                    at,
                    wall,
                };
                if sender.send(arrival).is_err() {
                    return;
                }
            }
        });
        Ok(Self { arrivals, reader })
    }

    /// Waits until all `count` messages of `run` have arrived. A message of an earlier run is an
    /// error: that run has waited for all its messages, so this one arrives for the second time.
    pub async fn collect(&mut self, run: u32, count: u32) -> anyhow::Result<Arrived> {
        let mut came: Vec<Option<SystemTime>> = vec![None; count as usize];
        let mut missing = count;
        let mut last = Instant::now();
        while missing > 0 {
            let Ok(arrival) = timeout(PATIENCE, self.arrivals.recv()).await else {
                bail!("{missing} of {count} messages are lost: none came for {PATIENCE:?}");
            };
            let arrival = arrival.context("the inbox lost RabbitMQ")?;
            ensure!(arrival.run == run, "a message of an earlier run came twice");
            let slot = came.get_mut(arrival.number as usize);
            let slot = slot.context("a message came that nobody sent")?;
            ensure!(slot.is_none(), "message {} came twice", arrival.number);
            *slot = Some(arrival.wall);
            missing -= 1;
            last = arrival.at;
        }
        Ok(Arrived {
            wall: came.into_iter().flatten().collect(),
            last,
        })
    }

    /// Fails if a message has arrived that nobody waits for. Call it after `collect`, which has
    /// seen each message once.
    pub fn nothing_more(&mut self) -> anyhow::Result<()> {
        ensure!(self.arrivals.try_recv().is_err(), "a message came twice");
        Ok(())
    }
}

impl Drop for Inbox {
    fn drop(&mut self) {
        self.reader.abort();
    }
}
