//! Rows fall due: claim them, settle them, ask when to look again.

use std::{collections::HashMap, error::Error, str::FromStr, time::Duration};

use chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, Decode, FromRow, Postgres, Row, SqlSafeStr, Type, postgres::PgRow};
use uuid::Uuid;

use super::{
    LARGE_BYTES, Store, StoreError, Tx,
    due::{Tid, Tids, waits},
    events::{Event, changed},
    millis,
    statement::{Statement, understood},
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
    /// Where the rows of each task stand, by its id.
    places: HashMap<i64, Places>,
    /// The rows: the oldest due first; after a fair claim, the first of each lane before
    /// any lane's second.
    pub tasks: Vec<Task>,
    /// Whether there may be more due than were taken.
    pub full: bool,
    /// The time from the answer until the first row falls due that was not due yet; none if
    /// no such row waited, or if nothing was claimed.
    pub next: Option<Duration>,
}

/// Where the versions of a claimed task's two rows stand.
struct Places {
    task: Tid,
    due: Tid,
}

/// The columns of a [`Task`] `q`, in the order in which they are read. `body` gives payload and
/// properties, which a mere look leaves out.
fn task_columns(body: &str) -> String {
    format!(
        "q.id, q.message_id, q.producer_id, {body}, q.original_queue, q.error_reason,
         q.error_class, q.retry_count, q.max_retries, q.free_attempt, q.policy, q.category,
         q.operation, q.error_type, q.tenant_id, q.correlation_id, q.trace_id, q.reason,
         q.expires_at <= statement_timestamp() AS expired, q.first_failed_at, q.last_failed_at,
         q.next_retry_at"
    )
}

/// Tasks that wait and satisfy `which` (a condition on `retry_due`), locked, in the order of
/// `order`: where their rows stand, and what a claim chooses by. `retry_due` says which wait, and the
/// task is what is locked: who holds it may change both. What another transaction did since the
/// snapshot was taken shows in the locked row, so that is compared again. A join can only go from
/// the one to the other, row by row, and ends when a LIMIT around it has enough: an `UPDATE … WHERE
/// id IN (SELECT … FOR UPDATE SKIP LOCKED LIMIT n)` can take more than n.
fn locked(which: &str, order: &str) -> String {
    format!(
        "SELECT task.*, due.place AS due_place
         FROM (SELECT ctid AS place, * FROM retry_due WHERE {which} ORDER BY {order}) due
         CROSS JOIN LATERAL (
             SELECT q.id, q.lane, q.next_retry_at, octet_length(q.original_payload) AS bytes,
                    q.ctid AS place
             FROM retry_queue q
             WHERE q.id = due.task_id AND q.status = 'pending'
               AND q.next_retry_at = due.next_retry_at AND q.lane = due.lane
               AND q.priority = due.priority AND {}
             FOR UPDATE SKIP LOCKED
         ) task",
        understood("q")
    )
}

/// The oldest due rows, live work before backfill.
fn oldest() -> String {
    let due = |priority: u8| {
        let which = format!("priority = {priority} AND next_retry_at <= statement_timestamp()");
        locked(&which, "next_retry_at, task_id")
    };
    format!("{} UNION ALL {} LIMIT $1", due(0), due(1))
}

/// The moment when the first of the rows falls due that satisfy `which`. It is asked by
/// priority, because the index is ordered so. Not by `min()`: where Postgres believes that
/// nothing waits, `min()` walks all that does.
fn first_due(which: &str) -> String {
    let first = |priority: u8| {
        format!(
            "(SELECT due.next_retry_at
              FROM (SELECT task_id, next_retry_at FROM retry_due
                    WHERE priority = {priority} AND {which} ORDER BY next_retry_at, task_id) due
              CROSS JOIN LATERAL (
                  SELECT FROM retry_queue q WHERE q.id = due.task_id AND {} OFFSET 0
              ) task
              LIMIT 1)",
            understood("q")
        )
    };
    format!("LEAST({}, {})", first(0), first(1))
}

/// The tasks of `claimed` within the byte budget `$2`, in the order in which they come. Rows beyond
/// it stay locked until the commit and are then free again. Only here are the rows read whole, so
/// that payloads take no part in sorting and counting. A row that was changed between this
/// statement's snapshot and its lock is not seen by the snapshot, and waits for the next claim.
///
/// Each task comes with the places of its rows, with the moment of the answer, and with the moment
/// at which the next row falls due, which saves a worker the question after its turn.
fn within_budget(claimed: &str, last_lane: &str) -> String {
    format!(
        "SELECT {}, clock_timestamp(), tidsend(taken.place), tidsend(taken.due_place), {last_lane},
                {}
         FROM (SELECT *, sum(bytes) OVER (ROWS UNBOUNDED PRECEDING) - bytes AS bytes_before
               FROM ({claimed}) claimed) taken
         CROSS JOIN LATERAL (SELECT * FROM retry_queue WHERE ctid = taken.place OFFSET 0) q
         WHERE taken.bytes_before < $2",
        task_columns("q.original_payload, q.properties"),
        first_due("next_retry_at > statement_timestamp()")
    )
}

