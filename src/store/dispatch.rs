//! Rows fall due: claim them, settle them, ask when to look again.

use std::{error::Error, str::FromStr, time::Duration};

use sqlx::{AssertSqlSafe, FromRow, Row, SqlSafeStr, postgres::PgRow};
use uuid::Uuid;

use super::{
    LARGE_BYTES, Store, StoreError, Tx,
    events::{Event, changed},
    millis,
    statement::{Statement, found_by_key, understood},
};
use crate::{
    domain::{
        budget::Budget,
        review::Reason,
        settlement::Settlement,
        task::{Labels, Task},
    },
    plant::{Bug, Point},
};

/// Locked rows and the transaction that holds them. When it is dropped the rows are
/// as they were, and free for any instance.
pub struct Claim {
    tx: Tx,
    /// The rows: the oldest due first; after a fair claim, the first of each lane before
    /// any lane's second.
    pub tasks: Vec<Task>,
    /// Whether there may be more due than were taken.
    pub full: bool,
    /// The time from the answer until the first row falls due that was not due yet; none if
    /// no such row waited, or if nothing was claimed.
    pub next: Option<Duration>,
}

/// The columns of a [`Task`], which are read by name. `body` gives payload and
/// properties, which a mere look leaves out.
fn task_columns(body: &str) -> String {
    format!(
        "id, message_id, producer_id, {body}, original_queue, error_reason, error_class,
         retry_count, max_retries, free_attempt, policy, category, operation, error_type,
         tenant_id, correlation_id, trace_id, reason,
         COALESCE(expires_at <= statement_timestamp(), FALSE) AS expired,
         first_failed_at, last_failed_at, next_retry_at,
         (EXTRACT(EPOCH FROM clock_timestamp() - next_retry_at) * 1000000)::bigint AS late_us"
    )
}

/// The oldest due rows, live work before backfill. They are locked in queries of
/// their own, because an `UPDATE … WHERE id IN (SELECT … FOR UPDATE SKIP LOCKED LIMIT
/// n)` can take more than n.
fn oldest() -> String {
    let due = |priority: u8, limit: &str| {
        format!(
            "SELECT * FROM retry_queue q
             WHERE status = 'pending' AND priority = {priority}
               AND next_retry_at <= statement_timestamp() AND {}
             ORDER BY next_retry_at
             LIMIT {limit}
             FOR UPDATE SKIP LOCKED",
            understood("q")
        )
    };
    format!(
        "live AS MATERIALIZED ({}), backfill AS MATERIALIZED ({})",
        due(0, "$1"),
        due(1, "$1 - (SELECT count(*) FROM live)")
    )
}

/// The moment when the first of the rows falls due that satisfy `which`. It is asked by
/// priority, because the index is ordered so. Not by `min()`: where Postgres believes that
/// nothing waits, `min()` walks all that does.
fn first_due(which: &str) -> String {
    let first = |priority: u8| {
        format!(
            "(SELECT next_retry_at FROM retry_queue q
              WHERE status = 'pending' AND priority = {priority} AND {which} AND {}
              ORDER BY next_retry_at LIMIT 1)",
            understood("q")
        )
    };
    format!("LEAST({}, {})", first(0), first(1))
}

/// The claimed rows of `due` within the byte budget `$2`. Rows beyond it stay locked
/// until the commit and are then free again. Each comes with the time until the next row
/// falls due, which saves a worker the question after its turn.
fn within_budget(last_lane: &str) -> String {
    format!(
        "measured AS (
            SELECT *,
                   count(*) OVER () AS locked,
                   sum(octet_length(original_payload)) OVER (ORDER BY rank, next_retry_at, id)
                       - octet_length(original_payload) AS bytes_before
            FROM due
        )
        SELECT {}, locked, {last_lane} AS last_lane,
               (EXTRACT(EPOCH FROM {} - clock_timestamp()) * 1000000)::bigint AS next_us
        FROM measured
        WHERE bytes_before < $2
        ORDER BY rank, next_retry_at, id",
        task_columns("original_payload, properties"),
        first_due("next_retry_at > statement_timestamp()")
    )
}

/// Claims the oldest rows that are due: `$1` rows at most, `$2` bytes of payload.
pub(super) static CLAIM: Statement = Statement::of_claim("claim", || {
    format!(
        "WITH {}, due AS (
            SELECT 1::bigint AS rank, * FROM live UNION ALL SELECT 1, * FROM backfill
        ), {}",
        oldest(),
        within_budget("NULL::int")
    )
});

