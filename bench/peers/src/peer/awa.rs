//! awa, by the batch interface of its queue storage.
//!
//! Its client runs a handler for each job, and claims and completes batches by this same interface;
//! used directly, it spares awa a task and a heartbeat for each job. The client runs beside it on a
//! queue that stays empty, because it does the maintenance: it makes jobs ready that become due, and
//! rotates the tables.

use std::time::Duration;

use ::awa::{
    Client, InsertOpts, InsertParams, JobContext, JobError, JobResult, QueueConfig, QueueStorage,
    QueueStorageConfig, Worker, migrations, model::ClaimedRuntimeJob,
};
use anyhow::ensure;
use async_trait::async_trait;
use chrono::DateTime;
use retry_scheduler::wire::proto::RetryMessage;
use sqlx::{
    PgPool,
    postgres::{PgListener, PgPoolOptions},
};

use super::{CONNECTIONS, Peer, QUEUE, Stored};
use crate::adapter::Wake;

/// The kind of all jobs.
const KIND: &str = "retry";

/// The queue of the client, which nothing is put into.
const EMPTY: &str = "empty";

/// The connections that the client uses itself: a listener for each queue, one for cancellations,
/// and maintenance.
const OF_CLIENT: u32 = 8;

/// Without a deadline awa stores claims in batches, which is its fast path.
const NO_DEADLINE: Duration = Duration::ZERO;

pub struct Awa {
    pool: PgPool,
    storage: QueueStorage,
    /// Maintenance ends when this is dropped.
    _client: Client,
}

impl Peer for Awa {
    type Handle = ClaimedRuntimeJob;

    /// awa's default poll interval. It also listens for notifications by default.
    const NAP: Duration = Duration::from_millis(200);

    async fn open(database_url: &str, wake: Wake) -> anyhow::Result<Self> {
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS + OF_CLIENT)
            .connect(database_url)
            .await?;
        migrations::run(&pool).await?;
        let client = Client::builder(pool.clone())
            .queue(EMPTY, QueueConfig::default())
            .register_worker(Idle)
            .build()?;
        // In a new database this also makes queue storage the engine.
        client.start().await?;
        let mut listener = PgListener::connect(database_url).await?;
        listener.listen(&format!("awa:{QUEUE}")).await?;
        tokio::spawn(async move {
            while listener.recv().await.is_ok() {
                wake.all();
            }
        });
        Ok(Self {
            pool,
            storage: QueueStorage::new(QueueStorageConfig::default())?,
            _client: client,
        })
    }

    async fn enqueue(&self, messages: Vec<RetryMessage>) -> anyhow::Result<()> {
        let mut jobs = Vec::with_capacity(messages.len());
        for message in messages {
            let due_ms = Some(message.next_retry_at_ms).filter(|ms| *ms > 0);
            jobs.push(InsertParams {
                kind: KIND.into(),
                args: serde_json::to_value(Stored::from(message))?,
                opts: InsertOpts {
                    queue: QUEUE.into(),
                    run_at: due_ms.and_then(DateTime::from_timestamp_millis),
                    ..InsertOpts::default()
                },
            });
        }
        self.storage.enqueue_params_copy(&self.pool, &jobs).await?;
        Ok(())
    }

    async fn fetch(&self, most: usize) -> anyhow::Result<Vec<(RetryMessage, Self::Handle)>> {
        let most = i64::try_from(most)?;
        let claimed = self
            .storage
            .claim_runtime_batch(&self.pool, QUEUE, most, NO_DEADLINE)
            .await?;
        let messages = claimed.into_iter().map(|mut claimed| {
            let stored: Stored = serde_json::from_value(claimed.job.args.take())?;
            Ok((stored.try_into()?, claimed))
        });
        messages.collect()
    }

    async fn done(&self, handles: Vec<Self::Handle>) -> anyhow::Result<()> {
        let completed = self
            .storage
            .complete_runtime_batch(&self.pool, &handles)
            .await?;
        ensure!(completed.len() == handles.len(), "jobs were not completed");
        Ok(())
    }
}

/// The client wants a worker. This one never gets a job.
struct Idle;

#[async_trait]
impl Worker for Idle {
    fn kind(&self) -> &'static str {
        KIND
    }

    async fn perform(&self, _: &JobContext) -> Result<JobResult, JobError> {
        Ok(JobResult::Completed)
    }
}
