//! The events of a task replay to its row, retention removes only what has ended, and an
//! idempotency key drops only what was applied before.

use std::{sync::Arc, time::Duration};

use lapin::{
    BasicProperties,
    types::{AMQPValue, FieldTable},
};
use prost::Message;
use retry_scheduler::{
    domain::{
        policy::{Jitter, Policy, PolicyBook},
        review::Reason,
        settlement::Settlement,
        task::Status,
    },
    intake::Recorder,
    janitor::Janitor,
    observe::metrics::Metrics,
    store::{
        Store,
        dispatch::{Claim, LaneCursor},
        maintenance::Retention,
    },
    wire::{
        Arrived, Rules, Source,
        proto::{ErrorClass, HeaderValue, Properties, RetryMessage, header_value::Kind},
    },
};
use uuid::Uuid;

use crate::support::{
    Bed, eventually,
    replay::{Event, replay},
};

fn recorder(bed: &Bed, store: &Store) -> Recorder {
    recorder_of(bed, store, Source::RetryMessages)
}

fn recorder_of(bed: &Bed, store: &Store, source: Source) -> Recorder {
    let settings = bed.settings();
    let policy = Policy {
        base_delay: Duration::from_millis(1),
        max_delay: Duration::from_millis(1),
        jitter: Jitter::None,
        ..Policy::default()
    };
    Recorder::new(
        store.clone(),
        Arc::new(Rules {
            book: PolicyBook::parse("", policy).unwrap(),
            allowed: settings.allowed_queues.clone(),
            intake_queue: settings.retry_queue.clone(),
            source,
            max_retries_limit: 100,
            max_payload_bytes: 1000,
        }),
        Default::default(),
        Arc::new(Metrics::new(10).unwrap()),
        Default::default(),
        Duration::from_secs(3600),
    )
}

/// A failure of the message with this id.
fn failure_of(id: Uuid) -> Arrived {
    let message = RetryMessage {
        message_id: id.to_string(),
        original_queue: "q".into(),
        ..Default::default()
    };
    Arrived {
        body: message.encode_to_vec(),
        properties: Default::default(),
        redelivered: false,
    }
}

/// Settles the first task of a claim, and leaves the other rows as they were.
async fn settle_first(mut claim: Claim, end: Settlement) {
    let task = claim.tasks.remove(0);
    claim.settle(&[(&task, &end)]).await.unwrap();
}

/// A random failure. Its id is one of a few thousand, so that many failures share an id.
fn arrival(random: &mut fastrand::Rng) -> Arrived {
    let message = RetryMessage {
        message_id: Uuid::from_u128(random.u128(1..4000)).to_string(),
        original_payload: vec![random.u8(0..2)],
        original_queue: format!("q{}", random.u8(0..2)),
        error_reason: if random.u8(..) < 5 {
            "[terminal]".into()
        } else {
            "e".into()
        },
        retry_count: random.i32(0..4),
        error_class: random.i32(0..4),
        retry_after_ms: random.bool().then_some(1),
        idempotency_key: if random.u8(..) < 30 {
            random.u16(..).to_string()
        } else {
            String::new()
        },
        ..Default::default()
    };
    let body = if random.u8(..) < 5 {
        vec![0xff]
    } else {
        message.encode_to_vec()
    };
    Arrived {
        body,
        properties: Default::default(),
        redelivered: false,
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_events_of_thousands_of_random_histories_replay_to_their_rows() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let store = Store::open(&bed.settings(), "test").unwrap();
    let recorder = recorder(&bed, &store);
    let seed = fastrand::u64(..);
    println!("seed {seed}");
    let mut random = fastrand::Rng::with_seed(seed);
    let mut lanes = LaneCursor::default();
    for round in 0..40 {
        let batch: Vec<Arrived> = (0..250).map(|_| arrival(&mut random)).collect();
        recorder.record(batch).await.unwrap();
        let mut claim = if round % 2 == 0 {
            store.claim(200, 1 << 20).await.unwrap()
        } else {
            store.claim_fairly(200, 1 << 20, &mut lanes).await.unwrap()
        };
        let mut ends = Vec::new();
        let tasks = std::mem::take(&mut claim.tasks);
        for task in &tasks {
            let delay = Duration::from_millis(1);
            let end = match (task.review_reason(), random.u8(0..10)) {
                (_, 0) => continue,
                (_, 1) => Settlement::Deferred { delay },
                (Some(reason), _) => Settlement::Reviewed(reason),
                (None, 2) => {
                    let budget = task.budget.at_least(task.budget.retry_count + 1);
                    let reason = budget.is_spent().then_some(Reason::Unroutable);
                    Settlement::Returned {
                        retry_count: budget.retry_count,
                        delay,
                        error: "gone".into(),
                        reason,
                    }
                }
                (None, _) => Settlement::SentBack {
                    retry_count: task.next_count(),
                },
            };
            ends.push((task, end));
        }
        let ends: Vec<_> = ends.iter().map(|(task, end)| (*task, end)).collect();
        claim.settle(&ends).await.unwrap();
    }

    type Row = (
        i64,
        String,
        i32,
        i32,
        chrono::DateTime<chrono::Utc>,
        Option<String>,
    );
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT id, status, retry_count, max_retries, next_retry_at, reason FROM retry_queue",
    )
    .fetch_all(&bed.db)
    .await
    .unwrap();
    assert!(rows.len() > 3000, "{} rows", rows.len());
    let mut again = 0;
    for (id, status, retry_count, max_retries, next_retry_at, reason) in rows {
        let events = events(&bed, id).await;
        again += i32::from(events.len() > 3);
        let state = replay(&events).unwrap_or_else(|e| panic!("row {id}: {e}\n{events:#?}"));
        assert_eq!(state.status.as_str(), status, "row {id}");
        assert_eq!(state.retry_count, retry_count, "row {id}");
        assert_eq!(state.max_retries, max_retries, "row {id}");
        assert_eq!(state.next_retry_at, next_retry_at, "row {id}");
        assert_eq!(state.reason.map(|r| r.to_string()), reason, "row {id}");
    }
    assert!(again > 300, "only {again} histories were of any length");
}

