//! Migrations under load: whoever applies them, and whatever they lock, the service goes
//! on afterwards, and no message is lost or sent twice.

use std::collections::HashSet;

use retry_scheduler::wire::proto::RetryMessage;

use crate::support::{Bed, Process, eventually, message};

const RETRIED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'retried'";

/// How often a message was sent back, according to the events.
const SENT_BACK: &str = "SELECT count(*) FROM retry_events WHERE event_type = 'retry_attempt'";

/// How many sessions in the test's database wait for a lock.
const WAITING: &str = "SELECT count(*) FROM pg_stat_activity
     WHERE datname = current_database() AND wait_event_type = 'Lock'";

/// Changes that a later version may make to the tables, each in a transaction that locks
/// everybody else out until it commits.
const LATER: [&str; 3] = [
    "ALTER TABLE retry_queue ADD COLUMN later TEXT NOT NULL DEFAULT 'none'",
    "ALTER TABLE retry_history ADD COLUMN later BIGINT",
    "ALTER TABLE idempotency_keys ADD COLUMN later TIMESTAMPTZ DEFAULT now();
     LOCK TABLE retry_queue, retry_history IN ACCESS EXCLUSIVE MODE;
     INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
         VALUES (9000, 'of a later version', TRUE, '', 0)",
];

/// A change that a later version may make outside of a transaction.
const LATER_STILL: &str = "CREATE INDEX CONCURRENTLY later ON retry_queue (error_class)";

#[tokio::test(flavor = "multi_thread")]
async fn migrations_under_load_lose_nothing_and_repeat_nothing() {
    const CHUNK: usize = 300;
    let mut bed = Bed::new().await;
    bed.set("BASE_DELAY_MS", "20")
        .set("INTAKE_BATCH", "20")
        .set("DISPATCH_BATCH", "20");
    let queue = bed.declare("migrated").await;
    let old = Process::spawn(bed.command());
    old.until_ready().await;
    let chunk = || -> Vec<RetryMessage> { (0..CHUNK).map(|_| message(&queue, "x")).collect() };
    for sql in LATER {
        bed.client.send_all(&bed.intake(), &chunk()).await;
        let mut tx = bed.db.begin().await.expect("a transaction");
        sqlx::raw_sql(sql).execute(&mut *tx).await.expect(sql);
        eventually("the service waits for it", || async {
            (bed.count(WAITING).await > 0).then_some(())
        })
        .await;
        tx.commit().await.expect("migrated");
        migrate(&bed).await;
    }
    bed.client.send_all(&bed.intake(), &chunk()).await;
    let index = sqlx::raw_sql(LATER_STILL).execute(&bed.db);
    let (index, ()) = tokio::join!(index, migrate(&bed));
    index.expect("an index");

    // An instance of this version starts on tables that a later version has changed, and
    // takes over from the first instance.
    bed.client.send_all(&bed.intake(), &chunk()).await;
    let new = Process::spawn(bed.command());
    new.until_ready().await;
    old.signal("TERM").await;
    let (status, log) = old.ended().await;
    assert_eq!(status.code(), Some(0), "{log}");

    let sent = (LATER.len() + 2) * CHUNK;
    bed.until_count(RETRIED, sent as i64).await;
    assert_eq!(bed.count(SENT_BACK).await, sent as i64);
    assert_eq!(bed.client.depth(&queue).await, Some(sent as u32));
    let mut inbox = bed.client.consume(&queue).await;
    let back: HashSet<String> = inbox.take(sent).await.iter().map(|m| m.id()).collect();
    assert_eq!(back.len(), sent);
    new.signal("TERM").await;
    assert_eq!(new.ended().await.0.code(), Some(0));
}

/// Runs the `migrate` command, as an operator may at any time.
async fn migrate(bed: &Bed) {
    let mut command = bed.command();
    command.arg("migrate");
    let (status, log) = Process::spawn(command).ended().await;
    assert_eq!(status.code(), Some(0), "{log}");
}
