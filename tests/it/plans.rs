//! Query plans: whatever Postgres knew of the tables when it planned, a statement finds
//! its rows by an index, and reads no more of that than it needs.

use retry_scheduler::store::{STATEMENTS, Statement, Store, dispatch::NextDue};
use sqlx::AssertSqlSafe;

use crate::support::{Bed, eventually, message};

const RETRIED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'retried'";

/// SQL that inserts `count` rows with this status, spread over a thousand queues.
fn rows(count: u32, status: &str) -> String {
    format!(
        "INSERT INTO retry_queue (message_id, original_payload, original_queue, status)
         SELECT gen_random_uuid(), convert_to(repeat('.', 1000), 'UTF8'), 'q' || i % 1000, '{status}'
         FROM generate_series(1, {count}) AS i;"
    )
}

fn named(name: &str) -> &'static Statement {
    let found = STATEMENTS.iter().find(|statement| statement.name == name);
    found.unwrap_or_else(|| panic!("no statement {name:?}"))
}

/// How Postgres reads our tables when it runs a statement by its generic plan: the index
/// and the condition of each scan. Panics if the plan compares rows pair by pair, or
/// compiles (JIT).
async fn reads(bed: &Bed, name: &str) -> Vec<String> {
    let (statement, settings) = (named(name).text(), named(name).settings());
    let mut tx = bed.db.begin().await.expect("a transaction");
    sqlx::raw_sql(AssertSqlSafe(format!(
        "SELECT {settings};
         SET LOCAL plan_cache_mode = force_generic_plan;
         PREPARE asked AS {statement}"
    )))
    .execute(&mut *tx)
    .await
    .expect("prepared");
    let values = (1..)
        .take_while(|n| statement.contains(&format!("${n}")))
        .map(|_| "NULL");
    let values = match values.collect::<Vec<_>>().join(", ") {
        none if none.is_empty() => none,
        some => format!("({some})"),
    };
    let explain = AssertSqlSafe(format!("EXPLAIN EXECUTE asked {values}"));
    let plan: Vec<String> = sqlx::query_scalar(explain)
        .fetch_all(&mut *tx)
        .await
        .expect("a plan");
    sqlx::raw_sql("DEALLOCATE asked")
        .execute(&mut *tx)
        .await
        .expect("forgotten");
    tx.rollback().await.expect("nothing changed");
    for word in ["JIT", "Join Filter"] {
        assert!(!plan.iter().any(|line| line.contains(word)), "{plan:#?}");
    }
    let scans = plan.iter().zip(plan.iter().skip(1));
    let scans = scans.filter(|(scan, _)| {
        let of_table = scan.contains(" on retry_") || scan.contains(" on idempotency_keys");
        scan.contains("Scan") && (of_table || scan.contains("Bitmap Index"))
    });
    scans
        .map(|(scan, condition)| {
            let index = scan.split_whitespace().skip_while(|word| *word != "using");
            let index = index.skip(1).take(1).collect::<String>();
            // Postgres numbers the second and later mentions of a table.
            let condition = (1..9).fold(condition.trim().to_owned(), |condition, n| {
                condition.replace(&format!("retry_due_{n}."), "retry_due.")
            });
            format!("{index} {condition}")
        })
        .collect()
}

/// States in which Postgres may have seen the tables when it planned: a name, and the SQL
/// that brings them about. Each adds to the one before, unless it truncates.
fn scenes() -> Vec<(&'static str, String)> {
    let key = "INSERT INTO idempotency_keys (scope, key, retry_count, digest, expires_at)
               SELECT '', i, 0, '', now() FROM generate_series";
    let few = |count: u32, status: &str| {
        format!(
            "TRUNCATE retry_queue CASCADE; TRUNCATE idempotency_keys; {} {key} (1, {count}) AS i;
             VACUUM ANALYZE",
            rows(count, status)
        )
    };
    let quiet_hour = format!(
        "{} VACUUM ANALYZE retry_queue; {} UPDATE retry_queue SET status = 'retried' WHERE \
         status = 'pending'; ANALYZE retry_queue",
        rows(20_000, "retried"),
        rows(5_000, "pending")
    );
    vec![
        ("never analyzed", String::new()),
        ("empty", "VACUUM ANALYZE".into()),
        ("one row", few(1, "retried")),
        ("two rows", few(2, "pending")),
        ("a few rows", few(5, "pending")),
        ("a quiet hour", quiet_hour),
        (
            "much waits",
            format!(
                "{} {key} (10, 20000) AS i; ANALYZE",
                rows(20_000, "pending")
            ),
        ),
    ]
}