async fn events(bed: &Bed, id: i64) -> Vec<Event> {
    type Row = (
        String,
        Option<String>,
        String,
        i32,
        i32,
        chrono::DateTime<chrono::Utc>,
        Option<String>,
    );
    let rows: Vec<Row> = sqlx::query_as(
        "SELECT event_type, from_status, status, retry_count, max_retries, next_retry_at, reason
         FROM retry_events WHERE task_id = $1 ORDER BY id",
    )
    .bind(id)
    .fetch_all(&bed.db)
    .await
    .unwrap();
    rows.into_iter()
        .map(
            |(kind, from, to, retry_count, max_retries, next_retry_at, reason)| Event {
                kind: kind.parse().unwrap(),
                from: from.map(|s| s.parse().unwrap()),
                to: to.parse().unwrap(),
                retry_count,
                max_retries,
                next_retry_at,
                reason: reason.map(|r| r.parse().unwrap()),
            },
        )
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn retention_removes_what_has_ended_each_after_its_own_time_and_never_what_waits() {
    let bed = Bed::new().await;
    bed.migrate().await;
    sqlx::query(
        "INSERT INTO retry_queue (message_id, original_payload, original_queue, status, reason,
                                  settled_at, next_retry_at)
         SELECT gen_random_uuid(), '', status || '-' || age, status,
                CASE status WHEN 'failed' THEN 'final' END,
                now() - age * interval '1 hour', now() - age * interval '1 hour'
         FROM unnest(ARRAY['pending', 'retried', 'failed', 'cancelled']) AS status,
              unnest(ARRAY[1, 5, 20]) AS age, generate_series(1, 1500)",
    )
    .execute(&bed.db)
    .await
    .unwrap();
    sqlx::query(
        "INSERT INTO retry_events (task_id, at, event_type, status, retry_count, max_retries,
                                   next_retry_at, instance)
         SELECT n, now() - (5000 - n) * interval '1 minute', 'scheduled', 'pending', 0, 3, now(), 't'
         FROM generate_series(1, 5000) AS n",
    )
    .execute(&bed.db)
    .await
    .unwrap();
    sqlx::query(
        "INSERT INTO idempotency_keys (scope, key, retry_count, digest, expires_at)
         SELECT 's', n::text, 0, '', now() + (n - 2500) * interval '1 minute'
         FROM generate_series(1, 5000) AS n",
    )
    .execute(&bed.db)
    .await
    .unwrap();
    let hours = |n: u64| Duration::from_secs(n * 3600);
    let janitor = Janitor {
        store: Store::open(&bed.settings(), "test").unwrap(),
        metrics: Arc::new(Metrics::new(1).unwrap()),
        retention: Retention {
            retried: hours(3),
            reviewed: hours(10),
            events: hours(24),
        },
    };
    let mut walk = Default::default();
    let mut removed = 0;
    for _ in 0..20 {
        removed += janitor.remove_old(&mut walk).await.unwrap().removed;
    }
    let left: Vec<String> =
        sqlx::query_scalar("SELECT DISTINCT original_queue FROM retry_queue ORDER BY 1")
            .fetch_all(&bed.db)
            .await
            .unwrap();
    let kept = [
        "cancelled-1",
        "cancelled-5",
        "failed-1",
        "failed-5",
        "pending-1",
        "pending-20",
        "pending-5",
        "retried-1",
    ];
    assert_eq!(left, kept);
    assert_eq!(
        bed.count("SELECT count(*) FROM retry_queue").await,
        8 * 1500
    );
    let events = bed.count("SELECT count(*) FROM retry_events").await;
    assert!((1430..=1440).contains(&events), "{events}");
    let keys = bed.count("SELECT count(*) FROM idempotency_keys").await;
    assert!((2490..=2500).contains(&keys), "{keys}");
    let gone = 4 * 1500 + (5000 - events) + (5000 - keys);
    assert_eq!(i64::try_from(removed), Ok(gone));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_expired_idempotency_key_may_be_used_again() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let store = Store::open(&bed.settings(), "test").unwrap();
    let recorder = recorder(&bed, &store);
    let send = || Arrived {
        body: RetryMessage {
            original_queue: "q".into(),
            idempotency_key: "k".into(),
            ..Default::default()
        }
        .encode_to_vec(),
        properties: Default::default(),
        redelivered: false,
    };
    recorder.record(vec![send(), send()]).await.unwrap();
    recorder.record(vec![send()]).await.unwrap();
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 1);
    sqlx::query("UPDATE idempotency_keys SET expires_at = now()")
        .execute(&bed.db)
        .await
        .unwrap();
    recorder.record(vec![send()]).await.unwrap();
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 2);
    let hits =
        "SELECT count(*) FROM retry_events WHERE event_type = 'idempotency' AND detail = 'hit'";
    assert_eq!(bed.count(hits).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_drops_only_what_is_provably_the_same_failure() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let store = Store::open(&bed.settings(), "test").unwrap();
    let recorder = recorder(&bed, &store);
    let id = Uuid::now_v7();
    let failure = |payload: &str, retry_count: i32| Arrived {
        body: RetryMessage {
            message_id: id.to_string(),
            original_payload: payload.into(),
            original_queue: "q".into(),
            retry_count,
            idempotency_key: "one key for all".into(),
            ..Default::default()
        }
        .encode_to_vec(),
        properties: Default::default(),
        redelivered: false,
    };
    recorder.record(vec![failure("a", 0)]).await.unwrap();
    let claim = store.claim(10, 1 << 20).await.unwrap();
    settle_first(claim, Settlement::SentBack { retry_count: 1 }).await;

    // With the same count it is the same failure, which the key drops. With a higher count
    // it is the next failure.
    recorder.record(vec![failure("a", 0)]).await.unwrap();
    let pending = "SELECT count(*) FROM retry_queue WHERE status = 'pending'";
    assert_eq!(bed.count(pending).await, 0);
    recorder.record(vec![failure("a", 1)]).await.unwrap();
    assert_eq!(bed.count(pending).await, 1);
    // Another message under the same key is not dropped but goes to review.
    recorder.record(vec![failure("b", 0)]).await.unwrap();
    let conflicts = "SELECT count(*) FROM retry_queue
                     WHERE reason = 'conflict' AND original_payload = 'b'";
    assert_eq!(bed.count(conflicts).await, 1);
    let hits =
        "SELECT count(*) FROM retry_events WHERE event_type = 'idempotency' AND detail = 'hit'";
    assert_eq!(bed.count(hits).await, 1);
}

