//! Rows fall due: claim them, settle them, ask when to look again.

use std::{error::Error, str::FromStr, time::Duration};

use sqlx::{AssertSqlSafe, FromRow, Row, SqlSafeStr, postgres::PgRow};

use super::{Store, StoreError, Tx, millis};
use crate::{
    plant::{Bug, Point},
    task::{Labels, Reason, Settlement, Status, Task},
};

/// Locked rows and the transaction that holds them. Dropped, they are as they
/// were, and free for any instance.
pub struct Claim {
    tx: Tx,
    /// The rows, oldest due first.
    pub tasks: Vec<Task>,
    /// There may be more due than were taken.
    pub full: bool,
}

/// Locks in queries of their own: an `UPDATE … WHERE id IN (SELECT … FOR UPDATE
/// SKIP LOCKED LIMIT n)` can take more than n. Live work first, then backfill.
macro_rules! oldest {
    () => {
        "live AS MATERIALIZED (
            SELECT * FROM retry_queue
            WHERE status = 'pending' AND priority = 0 AND next_retry_at <= statement_timestamp()
            ORDER BY next_retry_at
            LIMIT $1
            FOR UPDATE SKIP LOCKED
        ), backfill AS MATERIALIZED (
            SELECT * FROM retry_queue
            WHERE status = 'pending' AND priority = 1 AND next_retry_at <= statement_timestamp()
            ORDER BY next_retry_at
            LIMIT $1 - (SELECT count(*) FROM live)
            FOR UPDATE SKIP LOCKED
        )"
    };
}

/// The claimed rows within the byte budget. Rows past it stay locked until the
/// commit and are then free again.
macro_rules! within_budget {
    (last_lane: $last_lane:literal) => {
        concat!("measured AS (
            SELECT *,
                   count(*) OVER () AS locked,
                   sum(octet_length(original_payload)) OVER (ORDER BY turn, next_retry_at, id)
                       - octet_length(original_payload) AS bytes_before
            FROM due
        )
        SELECT id, message_id, producer_id, original_payload, original_queue, properties,
               error_reason, error_class, retry_count, max_retries, free_attempt, reason,
               first_failed_at, last_failed_at, policy, category, tenant_id, correlation_id,
               trace_id, locked, ", $last_lane, " AS last_lane,
               COALESCE(expires_at <= statement_timestamp(), FALSE) AS expired,
               (EXTRACT(EPOCH FROM clock_timestamp() - next_retry_at) * 1000000)::bigint AS late_us
        FROM measured
        WHERE bytes_before < $2
        ORDER BY turn, next_retry_at, id")
    };
}

/// For the transaction of a claim, besides those of all. Analyzed in a quiet
/// hour, Postgres believes that nothing waits and that any index does; later that
/// plan walks all that is due for each lane and sorts it. Without sorting, only
/// the index that has the order is left.
pub const CLAIM_SETTINGS: &str = "set_config('enable_sort', 'off', true)";

/// Claims the oldest that are due: `$1` rows at most, `$2` bytes of payload.
/// Public for those who want to see its plan, as are some of the others.
pub const CLAIM: &str = concat!(
    "WITH ",
    oldest!(),
    ", due AS (
        SELECT 1::bigint AS turn, * FROM live UNION ALL SELECT 1, * FROM backfill
    ), ",
    within_budget!(last_lane: "NULL::int")
);

