//! However the tables looked when Postgres last analyzed them, a claim walks its
//! indexes and no more of them than it takes.

use retry_scheduler::store::dispatch::{CLAIM, CLAIM_FAIRLY, CLAIM_SETTINGS};
use sqlx::AssertSqlSafe;

use crate::support::{Bed, message};

const RETRIED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'retried'";

/// Rows of a thousand queues, all with this status.
fn rows(count: u32, status: &str) -> String {
    format!(
        "INSERT INTO retry_queue (message_id, original_payload, original_queue, status)
         SELECT gen_random_uuid(), convert_to(repeat('.', 1000), 'UTF8'), 'q' || i % 1000, '{status}'
         FROM generate_series(1, {count}) AS i;"
    )
}

/// How Postgres reads the table for a statement it has prepared for any values.
async fn reads(bed: &Bed, statement: &str, types: &str, values: &str) -> Vec<String> {
    let mut tx = bed.db.begin().await.expect("a transaction");
    sqlx::raw_sql(AssertSqlSafe(format!(
        "SELECT {CLAIM_SETTINGS};
         SET LOCAL plan_cache_mode = force_generic_plan;
         PREPARE asked ({types}) AS {statement}"
    )))
    .execute(&mut *tx)
    .await
    .expect("prepared");
    let explain = AssertSqlSafe(format!("EXPLAIN EXECUTE asked ({values})"));
    let plan: Vec<String> = sqlx::query_scalar(explain)
        .fetch_all(&mut *tx)
        .await
        .expect("a plan");
    sqlx::raw_sql("DEALLOCATE asked")
        .execute(&mut *tx)
        .await
        .expect("forgotten");
    tx.rollback().await.expect("nothing changed");
    assert!(!plan.iter().any(|line| line.contains("JIT")), "{plan:#?}");
    let scans = plan.iter().zip(plan.iter().skip(1));
    let scans = scans.filter(|(scan, _)| scan.contains(" on retry_queue"));
    scans
        .map(|(scan, condition)| {
            let index = scan.split_whitespace().skip_while(|word| *word != "using");
            let index = index.skip(1).take(1).collect::<String>();
            format!("{index} {}", condition.trim())
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_claim_walks_its_indexes_whatever_postgres_believes_of_the_table() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let oldest = [
        "idx_retry_next_retry Index Cond: ((priority = 0) AND (next_retry_at <= statement_timestamp()))",
        "idx_retry_next_retry Index Cond: ((priority = 1) AND (next_retry_at <= statement_timestamp()))",
    ];
    let lanes = [
        "idx_retry_lane Index Cond: (lane > $3)",
        "idx_retry_lane Index Cond: ((lane = l_1.lane) AND (next_retry_at <= statement_timestamp()))",
    ];
    let quiet_hour = format!(
        "{} VACUUM ANALYZE retry_queue; {} UPDATE retry_queue SET status = 'retried' WHERE \
         status = 'pending'; ANALYZE retry_queue",
        rows(20_000, "retried"),
        rows(5_000, "pending")
    );
    let scenes = [
        ("never analyzed", String::new()),
        (
            "a few rows",
            format!("{} ANALYZE retry_queue", rows(5, "pending")),
        ),
        ("a quiet hour", quiet_hour),
        (
            "much waits",
            format!("{} ANALYZE retry_queue", rows(20_000, "pending")),
        ),
    ];
    for (scene, sql) in scenes {
        for statement in sql.split(';').filter(|s| !s.trim().is_empty()) {
            sqlx::raw_sql(AssertSqlSafe(statement.to_owned()))
                .execute(&bed.db)
                .await
                .expect(scene);
        }
        let claim = reads(&bed, CLAIM, "bigint, bigint", "500, 8388608").await;
        assert_eq!(claim, oldest, "{scene}");
        let (types, values) = (
            "bigint, bigint, int, bigint, bigint",
            "500, 8388608, -2147483648, 64, 250",
        );
        let fairly = reads(&bed, CLAIM_FAIRLY, types, values).await;
        let wanted: Vec<&str> = lanes.into_iter().chain(oldest).collect();
        assert_eq!(fairly, wanted, "{scene}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn only_a_claim_is_planned_without_sorting() {
    let bed = Bed::new().await;
    bed.migrate().await;
    bed.witness("enable_sort").await;
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    bed.client
        .send(&bed.intake(), &message(&queue, "body"))
        .await;
    bed.until_count(RETRIED, 1).await;
    let saw = |what: &str, setting: &str| (what.to_owned(), setting.to_owned());
    let wanted = [saw("INSERT", "on"), saw("UPDATE", "off")];
    assert_eq!(bed.witnessed().await, wanted);
    service.stop().await;
}
