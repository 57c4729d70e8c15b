//! apalis, by the batch statements that apalis-postgres makes public.
//!
//! Its workers hand tasks to a handler one by one. The statements are those that they use below that,
//! so apalis is spared the cost of its own runtime: the measure is in its favour.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use apalis_core::{
    backend::TaskResult,
    task::{builder::TaskBuilder, status::Status, task_id::TaskId},
    worker::context::WorkerContext,
};
use apalis_postgres::{Config, PgPool, PostgresStorage, queries};
use prost::Message;
use retry_scheduler::wire::proto::RetryMessage;
use serde_json::Value;

use super::{Peer, QUEUE};
use crate::adapter::Wake;

pub struct Apalis {
    pool: PgPool,
    worker: WorkerContext,
}

/// The id of a task, and which attempt was made.
pub struct Handle {
    id: TaskId,
    attempt: usize,
}

impl Peer for Apalis {
    type Handle = Handle;

    /// The interval in the documentation of apalis's polling strategies. Its notifications are an
    /// option, and tell only of inserts.
    const NAP: Duration = Duration::from_millis(200);

    async fn open(database_url: &str, _: Wake) -> anyhow::Result<Self> {
        let pool = PgPool::connect(database_url).await?;
        PostgresStorage::setup(&pool).await?;
        let worker = WorkerContext::new(&format!("bench-{}", std::process::id()));
        let now = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs();
        let now = i64::try_from(now)?.into();
        let mut connection = pool.acquire().await?;
        queries::register_worker(&mut *connection, QUEUE, &worker, &now, "PgStorage").await?;
        drop(connection);
        Ok(Self { pool, worker })
    }

    async fn enqueue(&self, messages: Vec<RetryMessage>) -> anyhow::Result<()> {
        let mut tasks = Vec::with_capacity(messages.len());
        for message in messages {
            let mut task = TaskBuilder::new(message.encode_to_vec());
            if message.next_retry_at_ms > 0 {
                // apalis knows whole seconds. The next one is the first that is not too early.
                let due = u64::try_from(message.next_retry_at_ms)?.div_ceil(1000);
                task = task.run_at_timestamp(due);
            }
            tasks.push(task.build());
        }
        let mut tx = self.pool.begin().await?;
        queries::push_tasks(&mut *tx, QUEUE, tasks).await?;
        tx.commit().await?;
        Ok(())
    }

    async fn fetch(&self, most: usize) -> anyhow::Result<Vec<(RetryMessage, Handle)>> {
        let config = Config::default().queue(QUEUE).batch_size(most);
        let mut tx = self.pool.begin().await?;
        let tasks = queries::fetch_next(&mut *tx, &config, &self.worker).await?;
        tx.commit().await?;
        // A worker of apalis now marks its tasks as running, in a second statement. The option
        // `lock_tasks(false)` leaves that out, and so do we.
        let messages = tasks.into_iter().map(|task| {
            let id = task.task_id().cloned();
            let handle = Handle {
                id: id.ok_or_else(|| anyhow::anyhow!("a task has no id"))?,
                attempt: task.attempt() + 1,
            };
            Ok((RetryMessage::decode(task.args.as_slice())?, handle))
        });
        messages.collect()
    }

    async fn done(&self, handles: Vec<Handle>) -> anyhow::Result<()> {
        let results: Vec<TaskResult<Value>> = handles
            .into_iter()
            .map(|handle| TaskResult {
                task_id: handle.id,
                attempt: handle.attempt,
                status: Status::Done,
                result: Ok(Value::Null),
            })
            .collect();
        let results: Vec<&TaskResult<Value>> = results.iter().collect();
        let mut tx = self.pool.begin().await?;
        queries::handle_results(&mut *tx, &results, self.worker.name()).await?;
        tx.commit().await?;
        Ok(())
    }
}
