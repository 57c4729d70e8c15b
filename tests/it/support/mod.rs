//! What every test needs: a database and queues of its own, a running service, a
//! client of the broker, and ways to wait with a deadline.

mod bed;
mod client;
mod metrics;
mod process;
pub mod raw;
pub mod replay;
mod services;

pub use bed::{Bed, Running};
pub use client::{Client, Inbox, Received};
pub use metrics::Scrape;
pub use process::Process;
pub use services::{Breakable, breakable, examined, shared};

use std::time::{Duration, Instant};

/// How long a test waits for something before it fails. Nothing takes this long, even on
/// a busy machine with two cores.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// Waits until `condition` gives a value, and returns it; panics with `what` when that
/// takes longer than [`PATIENCE`].
pub async fn eventually<T, F>(what: &str, mut condition: impl FnMut() -> F) -> T
where
    F: Future<Output = Option<T>>,
{
    let start = Instant::now();
    loop {
        if let Some(value) = condition().await {
            return value;
        }
        assert!(start.elapsed() < PATIENCE, "never came true: {what}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Runs a blocking call that disturbs Postgres or RabbitMQ, such as stopping it.
pub fn disturb<T>(act: impl FnOnce() -> anyhow::Result<T>) -> T {
    tokio::task::block_in_place(act).expect("the service is disturbed")
}

/// A RetryMessage for `queue` with a new id.
pub fn message(
    queue: &str,
    payload: impl Into<Vec<u8>>,
) -> retry_scheduler::wire::proto::RetryMessage {
    retry_scheduler::wire::proto::RetryMessage {
        message_id: uuid::Uuid::now_v7().to_string(),
        original_payload: payload.into(),
        original_queue: queue.to_owned(),
        error_reason: "the test said so".into(),
        ..Default::default()
    }
}

/// Arguments of a queue that keeps only its newest messages.
pub fn max_length(messages: i32) -> lapin::types::FieldTable {
    let mut arguments = lapin::types::FieldTable::default();
    arguments.insert(
        "x-max-length".into(),
        lapin::types::AMQPValue::LongInt(messages),
    );
    arguments
}

/// Arguments of a queue whose dead letters go to the queue `dead_letters`.
pub fn dead_letters_to(dead_letters: &str) -> lapin::types::FieldTable {
    let text = |text: &str| lapin::types::AMQPValue::LongString(text.into());
    let mut arguments = lapin::types::FieldTable::default();
    arguments.insert("x-dead-letter-exchange".into(), text(""));
    arguments.insert("x-dead-letter-routing-key".into(), text(dead_letters));
    arguments
}

/// Arguments of a quorum queue that gives a message up once it was delivered more often than
/// `limit`.
pub fn quorum(limit: Option<i32>) -> lapin::types::FieldTable {
    let mut arguments = lapin::types::FieldTable::default();
    arguments.insert(
        "x-queue-type".into(),
        lapin::types::AMQPValue::LongString("quorum".into()),
    );
    if let Some(limit) = limit {
        arguments.insert(
            "x-delivery-limit".into(),
            lapin::types::AMQPValue::LongInt(limit),
        );
    }
    arguments
}
