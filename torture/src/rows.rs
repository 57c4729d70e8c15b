//! What is in Postgres: which messages wait, and whether the history is consistent.

use std::collections::HashSet;

use anyhow::Context;
use sqlx::{PgPool, postgres::PgPoolOptions};

use crate::{instance::MAX_DELAY, ledger::Verdict, message::Message};

/// The campaign's own connections to the instances' database.
pub struct Rows(PgPool);

/// Queries that find history which must not exist, each with what is wrong about it.
const UNSOUND: [(&str, &str); 5] = [
    (
        "one retry was settled twice",
        "SELECT format('task %s as retry %s', task_id, retry_count) FROM retry_events
         WHERE event_type = 'retry_attempt'
         GROUP BY task_id, retry_count HAVING count(*) > 1",
    ),
    (
        "a count went down",
        "SELECT format('task %s at event %s', task_id, id) FROM (
             SELECT *, lag(retry_count) OVER (PARTITION BY task_id ORDER BY id) AS before
             FROM retry_events) e
         WHERE retry_count < before",
    ),
    (
        "a message was sent before it was due",
        "SELECT format('task %s at event %s: %s before %s', task_id, id, at, due) FROM (
             SELECT *, lag(next_retry_at) OVER (PARTITION BY task_id ORDER BY id) AS due
             FROM retry_events) e
         WHERE event_type IN ('retry_attempt', 'retry_exhausted') AND at < due",
    ),
    (
        "a row is not as its history says",
        "SELECT format('task %s is %s, by its history %s', q.id, q.status, e.status)
         FROM retry_queue q LEFT JOIN (
             SELECT DISTINCT ON (task_id) * FROM retry_events ORDER BY task_id, id DESC) e
             ON e.task_id = q.id
         WHERE (q.status, q.retry_count) IS DISTINCT FROM (e.status, e.retry_count)",
    ),
    (
        "retry_due is not what waits",
        "SELECT format('task %s is due %s, by its row %s', COALESCE(q.id, d.task_id), d, q)
         FROM retry_due d FULL JOIN (
             SELECT id, priority, next_retry_at, lane FROM retry_queue WHERE status = 'pending') q
             ON (q.id, q.priority, q.next_retry_at, q.lane)
              = (d.task_id, d.priority, d.next_retry_at, d.lane)
         WHERE q.id IS NULL OR d.task_id IS NULL",
    ),
];

/// The same, for runs that end before old events are removed.
const UNSOUND_IN_WHOLE: (&str, &str) = (
    "the history does not follow on itself",
    "SELECT format('task %s at event %s: %s after %s', task_id, id, from_status, before) FROM (
             SELECT *, lag(status) OVER (PARTITION BY task_id ORDER BY id) AS before
             FROM retry_events) e
         WHERE from_status IS DISTINCT FROM before",
);

const OVER_BOUND: &str = "
    SELECT format('task %s was sent back %s times, of %s', task_id, count(*), max(max_retries))
    FROM retry_events WHERE event_type = 'retry_attempt'
    GROUP BY task_id HAVING count(*) > max(max_retries)";

impl Rows {
    pub fn open(url: &str) -> anyhow::Result<Self> {
        let pool = PgPoolOptions::new().max_connections(2).connect_lazy(url)?;
        Ok(Self(pool))
    }

    /// How many rows wait.
    pub async fn waiting(&self) -> anyhow::Result<i64> {
        let sql = "SELECT count(*) FROM retry_queue WHERE status = 'pending'";
        Ok(sqlx::query_scalar(sql).fetch_one(&self.0).await?)
    }

    /// The messages that wait in a row.
    pub async fn live(&self) -> anyhow::Result<HashSet<usize>> {
        let sql = "SELECT substring(original_payload FROM 1 FOR 50)
                   FROM retry_queue WHERE status = 'pending'";
        let payloads: Vec<Vec<u8>> = sqlx::query_scalar(sql).fetch_all(&self.0).await?;
        let messages = payloads.iter().filter_map(|p| Message::of_beginning(p));
        Ok(messages.map(|m| m.number).collect())
    }

    /// The publishes that RabbitMQ did not confirm in time, by message and retry; it may deliver them all the
    /// same. They are recognised by their delay, which is the only one without jitter.
    pub async fn unconfirmed(&self) -> anyhow::Result<HashSet<(usize, i32)>> {
        let sql = "SELECT substring(q.original_payload FROM 1 FOR 50), e.retry_count + 1
                   FROM retry_events e JOIN retry_queue q ON q.id = e.task_id
                   WHERE e.event_type = 'deferred' AND e.delay_ms = $1";
        let most = i64::try_from(MAX_DELAY.as_millis())?;
        let found: Vec<(Vec<u8>, i32)> = sqlx::query_as(sql).bind(most).fetch_all(&self.0).await?;
        let of = |(payload, count): &(Vec<u8>, i32)| {
            Message::of_beginning(payload).map(|message| (message.number, *count))
        };
        Ok(found.iter().filter_map(of).collect())
    }

    /// Adds what is wrong with the history to a verdict. `whole` says that no event has been removed yet.
    pub async fn judge(&self, verdict: &mut Verdict, whole: bool) -> anyhow::Result<()> {
        let in_whole = whole.then_some(UNSOUND_IN_WHOLE);
        for (rule, sql) in UNSOUND.into_iter().chain(in_whole) {
            let found: Vec<String> = sqlx::query_scalar(sql)
                .fetch_all(&self.0)
                .await
                .with_context(|| format!("looking whether {rule}"))?;
            let found = found.iter().map(|what| format!("{rule}: {what}"));
            verdict.unexpected.extend(found);
        }
        let over: Vec<String> = sqlx::query_scalar(OVER_BOUND).fetch_all(&self.0).await?;
        verdict.over_bound.extend(over);
        Ok(())
    }

    /// How many connections the instances have.
    pub async fn connections(&self) -> anyhow::Result<f64> {
        let sql =
            "SELECT count(*)::float8 FROM pg_stat_activity WHERE application_name LIKE 'torture-%'";
        Ok(sqlx::query_scalar(sql).fetch_one(&self.0).await?)
    }

    /// Pending rows; live and dead tuples; megabytes of tables, of TOAST, and of indexes.
    pub async fn sizes(&self) -> anyhow::Result<[f64; 6]> {
        let sql = "
            SELECT ARRAY[(SELECT count(*) FROM retry_queue WHERE status = 'pending'),
                         sum(n_live_tup), sum(n_dead_tup),
                         sum(pg_relation_size(s.relid)) / 1e6,
                         sum(COALESCE(pg_total_relation_size(NULLIF(c.reltoastrelid, 0)), 0)) / 1e6,
                         sum(pg_indexes_size(s.relid)) / 1e6]::float8[]
            FROM pg_stat_user_tables s JOIN pg_class c ON c.oid = s.relid";
        let sizes: Vec<f64> = sqlx::query_scalar(sql).fetch_one(&self.0).await?;
        sizes.try_into().ok().context("six figures")
    }

    /// Changes a few rows behind the service's back, and returns how many.
    pub async fn spoil(&self, sql: &'static str) -> anyhow::Result<u64> {
        Ok(sqlx::query(sql).execute(&self.0).await?.rows_affected())
    }
}
