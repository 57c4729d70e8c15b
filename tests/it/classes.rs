//! Error classes, reasons for review, policies, fair claims and idempotency keys, end to
//! end.

use std::time::{Duration, Instant};

use prost::Message;
use retry_scheduler::wire::proto::{ErrorClass, Priority, RetryMessage};

use crate::support::{Bed, Process, eventually, message};

#[tokio::test(flavor = "multi_thread")]
async fn a_rate_limited_message_waits_as_asked_and_spends_no_attempt() {
    let bed = Bed::new().await;
    let queue = bed.declare("limited").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let start = Instant::now();
    let sent = RetryMessage {
        error_class: ErrorClass::RateLimited.into(),
        retry_after_ms: Some(3000),
        retry_count: 1,
        ..message(&queue, "slow down")
    };
    bed.client.send(&bed.intake(), &sent).await;
    let back = inbox.next().await;
    assert!(back.at - start >= Duration::from_secs(3), "too early");
    assert_eq!(back.number("x-retry-count"), Some(1));
    bed.until_count(
        "SELECT count(*) FROM retry_queue WHERE status = 'retried' AND retry_count = 1",
        1,
    )
    .await;
    let exact = "SELECT count(*) FROM retry_queue
                 WHERE next_retry_at - last_failed_at = interval '3 seconds'";
    assert_eq!(bed.count(exact).await, 1);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rate_limited_message_without_a_hint_backs_off_and_spends_an_attempt() {
    let mut bed = Bed::new().await;
    bed.set("BASE_DELAY_MS", "300").set("JITTER_MS", "0");
    let queue = bed.declare("limited").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let sent = RetryMessage {
        error_class: ErrorClass::RateLimited.into(),
        ..message(&queue, "slow down, for a while")
    };
    bed.client.send(&bed.intake(), &sent).await;
    assert_eq!(inbox.next().await.number("x-retry-count"), Some(1));
    let backed_off = "SELECT count(*) FROM retry_queue
                      WHERE status = 'retried' AND retry_count = 1
                        AND next_retry_at - last_failed_at = interval '300 milliseconds'";
    bed.until_count(backed_off, 1).await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wait_that_spends_no_attempt_lasts_a_second_at_least() {
    let bed = Bed::new().await;
    let queue = bed.declare("limited").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let sent = RetryMessage {
        error_class: ErrorClass::RateLimited.into(),
        retry_after_ms: Some(1),
        ..message(&queue, "at once, please")
    };
    bed.client.send(&bed.intake(), &sent).await;
    assert_eq!(inbox.next().await.number("x-retry-count"), Some(0));
    let waited = "SELECT count(*) FROM retry_queue
                  WHERE status = 'retried' AND next_retry_at - last_failed_at = interval '1 second'";
    bed.until_count(waited, 1).await;
    service.stop().await;
}

/// Of four tasks, one failed long ago and is due again, two are new, and one is not due
/// yet. They are claimed in the order in which they fell due, whatever their age.
#[tokio::test(flavor = "multi_thread")]
async fn old_and_new_failures_leave_in_the_order_in_which_they_fell_due() {
    let bed = Bed::new().await;
    bed.migrate().await;
    sqlx::query(
        "INSERT INTO retry_queue (message_id, original_payload, original_queue, retry_count,
                                  first_failed_at, next_retry_at)
         SELECT gen_random_uuid(), convert_to(name, 'UTF8'), 'q', retries,
                now() + failed * interval '1 day', now() + due * interval '1 day'
         FROM (VALUES ('oldest, failed again', 1, -4.5, -0.5), ('new', 0, -2.5, -2.5),
                      ('newer', 0, -1.5, -1.5), ('not ready yet', 1, -1.5, 0.5))
             AS f (name, retries, failed, due)",
    )
    .execute(&bed.db)
    .await
    .unwrap();
    let store = retry_scheduler::store::Store::open(&bed.settings(), "test").unwrap();
    let claim = store.claim(10, 1 << 20).await.unwrap();
    let order: Vec<&str> = claim
        .tasks
        .iter()
        .map(|task| std::str::from_utf8(&task.payload).unwrap())
        .collect();
    assert_eq!(order, ["new", "newer", "oldest, failed again"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_helped_is_in_review_at_once_with_its_reason() {
    let mut bed = Bed::new().await;
    bed.set("BASE_DELAY_MS", "60000")
        .set("MAX_DELAY_MS", "60000");
    let queue = bed.declare("hopeless").await;
    let service = bed.start().await;
    let long_ago = 1_000_000_000_000;
    let cases = [
        (
            "final",
            RetryMessage {
                error_class: ErrorClass::Final.into(),
                ..message(&queue, "f")
            },
        ),
        (
            "terminal",
            RetryMessage {
                error_reason: "schema changed [terminal]".into(),
                // `[terminal]` in the error text outranks the stated class.
                error_class: ErrorClass::Retryable.into(),
                ..message(&queue, "t")
            },
        ),
        (
            "expired",
            RetryMessage {
                first_failed_at_ms: long_ago,
                ..message(&queue, "e")
            },
        ),
        (
            "exhausted",
            RetryMessage {
                retry_count: 3,
                ..message(&queue, "x")
            },
        ),
    ];
    let mut review = bed.client.consume(&bed.review()).await;
    for (reason, sent) in &cases {
        bed.client.send(&bed.intake(), sent).await;
        let envelope = review.next().await.review();
        assert_eq!(envelope.reason, *reason);
        assert_eq!(envelope.message_id, sent.message_id);
        assert_eq!(envelope.original_payload, sent.original_payload);
        assert_eq!(envelope.error, sent.error_reason);
    }
    bed.until_count(
        "SELECT count(*) FROM retry_queue WHERE status = 'failed'",
        4,
    )
    .await;
    // A retry would have waited for a minute; these tasks did not wait.
    let late = "SELECT count(*) FROM retry_queue
                WHERE settled_at - last_failed_at > interval '30 seconds'";
    assert_eq!(bed.count(late).await, 0);
    let events = "SELECT count(*) FROM retry_events e JOIN retry_queue q ON q.id = e.task_id
                  WHERE e.event_type = 'retry_exhausted' AND e.reason = q.reason";
    assert_eq!(bed.count(events).await, 4);
    let metrics = service.scrape().await;
    for (reason, _) in &cases {
        assert_eq!(
            metrics.get(&format!("retries_reviewed_total{{reason=\"{reason}\"}}")),
            1.0
        );
    }
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rate_limited_message_does_not_outlive_its_max_age() {
    let mut bed = Bed::new().await;
    bed.set("MAX_AGE_MS", "1500");
    let queue = bed.declare("stubborn").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let mut review = bed.client.consume(&bed.review()).await;
    let limited = RetryMessage {
        error_class: ErrorClass::RateLimited.into(),
        retry_after_ms: Some(100),
        ..message(&queue, "again and again")
    };
    bed.client.send(&bed.intake(), &limited).await;
    let envelope = loop {
        tokio::select! {
            back = inbox.next() => {
                assert_eq!(back.number("x-retry-count"), Some(0));
                bed.client.send(&bed.intake(), &limited).await;
            }
            end = review.next() => break end.review(),
        }
    };
    assert_eq!(envelope.reason, "expired");
    assert_eq!(envelope.retry_count, 0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_category_chooses_its_policy_and_a_file_may_bring_others() {
    let mut bed = Bed::new().await;
    let queue = bed.declare("work").await;
    let dir = std::env::temp_dir().join(bed.queue("policies"));
    std::fs::create_dir_all(&dir).unwrap();
    let file = dir.join("policies.toml");
    std::fs::write(
        &file,
        "[policy.strict]\ncategories = ['STRICT']\nmax_retries = 1\nbase_delay = '10ms'\n\
         jitter = 'none'\nnon_retryable = ['schema*']\n",
    )
    .unwrap();
    bed.set("POLICIES_FILE", file.to_str().unwrap());
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let mut review = bed.client.consume(&bed.review()).await;
    let strict = |error: &str| RetryMessage {
        category: "STRICT".into(),
        error_reason: error.into(),
        ..message(&queue, "x")
    };
    bed.client.send(&bed.intake(), &strict("timeout")).await;
    assert_eq!(inbox.next().await.number("x-max-retries"), Some(1));
    bed.client
        .send(&bed.intake(), &strict("Schema mismatch"))
        .await;
    let envelope = review.next().await.review();
    assert_eq!(
        (envelope.reason.as_str(), envelope.policy.as_str()),
        ("final", "strict")
    );
    service.stop().await;
    std::fs::remove_dir_all(dir).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_cannot_ask_for_more_retries_than_the_limit() {
    let mut bed = Bed::new().await;
    bed.set("MAX_RETRIES_LIMIT", "5");
    let queue = bed.declare("greedy").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let greedy = RetryMessage {
        max_retries: i32::MAX,
        ..message(&queue, "more")
    };
    bed.client.send(&bed.intake(), &greedy).await;
    assert_eq!(inbox.next().await.number("x-max-retries"), Some(5));
    service.stop().await;
}

/// A dead-letter handler written for Node may report failures like this: in JSON without
/// a content type, with the payload as a Buffer, with a new UUID each time, and with a
/// count of 0, because it reads the count from `x-death`, which starts anew after each
/// republish.
#[tokio::test(flavor = "multi_thread")]
async fn a_handler_that_mints_new_ids_gets_three_republishes_then_review() {
    let mut bed = Bed::new().await;
    let queue = bed.declare("ubl").await;
    let dir = std::env::temp_dir().join(bed.queue("identity"));
    std::fs::create_dir_all(&dir).unwrap();
    let file = dir.join("policies.toml");
    std::fs::write(&file, "[policy.default]\nidentity = 'payload'\n").unwrap();
    bed.set("POLICIES_FILE", file.to_str().unwrap())
        .set("BASE_DELAY_MS", "20");
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let fail = || {
        serde_json::to_vec(&serde_json::json!({
            "message_id": uuid::Uuid::new_v4(),
            "original_payload": {"type": "Buffer", "data": [60, 120, 47, 62]},
            "original_queue": queue,
            "error_reason": "ECONNREFUSED",
            "retry_count": 0,
            "max_retries": 3,
            "next_retry_at_ms": 0,
        }))
        .unwrap()
    };
    bed.client
        .publish(&bed.intake(), &fail(), Default::default())
        .await;
    for attempt in 1..=3 {
        let back = inbox.next().await;
        assert_eq!(back.body, b"<x/>");
        assert_eq!(back.number("x-retry-count"), Some(attempt));
        bed.client
            .publish(&bed.intake(), &fail(), Default::default())
            .await;
    }
    let mut review = bed.client.consume(&bed.review()).await;
    let envelope = review.next().await.review();
    assert_eq!(envelope.reason, "exhausted");
    assert_eq!(envelope.original_payload, b"<x/>");
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 1);
    service.stop().await;
    std::fs::remove_dir_all(dir).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_falling_due_is_not_kept_waiting_by_200_000_due_on_another_queue() {
    let mut bed = Bed::new().await;
    bed.set("LOG_LEVEL", "warn");
    let flood = bed.queue("flood");
    let quiet = bed.declare("quiet").await;
    // The flooded queue keeps only its newest 1,000 messages, so that it does not fill the
    // broker.
    bed.client
        .declare_with(&flood, crate::support::max_length(1000))
        .await;
    bed.migrate().await;
    sqlx::query(
        "INSERT INTO retry_queue (message_id, original_payload, original_queue, next_retry_at)
         SELECT gen_random_uuid(), 'x', $1, now() - interval '1 hour'
         FROM generate_series(1, 200000)",
    )
    .bind(&flood)
    .execute(&bed.db)
    .await
    .unwrap();
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&quiet).await;
    let pending = "SELECT count(*) FROM retry_queue WHERE status = 'pending'";
    let mut kept = Vec::new();
    for (n, priority) in [Priority::Live, Priority::Live, Priority::Backfill]
        .into_iter()
        .enumerate()
    {
        let sent = RetryMessage {
            priority: priority.into(),
            ..message(&quiet, format!("{n}"))
        };
        bed.client.send(&bed.intake(), &sent).await;
        assert_eq!(inbox.next().await.id(), sent.message_id);
        kept.push(bed.count(pending).await);
    }
    // Each message came while more than 20,000 rows of the flood were still waiting, so it
    // overtook them.
    assert!(
        kept.iter().all(|n| *n > 20_000),
        "the flood was already over: {kept:?}"
    );
    service.abort().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn neither_live_work_nor_backfill_starves_the_other() {
    let bed = Bed::new().await;
    bed.migrate().await;
    sqlx::query(
        "INSERT INTO retry_queue (message_id, original_payload, original_queue, priority,
                                  next_retry_at)
         SELECT gen_random_uuid(), '', 'q' || n % 3, n % 2, now() - n * interval '1 second'
         FROM generate_series(1, 3000) AS n",
    )
    .execute(&bed.db)
    .await
    .unwrap();
    let store = retry_scheduler::store::Store::open(&bed.settings(), "test").unwrap();
    let mut lanes = Default::default();
    let claim = store.claim_fairly(100, 1 << 20, &mut lanes).await.unwrap();
    assert_eq!(claim.tasks.len(), 100);
    let ids: std::collections::HashSet<i64> = claim.tasks.iter().map(|t| t.id).collect();
    assert_eq!(ids.len(), 100, "no row twice in a claim");
    let backfill: i64 =
        sqlx::query_scalar("SELECT count(*) FROM retry_queue WHERE id = ANY($1) AND priority = 1")
            .bind(ids.iter().copied().collect::<Vec<_>>())
            .fetch_one(&bed.db)
            .await
            .unwrap();
    // The three lanes of backfill get their shares, and live work gets the rest.
    assert!((3..50).contains(&backfill), "{backfill}");
    assert!(claim.full);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_fair_claim_visits_every_lane_in_turn() {
    let bed = Bed::new().await;
    bed.migrate().await;
    sqlx::query(
        "INSERT INTO retry_queue (message_id, original_payload, original_queue, next_retry_at)
         SELECT gen_random_uuid(), '', 'q' || n % 300,
                -- every tenth lane has something due, the others wait for tomorrow
                now() + CASE WHEN n % 10 = 0 THEN interval '-1 second' ELSE interval '1 day' END
         FROM generate_series(0, 8999) AS n",
    )
    .execute(&bed.db)
    .await
    .unwrap();
    let store = retry_scheduler::store::Store::open(&bed.settings(), "test").unwrap();
    let mut lanes = Default::default();
    let mut seen = std::collections::HashSet::new();
    for _ in 0..6 {
        let claim = store.claim_fairly(64, 1 << 20, &mut lanes).await.unwrap();
        seen.extend(claim.tasks.iter().map(|t| t.queue.clone()));
        claim.settle(&[]).await.unwrap();
    }
    assert_eq!(seen.len(), 30);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_tells_and_touches_nothing() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let queue = bed.declare("untouched").await;
    bed.client.declare(&bed.intake()).await;
    bed.client
        .send(&bed.intake(), &message(&queue, "stays"))
        .await;
    sqlx::query(
        "INSERT INTO retry_queue (message_id, original_payload, original_queue, retry_count)
         VALUES (gen_random_uuid(), 'a', $1, 0), (gen_random_uuid(), 'b', $1, 3)",
    )
    .bind(&queue)
    .execute(&bed.db)
    .await
    .unwrap();
    let before: Vec<String> = sqlx::query_scalar("SELECT q::text FROM retry_queue q ORDER BY id")
        .fetch_all(&bed.db)
        .await
        .unwrap();
    let mut command = bed.command();
    command.args(["serve", "--dry-run"]);
    let service = Process::spawn(command);
    service.until_logged("would be sent back").await;
    let told = service.until_logged("would be given to review").await;
    assert!(told.contains("\"reason\":\"exhausted\""), "{told}");
    service.signal("TERM").await;
    assert!(service.ended().await.0.success());
    let after: Vec<String> = sqlx::query_scalar("SELECT q::text FROM retry_queue q ORDER BY id")
        .fetch_all(&bed.db)
        .await
        .unwrap();
    assert_eq!(before, after);
    assert_eq!(bed.client.depth(&bed.intake()).await, Some(1));
    assert_eq!(bed.client.depth(&queue).await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_same_idempotency_key_ten_times_at_three_instances_is_one_retry_and_nine_hits() {
    let bed = Bed::new().await;
    let queue = bed.declare("once").await;
    let services = [bed.start().await, bed.start().await, bed.start().await];
    let mut inbox = bed.client.consume(&queue).await;
    let messages: Vec<RetryMessage> = (0..10)
        .map(|n| RetryMessage {
            idempotency_key: "invoice-7/attempt-1".into(),
            // Half of the messages have no id, and the others have one each. Only the key
            // says that they are the same failure.
            message_id: if n % 2 == 0 {
                String::new()
            } else {
                uuid::Uuid::now_v7().to_string()
            },
            ..message(&queue, "once")
        })
        .collect();
    bed.client.send_all(&bed.intake(), &messages).await;
    inbox.next().await;
    let hits = || async {
        let mut sum = 0.0;
        for service in &services {
            sum += service.scrape().await.get("retry_idempotency_hits_total");
        }
        sum
    };
    eventually("nine hits", || async {
        (hits().await == 9.0).then_some(())
    })
    .await;
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 1);
    let told =
        "SELECT count(*) FROM retry_events WHERE event_type = 'idempotency' AND detail = 'hit'";
    assert_eq!(bed.count(told).await, 9);
    let told =
        "SELECT count(*) FROM retry_events WHERE event_type = 'idempotency' AND detail = 'record'";
    assert_eq!(bed.count(told).await, 1);
    assert_eq!(bed.client.depth(&queue).await, Some(0));
    for service in services {
        service.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_message_in_json_and_in_protobuf_is_the_same_message() {
    let bed = Bed::new().await;
    let queue = bed.declare("both").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let sent = message(&queue, "either way");
    let json = serde_json::to_vec(&sent).unwrap();
    bed.client
        .publish(&bed.intake(), &json, Default::default())
        .await;
    bed.client
        .publish(&bed.intake(), &sent.encode_to_vec(), Default::default())
        .await;
    assert_eq!(inbox.next().await.body, b"either way");
    bed.until_count(
        "SELECT count(*) FROM retry_events WHERE event_type = 'duplicate'",
        1,
    )
    .await;
    service.stop().await;
}