/// A retry after a rate limit spends no attempt, so the next failure of the message has the
/// count of the one before, and maybe its key. Only the row tells that the message was sent
/// back in between.
#[tokio::test(flavor = "multi_thread")]
async fn a_key_does_not_drop_the_failure_after_a_retry_that_spent_nothing() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let store = Store::open(&bed.settings(), "test").unwrap();
    let recorder = recorder(&bed, &store);
    let id = Uuid::now_v7();
    let failure = || Arrived {
        body: RetryMessage {
            message_id: id.to_string(),
            original_queue: "q".into(),
            error_class: ErrorClass::RateLimited.into(),
            retry_after_ms: Some(1),
            idempotency_key: "one key for all".into(),
            ..Default::default()
        }
        .encode_to_vec(),
        properties: Default::default(),
        redelivered: false,
    };
    let pending = "SELECT count(*) FROM retry_queue WHERE status = 'pending'";
    let hits =
        "SELECT count(*) FROM retry_events WHERE event_type = 'idempotency' AND detail = 'hit'";
    let claim = async || {
        bed.make_due().await;
        let claim = store.claim(10, 1 << 20).await.unwrap();
        assert_eq!(claim.tasks.len(), 1);
        claim
    };
    let sent_back = Settlement::SentBack { retry_count: 0 };
    recorder.record(vec![failure()]).await.unwrap();
    recorder.record(vec![failure()]).await.unwrap();
    assert_eq!(bed.count(hits).await, 1, "while it waits it is the same");

    settle_first(claim().await, sent_back.clone()).await;
    recorder.record(vec![failure(), failure()]).await.unwrap();
    assert_eq!(
        bed.count(pending).await,
        1,
        "after its retry it is the next"
    );
    assert_eq!(bed.count(hits).await, 2, "and was reported twice");

    // The consumer may be faster than the dispatcher's COMMIT.
    let claim = claim().await;
    let again = tokio::spawn({
        let (recorder, failure) = (recorder.clone(), failure());
        async move { recorder.record(vec![failure]).await }
    });
    let waiting = "SELECT count(*) FROM pg_stat_activity
                   WHERE datname = current_database() AND wait_event_type = 'Lock'";
    bed.until_count(waiting, 1).await;
    settle_first(claim, sent_back).await;
    again.await.unwrap().unwrap();
    assert_eq!(bed.count(pending).await, 1);
    assert_eq!(bed.count(hits).await, 2);
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_expired_and_cannot_be_sent_waits_like_all_else() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let store = Store::open(&bed.settings(), "test").unwrap();
    sqlx::query(
        "INSERT INTO retry_queue (message_id, original_payload, original_queue, expires_at)
         VALUES (gen_random_uuid(), '', 'q', now() - interval '1 hour')",
    )
    .execute(&bed.db)
    .await
    .unwrap();
    let claim = store.claim(10, 1 << 20).await.unwrap();
    assert!(claim.tasks[0].expired);
    let delay = Duration::from_secs(60);
    settle_first(claim, Settlement::Deferred { delay }).await;
    assert_eq!(store.claim(10, 1 << 20).await.unwrap().tasks.len(), 0);
}

