//! How much memory the service needs, whatever waits for it.

use sqlx::{Postgres, Transaction};

use crate::support::{Bed, Process, eventually, message};

const MIB: usize = 1 << 20;
const RECONNECTS: &str = "retry_reconnects_total{part=\"intake\"}";

/// Keeps everybody from storing a failure until the transaction ends.
async fn locked(bed: &Bed) -> Transaction<'static, Postgres> {
    let mut lock = bed.db.begin().await.expect("a transaction");
    sqlx::query("LOCK TABLE retry_queue IN EXCLUSIVE MODE")
        .execute(&mut *lock)
        .await
        .expect("the lock");
    lock
}

/// Waits until the service has tried to store a batch for this long.
async fn until_waiting(bed: &Bed, interval: &str) {
    eventually("it waits with deliveries in hand", || async {
        let waiting: i64 = sqlx::query_scalar(
            "SELECT count(*) FROM pg_stat_activity
             WHERE datname = current_database() AND wait_event_type = 'Lock'
               AND query LIKE 'WITH arrays%' AND clock_timestamp() > query_start + $1::interval",
        )
        .bind(interval)
        .fetch_one(&bed.db)
        .await
        .expect("a count");
        (waiting > 0).then_some(())
    })
    .await;
}

/// The service reads no more than INTAKE_MEMORY_BYTES ahead; what it reads passes through several
/// buffers on its way to Postgres, and back from there to RabbitMQ at the same time.
#[tokio::test(flavor = "multi_thread")]
async fn large_messages_that_wait_fit_a_container_of_256_mb() {
    let mut bed = Bed::new().await;
    bed.migrate().await;
    bed.set("DATABASE_TIMEOUT_MS", "60000");
    let (intake, work) = (bed.intake(), bed.declare("work").await);
    let mut command = bed.command();
    command.arg("serve");
    let service = Process::spawn(command);
    service.until_ready().await;
    // By count alone, the window is large enough for all large messages after these.
    let small = bed.declare("small").await;
    let first: Vec<_> = (0..400).map(|_| message(&small, b"small")).collect();
    bed.client.send_all(&intake, &first).await;
    bed.until_count("SELECT count(*) FROM retry_queue", 400)
        .await;

    // Nothing can be stored for a while, and all that is read has to be held.
    let lock = locked(&bed).await;
    let sizes = [(24, 8 * MIB), (8, 16 * MIB)];
    for (n, size) in sizes {
        for _ in 0..n {
            let payload = vec![fastrand::u8(..); size];
            bed.client.send(&intake, &message(&work, payload)).await;
        }
    }
    until_waiting(&bed, "4 s").await;
    lock.rollback().await.expect("unlocked");
    let mut inbox = bed.client.consume(&work).await;
    for (n, _) in sizes {
        for _ in 0..n {
            let received = inbox.next().await.body.len();
            assert!(sizes.iter().any(|(_, size)| *size == received));
        }
    }
    let peak = service.peak_memory();
    println!("peak: {peak} MiB");
    service.signal("TERM").await;
    service.ended().await;
    assert!(peak < 240, "{peak} MiB were resident");
}

#[tokio::test(flavor = "multi_thread")]
async fn with_room_for_less_than_one_message_all_are_stored() {
    let mut bed = Bed::new().await;
    bed.migrate().await;
    bed.set("INTAKE_MEMORY_BYTES", "65536");
    let (intake, work) = (bed.intake(), bed.declare("work").await);
    bed.client.declare(&intake).await;
    let messages: Vec<_> = (0..600)
        .map(|n| message(&work, vec![b'x'; if n % 20 == 7 { MIB } else { 1000 }]))
        .collect();
    bed.client.send_all(&intake, &messages).await;
    let service = bed.start().await;
    bed.until_count("SELECT count(*) FROM retry_queue", 600)
        .await;
    let reconnects = service.scrape().await.get(RECONNECTS);
    assert!(reconnects < 1.0, "{reconnects} times");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_is_not_read_for_want_of_room_is_not_taken_for_dead() {
    let mut bed = Bed::new().await;
    bed.migrate().await;
    bed.set("INTAKE_MEMORY_BYTES", "65536")
        .set("BROKER_HEARTBEAT_SECONDS", "2")
        .set("DATABASE_TIMEOUT_MS", "60000");
    let (intake, work) = (bed.intake(), bed.declare("work").await);
    bed.client.declare(&intake).await;
    let service = bed.start().await;
    let lock = locked(&bed).await;
    let large = message(&work, vec![b'x'; 100_000]);
    bed.client.send(&intake, &large).await;
    // The client takes a connection for dead after two heartbeats, so after four seconds.
    until_waiting(&bed, "10 s").await;
    lock.rollback().await.expect("unlocked");
    bed.client.send(&intake, &message(&work, b"the next")).await;
    bed.until_count("SELECT count(*) FROM retry_queue", 2).await;
    let reconnects = service.scrape().await.get(RECONNECTS);
    assert!(reconnects < 1.0, "{reconnects} times");
    service.stop().await;
}