/// For when more is due than one claim takes: first a share for each lane, `$5`
/// rows in all, then the oldest. A loose index scan finds the lanes after `$3`, `$4` of them.
pub const CLAIM_FAIRLY: &str = concat!(
    "WITH RECURSIVE lanes AS (
        (SELECT lane, 1::bigint AS n FROM retry_queue
         WHERE status = 'pending' AND lane > $3 ORDER BY lane LIMIT 1)
        UNION ALL
        SELECT (SELECT q.lane FROM retry_queue q
                WHERE q.status = 'pending' AND q.lane > l.lane ORDER BY q.lane LIMIT 1), l.n + 1
        FROM lanes l
        WHERE l.lane IS NOT NULL AND l.n < $4::bigint
    ), shares AS MATERIALIZED (
        SELECT r.* FROM lanes l CROSS JOIN LATERAL (
            SELECT * FROM retry_queue q
            WHERE q.status = 'pending' AND q.lane = l.lane
              AND q.next_retry_at <= statement_timestamp()
            ORDER BY q.next_retry_at
            LIMIT (SELECT GREATEST(1, $5 / count(lane)) FROM lanes)
            FOR UPDATE SKIP LOCKED
        ) r
    ), ",
    oldest!(),
    ", due AS (
        -- The first row of each lane before anybody's second: the byte budget
        -- may end anywhere.
        SELECT row_number() OVER (PARTITION BY lane ORDER BY next_retry_at, id) AS turn, *
        FROM shares
        UNION ALL
        (SELECT 1000000, o.* FROM (SELECT * FROM live UNION ALL SELECT * FROM backfill) o
         WHERE o.id NOT IN (SELECT id FROM shares)
         ORDER BY o.priority, o.next_retry_at
         LIMIT GREATEST(0, $1 - (SELECT count(*) FROM shares)))
    ), ",
    within_budget!(last_lane:
        "CASE WHEN (SELECT count(lane) FROM lanes) >= $4 THEN (SELECT max(lane) FROM lanes) END")
);

/// How many lanes one fair claim looks at.
const LANES: i64 = 64;

/// One statement for the whole batch and its history. `clock_timestamp()`: the
/// transaction began before the broker was asked.
pub const SETTLE: &str = concat!(
    "WITH outcome AS (
        SELECT *
        FROM unnest($1::bigint[], $2::text[], $3::text[], $4::int[], $5::bigint[], $6::text[],
                    $7::text[])
            AS o (id, event_type, status, retry_count, delay_ms, reason, error)
    ), settled AS (
        UPDATE retry_queue q
        SET status = o.status,
            retry_count = COALESCE(o.retry_count, q.retry_count),
            next_retry_at = CASE WHEN o.delay_ms IS NULL THEN q.next_retry_at
                -- What has expired waits like all else when it cannot be sent.
                WHEN q.expires_at > clock_timestamp()
                THEN LEAST(clock_timestamp() + o.delay_ms * interval '1 millisecond',
                           q.expires_at)
                ELSE clock_timestamp() + o.delay_ms * interval '1 millisecond' END,
            free_attempt = q.free_attempt AND o.status = 'pending',
            reason = COALESCE(o.reason, q.reason),
            error_reason = COALESCE(o.error, q.error_reason),
            settled_at = CASE WHEN o.status = 'pending' THEN q.settled_at
                              ELSE clock_timestamp() END
        FROM outcome o",
    place!("retry_queue", "id = o.id"),
    "WHERE q.ctid = place.ctid
        RETURNING o.event_type, o.delay_ms, o.error, ",
    changed!(),
    ") ",
    record_events!(from: "settled", event: "c.event_type", detail: "NULL", was: "'pending'",
        delay_ms: "c.delay_ms", error: "c.error", instance: "$8"),
);

/// As [`CLAIM`], but looks only: no lock, no payload.
const LOOK: &str = "
    SELECT id, message_id, producer_id, ''::bytea AS original_payload, original_queue,
           NULL::bytea AS properties, error_reason, error_class, retry_count, max_retries,
           free_attempt, reason, first_failed_at, last_failed_at, policy, category, tenant_id,
           correlation_id, trace_id,
           COALESCE(expires_at <= statement_timestamp(), FALSE) AS expired,
           (EXTRACT(EPOCH FROM clock_timestamp() - next_retry_at) * 1000000)::bigint AS late_us
    FROM retry_queue
    WHERE status = 'pending' AND next_retry_at <= statement_timestamp()
    ORDER BY priority, next_retry_at
    LIMIT $1";

