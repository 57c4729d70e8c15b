//! Several instances on one database: nothing twice, nothing missing.

use std::collections::HashMap;

use futures::future::join_all;
use retry_scheduler::store::Store;

use crate::support::{Bed, Client, Fault};

const ROWS: i32 = 20_000;
const RETRIED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'retried'";
const EVENTS_OF_OTHERS: &str = "SELECT count(DISTINCT instance) FROM retry_events";

/// How often each id is in the queue.
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
    // Published and confirmed, not committed: then it dies.
    proxy.set_trap(b"job ", "COMMIT", Fault::Hold);
    bed.insert_due(&queue, ROWS).await;
    proxy.until_sprung().await;
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
