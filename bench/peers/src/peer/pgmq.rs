//! pgmq, by its Rust crate. Its SQL is installed without the extension, as the crate offers.

use std::time::Duration;

use ::pgmq::{Message, PGMQueueExt};
use chrono::DateTime;
use retry_scheduler::wire::proto::RetryMessage;
use serde_json::Value;
use sqlx::{PgPool, postgres::PgPoolOptions};

use super::{CONNECTIONS, Peer, QUEUE, Stored};
use crate::adapter::Wake;

/// How long a message that was read stays invisible, in seconds: the crate's own default.
const VISIBILITY_TIMEOUT: i32 = 30;

pub struct Pgmq {
    queue: PGMQueueExt,
    pool: PgPool,
}

impl Peer for Pgmq {
    type Handle = i64;

    /// The interval at which pgmq's own `read_with_poll` polls by default. Notifications have to be
    /// enabled for each queue, and tell only of inserts.
    const NAP: Duration = Duration::from_millis(100);

    async fn open(database_url: &str, _: Wake) -> anyhow::Result<Self> {
        let pool = PgPoolOptions::new()
            .max_connections(CONNECTIONS)
            .connect(database_url)
            .await?;
        let queue = PGMQueueExt::new_with_pool(pool.clone()).await;
        let installed: Option<String> = sqlx::query_scalar("SELECT to_regnamespace('pgmq')::text")
            .fetch_one(&pool)
            .await?;
        if installed.is_none() {
            queue.install_sql_from_embedded().await?;
        }
        queue.create(QUEUE).await?;
        Ok(Self { queue, pool })
    }

    async fn enqueue(&self, messages: Vec<RetryMessage>) -> anyhow::Result<()> {
        let (later, at_once): (Vec<_>, Vec<_>) = messages
            .into_iter()
            .partition(|message| message.next_retry_at_ms > 0);
        let mut tx = self.pool.begin().await?;
        if !at_once.is_empty() {
            let at_once: Vec<Stored> = at_once.into_iter().map(Stored::from).collect();
            let sent = self
                .queue
                .send_batch_with_delay_with_cxn(QUEUE, &at_once, 0, &mut *tx);
            sent.await?;
        }
        // `send_batch` has one delay for a whole batch, and the crate counts it in whole seconds.
        // pgmq's SQL takes a moment.
        for message in later {
            let due = DateTime::from_timestamp_millis(message.next_retry_at_ms);
            sqlx::query("SELECT pgmq.send($1, $2, $3::timestamptz)")
                .bind(QUEUE)
                .bind(sqlx::types::Json(Stored::from(message)))
                .bind(due)
                .execute(&mut *tx)
                .await?;
        }
        tx.commit().await?;
        Ok(())
    }

    async fn fetch(&self, most: usize) -> anyhow::Result<Vec<(RetryMessage, i64)>> {
        let most = i32::try_from(most)?;
        let read: Vec<Message<Value>> = self
            .queue
            .read_batch(QUEUE, VISIBILITY_TIMEOUT, most)
            .await?;
        let messages = read.into_iter().map(|message| {
            let stored: Stored = serde_json::from_value(message.message)?;
            Ok((stored.try_into()?, message.msg_id))
        });
        messages.collect()
    }

    async fn done(&self, handles: Vec<i64>) -> anyhow::Result<()> {
        self.queue.delete_batch(QUEUE, &handles).await?;
        Ok(())
    }
}