/// By priority, as the index is ordered. Not min(): where Postgres believes that
/// nothing waits, that walks all that does. Not prepared: alone, without settings
/// of a transaction, it is planned each time for the table as it is.
const NEXT_DUE: &str = "
    SELECT (EXTRACT(EPOCH FROM LEAST(
                (SELECT next_retry_at FROM retry_queue
                 WHERE status = 'pending' AND priority = 0 ORDER BY next_retry_at LIMIT 1),
                (SELECT next_retry_at FROM retry_queue
                 WHERE status = 'pending' AND priority = 1 ORDER BY next_retry_at LIMIT 1))
            - clock_timestamp()) * 1000000)::bigint AS us";

/// Where a fair claim goes on next time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneCursor(Option<i32>);

impl Store {
    /// Locks up to `rows` due rows, or as many as `bytes` of payload allow: the
    /// oldest.
    pub async fn claim(&self, rows: usize, bytes: usize) -> Result<Claim, StoreError> {
        let mut tx = self.begin_with(&self.begin_claim).await?;
        let claim = if Bug::DueByOwnClock.planted() {
            let own = format!("'{}'::timestamptz", chrono::Utc::now().to_rfc3339());
            AssertSqlSafe(CLAIM.replace("statement_timestamp()", &own)).into_sql_str()
        } else {
            CLAIM.into_sql_str()
        };
        let query = sqlx::query(claim).bind(limit(rows)).bind(limit(bytes));
        let found = tx.run(|c| query.fetch_all(c)).await?;
        if Bug::ClaimWithoutLock.planted() {
            tx.commit().await?;
            tx = self.begin_with(&self.begin_claim).await?;
        }
        Claim::of(tx, &found, rows)
    }

    /// The same, but with a few rows of each lane before the oldest, so that
    /// much work of one queue or tenant does not keep another's waiting. `at`
    /// takes turns among the lanes when there are many.
    pub async fn claim_fairly(
        &self,
        rows: usize,
        bytes: usize,
        at: &mut LaneCursor,
    ) -> Result<Claim, StoreError> {
        let mut tx = self.begin_with(&self.begin_claim).await?;
        let lanes = LANES.min(limit(rows));
        let shares = limit(rows) / 2;
        let query = sqlx::query(CLAIM_FAIRLY)
            .bind(limit(rows))
            .bind(limit(bytes))
            .bind(at.0.unwrap_or(i32::MIN))
            .bind(lanes)
            .bind(shares);
        let found = tx.run(|c| query.fetch_all(c)).await?;
        // No last lane: the end was reached, begin anew.
        *at = match found.first() {
            Some(row) => LaneCursor(row.try_get("last_lane")?),
            None => LaneCursor::default(),
        };
        Claim::of(tx, &found, rows)
    }

    /// What a claim would take now, without taking it.
    pub async fn look_at_due(&self, rows: usize) -> Result<Vec<Task>, StoreError> {
        self.within(sqlx::query_as(LOOK).bind(limit(rows)).fetch_all(&self.pool))
            .await
    }

    /// How long until the next row is due; zero when one is due already.
    pub async fn next_due(&self) -> Result<Option<Duration>, StoreError> {
        let row = self.within(sqlx::raw_sql(NEXT_DUE).fetch_one(&self.pool));
        let micros: Option<i64> = row.await?.try_get("us")?;
        Ok(micros.map(|us| Duration::from_micros(u64::try_from(us).unwrap_or(0))))
    }
}

