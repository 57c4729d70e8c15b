//! The layout of the tables: `retry_due` says what waits and follows every change of a task, whoever
//! makes it; settling a task touches no index of `retry_queue`; history is a row for each batch, in a
//! table for each day; and what the layout before held is taken over.

use retry_scheduler::store::Store;

use crate::support::{Bed, eventually, message};

/// How many tasks wait.
const WAITING: &str = "SELECT count(*) FROM retry_due";

/// How many rows one of the two tables has that the other lacks.
const OUT_OF_STEP: &str = "
    SELECT count(*) FROM retry_due d FULL JOIN (
        SELECT id, priority, next_retry_at, lane FROM retry_queue WHERE status = 'pending') q
        ON (q.id, q.priority, q.next_retry_at, q.lane)
         = (d.task_id, d.priority, d.next_retry_at, d.lane)
    WHERE q.id IS NULL OR d.task_id IS NULL";

/// What people do to tasks by hand, and how many wait afterwards.
const BY_HAND: [(&str, i64); 11] = [
    (
        "INSERT INTO retry_queue (message_id, original_payload, original_queue, error_reason,
                                  retry_count, max_retries, next_retry_at, status)
         SELECT gen_random_uuid(), 'x', 'q' || i % 3, 'by hand', 0, 3, now() + i * interval '1 hour',
                CASE WHEN i <= 8 THEN 'pending' ELSE 'cancelled' END
         FROM generate_series(1, 10) AS i",
        8,
    ),
    ("UPDATE retry_queue SET next_retry_at = now()", 8),
    ("UPDATE retry_queue SET next_retry_at = next_retry_at", 8),
    ("UPDATE retry_queue SET priority = 1 WHERE original_queue = 'q1'", 8),
    ("UPDATE retry_queue SET tenant_id = 'other' WHERE original_queue = 'q2'", 8),
    ("UPDATE retry_queue SET status = 'pending' WHERE status = 'cancelled'", 10),
    ("UPDATE retry_queue SET status = 'retried' WHERE original_queue = 'q1'", 6),
    (
        "INSERT INTO retry_queue (message_id, original_payload, original_queue)
         SELECT message_id, 'y', 'q4' FROM retry_queue WHERE status = 'retried' LIMIT 1
         ON CONFLICT (message_id) DO UPDATE SET status = 'pending', next_retry_at = now()",
        7,
    ),
    ("DELETE FROM retry_queue WHERE status = 'retried' OR original_queue = 'q2'", 4),
    ("DELETE FROM retry_queue WHERE FALSE", 4),
    ("TRUNCATE retry_queue", 0),
];

#[tokio::test(flavor = "multi_thread")]
async fn what_waits_follows_what_is_done_to_tasks_by_hand() {
    let bed = Bed::new().await;
    bed.migrate().await;
    for (sql, waiting) in BY_HAND {
        bed.arrange(sql).await;
        assert_eq!(bed.count(WAITING).await, waiting, "{sql}");
        assert_eq!(bed.count(OUT_OF_STEP).await, 0, "{sql}");
    }
    // The comparison itself notices when they are not in step.
    bed.arrange("ALTER TABLE retry_queue DISABLE TRIGGER keep_due_on_insert")
        .await;
    bed.insert_due("forgotten", 2).await;
    assert_eq!(bed.count(OUT_OF_STEP).await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn settling_a_task_touches_no_index_and_a_batch_is_one_row_of_history() {
    const MESSAGES: i64 = 200;
    let bed = Bed::new().await;
    bed.migrate().await;
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let body = ".".repeat(1024);
    let messages: Vec<_> = (0..MESSAGES)
        .map(|_| message(&queue, body.as_str()))
        .collect();
    bed.client.send_all(&bed.intake(), &messages).await;
    bed.until_count(
        "SELECT count(*) FROM retry_queue WHERE status = 'retried'",
        MESSAGES,
    )
    .await;
    service.stop().await;
    // Backends tell what they did when they end, at the latest.
    bed.until_count(
        "SELECT n_tup_upd FROM pg_stat_user_tables WHERE relname = 'retry_queue'",
        MESSAGES,
    )
    .await;
    let elsewhere = "SELECT n_tup_upd - n_tup_hot_upd FROM pg_stat_user_tables \
                     WHERE relname = 'retry_queue'";
    assert_eq!(bed.count(elsewhere).await, 0);
    assert_eq!(bed.count(OUT_OF_STEP).await, 0);
    let events = bed.count("SELECT count(*) FROM retry_events").await;
    assert_eq!(events, 2 * MESSAGES);
    // They arrive together; when each falls due is up to chance.
    let rows = "SELECT count(*) FROM retry_history WHERE event_type = 'scheduled'";
    let rows = bed.count(rows).await;
    assert!(rows < MESSAGES / 4, "{rows} rows hold {MESSAGES} events");
}

/// The tables of history, the oldest first.
const DAYS: &str = "SELECT part FROM retry_history_parts WHERE until IS NOT NULL ORDER BY until";

#[tokio::test(flavor = "multi_thread")]
async fn a_day_of_history_has_a_table_which_goes_when_the_day_is_too_old() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let days = async || -> Vec<String> {
        let days = sqlx::query_scalar(DAYS).fetch_all(&bed.db).await;
        days.expect("days")
    };
    let rotate = async |keep: &str| {
        bed.arrange(&format!("SELECT retry_rotate_history('{keep}', 10)"))
            .await;
    };
    let event = async |moment: &str| {
        bed.arrange(&format!(
            "INSERT INTO retry_events (task_id, at, event_type, status, retry_count, max_retries,
                                       next_retry_at, instance)
             SELECT 1, {moment}, 'scheduled', 'pending', 0, 3, now(), 'test'"
        ))
        .await;
    };
    let coming = days().await;
    assert_eq!(coming.len(), 8, "today and a week: {coming:?}");
    for moment in [
        "now()",
        "now() + interval '2 days'",
        "now() - interval '2 days'",
    ] {
        event(moment).await;
    }
    let events = "SELECT count(*) FROM retry_events";
    let elsewhere = "SELECT count(*) FROM retry_history_other";
    assert_eq!(
        (bed.count(events).await, bed.count(elsewhere).await),
        (3, 1)
    );

    // What belongs to no day goes one by one; a day goes when all of it is too old.
    rotate("1 day").await;
    assert_eq!(
        (bed.count(events).await, bed.count(elsewhere).await),
        (2, 0)
    );
    assert_eq!(days().await, coming);
    // Seen from the day after tomorrow, and it makes no day twice.
    rotate("-2 days").await;
    assert_eq!(days().await, coming[2..]);
    assert_eq!(bed.count(events).await, 1);

    // A day whose events have already gone elsewhere gets no table, but the next one does.
    bed.arrange(
        &coming[3..]
            .iter()
            .map(|day| format!("DROP TABLE {day};"))
            .collect::<String>(),
    )
    .await;
    event("now() + interval '4 days'").await;
    rotate("1 day").await;
    let left: Vec<String> = days().await;
    assert_eq!(left.len(), 5, "{left:?}");
    assert!(!left.contains(&coming[4]), "{left:?}");
    assert_eq!(
        (bed.count(events).await, bed.count(elsewhere).await),
        (2, 1)
    );
}