/// A consumer may fail a message before the dispatcher has committed that it was sent
/// back. If intake took this failure for a duplicate of the row that waits, the failure
/// would be lost.
#[tokio::test(flavor = "multi_thread")]
async fn what_fails_again_before_it_is_settled_waits_again() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let store = Store::open(&bed.settings(), "test").unwrap();
    let recorder = recorder(&bed, &store);
    let id = Uuid::now_v7();
    let failure = || failure_of(id);
    recorder.record(vec![failure()]).await.unwrap();
    let claim = eventually("it is due", async || {
        let claim = store.claim(10, 1 << 20).await.unwrap();
        (claim.tasks.len() == 1).then_some(claim)
    })
    .await;
    let again = tokio::spawn({
        let (recorder, failure) = (recorder.clone(), failure());
        async move { recorder.record(vec![failure]).await }
    });
    let waiting = "SELECT count(*) FROM pg_stat_activity
                   WHERE datname = current_database() AND wait_event_type = 'Lock'";
    bed.until_count(waiting, 1).await;
    settle_first(claim, Settlement::SentBack { retry_count: 1 }).await;
    again.await.unwrap().unwrap();
    let waits = "SELECT count(*) FROM retry_queue WHERE status = 'pending' AND retry_count = 1";
    assert_eq!(bed.count(waits).await, 1);
}

/// A report that arrives while the task waits may be of an attempt whose confirm was lost.
/// A consumer that takes each attempt once would skip the next one under the same id.
#[tokio::test(flavor = "multi_thread")]
async fn an_attempt_keeps_its_id_until_a_failure_is_reported() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let store = Store::open(&bed.settings(), "test").unwrap();
    let recorder = recorder(&bed, &store);
    let id = Uuid::now_v7();
    let failure = || failure_of(id);
    // A claim that is dropped leaves the row as it was, as a crash does.
    let attempt = || {
        eventually("it is due", async || {
            let claim = store.claim(10, 1 << 20).await.unwrap();
            claim.tasks.first().map(|task| task.attempt_id())
        })
    };
    recorder.record(vec![failure()]).await.unwrap();
    let first = attempt().await;
    assert_eq!(attempt().await, first, "the same attempt, sent again");
    recorder.record(vec![failure()]).await.unwrap();
    assert_ne!(attempt().await, first, "reported as failed meanwhile");
}

