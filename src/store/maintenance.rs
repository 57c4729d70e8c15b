//! What the gauges show, and what is too old to keep.

use std::time::Duration;

use sqlx::FromRow;

use super::{
    Store, StoreError, millis,
    statement::{Statement, statuses, understood},
};

/// The backlog at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Backlog {
    /// How many rows wait.
    pub pending: i64,
    /// How long the oldest due row has been due.
    pub oldest_due: Duration,
}

/// How long each kind of row is kept.
#[derive(Clone, Copy, Debug)]
pub struct Retention {
    /// Tasks whose message was sent back and has not been heard of since.
    pub retried: Duration,
    /// Tasks that are with people, or cancelled.
    pub reviewed: Duration,
    /// Entries of history.
    pub events: Duration,
}

/// How far a walk over the tasks has come, and what it met on the way.
#[derive(Clone, Debug, Default)]
pub struct Walk {
    after: i64,
    unknown: Unknown,
}

/// The rows that hold a text this version does not know.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Unknown {
    /// How many there are.
    pub rows: i64,
    /// Status, reason and class of one of them, for the log.
    pub sample: Option<String>,
}

/// What one step of a walk did.
#[derive(Debug)]
pub struct Step {
    /// How many rows were removed.
    pub removed: u64,
    /// Set when the walk has come to the last row, and begins anew: what all of it met.
    pub finished: Option<Unknown>,
}

/// The backlog. It is sent unprepared, so that it is planned each time for the table as
/// it is.
pub(super) static BACKLOG: Statement = Statement::new("backlog", || {
    "SELECT count(*),
            (EXTRACT(EPOCH FROM clock_timestamp() - min(next_retry_at)) * 1000000)::bigint
     FROM retry_due"
        .to_owned()
});

/// Looks at the `$2` tasks after `$1`. Those that have ended and are old are looked at
/// again under their locks, and removed. A row that this version does not understand
/// is counted and left alone.
pub(super) static REMOVE_TASKS: Statement = Statement::new("remove old tasks", || {
    let is_old = "status <> 'pending' AND settled_at < now() - interval '1 millisecond' *
                      CASE status WHEN 'retried' THEN $3::bigint ELSE $4 END";
    let is_ours = format!("status IN ({}) AND {}", statuses(), understood("q"));
    format!(
        "WITH looked_at AS MATERIALIZED (
            SELECT id, status, reason, error_class, {is_ours} AS ours, {is_ours} AND {is_old} AS old
            FROM retry_queue q WHERE id > $1 ORDER BY id LIMIT $2
        ), old AS MATERIALIZED (
            SELECT id FROM retry_queue q
            WHERE id = ANY(ARRAY(SELECT id FROM looked_at WHERE old)) AND {is_ours} AND {is_old}
            ORDER BY id
            FOR UPDATE SKIP LOCKED
        ), removed AS (
            DELETE FROM retry_queue WHERE id = ANY(ARRAY(SELECT id FROM old)) RETURNING id
        )
        SELECT max(id), count(*), (SELECT count(*) FROM removed),
               count(*) FILTER (WHERE NOT ours),
               min(format('status %s, reason %s, class %s', status, reason, error_class))
                   FILTER (WHERE NOT ours)
        FROM looked_at"
    )
});

/// Drops the days of history that are too old, and makes the tables of the days to come.
pub(super) static ROTATE_HISTORY: Statement = Statement::new("rotate history", || {
    "SELECT retry_rotate_history($1 * interval '1 millisecond', $2)".to_owned()
});

/// Removes expired keys. A key that is taken meanwhile has another `ctid`, and stays.
pub(super) static REMOVE_KEYS: Statement = Statement::new("remove expired keys", || {
    "DELETE FROM idempotency_keys WHERE ctid = ANY(ARRAY(
         SELECT ctid FROM idempotency_keys WHERE expires_at <= now()
         ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED))"
        .to_owned()
});

impl Store {
    /// Counts what waits.
    pub async fn backlog(&self) -> Result<Backlog, StoreError> {
        let row = self.within(sqlx::raw_sql(self.sql.of(&BACKLOG)).fetch_one(&self.pool));
        let (pending, late_us) = <(i64, Option<i64>)>::from_row(&row.await?)?;
        Ok(Backlog {
            pending,
            oldest_due: Duration::from_micros(
                late_us.and_then(|us| u64::try_from(us).ok()).unwrap_or(0),
            ),
        })
    }

    /// Looks at the next `rows` tasks in order of id and removes those that have ended
    /// and are too old; never one that is pending. A walk over the primary key needs
    /// no index of its own, which every settled row would have to pay for.
    pub async fn remove_old_tasks(
        &self,
        retention: Retention,
        walk: &mut Walk,
        rows: i64,
    ) -> Result<Step, StoreError> {
        type Row = (Option<i64>, i64, i64, i64, Option<String>);
        let mut tx = self.begin().await?;
        let query = sqlx::query_as(self.sql.of(&REMOVE_TASKS))
            .bind(walk.after)
            .bind(rows)
            .bind(millis(retention.retried))
            .bind(millis(retention.reviewed));
        let (last, seen, removed, unknown, sample): Row = tx.run(|c| query.fetch_one(c)).await?;
        tx.commit().await?;
        walk.unknown.rows += unknown;
        walk.unknown.sample = walk.unknown.sample.take().or(sample);
        let finished = match last {
            Some(last) if seen >= rows => {
                walk.after = last;
                None
            }
            _ => Some(std::mem::take(walk).unknown),
        };
        Ok(Step {
            removed: removed.unsigned_abs(),
            finished,
        })
    }

    /// Removes the days of history that are over and too old, and up to `rows` of its old rows that
    /// belong to no day; makes the tables of the next days. Returns about how many rows were
    /// removed, each of which holds the events of a batch.
    pub async fn rotate_history(&self, retention: Retention, rows: i64) -> Result<u64, StoreError> {
        let mut tx = self.begin().await?;
        let query = sqlx::query_scalar(self.sql.of(&ROTATE_HISTORY))
            .bind(millis(retention.events))
            .bind(rows);
        let removed: i64 = tx.run(|c| query.fetch_one(c)).await?;
        tx.commit().await?;
        Ok(removed.unsigned_abs())
    }

    /// Removes up to `rows` expired idempotency keys.
    pub async fn remove_expired_keys(&self, rows: i64) -> Result<u64, StoreError> {
        let mut tx = self.begin().await?;
        let query = sqlx::query(self.sql.of(&REMOVE_KEYS)).bind(rows);
        let removed = tx.run(|c| query.execute(c)).await?;
        tx.commit().await?;
        Ok(removed.rows_affected())
    }
}
