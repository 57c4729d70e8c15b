//! What the gauges show, and what is too old to keep.

use std::time::Duration;

use sqlx::FromRow;

use super::{Store, StoreError, millis};

/// The backlog at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Backlog {
    /// Rows that wait.
    pub pending: i64,
    /// How long the oldest due row has been due.
    pub oldest_due: Duration,
}

/// How long each kind of row is kept.
#[derive(Clone, Copy, Debug)]
pub struct Retention {
    /// Sent back, and not heard of since.
    pub retried: Duration,
    /// With people, or cancelled.
    pub reviewed: Duration,
    /// History.
    pub events: Duration,
}

/// How far a walk over a table has come.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Walk(i64);

impl Walk {
    /// Whether it stands at the beginning again.
    pub fn is_at_start(self) -> bool {
        self == Self::default()
    }
}

/// Not prepared, so that it is planned each time for the table as it is.
const BACKLOG: &str = "
    SELECT count(*),
           (EXTRACT(EPOCH FROM clock_timestamp() - min(next_retry_at)) * 1000000)::bigint
    FROM retry_queue WHERE status = 'pending'";

/// Looks at the `$2` tasks after `$1`; those that have ended and are old are
/// looked at again under their locks. Public for those who want to see its plan,
/// as are the next ones.
pub const REMOVE_TASKS: &str = "
    WITH looked_at AS MATERIALIZED (
        SELECT id, status <> 'pending' AND settled_at < now() - interval '1 millisecond' *
                   CASE status WHEN 'retried' THEN $3::bigint ELSE $4 END AS old
        FROM retry_queue WHERE id > $1 ORDER BY id LIMIT $2
    ), old AS MATERIALIZED (
        SELECT id FROM retry_queue
        WHERE id = ANY(ARRAY(SELECT id FROM looked_at WHERE old))
          AND status <> 'pending'
          AND settled_at < now() - interval '1 millisecond' *
                  CASE status WHEN 'retried' THEN $3::bigint ELSE $4 END
        ORDER BY id
        FOR UPDATE SKIP LOCKED
    ), removed AS (
        DELETE FROM retry_queue WHERE id = ANY(ARRAY(SELECT id FROM old)) RETURNING id
    )
    SELECT (SELECT max(id) FROM looked_at), (SELECT count(*) FROM looked_at),
           (SELECT count(*) FROM removed)";

/// Ids grow with time, so the oldest stand first. Events stay where they are.
pub const REMOVE_EVENTS: &str = "
    DELETE FROM retry_events WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM (SELECT ctid, at FROM retry_events ORDER BY id LIMIT $1) e
        WHERE e.at < now() - $2 * interval '1 millisecond'))";

/// What is written meanwhile has another place, and stays.
pub const REMOVE_KEYS: &str = "
    DELETE FROM idempotency_keys WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM idempotency_keys WHERE expires_at <= now()
        ORDER BY expires_at LIMIT $1 FOR UPDATE SKIP LOCKED))";

impl Store {
    /// Counts what waits.
    pub async fn backlog(&self) -> Result<Backlog, StoreError> {
        let row = self.within(sqlx::raw_sql(BACKLOG).fetch_one(&self.pool));
        let (pending, late_us) = <(i64, Option<i64>)>::from_row(&row.await?)?;
        Ok(Backlog {
            pending,
            oldest_due: Duration::from_micros(
                late_us.and_then(|us| u64::try_from(us).ok()).unwrap_or(0),
            ),
        })
    }

    /// Looks at the next `rows` rows in order of id and removes those that have
    /// ended and are too old; never what is pending. A walk over the primary key
    /// needs no index of its own, which every settled row would have to pay for.
    pub async fn remove_old_tasks(
        &self,
        retention: Retention,
        walk: &mut Walk,
        rows: i64,
    ) -> Result<u64, StoreError> {
        let mut tx = self.begin().await?;
        let query = sqlx::query_as(REMOVE_TASKS)
            .bind(walk.0)
            .bind(rows)
            .bind(millis(retention.retried))
            .bind(millis(retention.reviewed));
        let (last, seen, removed): (Option<i64>, i64, i64) = tx.run(|c| query.fetch_one(c)).await?;
        tx.commit().await?;
        *walk = match last {
            Some(last) if seen >= rows => Walk(last),
            _ => Walk::default(),
        };
        Ok(removed.unsigned_abs())
    }

    /// Removes up to `rows` of the oldest events that are too old.
    pub async fn remove_old_events(
        &self,
        retention: Retention,
        rows: i64,
    ) -> Result<u64, StoreError> {
        let mut tx = self.begin().await?;
        let query = sqlx::query(REMOVE_EVENTS)
            .bind(rows)
            .bind(millis(retention.events));
        let removed = tx.run(|c| query.execute(c)).await?;
        tx.commit().await?;
        Ok(removed.rows_affected())
    }

    /// Removes up to `rows` expired idempotency keys.
    pub async fn remove_expired_keys(&self, rows: i64) -> Result<u64, StoreError> {
        let mut tx = self.begin().await?;
        let query = sqlx::query(REMOVE_KEYS).bind(rows);
        let removed = tx.run(|c| query.execute(c)).await?;
        tx.commit().await?;
        Ok(removed.rows_affected())
    }
}
