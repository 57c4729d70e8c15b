//! Our tables beside another program's: refused where they cannot stand, made in a schema of
//! their own, and filled with what waits in another scheduler's table.

use lapin::BasicProperties;
use retry_scheduler::store::{STATEMENTS, Store};
use sqlx::AssertSqlSafe;

use crate::{
    commands::{one_line_naming, run, text},
    support::{Bed, Process, message},
};

/// The table of another scheduler.
const FOREIGN: &str = "
    CREATE TABLE public.retry_queue (
        id BIGSERIAL PRIMARY KEY,
        message_id UUID UNIQUE NOT NULL,
        original_payload BYTEA NOT NULL,
        original_queue VARCHAR(255) NOT NULL,
        error_reason TEXT,
        retry_count INT NOT NULL DEFAULT 0,
        max_retries INT NOT NULL DEFAULT 3,
        next_retry_at TIMESTAMP NOT NULL,
        created_at TIMESTAMP DEFAULT NOW(),
        status VARCHAR(50) DEFAULT 'pending'
    );
    CREATE INDEX idx_retry_next_retry ON public.retry_queue (next_retry_at, status)";

/// A name that has to be quoted wherever it is used.
const SCHEMA: &str = "Our Retries";

/// Inserts rows that wait in the other scheduler's table; `more` and `values` are columns.
async fn foreign_rows(bed: &Bed, queue: &str, count: i32, more: &str, values: &str) {
    sqlx::query(AssertSqlSafe(format!(
        "INSERT INTO public.retry_queue
             (message_id, original_payload, original_queue, error_reason, {more})
         SELECT gen_random_uuid(), convert_to('old ' || i, 'UTF8'), $1, 'timeout', {values}
         FROM generate_series(1, $2) AS i"
    )))
    .bind(queue)
    .bind(count)
    .execute(&bed.db)
    .await
    .expect("rows");
}

#[tokio::test(flavor = "multi_thread")]
async fn another_programs_retry_queue_stops_the_start_with_one_line_that_says_what_to_do() {
    let mut bed = Bed::new().await;
    bed.arrange(FOREIGN).await;
    let parts = [
        "retry_queue",
        "next_retry_at, created_at, status",
        "DATABASE_SCHEMA",
        "import",
    ];
    one_line_naming(&run(&bed, &["migrate"]).await, &parts);
    for migrate in ["true", "false"] {
        bed.set("MIGRATE_ON_START", migrate);
        let (status, log) = Process::spawn(bed.command()).ended().await;
        assert_eq!(status.code(), Some(1), "{log}");
        let line = log.lines().last().expect("a line");
        for part in parts {
            assert!(line.contains(part), "{part}: {log}");
        }
        assert!(!log.contains("not ready yet"), "it does not wait: {log}");
    }
    bed.arrange("DROP TABLE public.retry_queue; CREATE TABLE idempotency_keys (key TEXT)")
        .await;
    let others = run(&bed, &["migrate"]).await;
    one_line_naming(&others, &["idempotency_keys", "DATABASE_SCHEMA"]);
}

