//! How many attempts a message gets, and the id that each attempt has.

use std::collections::HashSet;

use retry_scheduler::wire::proto::{ErrorClass, RetryMessage};
use sha2::{Digest, Sha256};
use uuid::Uuid;

use crate::support::{Bed, Received, message};

const RETRIED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'retried'";
const SENT_BACK: &str = "SELECT count(*) FROM retry_events WHERE event_type = 'retry_attempt'";

fn attempt_of(received: &Received) -> Uuid {
    let id = received.text("x-retry-attempt-id").expect("an attempt id");
    id.parse().expect("a UUID")
}

/// The attempt ids of all events of this type, in order.
async fn attempts(bed: &Bed, kind: &str) -> Vec<Option<Uuid>> {
    sqlx::query_scalar("SELECT attempt_id FROM retry_events WHERE event_type = $1 ORDER BY id")
        .bind(kind)
        .fetch_all(&bed.db)
        .await
        .expect("events")
}

#[tokio::test(flavor = "multi_thread")]
async fn max_attempts_counts_the_first_execution_so_one_means_no_retry_and_three_mean_two() {
    let bed = Bed::new().await;
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let mut review = bed.client.consume(&bed.review()).await;

    // The preset policy for this category allows one attempt, and that one has failed.
    let once = RetryMessage {
        category: "RETRY_EXECUTION_EXPIRATION".into(),
        ..message(&queue, "once")
    };
    bed.client.send(&bed.intake(), &once).await;
    let envelope = review.next().await.review();
    assert_eq!(envelope.message_id, once.message_id);
    assert_eq!(envelope.reason, "exhausted");
    assert_eq!(envelope.retry_count, 0);
    assert_eq!(bed.count(SENT_BACK).await, 0);

    // The preset policy for this category allows three attempts.
    let thrice = RetryMessage {
        category: "RETRY_KV_GET".into(),
        ..message(&queue, "thrice")
    };
    bed.client.send(&bed.intake(), &thrice).await;
    for retries in 1..=2 {
        let back = inbox.next().await;
        assert_eq!(back.number("x-retry-count"), Some(retries));
        bed.client.send(&bed.intake(), &thrice).await;
    }
    let envelope = review.next().await.review();
    assert_eq!(envelope.message_id, thrice.message_id);
    assert_eq!(envelope.retry_count, 2);
    bed.until_count(SENT_BACK, 2).await;
    service.stop().await;
    assert_eq!(bed.client.depth(&queue).await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn each_attempt_has_an_id_of_its_own_in_its_message_and_its_event() {
    let bed = Bed::new().await;
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let failure = message(&queue, "again and again");
    // A rate-limited failure spends no attempt, so the count is the same for both of its
    // retries and cannot tell them apart.
    let limited = RetryMessage {
        error_class: ErrorClass::RateLimited.into(),
        retry_after_ms: Some(50),
        ..failure.clone()
    };
    let mut seen = Vec::new();
    for failure in [&failure, &failure, &limited, &limited] {
        bed.client.send(&bed.intake(), failure).await;
        seen.push(attempt_of(&inbox.next().await));
        bed.until_count(RETRIED, 1).await;
    }
    assert_eq!(seen.iter().collect::<HashSet<_>>().len(), 4, "{seen:?}");
    let told: Vec<Option<Uuid>> = seen.into_iter().map(Some).collect();
    assert_eq!(attempts(&bed, "retry_attempt").await, told);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_that_found_no_queue_is_another_one_next_time_and_review_is_none() {
    let mut bed = Bed::new().await;
    bed.set("BASE_DELAY_MS", "20").set("JITTER_MS", "0");
    let service = bed.start().await;
    let mut review = bed.client.consume(&bed.review()).await;
    let homeless = message(&bed.queue("nowhere"), "homeless");
    bed.client.send(&bed.intake(), &homeless).await;
    let envelope = review.next().await;
    assert_eq!(envelope.text("x-retry-attempt-id"), None);
    bed.until_count(
        "SELECT count(*) FROM retry_queue WHERE status = 'failed'",
        1,
    )
    .await;
    let returned = attempts(&bed, "returned").await;
    let different: HashSet<Uuid> = returned.iter().copied().flatten().collect();
    assert_eq!((returned.len(), different.len()), (3, 3));
    assert_eq!(attempts(&bed, "retry_exhausted").await, [None]);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failure_with_another_body_is_told_with_the_digests_of_both() {
    let bed = Bed::new().await;
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let first = message(&queue, "the first body");
    let other = RetryMessage {
        original_payload: b"another body".to_vec(),
        ..first.clone()
    };
    for failure in [&first, &first, &other] {
        bed.client.send(&bed.intake(), failure).await;
        let back = inbox.next().await;
        assert_eq!(back.body, failure.original_payload);
        bed.until_count(RETRIED, 1).await;
    }
    let details: Vec<Option<String>> = sqlx::query_scalar(
        "SELECT detail FROM retry_events WHERE event_type = 'scheduled' ORDER BY id",
    )
    .fetch_all(&bed.db)
    .await
    .expect("events");
    let hex = |body: &[u8]| {
        let digest = Sha256::digest(body);
        digest
            .iter()
            .map(|b| format!("{b:02x}"))
            .collect::<String>()
    };
    let (was, is) = (hex(b"the first body"), hex(b"another body"));
    let changed = format!("body changed from sha256 {was} to sha256 {is}");
    assert_eq!(details, [None, None, Some(changed)]);
    service.stop().await;
}