fn limit(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

impl Claim {
    fn of(tx: Tx, found: &[PgRow], rows: usize) -> Result<Self, StoreError> {
        let locked = match found.first() {
            Some(row) => row.try_get::<i64, _>("locked")?,
            None => 0,
        };
        let tasks = found
            .iter()
            .map(Task::from_row)
            .collect::<Result<Vec<_>, _>>()?;
        Ok(Self {
            tx,
            full: usize::try_from(locked).is_ok_and(|n| n >= rows || n > tasks.len()),
            tasks,
        })
    }

    /// Writes how each row ended, with its event. Rows that are not named stay
    /// as they were.
    pub async fn settle(mut self, ends: &[(i64, &Settlement)]) -> Result<(), StoreError> {
        if ends.is_empty() {
            return self.tx.rollback().await;
        }
        let mut ids = Vec::with_capacity(ends.len());
        let mut kinds = Vec::with_capacity(ends.len());
        let mut statuses = Vec::with_capacity(ends.len());
        let mut counts = Vec::with_capacity(ends.len());
        let mut delays = Vec::with_capacity(ends.len());
        let mut reasons = Vec::with_capacity(ends.len());
        let mut errors: Vec<Option<&str>> = Vec::with_capacity(ends.len());
        for (id, end) in ends {
            let (kind, status, count, delay, reason, error) = match end {
                Settlement::Retried { retry_count } => (
                    "retry_attempt",
                    Status::Retried,
                    Some(*retry_count),
                    None,
                    None,
                    None,
                ),
                Settlement::Reviewed(reason) => (
                    "retry_exhausted",
                    Status::Failed,
                    None,
                    None,
                    Some(*reason),
                    None,
                ),
                Settlement::Failed {
                    retry_count,
                    delay,
                    error,
                    reason,
                } => (
                    "returned",
                    Status::Pending,
                    Some(*retry_count),
                    Some(*delay),
                    *reason,
                    Some(error.as_str()),
                ),
                Settlement::Deferred { delay } => {
                    ("deferred", Status::Pending, None, Some(*delay), None, None)
                }
            };
            ids.push(*id);
            kinds.push(kind);
            statuses.push(status.as_str());
            counts.push(count);
            delays.push(delay.map(millis));
            reasons.push(reason.map(Reason::as_str));
            errors.push(error);
        }
        let instance = self.tx.instance.clone();
        let query = sqlx::query(SETTLE)
            .bind(&ids)
            .bind(&kinds)
            .bind(&statuses)
            .bind(&counts)
            .bind(&delays)
            .bind(&reasons)
            .bind(&errors)
            .bind(&*instance);
        self.tx.run(|c| query.execute(c)).await?;
        Point::BeforeSettleCommit.pass();
        self.tx.commit().await?;
        Point::AfterSettleCommit.pass();
        Ok(())
    }
}

pub(super) fn parsed<T>(row: &PgRow, column: &str) -> Result<T, sqlx::Error>
where
    T: FromStr,
    T::Err: Error + Send + Sync + 'static,
{
    row.try_get::<&str, _>(column)?
        .parse()
        .map_err(|e: T::Err| sqlx::Error::Decode(e.into()))
}

impl FromRow<'_, PgRow> for Task {
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        let reason: Option<&str> = row.try_get("reason")?;
        let late_us: i64 = row.try_get("late_us")?;
        Ok(Self {
            id: row.try_get("id")?,
            message_id: row.try_get("message_id")?,
            producer_id: row.try_get("producer_id")?,
            payload: row.try_get("original_payload")?,
            queue: row.try_get("original_queue")?,
            properties: row
                .try_get::<Option<_>, _>("properties")?
                .unwrap_or_default(),
            error: row.try_get("error_reason")?,
            class: row.try_get("error_class")?,
            retry_count: row.try_get("retry_count")?,
            max_retries: row.try_get("max_retries")?,
            free: row.try_get("free_attempt")?,
            policy: row.try_get("policy")?,
            labels: Labels {
                category: row.try_get("category")?,
                tenant: row.try_get("tenant_id")?,
                correlation_id: row.try_get("correlation_id")?,
                trace_id: row.try_get("trace_id")?,
            },
            reason: match reason {
                Some(_) => Some(parsed(row, "reason")?),
                None => None,
            },
            expired: row.try_get("expired")?,
            first_failed_at: row.try_get("first_failed_at")?,
            last_failed_at: row.try_get("last_failed_at")?,
            late: Duration::from_micros(u64::try_from(late_us).unwrap_or(0)),
        })
    }
}