/// Claims when more is due than one claim takes: first a share for each lane, `$5` rows
/// in all, then the oldest. A loose index scan finds up to `$4` lanes after `$3`.
pub(super) static CLAIM_FAIRLY: Statement = Statement::of_claim("claim fairly", || {
    format!(
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
                  AND q.next_retry_at <= statement_timestamp() AND {understood}
                ORDER BY q.next_retry_at
                LIMIT (SELECT GREATEST(1, $5 / count(lane)) FROM lanes)
                FOR UPDATE SKIP LOCKED
            ) r
        ), {oldest}, due AS (
            -- The first row of each lane comes before any lane's second: the byte
            -- budget may end anywhere.
            SELECT row_number() OVER (PARTITION BY lane ORDER BY next_retry_at, id) AS rank, *
            FROM shares
            UNION ALL
            (SELECT 1000000, o.* FROM (SELECT * FROM live UNION ALL SELECT * FROM backfill) o
             WHERE o.id NOT IN (SELECT id FROM shares)
             ORDER BY o.priority, o.next_retry_at
             LIMIT GREATEST(0, $1 - (SELECT count(*) FROM shares)))
        ), {within_budget}",
        understood = understood("q"),
        oldest = oldest(),
        within_budget = within_budget(
            "CASE WHEN (SELECT count(lane) FROM lanes) >= $4 THEN (SELECT max(lane) FROM lanes) END"
        )
    )
});

/// How many lanes one fair claim looks at.
const LANES: i64 = 64;

/// Settles a whole batch with its history in one statement. Moments are of
/// `clock_timestamp()`, because the transaction began before the broker was asked.
pub(super) static SETTLE: Statement = Statement::of_claim("settle", || {
    let events = Event {
        was: "'pending'",
        delay_ms: "c.delay_ms",
        error: "c.error",
        attempt_id: "c.attempt_id",
        ..Event::of("settled", "c.event_type", "$9")
    };
    format!(
        "WITH outcome AS (
            SELECT *
            FROM unnest($1::bigint[], $2::text[], $3::text[], $4::int[], $5::bigint[], $6::text[],
                        $7::text[], $8::uuid[])
                AS o (id, event_type, status, retry_count, delay_ms, reason, error, attempt_id)
        ), settled AS (
            UPDATE retry_queue q
            SET status = o.status,
                retry_count = COALESCE(o.retry_count, q.retry_count),
                next_retry_at = CASE WHEN o.status <> 'pending' THEN q.next_retry_at
                    -- A task that has expired waits like any other when it cannot be sent.
                    WHEN q.expires_at > clock_timestamp()
                    THEN LEAST(clock_timestamp() + o.delay_ms * interval '1 millisecond',
                               q.expires_at)
                    ELSE clock_timestamp() + o.delay_ms * interval '1 millisecond' END,
                free_attempt = q.free_attempt AND o.status = 'pending',
                reason = COALESCE(o.reason, q.reason),
                error_reason = COALESCE(o.error, q.error_reason),
                settled_at = CASE WHEN o.status = 'pending' THEN q.settled_at
                                  ELSE clock_timestamp() END
            FROM outcome o {}
            WHERE q.ctid = found.ctid
            RETURNING o.event_type, o.delay_ms, o.error, o.attempt_id, {}
        ) {}",
        found_by_key("retry_queue", "id = o.id", "ctid"),
        changed(),
        events.insert(),
    )
});

/// What a claim would take, without a lock and without the payloads.
pub(super) static LOOK: Statement = Statement::new("look at due", || {
    format!(
        "SELECT {} FROM retry_queue q
         WHERE status = 'pending' AND next_retry_at <= statement_timestamp() AND {}
         ORDER BY priority, next_retry_at
         LIMIT $1",
        task_columns("''::bytea AS original_payload, NULL::bytea AS properties"),
        understood("q")
    )
});

/// The time until the next row is due. It is sent unprepared: alone, without the settings
/// of a transaction, it is planned each time for the table as it is.
pub(super) static NEXT_DUE: Statement = Statement::new("next due", || {
    format!(
        "SELECT (EXTRACT(EPOCH FROM {} - clock_timestamp()) * 1000000)::bigint AS us",
        first_due("TRUE")
    )
});

/// When the first of the waiting rows is due, by Postgres's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NextDue {
    /// It will be due after this time.
    In(Duration),
    /// It has been due for this time: somebody holds it, or nobody has claimed it yet.
    Since(Duration),
}

/// Where a fair claim goes on next time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneCursor(Option<i32>);

