//! Stopping: after one signal the service finishes or rolls back what is in hand, after a
//! second one it exits at once. Neither loses anything.

use std::collections::HashSet;

use retry_scheduler::wire::proto::RetryMessage;

use crate::support::{Bed, Process, eventually, message};

const RETRIED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'retried'";

/// How many sessions in the test's database wait for a lock.
const WAITING: &str = "SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND wait_event_type = 'Lock'";

/// Locks the tables against everybody else until the returned transaction ends.
async fn hold_tables(bed: &Bed) -> sqlx::Transaction<'static, sqlx::Postgres> {
    let mut tx = bed.db.begin().await.expect("a transaction");
    sqlx::query("LOCK TABLE retry_queue, retry_history IN ACCESS EXCLUSIVE MODE")
        .execute(&mut *tx)
        .await
        .expect("locked");
    tx
}

async fn exits_cleanly_on(signal: &str) {
    let bed = Bed::new().await;
    let queue = bed.declare("clean").await;
    let service = Process::spawn(bed.command());
    service.until_ready().await;
    let sent = RetryMessage {
        next_retry_at_ms: 4_000_000_000_000,
        ..message(&queue, "waits")
    };
    bed.client.send(&bed.intake(), &sent).await;
    bed.until_count("SELECT count(*) FROM retry_queue", 1).await;
    service.signal(signal).await;
    let (status, log) = service.ended().await;
    assert_eq!(status.code(), Some(0), "{log}");
    assert!(!log.contains("not all parts stopped in time"), "{log}");
    assert!(!log.contains("panicked"), "{log}");
    let pending = "SELECT count(*) FROM retry_queue WHERE status = 'pending'";
    assert_eq!(bed.count(pending).await, 1);
    assert_eq!(bed.client.depth(&bed.intake()).await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn sigterm_stops_it_cleanly() {
    exits_cleanly_on("TERM").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sigint_stops_it_cleanly() {
    exits_cleanly_on("INT").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn deliveries_in_hand_go_back_to_the_queue_when_they_cannot_be_stored_in_time() {
    let mut bed = Bed::new().await;
    bed.set("SHUTDOWN_TIMEOUT_MS", "1000");
    let queue = bed.declare("in-hand").await;
    let service = Process::spawn(bed.command());
    service.until_ready().await;
    bed.widen(16).await;
    let held = hold_tables(&bed).await;
    let messages: Vec<RetryMessage> = (0..10).map(|_| message(&queue, "x")).collect();
    bed.client.send_all(&bed.intake(), &messages).await;
    eventually("all are with the service", || async {
        (bed.client.depth(&bed.intake()).await == Some(0)).then_some(())
    })
    .await;
    service.signal("TERM").await;
    let (status, log) = service.ended().await;
    assert_eq!(status.code(), Some(0), "{log}");
    eventually("all are back in the queue", || async {
        (bed.client.depth(&bed.intake()).await == Some(10)).then_some(())
    })
    .await;
    held.rollback().await.unwrap();
    // Postgres may take a while to notice that the service's connection is gone. It then rolls
    // back the transaction that waited for the lock.
    bed.until_count(WAITING, 0).await;
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_signal_ends_it_at_once() {
    let mut bed = Bed::new().await;
    // Both time-outs are far longer than the test waits, so only the second signal can end
    // the process.
    bed.set("SHUTDOWN_TIMEOUT_MS", "600000")
        .set("DATABASE_TIMEOUT_MS", "600000");
    let queue = bed.declare("twice").await;
    let service = Process::spawn(bed.command());
    service.until_ready().await;
    let held = hold_tables(&bed).await;
    bed.client
        .send(&bed.intake(), &message(&queue, "stuck"))
        .await;
    eventually("the service is stuck", || async {
        (bed.count(WAITING).await > 0).then_some(())
    })
    .await;
    service.signal("TERM").await;
    service.until_logged("finishing what is in hand").await;
    service.signal("TERM").await;
    let (status, log) = service.ended().await;
    assert_eq!(status.code(), Some(1), "{log}");
    held.rollback().await.unwrap();
    eventually("the message is back in its queue", || async {
        (bed.client.depth(&bed.intake()).await == Some(1)).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rolling_restarts_under_load_lose_nothing_and_repeat_nothing() {
    const MESSAGES: usize = 1500;
    let mut bed = Bed::new().await;
    bed.set("BASE_DELAY_MS", "20")
        .set("INTAKE_BATCH", "20")
        .set("DISPATCH_BATCH", "20");
    let queue = bed.declare("rolling").await;
    bed.client.declare(&bed.intake()).await;
    let messages: Vec<RetryMessage> = (0..MESSAGES)
        .map(|n| message(&queue, format!("{n}")))
        .collect();
    let mut service = Process::spawn(bed.command());
    for (stop, some) in messages.chunks(MESSAGES / 3).enumerate() {
        bed.client.send_all(&bed.intake(), some).await;
        // Each process is stopped in the middle of its work, when the next one has started.
        eventually("some are done", || async {
            let done = bed.client.depth(&queue).await.unwrap() as usize;
            (done > stop * MESSAGES / 3 + MESSAGES / 15).then_some(())
        })
        .await;
        let next = Process::spawn(bed.command());
        service.signal("TERM").await;
        let (status, log) = service.ended().await;
        assert_eq!(status.code(), Some(0), "{log}");
        service = next;
    }
    bed.until_count(RETRIED, MESSAGES as i64).await;
    // The queue is counted before the test consumes from it. Later, a message that was sent
    // twice could be with the consumer, where it is not counted.
    assert_eq!(bed.client.depth(&queue).await, Some(MESSAGES as u32));
    let mut inbox = bed.client.consume(&queue).await;
    let back: HashSet<String> = inbox.take(MESSAGES).await.iter().map(|m| m.id()).collect();
    assert_eq!(back.len(), MESSAGES);
    service.signal("TERM").await;
    assert_eq!(service.ended().await.0.code(), Some(0));
}