/// Claims the oldest rows that are due: `$1` rows at most, `$2` bytes of payload.
pub(super) static CLAIM: Statement = Statement::of_claim("claim", || {
    let no_lane = "NULL::int";
    within_budget(&oldest(), no_lane)
});

/// Claims when more is due than one claim takes: first a share for each lane, `$5` rows
/// in all, then the oldest. A loose index scan finds up to `$4` lanes after `$3`. Where there is one
/// lane only, nobody has to be protected from it, and a share would be looked at twice.
pub(super) static CLAIM_FAIRLY: Statement = Statement::of_claim("claim fairly", || {
    format!(
        "WITH RECURSIVE lanes AS (
            (SELECT lane, 1::bigint AS n FROM retry_due WHERE lane > $3 ORDER BY lane LIMIT 1)
            UNION ALL
            SELECT (SELECT d.lane FROM retry_due d WHERE d.lane > l.lane ORDER BY d.lane LIMIT 1),
                   l.n + 1
            FROM lanes l
            WHERE l.lane IS NOT NULL AND l.n < $4::bigint
        ), shares AS MATERIALIZED (
            SELECT r.* FROM lanes l CROSS JOIN LATERAL (
                {share} LIMIT (SELECT CASE WHEN count(lane) = 1 AND $3 = -2147483648 THEN 0
                                           ELSE GREATEST(1, $5 / count(lane)) END FROM lanes)
            ) r
        ), oldest AS MATERIALIZED ({oldest}), due AS (
            -- The first row of each lane comes before any lane's second: the byte
            -- budget may end anywhere.
            (SELECT *, row_number() OVER (PARTITION BY lane ORDER BY next_retry_at, id) AS rank
             FROM shares ORDER BY rank, next_retry_at, id)
            UNION ALL
            (SELECT *, NULL FROM oldest WHERE id NOT IN (SELECT id FROM shares)
             LIMIT GREATEST(0, $1 - (SELECT count(*) FROM shares)))
        ) {within_budget}",
        share = locked(
            "lane = l.lane AND next_retry_at <= statement_timestamp()",
            "next_retry_at"
        ),
        oldest = oldest(),
        within_budget = within_budget(
            "SELECT * FROM due",
            "CASE WHEN (SELECT count(lane) FROM lanes) >= $4 THEN (SELECT max(lane) FROM lanes) END"
        )
    )
});

/// How many lanes one fair claim looks at.
const LANES: i64 = 64;

/// Settles a whole batch with its history in one statement. It finds the rows where the claim
/// found them: the tasks are locked, so their versions stay where they are, and the rows of
/// `retry_due` belong to whoever has locked the task. Returns how many there were of each. Moments
/// are of `clock_timestamp()`, because the transaction began before the broker was asked.
pub(super) static SETTLE: Statement = Statement::of_claim("settle", || {
    let events = Event {
        was: "'pending'",
        delay_ms: "c.delay_ms",
        error: "c.error",
        attempt_id: "c.attempt_id",
        ..Event::of("settled", "c.event_type", "$9")
    };
    format!(
        "WITH gone AS (
            DELETE FROM retry_due WHERE ctid = ANY($11) RETURNING 1
        ), outcome AS (
            SELECT *
            FROM unnest($1::bigint[], $2::text[], $3::text[], $4::int[], $5::bigint[], $6::text[],
                        $7::text[], $8::uuid[], $10::tid[])
                AS o (id, event_type, status, retry_count, delay_ms, reason, error, attempt_id, place)
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
            FROM outcome o
            WHERE q.ctid = o.place
            RETURNING o.event_type, o.delay_ms, o.error, o.attempt_id, q.lane, q.priority, {}
        ), waits AS ({}), events AS ({})
        SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM settled)",
        changed(),
        waits("settled", "status = 'pending'"),
        events.insert(),
    )
});