impl Store {
    /// Locks the oldest due rows: up to `rows` of them, or as many as `bytes` of
    /// payload allow.
    pub async fn claim(&self, rows: usize, bytes: usize) -> Result<Claim, StoreError> {
        let mut tx = self.begin_with(&self.begin_claim).await?;
        let claim = if Bug::DueByOwnClock.planted() {
            let own = format!("'{}'::timestamptz", chrono::Utc::now().to_rfc3339());
            let claim = self.sql.of(&CLAIM);
            AssertSqlSafe(claim.as_str().replace("statement_timestamp()", &own)).into_sql_str()
        } else {
            self.sql.of(&CLAIM)
        };
        let query = sqlx::query(claim).bind(limit(rows)).bind(limit(bytes));
        let found = tx.run(|c| query.fetch_all(c)).await?;
        if Bug::ClaimWithoutLock.planted() {
            tx.commit().await?;
            tx = self.begin_with(&self.begin_claim).await?;
        }
        Claim::of(tx, found, rows)
    }

    /// Locks a few due rows of each lane, then the oldest, so that much work of one
    /// queue or tenant does not keep another's waiting. When there are many lanes,
    /// `at` remembers which come next.
    pub async fn claim_fairly(
        &self,
        rows: usize,
        bytes: usize,
        at: &mut LaneCursor,
    ) -> Result<Claim, StoreError> {
        let mut tx = self.begin_with(&self.begin_claim).await?;
        let lanes = LANES.min(limit(rows));
        let shares = limit(rows) / 2;
        let query = sqlx::query(self.sql.of(&CLAIM_FAIRLY))
            .bind(limit(rows))
            .bind(limit(bytes))
            .bind(at.0.unwrap_or(i32::MIN))
            .bind(lanes)
            .bind(shares);
        let found = tx.run(|c| query.fetch_all(c)).await?;
        // Without a last lane the end was reached, and the next claim begins anew.
        *at = match found.first() {
            Some(row) => LaneCursor(row.try_get("last_lane")?),
            None => LaneCursor::default(),
        };
        Claim::of(tx, found, rows)
    }

    /// Returns what a claim would take now, without taking it.
    pub async fn look_at_due(&self, rows: usize) -> Result<Vec<Task>, StoreError> {
        let query = sqlx::query_as(self.sql.of(&LOOK)).bind(limit(rows));
        let mut tx = self.begin().await?;
        let due = tx.run(|c| query.fetch_all(c)).await?;
        tx.rollback().await?;
        Ok(due)
    }

    /// Returns when the first of the waiting rows is due, whoever holds it; none when no
    /// row waits.
    pub async fn next_due(&self) -> Result<Option<NextDue>, StoreError> {
        let row = self.within(sqlx::raw_sql(self.sql.of(&NEXT_DUE)).fetch_one(&self.pool));
        let micros: Option<i64> = row.await?.try_get("us")?;
        Ok(micros.map(|us| {
            let distance = Duration::from_micros(us.unsigned_abs());
            match us > 0 {
                true => NextDue::In(distance),
                false => NextDue::Since(distance),
            }
        }))
    }
}

fn limit(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

impl Claim {
    fn of(mut tx: Tx, found: Vec<PgRow>, rows: usize) -> Result<Self, StoreError> {
        let (locked, next_us): (i64, Option<i64>) = match found.first() {
            Some(row) => (row.try_get("locked")?, row.try_get("next_us")?),
            None => (0, None),
        };
        let tasks: Vec<Task> = found
            .iter()
            .map(Task::from_row)
            .collect::<Result<Vec<_>, _>>()?;
        drop(found);
        let bytes: usize = tasks.iter().map(|task| task.payload.len()).sum();
        if bytes > LARGE_BYTES {
            tx.shrink_buffers();
        }
        Ok(Self {
            tx,
            full: usize::try_from(locked).is_ok_and(|n| n >= rows || n > tasks.len()),
            next: next_us.map(|us| Duration::from_micros(u64::try_from(us).unwrap_or(0))),
            tasks,
        })
    }

    /// Writes how each task ended, with its event. Rows that are not named stay as
    /// they were.
    pub async fn settle(mut self, ends: &[(&Task, &Settlement)]) -> Result<(), StoreError> {
        if ends.is_empty() {
            return self.tx.rollback().await;
        }
        let outcomes = Outcomes::of(ends);
        let instance = self.tx.instance.clone();
        let query = sqlx::query(self.tx.sql.of(&SETTLE))
            .bind(&outcomes.ids)
            .bind(&outcomes.kinds)
            .bind(&outcomes.statuses)
            .bind(&outcomes.counts)
            .bind(&outcomes.delays)
            .bind(&outcomes.reasons)
            .bind(&outcomes.errors)
            .bind(&outcomes.attempts)
            .bind(&*instance);
        self.tx.run(|c| query.execute(c)).await?;
        Point::BeforeSettleCommit.pass();
        self.tx.commit().await?;
        Point::AfterSettleCommit.pass();
        Ok(())
    }
}

/// The columns of [`SETTLE`]'s batch, as arrays for `unnest`.
#[derive(Default)]
struct Outcomes<'e> {
    ids: Vec<i64>,
    kinds: Vec<&'static str>,
    statuses: Vec<&'static str>,
    counts: Vec<Option<i32>>,
    /// The wait that the event tells of: the next one, or, of a message that was sent
    /// back, the whole time from its failure to its due moment.
    delays: Vec<Option<i64>>,
    reasons: Vec<Option<&'static str>>,
    errors: Vec<Option<&'e str>>,
    /// The attempt, where the message was to go to its queue and not to review.
    attempts: Vec<Option<Uuid>>,
}

