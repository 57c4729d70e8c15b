//! Several instances share one database: together they send every row once. Only a batch
//! that an instance was sending when it was killed is sent again.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use futures::future::join_all;
use retry_scheduler::store::{Store, dispatch::NextDue};
use testkit::{Fault, Trap};

use crate::support::{Bed, Client, PATIENCE, message};

const ROWS: i32 = 20_000;
const RETRIED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'retried'";
const EVENTS_OF_OTHERS: &str = "SELECT count(DISTINCT instance) FROM retry_events";

/// Empties a queue, and returns how often each id was in it.
async fn times_in(client: &Client, queue: &str) -> HashMap<String, u32> {
    let depth = client.depth(queue).await.expect("the queue");
    let mut times = HashMap::new();
    for id in client.ids(queue, depth as usize).await {
        *times.entry(id).or_default() += 1;
    }
    times
}

#[tokio::test(flavor = "multi_thread")]
async fn four_instances_send_twenty_thousand_due_rows_once_each() {
    let mut bed = Bed::new().await;
    bed.set("RETRY_POLL_INTERVAL_MS", "50")
        .set("DISPATCH_BATCH", "200");
    let queue = bed.declare("target").await;
    let services = join_all((0..4).map(|_| bed.start())).await;
    bed.insert_due(&queue, ROWS).await;
    bed.until_count(RETRIED, ROWS.into()).await;
    for service in services {
        service.stop().await;
    }
    assert!(bed.count(EVENTS_OF_OTHERS).await > 1, "nobody competed");
    let times = times_in(&bed.client, &queue).await;
    assert_eq!(times.len(), ROWS as usize, "some are missing");
    assert!(times.values().all(|n| *n == 1), "some came twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_killed_mid_batch_loses_nothing_and_repeats_only_that_batch() {
    const BATCH: usize = 200;
    const WORKERS: usize = 2;
    let mut bed = Bed::new().await;
    bed.set("RETRY_POLL_INTERVAL_MS", "50")
        .set("DISPATCH_BATCH", &BATCH.to_string())
        .set("DISPATCH_WORKERS", &WORKERS.to_string())
        .set("LOG_LEVEL", "warn");
    bed.migrate().await;
    let queue = bed.declare("target").await;
    let survivors: Vec<_> = (0..3).map(|_| bed.spawn()).collect();
    let proxy = bed.proxy_postgres().await;
    let mut victim = bed.spawn();
    // The victim is killed when its batch is published and confirmed, but not committed.
    let sprung = proxy.set_trap(Trap::on_request(b"COMMIT", Fault::Hold).after(b"job "));
    bed.insert_due(&queue, ROWS).await;
    assert!(sprung.within(PATIENCE).await);
    victim.kill().await.expect("SIGKILL");
    bed.until_count(RETRIED, ROWS.into()).await;
    drop(survivors);

    let times = times_in(&bed.client, &queue).await;
    assert_eq!(times.len(), ROWS as usize, "some are missing");
    let twice = times.values().filter(|n| **n > 1).count();
    assert!((1..=WORKERS * BATCH).contains(&twice), "{twice} repeated");
    assert!(times.values().all(|n| *n <= 2), "some came thrice");
    let counted = "SELECT count(*) FROM retry_queue WHERE retry_count = 1";
    assert_eq!(bed.count(counted).await, i64::from(ROWS));
}

/// Claims in vain, lets something happen, and asks for the next due moment. Returns for how
/// long the first row has been due, and how long ago the claim began.
async fn after_a_claim_in_vain(
    store: &Store,
    meanwhile: impl Future<Output = ()>,
) -> (Duration, Duration) {
    let began = Instant::now();
    let claim = store.claim(10, 1 << 20).await.expect("a claim");
    assert!(claim.tasks.is_empty(), "a row was due and free");
    claim.settle(&[]).await.expect("the claim ends");
    meanwhile.await;
    match store.next_due().await.expect("an answer") {
        Some(NextDue::Since(overdue)) => (overdue, began.elapsed()),
        other => panic!("no row is due: {other:?}"),
    }
}

/// A worker that has claimed in vain rests if others hold what is due, and claims again at
/// once if a row has fallen due since. It tells the two apart by these times.
#[tokio::test(flavor = "multi_thread")]
async fn a_row_that_fell_due_after_a_claim_is_told_from_one_that_others_hold() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let store = Store::open(&bed.settings(), "test").expect("a store");
    let (overdue, ago) = after_a_claim_in_vain(&store, bed.insert_due("q", 1)).await;
    assert!(overdue < ago, "due for {overdue:?}, claimed {ago:?} ago");

    bed.arrange("UPDATE retry_queue SET next_retry_at = now() - interval '1 hour'")
        .await;
    let others = store.claim(10, 1 << 20).await.expect("a claim");
    assert_eq!(others.tasks.len(), 1, "others hold the row");
    let (overdue, ago) = after_a_claim_in_vain(&store, async {}).await;
    assert!(overdue >= ago, "due for {overdue:?}, claimed {ago:?} ago");
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_instances_at_once_migrate_an_empty_database_without_a_fault() {
    let bed = Bed::new().await;
    let settings = bed.settings();
    let stores = (0..8).map(|_| Store::open(&settings, "test").expect("a store"));
    let migrations = stores.map(|store| async move { store.migrate().await });
    for migrated in join_all(migrations).await {
        migrated.expect("migrations apply");
    }
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn eight_instances_starting_at_once_on_an_empty_database_all_become_ready() {
    let bed = Bed::new().await;
    let services = join_all((0..8).map(|_| bed.start())).await;
    for stopped in services.into_iter().map(|s| s.stop()) {
        stopped.await;
    }
}

/// A pooler in transaction mode may give each transaction of a client another session. So
/// a lock or a setting that outlives its transaction is lost to us, and affects others.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_asked_of_postgres_that_a_pooler_in_transaction_mode_cannot_keep() {
    let mut bed = Bed::new().await;
    sqlx::raw_sql(sqlx::AssertSqlSafe(format!(
        "ALTER DATABASE {} SET log_statement = 'all'",
        bed.queue("").trim_end_matches('.')
    )))
    .execute(&bed.db)
    .await
    .expect("statements are logged");
    let queue = bed.declare("pooled").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    bed.client.send(&bed.intake(), &message(&queue, "x")).await;
    inbox.next().await;
    service.stop().await;
    bed.set("DATABASE_SCHEMA", "pooled");
    bed.start().await.stop().await;

    let log = crate::support::shared().await.postgres.log();
    let log = std::fs::read_to_string(log).expect("Postgres's log");
    let said = |what: &str| log.to_lowercase().contains(what);
    // The log has the service's statements; its locks and limits are local to a transaction.
    assert!(said("pg_advisory_xact_lock"), "the migration lock");
    assert!(said("set_config('statement_timeout', '13500', true)"));
    assert!(said("for update skip locked"), "the claim");
    assert!(said("set local search_path = \"pooled\""), "a migration");
    for session in [
        "pg_advisory_lock(",
        "pg_try_advisory_lock(",
        " listen ",
        "set session ",
        "set statement_timeout",
        // A function may have a search path of its own.
        "statement: set search_path",
        "\nset search_path",
    ] {
        assert!(!said(session), "{session:?} outlives its transaction");
    }
}
