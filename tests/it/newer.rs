//! Rows that a newer version of the service wrote: this version leaves them alone, and
//! goes on with all others.

use std::{sync::Arc, time::Duration};

use retry_scheduler::{
    janitor::Janitor,
    observe::metrics::Metrics,
    store::{Store, maintenance::Retention},
    wire::proto::RetryMessage,
};
use uuid::Uuid;

use crate::support::{Bed, Process, message};

/// Lets the table hold texts that only a newer version knows, as its migration would.
const NEWER: &str = "
    ALTER TABLE retry_queue DROP CONSTRAINT retry_queue_status_check;
    ALTER TABLE retry_queue DROP CONSTRAINT retry_queue_reason_check;
    ALTER TABLE retry_queue DROP CONSTRAINT retry_queue_error_class_check";

/// Inserts a row with these texts that has been due for an hour and was settled a year
/// ago, and an event of a type that only a newer version knows. Returns its message's id.
async fn row_of_the_future(
    bed: &Bed,
    queue: &str,
    status: &str,
    reason: Option<&str>,
    class: &str,
) -> Uuid {
    let id = Uuid::now_v7();
    sqlx::query(
        "WITH future AS (
             INSERT INTO retry_queue (message_id, original_payload, original_queue, status, reason,
                                      error_class, next_retry_at, settled_at)
             VALUES ($1, 'future', $2, $3, $4, $5, now() - interval '1 hour',
                     now() - interval '1 year')
             RETURNING id, status, next_retry_at)
         INSERT INTO retry_events (task_id, event_type, status, retry_count, max_retries,
                                   next_retry_at, instance)
         SELECT id, 'teleported', status, 0, 3, next_retry_at, 'newer' FROM future",
    )
    .bind(id)
    .bind(queue)
    .bind(status)
    .bind(reason)
    .bind(class)
    .execute(&bed.db)
    .await
    .expect("a row of the future");
    id
}

async fn snapshot(bed: &Bed, ids: &[Uuid]) -> Vec<String> {
    sqlx::query_scalar("SELECT q::text FROM retry_queue q WHERE message_id = ANY($1) ORDER BY id")
        .bind(ids)
        .fetch_all(&bed.db)
        .await
        .expect("rows")
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_of_a_newer_version_stay_as_they_are_while_claims_intake_and_retention_go_on() {
    let mut bed = Bed::new().await;
    // If the rows of the newer version were claimed, they would fill every batch of two, and
    // no other row would be sent.
    bed.set("DISPATCH_BATCH", "2");
    bed.migrate().await;
    bed.arrange(NEWER).await;
    let queue = bed.declare("target").await;
    let future = [
        row_of_the_future(&bed, &queue, "pending", Some("quarantined"), "retryable").await,
        row_of_the_future(&bed, &queue, "pending", None, "cosmic").await,
        row_of_the_future(&bed, &queue, "pending", Some("quarantined"), "cosmic").await,
        row_of_the_future(&bed, &queue, "paused", None, "retryable").await,
        row_of_the_future(&bed, &queue, "failed", Some("quarantined"), "retryable").await,
    ];
    let before = snapshot(&bed, &future).await;
    let service = Process::spawn(bed.command());
    service.until_ready().await;
    let mut inbox = bed.client.consume(&queue).await;

    // Claims go on: rows that fell due after those of the newer version are sent.
    bed.insert_due(&queue, 50).await;
    for back in inbox.take(50).await {
        assert_ne!(back.body, b"future");
    }
    // Intake goes on: a new failure is stored, and failures that have the ids of those rows
    // go to review.
    let mut review = bed.client.consume(&bed.review()).await;
    let fresh = message(&queue, "fresh");
    let mut batch = vec![fresh.clone()];
    batch.extend(future.iter().map(|id| RetryMessage {
        message_id: id.to_string(),
        ..message(&queue, "future")
    }));
    bed.client.send_all(&bed.intake(), &batch).await;
    assert_eq!(inbox.next().await.id(), fresh.message_id);
    for _ in future {
        let envelope = review.next().await.review();
        assert_eq!(envelope.reason, "conflict");
        assert_eq!(envelope.original_payload, b"future");
    }
    let told = service.until_logged("a newer version wrote").await;
    assert!(told.contains("this version does not know"), "{told}");
    let (ready, body) = service.get("/ready").await;
    assert_eq!(ready, 200, "{body}");
    service.signal("TERM").await;
    let (status, log) = service.ended().await;
    assert!(status.success(), "{log}");
    let times = log.matches("belongs to a row that a newer version wrote");
    assert_eq!(times.count(), 1, "{log}");
    assert!(!log.contains("not available"), "{log}");

    // Retention goes on: what has ended is removed, and the rows of the newer version are
    // counted.
    let metrics = Arc::new(Metrics::new(1).expect("metrics"));
    let nothing = Duration::ZERO;
    let janitor = Janitor {
        store: Store::open(&bed.settings(), "test").expect("a store"),
        metrics: metrics.clone(),
        retention: Retention {
            retried: nothing,
            reviewed: nothing,
            events: nothing,
        },
    };
    let round = janitor.remove_old(&mut Default::default()).await;
    assert!(round.expect("a round").finished);
    assert_eq!(metrics.rows_not_understood.get(), 5);
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 5);
    assert_eq!(snapshot(&bed, &future).await, before);
}
