//! The benchmark's own queries: what it reads from the service's tables, and what it puts there.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, bail};
use retry_scheduler::store::STATEMENTS;
use sqlx::{AssertSqlSafe, PgPool, Row, postgres::PgPoolOptions};
use tokio::time::{Instant, sleep};

use crate::producer::identity;

/// Rows of a backlog that one statement inserts.
const CHUNK: u32 = 250_000;

/// A connection to the database that retry-scheduler uses.
pub struct Rows {
    pool: PgPool,
    /// The name and version of Postgres, and whether it has `fsync` on; for the report.
    pub server: String,
}

/// When the message of this number was due and when its row was settled, in seconds of Postgres's
/// clock.
pub struct Times {
    pub number: u32,
    pub due: f64,
    pub settled: f64,
}

/// How large the tables are.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub tables_mb: f64,
    pub indexes_mb: f64,
    pub dead_rows: f64,
}

impl Rows {
    pub async fn open(url: &str) -> anyhow::Result<Self> {
        let pool = PgPoolOptions::new()
            .max_connections(2)
            .connect(url)
            .await
            .context("connecting to Postgres (DATABASE_URL)")?;
        let setting = |name: &'static str| {
            let query = sqlx::query_scalar::<_, String>("SELECT current_setting($1)").bind(name);
            query.fetch_one(&pool)
        };
        let (version, fsync) = (setting("server_version").await?, setting("fsync").await?);
        let server = format!("Postgres {version} (fsync {fsync})");
        Ok(Self { pool, server })
    }

    async fn execute(&self, sql: String) -> anyhow::Result<u64> {
        let done = sqlx::raw_sql(AssertSqlSafe(sql))
            .execute(&self.pool)
            .await?;
        Ok(done.rows_affected())
    }

    async fn number(&self, sql: String) -> anyhow::Result<f64> {
        let number = sqlx::query_scalar(AssertSqlSafe(sql)).fetch_one(&self.pool);
        Ok(number.await?)
    }

    pub async fn drop_schema(&self, schema: &str) -> anyhow::Result<()> {
        self.execute(format!("DROP SCHEMA IF EXISTS {schema} CASCADE"))
            .await?;
        Ok(())
    }

    pub async fn empty_schema(&self, schema: &str) -> anyhow::Result<()> {
        self.drop_schema(schema).await?;
        self.execute(format!("CREATE SCHEMA {schema}")).await?;
        Ok(())
    }

    /// Runs a statement in a schema, so that it need not name the schema with each table.
    pub async fn run_in(&self, schema: &str, sql: &str) -> anyhow::Result<()> {
        let sql = format!("SET LOCAL search_path = {schema}; {sql}");
        self.execute(sql).await?;
        Ok(())
    }

    /// Waits until no row is due. The last rows are settled a moment after their messages arrive,
    /// because the service waits for the broker's confirm in between.
    pub async fn until_settled(&self, schema: &str) -> anyhow::Result<()> {
        let deadline = Instant::now() + Duration::from_secs(30);
        loop {
            // ORDER BY makes Postgres walk the index on the due moment and stop at the first row.
            // Without it, Postgres might read a whole backlog.
            let due: bool = sqlx::query_scalar(AssertSqlSafe(format!(
                "SELECT EXISTS (SELECT FROM {schema}.retry_queue WHERE status = 'pending'
                 AND priority = 0 AND next_retry_at <= now() ORDER BY next_retry_at LIMIT 1)"
            )))
            .fetch_one(&self.pool)
            .await?;
            match due {
                false => return Ok(()),
                true if Instant::now() > deadline => bail!("rows stay due"),
                true => sleep(Duration::from_millis(20)).await,
            }
        }
    }

    /// When the messages of a run were due, and when their rows were settled.
    pub async fn times(&self, schema: &str, run: u32) -> anyhow::Result<Vec<Times>> {
        let rows = sqlx::query(AssertSqlSafe(format!(
            "SELECT substring(original_payload FOR 8) AS body,
                    EXTRACT(EPOCH FROM next_retry_at)::float8 AS due,
                    EXTRACT(EPOCH FROM settled_at)::float8 AS settled
             FROM {schema}.retry_queue
             WHERE status = 'retried' AND substring(original_payload FOR 4) = $1"
        )))
        .bind(run.to_be_bytes().as_slice())
        .fetch_all(&self.pool)
        .await?;
        let times = rows.iter().map(|row| {
            let (_, number) = identity(row.try_get("body")?).context("a body of ours")?;
            Ok(Times {
                number,
                due: row.try_get("due")?,
                settled: row.try_get("settled")?,
            })
        });
        times.collect()
    }

    /// Postgres's clock minus ours, in seconds: the median of several readings.
    pub async fn clock_ahead(&self) -> anyhow::Result<f64> {
        let mut ahead = Vec::new();
        for _ in 0..15 {
            let before = epoch(SystemTime::now());
            let theirs = self
                .number("SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8".into())
                .await?;
            let after = epoch(SystemTime::now());
            ahead.push(theirs - (before + after) / 2.0);
        }
        Ok(crate::finding::quantile(&ahead, 0.5))
    }

    /// Inserts rows that are all due at one moment, and returns that moment by Postgres's clock.
    pub async fn burst(
        &self,
        schema: &str,
        run: u32,
        count: u32,
        queue: &str,
    ) -> anyhow::Result<f64> {
        // Leave time for the INSERT. If it takes longer, the rows cannot be claimed before they are
        // committed, so the moment of the commit is returned as the due one.
        let lead = 1.0 + f64::from(count) / 25_000.0;
        let due: f64 = sqlx::query_scalar(AssertSqlSafe(format!(
            "WITH put AS (
                INSERT INTO {schema}.retry_queue
                    (message_id, original_payload, original_queue, error_reason, error_class,
                     next_retry_at, expires_at, policy)
                SELECT gen_random_uuid(),
                       int4send({run}) || int4send(i) || convert_to(repeat('.', 1016), 'UTF8'),
                       '{queue}', 'upstream timed out', 'retryable',
                       now() + interval '1 second' * {lead}, now() + interval '1 day', 'default'
                FROM generate_series(0, {count} - 1) AS i
                RETURNING next_retry_at
             ) SELECT EXTRACT(EPOCH FROM max(next_retry_at))::float8 FROM put"
        )))
        .fetch_one(&self.pool)
        .await?;
        let committed = self
            .number("SELECT EXTRACT(EPOCH FROM clock_timestamp())::float8".into())
            .await?;
        Ok(due.max(committed))
    }

    /// Inserts rows that wait for tomorrow, on a hundred queues. `told` is called with the number
    /// of rows inserted so far.
    pub async fn backlog(
        &self,
        schema: &str,
        count: u32,
        told: impl Fn(u32),
    ) -> anyhow::Result<()> {
        for from in (0..count).step_by(CHUNK as usize) {
            told(from);
            let to = (from + CHUNK).min(count) - 1;
            self.execute(format!(
                "INSERT INTO {schema}.retry_queue
                    (message_id, original_payload, original_queue, error_reason, error_class,
                     next_retry_at, expires_at, policy)
                 SELECT gen_random_uuid(), convert_to(repeat('.', 256), 'UTF8'),
                        'bench.waiting.' || i % 100, 'upstream timed out', 'retryable',
                        now() + interval '1 day' + interval '1 millisecond' * (i % 3600000),
                        now() + interval '7 days', 'default'
                 FROM generate_series({from}, {to}) AS i"
            ))
            .await?;
        }
        self.execute(format!("VACUUM ANALYZE {schema}.retry_queue"))
            .await?;
        Ok(())
    }

    /// Postgres's plan of the statement with which the dispatcher claims what is due.
    pub async fn claim_plan(&self, schema: &str) -> anyhow::Result<String> {
        let claim = STATEMENTS
            .iter()
            .find(|statement| statement.name == "claim");
        let claim = claim.context("the store has no statement named claim")?;
        let mut tx = self.pool.begin().await?;
        let settings = claim.settings();
        let settings = format!("SET LOCAL search_path = {schema}; SELECT {settings}");
        sqlx::raw_sql(AssertSqlSafe(settings))
            .execute(&mut *tx)
            .await?;
        let explain = format!("EXPLAIN {}", claim.text());
        let lines: Vec<String> = sqlx::query_scalar(AssertSqlSafe(explain))
            .bind(500_i64)
            .bind(8_i64 << 20)
            .fetch_all(&mut *tx)
            .await?;
        tx.rollback().await?;
        Ok(lines.join("\n"))
    }

    /// Transactions of this database since it was created, those of the benchmark included.
    pub async fn transactions(&self) -> anyhow::Result<f64> {
        self.number(
            "SELECT (xact_commit + xact_rollback)::float8 FROM pg_stat_database
             WHERE datname = current_database()"
                .into(),
        )
        .await
    }

    pub async fn sizes(&self, schema: &str) -> anyhow::Result<Sizes> {
        let row = sqlx::query(
            "SELECT sum(pg_table_size(relid))::float8 / 1e6 AS tables,
                    sum(pg_indexes_size(relid))::float8 / 1e6 AS indexes,
                    sum(n_dead_tup)::float8 AS dead
             FROM pg_stat_user_tables WHERE schemaname = $1",
        )
        .bind(schema)
        .fetch_one(&self.pool)
        .await?;
        Ok(Sizes {
            tables_mb: row.try_get("tables")?,
            indexes_mb: row.try_get("indexes")?,
            dead_rows: row.try_get("dead")?,
        })
    }
}

/// Unix time in seconds.
pub fn epoch(at: SystemTime) -> f64 {
    at.duration_since(UNIX_EPOCH)
        .unwrap_or_default()
        .as_secs_f64()
}
