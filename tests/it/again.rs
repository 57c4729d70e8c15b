//! A failure arrives whose id is known: what happens in each case of the table in
//! `ARCHITECTURE.md`, "It is stored", and the history that it leaves. `histories.rs` and
//! `classes.rs` test idempotency keys.

use retry_scheduler::wire::proto::{ErrorClass, RetryMessage};
use uuid::Uuid;

use crate::support::{Bed, Received, Running, eventually, message};

/// A bed with delays of ten minutes, where a retry falls due only when the test calls
/// [`Bed::make_due`].
async fn patient_bed() -> Bed {
    let mut bed = Bed::new().await;
    bed.set("BASE_DELAY_MS", "600000")
        .set("MAX_DELAY_MS", "600000")
        .set("RETRY_POLL_INTERVAL_MS", "50");
    bed
}

/// The columns of a row that these tests compare.
#[derive(Debug, PartialEq, sqlx::FromRow)]
struct Row {
    status: String,
    retry_count: i32,
    reason: Option<String>,
    original_payload: Vec<u8>,
}

fn row(status: &str, retry_count: i32, reason: Option<&str>, payload: &str) -> Row {
    Row {
        status: status.to_owned(),
        retry_count,
        reason: reason.map(str::to_owned),
        original_payload: payload.as_bytes().to_vec(),
    }
}

async fn row_of(bed: &Bed, id: &str) -> Row {
    sqlx::query_as(
        "SELECT status, retry_count, reason, original_payload
         FROM retry_queue WHERE message_id = $1",
    )
    .bind(Uuid::try_parse(id).expect("a UUID"))
    .fetch_one(&bed.db)
    .await
    .expect("the row")
}

/// A message's history: the type of each event, and the count that it left.
async fn history(bed: &Bed, id: &str) -> Vec<(String, i32)> {
    sqlx::query_as(
        "SELECT e.event_type, e.retry_count
         FROM retry_events e JOIN retry_queue q ON q.id = e.task_id
         WHERE q.message_id = $1 ORDER BY e.id",
    )
    .bind(Uuid::try_parse(id).expect("a UUID"))
    .fetch_all(&bed.db)
    .await
    .expect("the history")
}

/// Waits until a message has this history; panics when it has more events.
async fn until_history(bed: &Bed, id: &str, wanted: &[(&str, i32)]) {
    let wanted: Vec<(String, i32)> = wanted.iter().map(|(e, n)| (e.to_string(), *n)).collect();
    eventually(&format!("the history is {wanted:?}"), || async {
        let found = history(bed, id).await;
        assert!(found.len() <= wanted.len(), "{found:?} and not {wanted:?}");
        (found == wanted).then_some(())
    })
    .await;
}

async fn next_review(bed: &Bed) -> Received {
    bed.client.consume(&bed.review()).await.next().await
}

