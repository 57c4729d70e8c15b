//! A synchronous standby is away: a COMMIT that waits for it is neither done nor undone. It
//! is waited for, and nothing is stored or sent twice once the standby is back.

use std::collections::HashSet;

use devstack::Stack;
use retry_scheduler::wire::proto::RetryMessage;
use sqlx::PgPool;

use crate::support::{Bed, Process, breakable, disturb, eventually, message};

const RETRIED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'retried'";

/// How many sessions in the test's database wait for the standby.
const WAITING: &str = "SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND wait_event = 'SyncRep'";

/// How many of them have done so for several times the deadline of these tests, after which
/// the service gives up anything else.
const WAITING_LONG: &str = "SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND wait_event = 'SyncRep'
       AND clock_timestamp() - query_start > interval '5 seconds'";

/// The sessions of all instances in the test's database.
const BACKENDS: &str = "SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND application_name = 'retry-scheduler'";

const POOL: i64 = 5;

const TEXT: &str = "COMMIT waits for a synchronous standby (synchronous_standby_names = ";

async fn bed_on(stack: &Stack) -> Bed {
    let mut bed = Bed::on(stack).await;
    bed.set("DATABASE_TIMEOUT_MS", "1000")
        .set("DATABASE_POOL_SIZE", &POOL.to_string())
        .set("BASE_DELAY_MS", "20")
        .set("SHUTDOWN_TIMEOUT_MS", "1500");
    bed
}

/// Inserts rows that are due now, without waiting for a standby.
async fn insert_due_locally(db: &PgPool, queue: &str, n: i32) {
    let mut tx = db.begin().await.expect("a transaction");
    sqlx::query("SET LOCAL synchronous_commit = local")
        .execute(&mut *tx)
        .await
        .expect("set");
    sqlx::query(
        "INSERT INTO retry_queue (message_id, original_payload, original_queue, next_retry_at)
         SELECT gen_random_uuid(), convert_to('job ' || i, 'UTF8'), $1, now()
         FROM generate_series(1, $2) AS i",
    )
    .bind(queue)
    .bind(n)
    .execute(&mut *tx)
    .await
    .expect("rows are stored");
    tx.commit().await.expect("committed");
}

/// Waits until `/ready` says of a part, whose name starts so, that its COMMIT waits.
async fn until_waiting(service: &Process, part: &str) {
    eventually(&format!("{part} waits for the standby"), || async {
        let (status, body) = service.get("/ready").await;
        let body: serde_json::Value = serde_json::from_str(&body).expect("JSON");
        let parts = body["parts"].as_object().expect("the parts");
        let told = parts.iter().any(|(name, state)| {
            let detail = state["detail"].as_str().expect("a detail");
            name.starts_with(part) && state["up"] == false && detail.starts_with(TEXT)
        });
        (told && status == 503).then_some(())
    })
    .await;
}

/// Waits until `condition` returns at least `n`. Until then the instances may have
/// no more than `most` sessions.
async fn while_bounded(bed: &Bed, condition: &'static str, n: i64, most: i64) {
    eventually(&format!("{condition} >= {n}"), || async {
        let backends = bed.count(BACKENDS).await;
        assert!(backends <= most, "{backends} backends");
        (bed.count(condition).await >= n).then_some(())
    })
    .await;
}

