//! Rows fall due: claim them, ask when to look again.

use std::{collections::HashMap, time::Duration};

use chrono::{DateTime, Utc};
use sqlx::{AssertSqlSafe, FromRow, Row, SqlSafeStr, postgres::PgRow};

use super::{
    LARGE_BYTES, Store, StoreError, Tx,
    due::Tid,
    statement::{Statement, understood},
    task::{ANSWERED_AT, task_columns},
};
use crate::{domain::task::Task, plant::Bug};

/// Locked rows and the transaction that holds them. When it is dropped the rows are
/// as they were, and free for any instance.
pub struct Claim {
    pub(super) tx: Tx,
    /// Where the rows of each task stand, by its id.
    pub(super) places: HashMap<i64, Places>,
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
pub(super) struct Places {
    pub task: Tid,
    pub due: Tid,
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

pub(super) fn limit(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}

/// The columns of a claim after those of the task and the moment of the answer.
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
}

/// Reads a place.
fn tid(row: &PgRow, column: usize) -> Result<Tid, sqlx::Error> {
    let bytes: &[u8] = row.try_get(column)?;
    bytes
        .try_into()
        .map_err(|e: std::array::TryFromSliceError| sqlx::Error::Decode(e.into()))
}