/// Stops the service, and checks that no message is left in the queues.
async fn ends_empty(bed: &Bed, service: Running, queue: &str) {
    service.stop().await;
    for queue in [queue, &bed.intake(), &bed.review()] {
        assert_eq!(bed.client.depth(queue).await, Some(0), "{queue}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn said_again_while_it_waits_it_stays_one_row_whose_count_only_rises() {
    let bed = patient_bed().await;
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let sent = message(&queue, "body");
    let id = sent.message_id.as_str();
    let with_count = |retry_count| RetryMessage {
        retry_count,
        ..sent.clone()
    };
    let mut told = Vec::new();
    for (said, event, kept) in [
        (1, "scheduled", 1),
        (1, "duplicate", 1),
        (2, "duplicate", 2),
        (0, "duplicate", 2),
    ] {
        bed.client.send(&bed.intake(), &with_count(said)).await;
        told.push((event, kept));
        until_history(&bed, id, &told).await;
    }
    assert_eq!(row_of(&bed, id).await, row("pending", 2, None, "body"));
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 1);
    assert_eq!(bed.client.depth(&queue).await, Some(0));

    // The budget is three retries. A count of three spends it, so the task waits no longer
    // and goes to review.
    bed.client.send(&bed.intake(), &with_count(3)).await;
    told.extend([("duplicate", 3), ("retry_exhausted", 3)]);
    let review = next_review(&bed).await.review();
    assert_eq!(review.reason, "exhausted");
    assert_eq!(review.message_id, id);
    assert_eq!(review.original_payload, b"body");
    until_history(&bed, id, &told).await;
    ends_empty(&bed, service, &queue).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn said_to_be_final_while_it_waits_it_goes_to_review_at_once() {
    let bed = patient_bed().await;
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let by_class = RetryMessage {
        error_class: ErrorClass::Final.into(),
        error_reason: "no such customer".into(),
        ..message(&queue, "by class")
    };
    let by_marker = RetryMessage {
        error_reason: "schema changed [terminal]".into(),
        ..message(&queue, "by marker")
    };
    for (hopeless, reason) in [(by_class, "final"), (by_marker, "terminal")] {
        let id = hopeless.message_id.as_str();
        let first = RetryMessage {
            error_class: ErrorClass::Retryable.into(),
            error_reason: "timeout".into(),
            ..hopeless.clone()
        };
        bed.client.send(&bed.intake(), &first).await;
        until_history(&bed, id, &[("scheduled", 0)]).await;
        bed.client.send(&bed.intake(), &hopeless).await;
        let review = next_review(&bed).await.review();
        assert_eq!(review.reason, reason);
        assert_eq!(review.message_id, id);
        assert_eq!(review.error, hopeless.error_reason);
        let told = [("scheduled", 0), ("scheduled", 0), ("retry_exhausted", 0)];
        until_history(&bed, id, &told).await;
        let body = std::str::from_utf8(&hopeless.original_payload).unwrap();
        let ended = row("failed", 0, Some(reason), body);
        assert_eq!(row_of(&bed, id).await, ended);
    }
    ends_empty(&bed, service, &queue).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_id_on_two_messages_keeps_the_first_and_gives_the_other_to_review() {
    let bed = patient_bed().await;
    let queue = bed.declare("target").await;
    let elsewhere = bed.declare("elsewhere").await;
    let service = bed.start().await;
    let first = message(&queue, "first");
    let id = first.message_id.as_str();
    bed.client.send(&bed.intake(), &first).await;
    let other_payload = RetryMessage {
        original_payload: b"second".to_vec(),
        ..first.clone()
    };
    let other_queue = RetryMessage {
        original_queue: elsewhere.clone(),
        ..first.clone()
    };
    for newcomer in [other_payload, other_queue] {
        bed.client.send(&bed.intake(), &newcomer).await;
        let review = next_review(&bed).await.review();
        assert_eq!(review.reason, "conflict");
        assert_eq!(review.original_payload, newcomer.original_payload);
        assert_eq!(review.original_queue, newcomer.original_queue);
        assert_ne!(review.message_id, id);
        assert_eq!(review.producer_id, id, "people must find the other one");
        until_history(
            &bed,
            &review.message_id,
            &[("scheduled", 0), ("retry_exhausted", 0)],
        )
        .await;
    }
    assert_eq!(row_of(&bed, id).await, row("pending", 0, None, "first"));
    bed.make_due().await;
    let back = bed.client.consume(&queue).await.next().await;
    assert_eq!((back.id().as_str(), &*back.body), (id, b"first".as_slice()));
    until_history(&bed, id, &[("scheduled", 0), ("retry_attempt", 1)]).await;
    assert_eq!(bed.client.depth(&elsewhere).await, Some(0));
    ends_empty(&bed, service, &queue).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_again_after_a_retry_it_waits_again_with_the_higher_count_and_the_new_failure() {
    let mut bed = Bed::new().await;
    bed.set("BASE_DELAY_MS", "20").set("JITTER_MS", "0");
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let sent = RetryMessage {
        max_retries: 10,
        ..message(&queue, "first")
    };
    let id = sent.message_id.as_str();
    let mut told = Vec::new();
    // The second report says 0 retries although one was made, and the third says 5 although
    // only two were. The higher count wins each time.
    for (said, stored, payload) in [(0, 0, "first"), (0, 1, "second"), (5, 5, "third")] {
        let failure = RetryMessage {
            retry_count: said,
            original_payload: payload.into(),
            error_reason: format!("failure of the {payload}"),
            ..sent.clone()
        };
        bed.client.send(&bed.intake(), &failure).await;
        let back = inbox.next().await;
        assert_eq!(back.id(), id);
        assert_eq!(back.body, payload.as_bytes());
        assert_eq!(back.number("x-retry-count"), Some(i64::from(stored) + 1));
        assert_eq!(back.text("x-original-error"), Some(failure.error_reason));
        told.extend([("scheduled", stored), ("retry_attempt", stored + 1)]);
        until_history(&bed, id, &told).await;
    }
    assert_eq!(row_of(&bed, id).await, row("retried", 6, None, "third"));
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 1);
    ends_empty(&bed, service, &queue).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn spent_on_arrival_it_goes_to_review_at_once_and_after_that_end_it_is_late() {
    let bed = patient_bed().await;
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let sent = RetryMessage {
        retry_count: 3,
        ..message(&queue, "body")
    };
    let id = sent.message_id.as_str();
    bed.client.send(&bed.intake(), &sent).await;
    let review = next_review(&bed).await.review();
    assert_eq!(review.reason, "exhausted");
    assert_eq!(review.message_id, id);
    assert_eq!((review.retry_count, review.max_retries), (3, 3));
    let told = [("scheduled", 3), ("retry_exhausted", 3)];
    until_history(&bed, id, &told).await;

    let again = RetryMessage {
        retry_count: 0,
        original_payload: b"new".to_vec(),
        ..sent.clone()
    };
    bed.client.send(&bed.intake(), &again).await;
    is_late(&bed, id, "new").await;
    let ended = row("failed", 3, Some("exhausted"), "body");
    assert_eq!(row_of(&bed, id).await, ended);
    ends_empty(&bed, service, &queue).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_an_operator_cancelled_it_it_is_late() {
    let bed = patient_bed().await;
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let sent = message(&queue, "body");
    let id = sent.message_id.as_str();
    bed.client.send(&bed.intake(), &sent).await;
    until_history(&bed, id, &[("scheduled", 0)]).await;
    sqlx::query("UPDATE retry_queue SET status = 'cancelled', settled_at = now()")
        .execute(&bed.db)
        .await
        .expect("cancelled");
    bed.client.send(&bed.intake(), &sent).await;
    is_late(&bed, id, "body").await;
    assert_eq!(row_of(&bed, id).await, row("cancelled", 0, None, "body"));
    ends_empty(&bed, service, &queue).await;
}

/// Checks that the next message in review is there as `late`, because the task with this
/// id had already ended.
async fn is_late(bed: &Bed, id: &str, payload: &str) {
    let review = next_review(bed).await.review();
    assert_eq!(review.reason, "late");
    assert_eq!(review.original_payload, payload.as_bytes());
    assert_ne!(review.message_id, id);
    assert_eq!(review.producer_id, id, "people must find the other one");
    let told = [("scheduled", 0), ("retry_exhausted", 0)];
    until_history(bed, &review.message_id, &told).await;
    let late = row("failed", 0, Some("late"), payload);
    assert_eq!(row_of(bed, &review.message_id).await, late);
}

#[tokio::test(flavor = "multi_thread")]
async fn twice_in_one_batch_the_second_meets_what_the_first_did() {
    let mut bed = patient_bed().await;
    // Intake waits half a second after the first delivery, so that all four are gathered
    // into one batch, even on a slow machine.
    bed.set("INTAKE_LINGER_MS", "500");
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    bed.widen(4).await;
    let first = message(&queue, "first");
    let higher = RetryMessage {
        retry_count: 2,
        ..first.clone()
    };
    let other = RetryMessage {
        original_payload: b"other".to_vec(),
        ..first.clone()
    };
    let batch = [first.clone(), first.clone(), higher, other];
    bed.client.send_all(&bed.intake(), &batch).await;
    let review = next_review(&bed).await.review();
    assert_eq!(review.reason, "conflict");
    assert_eq!(review.original_payload, b"other");
    let id = first.message_id.as_str();
    let told = [("scheduled", 0), ("duplicate", 0), ("duplicate", 2)];
    until_history(&bed, id, &told).await;
    let stamps = "SELECT count(DISTINCT last_failed_at) FROM retry_queue";
    assert_eq!(bed.count(stamps).await, 1, "it was not one batch");
    assert_eq!(row_of(&bed, id).await, row("pending", 2, None, "first"));
    bed.make_due().await;
    let back = bed.client.consume(&queue).await.next().await;
    assert_eq!(back.number("x-retry-count"), Some(3));
    ends_empty(&bed, service, &queue).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn final_twice_in_one_batch_is_one_case_for_review() {
    let mut bed = patient_bed().await;
    bed.set("INTAKE_LINGER_MS", "500");
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    bed.widen(4).await;
    let first = message(&queue, "body");
    let hopeless = RetryMessage {
        error_class: ErrorClass::Final.into(),
        ..first.clone()
    };
    let batch = [first.clone(), hopeless.clone(), hopeless];
    bed.client.send_all(&bed.intake(), &batch).await;
    assert_eq!(next_review(&bed).await.review().reason, "final");
    let told = [
        ("scheduled", 0),
        ("scheduled", 0),
        ("duplicate", 0),
        ("retry_exhausted", 0),
    ];
    until_history(&bed, &first.message_id, &told).await;
    ends_empty(&bed, service, &queue).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_that_is_no_uuid_is_one_message_across_failures_and_can_be_found() {
    let mut bed = Bed::new().await;
    bed.set("BASE_DELAY_MS", "20").set("JITTER_MS", "0");
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let sent = RetryMessage {
        message_id: "order-7/ü".into(),
        ..message(&queue, "body")
    };
    let mut id = None;
    for count in 1..=3 {
        bed.client.send(&bed.intake(), &sent).await;
        let back = inbox.next().await;
        assert_eq!(back.number("x-retry-count"), Some(count));
        assert!(Uuid::try_parse(&back.id()).is_ok());
        assert_eq!(*id.get_or_insert_with(|| back.id()), back.id());
    }
    let settled = "SELECT count(*) FROM retry_queue WHERE status = 'retried' AND retry_count = 3";
    bed.until_count(settled, 1).await;
    let kept: Vec<String> = sqlx::query_scalar("SELECT producer_id FROM retry_queue")
        .fetch_all(&bed.db)
        .await
        .expect("rows");
    assert_eq!(kept, ["order-7/ü"]);
    bed.client.send(&bed.intake(), &sent).await;
    let review = next_review(&bed).await.review();
    assert_eq!(review.reason, "exhausted");
    assert_eq!(review.producer_id, "order-7/ü");
    assert_eq!(Some(review.message_id), id);
    ends_empty(&bed, service, &queue).await;
}