/// All messages are in their queue, each once, and all rows are settled.
async fn each_was_sent_once(bed: &Bed, queue: &str, messages: usize) {
    bed.until_count(RETRIED, messages as i64).await;
    assert_eq!(
        bed.count("SELECT count(*) FROM retry_queue").await,
        messages as i64
    );
    assert_eq!(bed.client.depth(queue).await, Some(messages as u32));
    let ids: HashSet<String> = bed.client.ids(queue, messages).await.into_iter().collect();
    assert_eq!(ids.len(), messages, "some were sent twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_commit_that_waits_for_a_standby_is_waited_for_and_its_work_is_not_done_again() {
    let stack = breakable().await;
    let bed = bed_on(&stack).await;
    let queue = bed.declare("target").await;
    let service = Process::spawn(bed.command());
    service.until_ready().await;

    disturb(|| stack.postgres.wait_for_standby(Some("nobody")));
    let messages: Vec<RetryMessage> = (0..200).map(|n| message(&queue, format!("{n}"))).collect();
    bed.client.send_all(&bed.intake(), &messages).await;
    until_waiting(&service, "consumer").await;
    insert_due_locally(&bed.db, &queue, 100).await;
    until_waiting(&service, "publisher").await;
    while_bounded(&bed, WAITING_LONG, 2, POOL + 1).await;
    until_waiting(&service, "consumer").await;
    until_waiting(&service, "publisher").await;
    // What was published is not published again by an instance that has just come.
    let other = Process::spawn(bed.command());
    until_waiting(&other, "consumer").await;
    assert_eq!(bed.client.depth(&queue).await, Some(100));
    assert!(bed.count(BACKENDS).await <= 2 * (POOL + 1));

    disturb(|| stack.postgres.wait_for_standby(None));
    service.until_ready().await;
    other.until_ready().await;
    each_was_sent_once(&bed, &queue, 300).await;
    let log = service.log();
    assert_eq!(log.matches(TEXT).count(), 1, "{log}");
    assert_eq!(log.matches("no COMMIT waits").count(), 1, "{log}");
    assert!(!log.contains("did not answer within"), "{log}");
    bed.until_count(WAITING, 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_that_is_stopped_while_a_commit_waits_leaves_in_time_and_nothing_doubles() {
    let stack = breakable().await;
    let bed = bed_on(&stack).await;
    let queue = bed.declare("target").await;
    let service = Process::spawn(bed.command());
    service.until_ready().await;

    disturb(|| stack.postgres.wait_for_standby(Some("nobody")));
    insert_due_locally(&bed.db, &queue, 50).await;
    let late: Vec<RetryMessage> = (0..50)
        .map(|n| RetryMessage {
            next_retry_at_ms: 4_000_000_000_000,
            ..message(&queue, format!("{n}"))
        })
        .collect();
    bed.client.send_all(&bed.intake(), &late).await;
    until_waiting(&service, "consumer").await;
    until_waiting(&service, "publisher").await;
    service.signal("TERM").await;
    let (status, log) = service.ended().await;
    assert_eq!(status.code(), Some(0), "{log}");
    eventually("the deliveries are back in their queue", || async {
        (bed.client.depth(&bed.intake()).await == Some(50)).then_some(())
    })
    .await;
    // The backends of what is not decided go on waiting, with their locks.
    assert!(bed.count(WAITING).await >= 2);

    let next = Process::spawn(bed.command());
    until_waiting(&next, "consumer").await;
    assert_eq!(bed.client.depth(&queue).await, Some(50));
    disturb(|| stack.postgres.wait_for_standby(None));
    next.until_ready().await;
    eventually("the deliveries are taken", || async {
        (bed.client.depth(&bed.intake()).await == Some(0)).then_some(())
    })
    .await;
    // A new subscription holds one delivery, so one COMMIT's worth was waiting.
    bed.until_count(
        "SELECT count(*) FROM retry_events WHERE event_type = 'duplicate'",
        1,
    )
    .await;
    bed.until_count("SELECT count(*) FROM retry_queue", 100)
        .await;
    bed.make_due().await;
    each_was_sent_once(&bed, &queue, 100).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_standby_that_goes_and_comes_back_under_load_doubles_nothing_and_loses_nothing() {
    const MESSAGES: usize = 1000;
    let stack = breakable().await;
    let bed = bed_on(&stack).await;
    let queue = bed.declare("target").await;
    let standby = disturb(|| stack.postgres.standby());
    let service = Process::spawn(bed.command());
    service.until_ready().await;

    let messages: Vec<RetryMessage> = (0..MESSAGES)
        .map(|n| message(&queue, format!("{n}")))
        .collect();
    let (first, rest) = messages.split_at(MESSAGES / 2);
    for away in 0..2 {
        let load = [first, rest][away];
        let (before, after) = load.split_at(load.len() / 2);
        bed.client.send_all(&bed.intake(), before).await;
        eventually("some are done", || async {
            (bed.client.depth(&queue).await? as usize > away * MESSAGES / 2).then_some(())
        })
        .await;
        disturb(|| stack.postgres.kill_standby(&standby));
        bed.client.send_all(&bed.intake(), after).await;
        until_waiting(&service, "consumer").await;
        while_bounded(&bed, WAITING_LONG, 1, POOL + 1).await;
        disturb(|| stack.postgres.start_standby_again(&standby));
        service.until_ready().await;
        bed.until_count(RETRIED, ((away + 1) * MESSAGES / 2) as i64)
            .await;
    }
    each_was_sent_once(&bed, &queue, MESSAGES).await;
    disturb(|| stack.postgres.dismiss(standby));
    bed.until_count(WAITING, 0).await;
}