#[tokio::test(flavor = "multi_thread")]
async fn every_statement_is_in_the_list_and_postgres_takes_each() {
    let bed = Bed::new().await;
    bed.migrate().await;
    for statement in STATEMENTS {
        reads(&bed, statement.name).await;
    }
    let sources = std::fs::read_dir("src/store").expect("the store's sources");
    let declared: usize = sources
        .map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap())
        .map(|text| text.matches("Statement = Statement::").count())
        .sum();
    assert_eq!(STATEMENTS.len(), declared);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_walks_the_index_that_has_its_order_whatever_postgres_believes() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let task = "retry_queue_pkey Index Cond: (id = retry_due.task_id)".to_owned();
    let walk = |place: &str, condition: &str| {
        let scan = format!("{place} AND (next_retry_at {condition} statement_timestamp()))");
        [scan, task.clone()]
    };
    let by_priority = |condition: &str| {
        let [live, backfill] = ["0", "1"].map(|priority| {
            let place = format!("idx_retry_due_next Index Cond: ((priority = {priority})");
            walk(&place, condition)
        });
        [live, backfill].concat()
    };
    let (oldest, next) = (by_priority("<="), by_priority(">"));
    let lanes = "idx_retry_due_lane Index Cond: (lane > $3)".to_owned();
    let shares = walk("idx_retry_due_lane Index Cond: ((lane = l_1.lane)", "<=");
    let whole = vec![" TID Cond: (ctid = taken.place)".to_owned()];
    let plain = [next.clone(), oldest.clone(), whole.clone()].concat();
    let fairly = [vec![lanes], shares.to_vec(), oldest, next, whole].concat();
    for (scene, sql) in scenes() {
        bed.arrange(&sql).await;
        assert_eq!(reads(&bed, "claim").await, plain, "{scene}");
        assert_eq!(reads(&bed, "claim fairly").await, fairly, "{scene}");
    }
}

/// A plan that was made for a small table stays in use while the table grows. So a
/// statement must not read the whole table even when that is small.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_finds_its_rows_by_key_whatever_postgres_believes() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let statements = [
        "settle",
        "lock known",
        "fail again",
        "note duplicates",
        "note outdated",
        "look up keys",
        "attach keys",
        "record hits",
        "clear a key",
        "remove old tasks",
        "remove expired keys",
    ];
    for (scene, sql) in scenes() {
        bed.arrange(&sql).await;
        for statement in statements {
            let found = reads(&bed, statement).await;
            assert!(!found.is_empty(), "{scene}: {statement}");
            for scan in found {
                assert!(scan.contains("Cond: "), "{scene}: {scan} in {statement}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_due_moment_is_read_from_its_index_once_the_table_has_grown() {
    let bed = Bed::new().await;
    bed.migrate().await;
    bed.arrange(&format!("{} VACUUM ANALYZE", rows(1, "pending")))
        .await;
    let store = Store::open(&bed.settings(), "test").expect("a store");
    let ask = async || store.next_due().await.expect("an answer");
    assert!(matches!(ask().await, Some(NextDue::Since(_))));
    bed.arrange(&rows(20_000, "pending")).await;
    const READ: &str = "SELECT seq_tup_read FROM pg_stat_user_tables WHERE relname = 'retry_due'";
    const BY_INDEX: &str = "SELECT (idx_scan > 0)::int::bigint FROM pg_stat_user_indexes
                            WHERE indexrelname = 'idx_retry_due_next'";
    let before = bed.count(READ).await;
    eventually("the index is used", async || {
        ask().await;
        (bed.count(BY_INDEX).await == 1).then_some(())
    })
    .await;
    let read = bed.count(READ).await - before;
    assert!(read < 20_000, "{read} rows were read");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_transaction_reads_tables_whole_and_only_a_claim_may_not_sort() {
    for (setting, storing, settling) in [
        ("enable_seqscan", "off", "off"),
        ("enable_sort", "on", "off"),
    ] {
        let bed = Bed::new().await;
        bed.migrate().await;
        bed.witness(setting).await;
        let queue = bed.declare("target").await;
        let service = bed.start().await;
        bed.client
            .send(&bed.intake(), &message(&queue, "body"))
            .await;
        bed.until_count(RETRIED, 1).await;
        let saw = |what: &str, value: &str| (what.to_owned(), value.to_owned());
        let wanted = [saw("INSERT", storing), saw("UPDATE", settling)];
        assert_eq!(bed.witnessed().await, wanted, "{setting}");
        service.stop().await;
    }
}