/// A function of our own tells the service that this is Postgres 12.
#[tokio::test(flavor = "multi_thread")]
async fn a_postgres_that_is_too_old_stops_the_start_with_one_line_and_gets_no_tables() {
    let bed = Bed::new().await;
    let database = bed.queue("");
    bed.arrange(&format!(
        "CREATE SCHEMA older;
         CREATE FUNCTION older.current_setting(name TEXT) RETURNS TEXT LANGUAGE sql AS $$
             SELECT CASE name WHEN 'server_version_num' THEN '120022'
                              ELSE pg_catalog.current_setting(name) END $$;
         ALTER DATABASE {} SET search_path = older, pg_catalog, public",
        database.trim_end_matches('.')
    ))
    .await;
    one_line_naming(
        &run(&bed, &["migrate"]).await,
        &["Postgres 12", "Postgres 13"],
    );
    let (status, log) = Process::spawn(bed.command()).ended().await;
    assert_eq!(status.code(), Some(1), "{log}");
    let line = log.lines().last().expect("a line");
    assert!(line.contains("Postgres 13 is the least"), "{log}");
    const TABLES: &str = "SELECT count(*) FROM pg_class WHERE relname ~ '^(retry_|_sqlx)'";
    assert_eq!(bed.count(TABLES).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn in_a_schema_of_its_own_the_pipeline_works_beside_another_programs_tables() {
    let mut bed = Bed::new().await;
    bed.arrange(FOREIGN).await;
    bed.set("DATABASE_SCHEMA", SCHEMA);
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let mut with_key = message(&queue, "once");
    with_key.idempotency_key = "k".into();
    bed.client
        .send_all(&bed.intake(), &[with_key.clone(), with_key.clone()])
        .await;
    let back = inbox.next().await;
    assert_eq!(back.body, b"once");
    // It fails again, and then it cannot be sent any more.
    let failed = retry_scheduler::wire::proto::RetryMessage {
        retry_count: 3,
        idempotency_key: String::new(),
        ..with_key
    };
    bed.client.send(&bed.intake(), &failed).await;
    let mut review = bed.client.consume(&bed.review()).await;
    assert_eq!(review.next().await.review().reason, "exhausted");
    bed.client
        .publish(&bed.intake(), b"junk", BasicProperties::default())
        .await;
    assert_eq!(review.next().await.review().reason, "invalid");
    let shown = run(&bed, &["idempotency", "show", "k", "--queue", &queue]).await;
    assert_eq!(shown.status.code(), Some(0), "{}", text(&shown.stderr));
    bed.until_count(
        "SELECT count(*) FROM \"Our Retries\".retry_queue WHERE status = 'failed'",
        2,
    )
    .await;
    for (sql, wanted) in [
        ("SELECT count(*) FROM \"Our Retries\".retry_place", 1),
        ("SELECT count(*) FROM public.retry_queue", 0),
        (
            "SELECT count(*) FROM pg_class WHERE relnamespace = 'public'::regnamespace
                 AND relkind = 'r' AND relname <> 'retry_queue'",
            0,
        ),
    ] {
        assert_eq!(bed.count(sql).await, wanted, "{sql}");
    }
    assert!(service.scrape().await.get("retry_queue_depth") >= 0.0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_statement_finds_its_tables_without_a_search_path() {
    let mut bed = Bed::new().await;
    bed.set("DATABASE_SCHEMA", SCHEMA);
    bed.migrate().await;
    let store = Store::open(&bed.settings(), "test").expect("a store");
    let mut tx = bed.db.begin().await.expect("a transaction");
    for statement in STATEMENTS {
        sqlx::raw_sql(AssertSqlSafe(format!(
            "SET LOCAL search_path = ''; PREPARE asked AS {}; DEALLOCATE asked",
            store.text(statement)
        )))
        .execute(&mut *tx)
        .await
        .unwrap_or_else(|e| panic!("{}: {e}", statement.name));
    }
    drop(tx);
    store.ping().await.expect("the tables are there");
    store.prove_durable().await.expect("they can be written");
    store.migrate().await.expect("nothing is left to do");
}

#[tokio::test(flavor = "multi_thread")]
async fn import_takes_over_what_waits_once_with_its_events() {
    let mut bed = Bed::new().await;
    bed.arrange(FOREIGN).await;
    bed.set("DATABASE_SCHEMA", "ours")
        .set("MAX_PAYLOAD_BYTES", "1000");
    let queue = bed.declare("target").await;
    let now = "now() AT TIME ZONE 'UTC'";
    foreign_rows(&bed, &queue, 240, "next_retry_at", now).await;
    let later = format!("{now} + interval '1 day', 2, 7");
    let budget = "next_retry_at, retry_count, max_retries";
    foreign_rows(&bed, &queue, 1, budget, &later).await;
    foreign_rows(&bed, &queue, 1, budget, &format!("{now}, 3, 3")).await;
    foreign_rows(&bed, &queue, 1, budget, &format!("{now}, 0, 0")).await;
    foreign_rows(&bed, &queue, 1, "next_retry_at", "'infinity'").await;
    foreign_rows(&bed, "amq.gen", 1, "next_retry_at", now).await;
    let sent = format!("{now}, 'retried'");
    foreign_rows(&bed, &queue, 3, "next_retry_at, status", &sent).await;

    let imported = run(&bed, &["import", "--batch", "100"]).await;
    let said = text(&imported.stdout);
    assert_eq!(
        imported.status.code(),
        Some(0),
        "{}",
        text(&imported.stderr)
    );
    for line in [
        "public.retry_queue: 245 pending, 3 retried",
        "taken over 100 of 245",
        "taken over 245 of 245",
        "Taken over: 245, of which 4 go to review. Left where they were: 0.",
    ] {
        assert!(said.lines().any(|l| l == line), "{line}: {said}");
    }
    for (sql, wanted) in [
        ("SELECT count(*) FROM ours.retry_queue", 245),
        (
            "SELECT count(*) FROM ours.retry_queue WHERE reason = 'exhausted'",
            2,
        ),
        (
            "SELECT count(*) FROM ours.retry_queue WHERE reason = 'invalid'",
            2,
        ),
        (
            "SELECT count(DISTINCT task_id) FROM ours.retry_events
             WHERE event_type = 'scheduled' AND from_status IS NULL AND instance = 'import'",
            245,
        ),
        // Ids, payloads, queues, budgets and due moments are those that the rows had.
        (
            "SELECT count(*) FROM ours.retry_queue o JOIN public.retry_queue p USING
                 (message_id, original_payload, original_queue, error_reason, retry_count, max_retries)
             WHERE o.first_failed_at = date_trunc('milliseconds', p.created_at AT TIME ZONE 'UTC')
                 AND o.next_retry_at >= p.next_retry_at AT TIME ZONE 'UTC'",
            243,
        ),
        (
            "SELECT count(*) FROM ours.retry_queue o JOIN public.retry_queue p USING (message_id)
             WHERE o.max_retries = 7 AND o.retry_count = 2 AND abs(EXTRACT(EPOCH FROM
                 o.next_retry_at - p.next_retry_at AT TIME ZONE 'UTC')) < 0.002",
            1,
        ),
        (
            "SELECT count(*) FROM public.retry_queue WHERE status = 'imported'",
            245,
        ),
    ] {
        assert_eq!(bed.count(sql).await, wanted, "{sql}");
    }

    let again = run(&bed, &["import"]).await;
    assert_eq!(again.status.code(), Some(0), "{}", text(&again.stderr));
    let said = text(&again.stdout);
    assert!(said.contains("245 imported, 3 retried"), "{said}");
    assert!(said.contains("Taken over: 0,"), "{said}");
    const EVENTS: &str = "SELECT count(*) FROM ours.retry_events";
    assert_eq!(bed.count(EVENTS).await, 245);

    let service = bed.start().await;
    const SENT: &str = "SELECT count(*) FROM ours.retry_queue WHERE status = 'retried'";
    bed.until_count(SENT, 240).await;
    bed.until_count(
        "SELECT count(*) FROM ours.retry_queue WHERE status = 'failed'",
        4,
    )
    .await;
    assert_eq!(bed.client.depth(&queue).await, Some(240));
    assert_eq!(bed.client.depth(&bed.review()).await, Some(4));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn import_names_what_it_leaves_and_takes_a_batch_whole_or_not_at_all() {
    let mut bed = Bed::new().await;
    bed.arrange(FOREIGN).await;
    bed.set("DATABASE_SCHEMA", "ours");
    bed.migrate().await;
    let time = "TIMESTAMP '2030-01-01 12:00'";
    foreign_rows(&bed, "q", 5, "next_retry_at", time).await;
    bed.arrange(
        "INSERT INTO ours.retry_queue (message_id, original_payload, original_queue, status)
             SELECT message_id, '', 'q', 'retried' FROM public.retry_queue WHERE id = 3;
         ALTER TABLE public.retry_queue ADD CONSTRAINT known CHECK (status IN ('pending'))",
    )
    .await;
    // The other table does not take our mark: then nothing is taken over.
    let refused = run(&bed, &["import"]).await;
    one_line_naming(&refused, &["known"]);
    const OURS: &str = "SELECT count(*) FROM ours.retry_queue WHERE status = 'pending'";
    const EVENTS: &str = "SELECT count(*) FROM ours.retry_events";
    assert_eq!(bed.count(OURS).await, 0);
    assert_eq!(bed.count(EVENTS).await, 0);

    bed.arrange("ALTER TABLE public.retry_queue DROP CONSTRAINT known")
        .await;
    let arguments = ["import", "--batch", "2", "--time-zone", "Asia/Tokyo"];
    let taken = run(&bed, &arguments).await;
    let said = text(&taken.stdout);
    one_line_naming(&taken, &["1 rows were not taken over"]);
    let id: String =
        sqlx::query_scalar("SELECT message_id::text FROM public.retry_queue WHERE id = 3")
            .fetch_one(&bed.db)
            .await
            .expect("the row");
    assert!(said.contains(&format!("left: {id}: ")), "{said}");
    assert_eq!(bed.count(OURS).await, 4);
    assert_eq!(bed.count(EVENTS).await, 4);
    const LEFT: &str = "SELECT count(*) FROM public.retry_queue WHERE status = 'pending'";
    assert_eq!(bed.count(LEFT).await, 1);
    for (arguments, part) in [
        (&["import", "--time-zone", "Nowhere"][..], "--time-zone"),
        (&["import", "--table", "absent"], "absent"),
        (&["import", "--from-schema", "ours"], "own table"),
    ] {
        one_line_naming(&run(&bed, arguments).await, &[part]);
    }
}
