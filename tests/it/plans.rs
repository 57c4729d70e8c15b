//! However the tables looked when Postgres last analyzed them, a statement walks
//! its index and no more of it than it takes.

use retry_scheduler::store::{
    PLAN_SETTINGS,
    dispatch::{CLAIM, CLAIM_FAIRLY, CLAIM_SETTINGS, SETTLE},
    intake::{FAIL_AGAIN, LOCK_KNOWN},
};
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

/// How Postgres reads the queue's table for a statement it has prepared for any
/// values: index and condition of each scan.
async fn reads(bed: &Bed, settings: &str, statement: &str) -> Vec<String> {
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
    let values = values.collect::<Vec<_>>().join(", ");
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
    let scans = scans.filter(|(scan, _)| scan.contains("Scan") && scan.contains(" on retry_queue"));
    scans
        .map(|(scan, condition)| {
            let index = scan.split_whitespace().skip_while(|word| *word != "using");
            let index = index.skip(1).take(1).collect::<String>();
            format!("{index} {}", condition.trim())
        })
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_statement_walks_its_index_whatever_postgres_believes_of_the_table() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let of_a_claim = format!("{PLAN_SETTINGS}, {CLAIM_SETTINGS}");
    let oldest = [
        "idx_retry_next_retry Index Cond: ((priority = 0) AND (next_retry_at <= statement_timestamp()))",
        "idx_retry_next_retry Index Cond: ((priority = 1) AND (next_retry_at <= statement_timestamp()))",
    ];
    let lanes = [
        "idx_retry_lane Index Cond: (lane > $3)",
        "idx_retry_lane Index Cond: ((lane = l_1.lane) AND (next_retry_at <= statement_timestamp()))",
    ];
    let fairly: Vec<&str> = lanes.into_iter().chain(oldest).collect();
    let statements = [
        (CLAIM, &*of_a_claim, oldest.to_vec()),
        (CLAIM_FAIRLY, &of_a_claim, fairly),
        (
            SETTLE,
            &of_a_claim,
            vec!["retry_queue_pkey Index Cond: (id = o.id)"],
        ),
        (
            LOCK_KNOWN,
            PLAN_SETTINGS,
            vec!["retry_queue_message_id_key Index Cond: (message_id = i.message_id)"],
        ),
        (
            FAIL_AGAIN,
            PLAN_SETTINGS,
            vec!["retry_queue_message_id_key Index Cond: (message_id = arrays.message_id)"],
        ),
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
            format!("{} VACUUM ANALYZE retry_queue", rows(5, "pending")),
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
        for (statement, settings, wanted) in &statements {
            let found = reads(&bed, settings, statement).await;
            assert_eq!(&found, wanted, "{scene}: {statement}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn all_is_planned_by_key_and_only_a_claim_without_sorting() {
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