impl<'e> Outcomes<'e> {
    fn of(ends: &[(&Task, &'e Settlement)]) -> Self {
        let mut all = Self::default();
        for (task, end) in ends {
            let (count, delay, reason, error) = match end {
                Settlement::SentBack { retry_count } => {
                    (Some(*retry_count), Some(task.delay()), None, None)
                }
                Settlement::Reviewed(reason) => (None, None, Some(*reason), None),
                Settlement::Returned {
                    retry_count,
                    delay,
                    error,
                    reason,
                } => {
                    let error = Some(error.as_str());
                    (Some(*retry_count), Some(*delay), *reason, error)
                }
                Settlement::Deferred { delay } => (None, Some(*delay), None, None),
            };
            all.ids.push(task.id);
            all.kinds.push(end.event().as_str());
            all.statuses.push(end.status().as_str());
            all.counts.push(count);
            all.delays.push(delay.map(millis));
            all.reasons.push(reason.map(Reason::as_str));
            all.errors.push(error);
            let to_its_queue = task.review_reason().is_none();
            all.attempts.push(to_its_queue.then(|| task.attempt_id()));
        }
        // `unnest` fills up shorter arrays with NULLs.
        leave_out_nulls(&mut all.reasons);
        leave_out_nulls(&mut all.errors);
        all
    }
}

fn leave_out_nulls<T>(column: &mut Vec<Option<T>>) {
    if column.iter().all(Option::is_none) {
        column.clear();
    }
}

/// A column's text as the type it stands for; NULL is none.
fn parsed<T>(row: &PgRow, column: &str) -> Result<Option<T>, sqlx::Error>
where
    T: FromStr,
    T::Err: Error + Send + Sync + 'static,
{
    let text: Option<&str> = row.try_get(column)?;
    text.map(str::parse)
        .transpose()
        .map_err(|e: T::Err| sqlx::Error::Decode(e.into()))
}

impl FromRow<'_, PgRow> for Task {
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        let late_us: i64 = row.try_get("late_us")?;
        Ok(Self {
            id: row.try_get("id")?,
            message_id: row.try_get("message_id")?,
            producer_id: row.try_get("producer_id")?,
            payload: row.try_get("original_payload")?,
            properties: row
                .try_get::<Option<_>, _>("properties")?
                .unwrap_or_default(),
            queue: row.try_get("original_queue")?,
            error: row.try_get("error_reason")?,
            class: parsed(row, "error_class")?,
            budget: Budget {
                retry_count: row.try_get("retry_count")?,
                max_retries: row.try_get("max_retries")?,
            },
            free: row.try_get("free_attempt")?,
            policy: row.try_get("policy")?,
            labels: Labels {
                category: row.try_get("category")?,
                operation: row.try_get("operation")?,
                error_type: row.try_get("error_type")?,
                tenant: row.try_get("tenant_id")?,
                correlation_id: row.try_get("correlation_id")?,
                trace_id: row.try_get("trace_id")?,
            },
            reason: parsed(row, "reason")?,
            expired: row.try_get("expired")?,
            first_failed_at: row.try_get("first_failed_at")?,
            last_failed_at: row.try_get("last_failed_at")?,
            due_at: row.try_get("next_retry_at")?,
            late: Duration::from_micros(u64::try_from(late_us).unwrap_or(0)),
        })
    }
}