/// What an instance of the layout before has left: tasks of every status, and their history.
const LEFT_BEFORE: &str = "
    INSERT INTO retry_queue (message_id, original_payload, original_queue, status, reason, priority)
        SELECT gen_random_uuid(), 'body', 'q' || i % 5,
               (ARRAY['pending', 'retried', 'failed', 'cancelled'])[1 + i % 4],
               CASE i % 4 WHEN 2 THEN 'final' END, i % 2
        FROM generate_series(1, 1000) AS i;
    INSERT INTO retry_events (task_id, at, event_type, status, retry_count, max_retries,
                              next_retry_at, instance)
        SELECT id, now() - id / 10 * interval '1 hour' + id % 10 * interval '10 microseconds',
               'scheduled', status, retry_count, max_retries, next_retry_at, 'before'
        FROM retry_queue ORDER BY 2;
    CREATE TABLE history_before AS SELECT * FROM retry_events";

/// How many events are told as they were before; `at` to the millisecond.
const SAME_HISTORY: &str = "
    SELECT count(*) FROM history_before b JOIN retry_events e USING (task_id, event_type)
    WHERE e.at BETWEEN b.at - interval '1 millisecond' AND b.at
      AND (b.status, b.retry_count, b.max_retries, b.next_retry_at, b.instance, b.actor)
        = (e.status, e.retry_count, e.max_retries, e.next_retry_at, e.instance, e.actor)
      AND COALESCE(b.reason, b.detail, b.error, b.from_status) IS NULL
      AND COALESCE(e.reason, e.detail, e.error, e.from_status) IS NULL";

#[tokio::test(flavor = "multi_thread")]
async fn the_layout_before_is_taken_over_with_all_that_waits_and_all_history() {
    let bed = Bed::new().await;
    let mut before = sqlx::migrate::Migrator::new(std::path::Path::new("migrations"))
        .await
        .expect("migrations");
    before.migrations.to_mut().retain(|m| m.version < 7);
    before.run(&bed.db).await.expect("the layout before");
    bed.arrange(LEFT_BEFORE).await;

    // A migration that is cut off leaves the layout before as it was, and can be run again.
    let mut tx = bed.db.begin().await.expect("a transaction");
    let lock = "LOCK TABLE retry_queue IN SHARE MODE";
    sqlx::raw_sql(lock).execute(&mut *tx).await.expect("locked");
    let store = Store::open(&bed.settings(), "test").expect("a store");
    let cut_off = tokio::spawn(async move { store.migrate().await });
    let waiting = "SELECT pid::bigint FROM pg_stat_activity
                   WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let pid = eventually("the migration waits", || async {
        let pid = sqlx::query_scalar(waiting).fetch_optional(&bed.db);
        pid.await.expect("an answer")
    });
    let pid: i64 = pid.await;
    bed.arrange(&format!("SELECT pg_terminate_backend({pid})"))
        .await;
    assert!(cut_off.await.expect("no panic").is_err());
    tx.rollback().await.expect("unlocked");
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 1000);

    bed.migrate().await;
    assert_eq!(bed.count(WAITING).await, 250);
    assert_eq!(bed.count(OUT_OF_STEP).await, 0);
    let events = "SELECT count(*) FROM retry_events e JOIN retry_queue q ON q.id = e.task_id";
    assert_eq!(bed.count(events).await, 1000);
    assert_eq!(bed.count(SAME_HISTORY).await, 1000);
    // History goes on behind what was there.
    bed.arrange(
        "INSERT INTO retry_events (task_id, event_type, status, retry_count, max_retries,
                                   next_retry_at, instance)
         VALUES (1, 'retry_attempt', 'retried', 1, 3, now(), 'after')",
    )
    .await;
    let last = "SELECT instance = 'after' FROM retry_events ORDER BY id DESC LIMIT 1";
    let last: bool = sqlx::query_scalar(last).fetch_one(&bed.db).await.unwrap();
    assert!(last);
    assert_eq!(
        bed.count("SELECT count(*) FROM retry_events_of(1)").await,
        2
    );
}