/// What a claim would take, without a lock and without the payloads.
pub(super) static LOOK: Statement = Statement::new("look at due", || {
    format!(
        "SELECT {}, clock_timestamp()
         FROM (SELECT task_id FROM retry_due WHERE next_retry_at <= statement_timestamp()
               ORDER BY priority, next_retry_at, task_id) due
         CROSS JOIN LATERAL (
             SELECT * FROM retry_queue q WHERE q.id = due.task_id AND {} OFFSET 0
         ) q
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
        Claim::of(tx, found, rows, bytes)
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
            Some(row) => LaneCursor(row.try_get(LAST_LANE)?),
            None => LaneCursor::default(),
        };
        Claim::of(tx, found, rows, bytes)
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

/// The columns of a claim after [`task_columns`].
const ANSWERED_AT: usize = 23;
const TASK_PLACE: usize = ANSWERED_AT + 1;
const DUE_PLACE: usize = TASK_PLACE + 1;
const LAST_LANE: usize = DUE_PLACE + 1;
const NEXT_AT: usize = LAST_LANE + 1;

impl Claim {
    /// Reads what was found by a claim of up to so many rows and bytes.
    fn of(mut tx: Tx, found: Vec<PgRow>, rows: usize, bytes: usize) -> Result<Self, StoreError> {
        let next = match found.first() {
            Some(row) => row.try_get::<Option<DateTime<Utc>>, _>(NEXT_AT)?.map(|at| {
                let now: DateTime<Utc> = row.try_get(ANSWERED_AT)?;
                Ok::<_, sqlx::Error>((at - now).to_std().unwrap_or_default())
            }),
            None => None,
        };
        let mut tasks = Vec::with_capacity(found.len());
        let mut places = HashMap::with_capacity(found.len());
        for row in &found {
            let task = Task::from_row(row)?;
            let place = Places {
                task: tid(row, TASK_PLACE)?,
                due: tid(row, DUE_PLACE)?,
            };
            places.insert(task.id, place);
            tasks.push(task);
        }
        drop(found);
        let taken: usize = tasks.iter().map(|task| task.payload.len()).sum();
        if taken > LARGE_BYTES {
            tx.shrink_buffers();
        }
        Ok(Self {
            tx,
            places,
            full: tasks.len() >= rows || taken >= bytes,
            next: next.transpose()?,
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
        let places = || {
            ends.iter()
                .filter_map(|(task, _)| self.places.get(&task.id))
        };
        let tasks = Tids(places().map(|place| place.task).collect());
        let due = Tids(places().map(|place| place.due).collect());
        let instance = self.tx.instance.clone();
        let query = sqlx::query_as(self.tx.sql.of(&SETTLE))
            .bind(&outcomes.ids)
            .bind(&outcomes.kinds)
            .bind(&outcomes.statuses)
            .bind(&outcomes.counts)
            .bind(&outcomes.delays)
            .bind(&outcomes.reasons)
            .bind(&outcomes.errors)
            .bind(&outcomes.attempts)
            .bind(&*instance)
            .bind(tasks)
            .bind(due);
        let settled: (i64, i64) = self.tx.run(|c| query.fetch_one(c)).await?;
        // If a row had left its place, its task would wait no longer and yet not be settled.
        let all = limit(ends.len());
        if settled != (all, all) {
            return Err(StoreError::Moved);
        }
        Point::BeforeSettleCommit.pass();
        self.tx.commit().await?;
        Point::AfterSettleCommit.pass();
        Ok(())
    }
}

/// Reads a place.
fn tid(row: &PgRow, column: usize) -> Result<Tid, sqlx::Error> {
    let bytes: &[u8] = row.try_get(column)?;
    bytes
        .try_into()
        .map_err(|e: std::array::TryFromSliceError| sqlx::Error::Decode(e.into()))
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

/// Reads the columns of a row one after the other: finding each by its name would take longer than
/// reading it.
struct InOrder<'r> {
    row: &'r PgRow,
    column: usize,
}

impl<'r> InOrder<'r> {
    fn next<T: Decode<'r, Postgres> + Type<Postgres>>(&mut self) -> Result<T, sqlx::Error> {
        let value = self.row.try_get(self.column)?;
        self.column += 1;
        Ok(value)
    }

    /// A text as the type it stands for; NULL is none.
    fn parsed<T>(&mut self) -> Result<Option<T>, sqlx::Error>
    where
        T: FromStr,
        T::Err: Error + Send + Sync + 'static,
    {
        let text: Option<&str> = self.next()?;
        text.map(str::parse)
            .transpose()
            .map_err(|e: T::Err| sqlx::Error::Decode(e.into()))
    }
}

impl FromRow<'_, PgRow> for Task {
    /// Reads the columns of a claim, or of a look at what is due, up to the moment of the answer.
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        let mut columns = InOrder { row, column: 0 };
        let mut task = Self {
            id: columns.next()?,
            message_id: columns.next()?,
            producer_id: columns.next()?,
            payload: columns.next()?,
            properties: columns.next::<Option<_>>()?.unwrap_or_default(),
            queue: columns.next()?,
            error: columns.next()?,
            class: columns.parsed()?,
            budget: Budget {
                retry_count: columns.next()?,
                max_retries: columns.next()?,
            },
            free: columns.next()?,
            policy: columns.next()?,
            labels: Labels {
                category: columns.next()?,
                operation: columns.next()?,
                error_type: columns.next()?,
                tenant: columns.next()?,
                correlation_id: columns.next()?,
                trace_id: columns.next()?,
            },
            reason: columns.parsed()?,
            expired: columns.next::<Option<bool>>()?.unwrap_or(false),
            first_failed_at: columns.next()?,
            last_failed_at: columns.next()?,
            due_at: columns.next()?,
            late: Duration::ZERO,
        };
        let now: DateTime<Utc> = columns.next()?;
        task.late = (now - task.due_at).to_std().unwrap_or_default();
        Ok(task)
    }
}