/// The broker delivers a dead letter again when we were killed between COMMIT and ack, and
/// marks it as redelivered.
#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_delivered_again_is_one_task_and_an_equal_one_is_another() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let store = Store::open(&bed.settings(), "test").unwrap();
    let recorder = recorder_of(&bed, &store, Source::DeadLetters);
    let dead_letter = |redelivered: bool| {
        let mut death = FieldTable::default();
        death.insert("queue".into(), AMQPValue::LongString("orders".into()));
        death.insert("time".into(), AMQPValue::Timestamp(1_000_000));
        let deaths = AMQPValue::FieldArray(vec![AMQPValue::FieldTable(death)].into());
        let mut headers = FieldTable::default();
        headers.insert("x-death".into(), deaths);
        Arrived {
            body: b"tick".to_vec(),
            properties: BasicProperties::default()
                .with_message_id("cron".into())
                .with_headers(headers),
            redelivered,
        }
    };
    let tasks = "SELECT count(*) FROM retry_queue WHERE reason IS NULL";
    recorder.record(vec![dead_letter(false)]).await.unwrap();
    assert_eq!(bed.count(tasks).await, 1);
    recorder.record(vec![dead_letter(true)]).await.unwrap();
    assert_eq!(bed.count(tasks).await, 1, "the same one");
    let two = vec![dead_letter(false), dead_letter(false)];
    recorder.record(two).await.unwrap();
    assert_eq!(bed.count(tasks).await, 3, "two more, in one batch");
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 3);
}

/// The acknowledgement of a failure may be lost, and its message sent back before the broker
/// delivers the failure again. The failure names its attempt, and history knows that a later
/// one was made.
#[tokio::test(flavor = "multi_thread")]
async fn a_failure_of_an_attempt_before_the_last_changes_nothing() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let store = Store::open(&bed.settings(), "test").unwrap();
    let recorder = recorder(&bed, &store);
    let id = Uuid::now_v7();
    // A handler that passes on the headers of the message that failed.
    let failure = |attempt: Option<Uuid>, body: &str| {
        let text = |id: Uuid| HeaderValue {
            kind: Some(Kind::Text(id.to_string())),
        };
        let headers = attempt.map(|attempt| ("x-retry-attempt-id".to_owned(), text(attempt)));
        Arrived {
            body: RetryMessage {
                message_id: id.to_string(),
                original_queue: "q".into(),
                original_payload: body.into(),
                max_retries: 9,
                properties: Some(Properties {
                    headers: headers.into_iter().collect(),
                    ..Default::default()
                }),
                ..Default::default()
            }
            .encode_to_vec(),
            properties: Default::default(),
            redelivered: true,
        }
    };
    let sent_back = async || {
        bed.make_due().await;
        let claim = store.claim(10, 1 << 20).await.unwrap();
        let (attempt, retry_count) = (claim.tasks[0].attempt_id(), claim.tasks[0].next_count());
        settle_first(claim, Settlement::SentBack { retry_count }).await;
        attempt
    };
    let pending = "SELECT count(*) FROM retry_queue WHERE status = 'pending'";
    recorder.record(vec![failure(None, "body")]).await.unwrap();
    let first = sent_back().await;
    let of_first = || failure(Some(first), "body");
    recorder.record(vec![of_first()]).await.unwrap();
    assert_eq!(bed.count(pending).await, 1, "the first retry failed");
    let second = sent_back().await;
    assert_ne!(first, second);

    recorder.record(vec![of_first(), of_first()]).await.unwrap();
    assert_eq!(bed.count(pending).await, 0, "it is known already");
    let told = "SELECT count(*) FROM retry_events WHERE event_type = 'duplicate'
                AND status = 'retried' AND detail = 'of an earlier attempt'";
    assert_eq!(bed.count(told).await, 2);
    let row: i64 = bed.count("SELECT id FROM retry_queue").await;
    let state = replay(&events(&bed, row).await).unwrap();
    assert_eq!((state.status, state.retry_count), (Status::Retried, 2));

    let of_second = failure(Some(second), "body");
    recorder.record(vec![of_second]).await.unwrap();
    assert_eq!(bed.count(pending).await, 1, "the second retry failed");
    sent_back().await;

    // A consumer may put the headers of one message on another one, which must not be lost.
    let other = failure(Some(first), "other");
    recorder.record(vec![other]).await.unwrap();
    assert_eq!(bed.count(pending).await, 1, "another body is no old news");
    sent_back().await;

    // Without proof in history a failure is taken for the next one.
    sqlx::query("DELETE FROM retry_history")
        .execute(&bed.db)
        .await
        .unwrap();
    let other = failure(Some(first), "other");
    recorder.record(vec![other]).await.unwrap();
    assert_eq!(bed.count(pending).await, 1, "nothing tells that it is old");
}
