//! Failures arrive: insert what is new, lock what is known, apply decisions.

use std::{collections::HashSet, time::Duration};

use chrono::{DateTime, Utc};
use sha2::{Digest, Sha256};
use sqlx::{AssertSqlSafe, FromRow, Row, postgres::PgRow};
use uuid::Uuid;

use super::{Store, StoreError, Tx, millis};
use crate::{
    plant::Point,
    task::{Known, NewTask, Next, Reason},
};

/// A task and what was decided to happen to it next.
pub struct Planned<'t> {
    /// The failure.
    pub task: &'t NewTask,
    /// Count to store: the higher of the producer's and ours.
    pub retry_count: i32,
    /// Its next step.
    pub next: Next,
}

/// A transaction that stores one batch of failures.
pub struct IntakeTx {
    pub(super) tx: Tx,
    /// Tells it from all others, should its COMMIT go unanswered.
    pub mark: Mark,
}

/// What is known of a transaction before it commits: the moment stamped on every
/// failure it stores, and Postgres's own name for it.
#[derive(Clone, Debug, FromRow)]
pub struct Mark {
    at: DateTime<Utc>,
    xid: String,
}

/// Columns of a [`Mark`].
const MARK: &str = "now() AS at, pg_current_xact_id()::text AS xid";

/// The columns of a batch, as arrays for `unnest`.
#[derive(Default)]
struct Columns<'t> {
    message_id: Vec<Uuid>,
    producer_id: Vec<Option<&'t str>>,
    payload: Vec<&'t [u8]>,
    queue: Vec<&'t str>,
    properties: Vec<Option<&'t [u8]>>,
    error: Vec<&'t str>,
    class: Vec<&'t str>,
    retry_count: Vec<i32>,
    max_retries: Vec<i32>,
    free: Vec<bool>,
    delay_ms: Vec<Option<i64>>,
    not_before_ms: Vec<Option<i64>>,
    first_failed_at_ms: Vec<Option<i64>>,
    max_age_ms: Vec<i64>,
    reason: Vec<Option<&'t str>>,
    policy: Vec<&'t str>,
    category: Vec<Option<&'t str>>,
    tenant: Vec<Option<&'t str>>,
    correlation_id: Vec<Option<&'t str>>,
    trace_id: Vec<Option<&'t str>>,
    priority: Vec<i16>,
}

impl<'t> Columns<'t> {
    /// In order of id, so that two instances with the same messages wait for each
    /// other but never both.
    fn of(batch: &[Planned<'t>]) -> Self {
        let mut c = Self::default();
        let mut ordered: Vec<&Planned<'t>> = batch.iter().collect();
        ordered.sort_unstable_by_key(|planned| planned.task.message_id);
        for Planned {
            task,
            retry_count,
            next,
        } in ordered
        {
            let (delay, free, reason): (Option<Duration>, bool, Option<Reason>) = match *next {
                Next::Retry { delay, free } => (Some(delay), free, None),
                Next::Review(reason) => (None, false, Some(reason)),
            };
            c.message_id.push(task.message_id);
            c.producer_id.push(task.producer_id.as_deref());
            c.payload.push(&task.payload);
            c.queue.push(&task.queue);
            c.properties
                .push((!task.properties.is_empty()).then_some(&task.properties));
            c.error.push(&task.error);
            c.class.push(task.class.as_str());
            c.retry_count.push(*retry_count);
            c.max_retries.push(task.max_retries);
            c.free.push(free);
            c.delay_ms.push(delay.map(millis));
            c.not_before_ms.push(task.not_before_ms);
            c.first_failed_at_ms.push(task.first_failed_at_ms);
            c.max_age_ms.push(millis(task.max_age));
            c.reason.push(reason.map(Reason::as_str));
            c.policy.push(&task.policy);
            c.category.push(task.labels.category.as_deref());
            c.tenant.push(task.labels.tenant.as_deref());
            c.correlation_id.push(task.labels.correlation_id.as_deref());
            c.trace_id.push(task.labels.trace_id.as_deref());
            c.priority.push(task.priority as i16);
        }
        c
    }
}

/// Binds a batch in the order of `INCOMING`'s columns.
macro_rules! bind_columns {
    ($query:expr, $c:expr, $instance:expr) => {
        $query
            .bind(&$c.message_id)
            .bind(&$c.producer_id)
            .bind(&$c.payload)
            .bind(&$c.queue)
            .bind(&$c.properties)
            .bind(&$c.error)
            .bind(&$c.class)
            .bind(&$c.retry_count)
            .bind(&$c.max_retries)
            .bind(&$c.free)
            .bind(&$c.delay_ms)
            .bind(&$c.not_before_ms)
            .bind(&$c.first_failed_at_ms)
            .bind(&$c.max_age_ms)
            .bind(&$c.reason)
            .bind(&$c.policy)
            .bind(&$c.category)
            .bind(&$c.tenant)
            .bind(&$c.correlation_id)
            .bind(&$c.trace_id)
            .bind(&$c.priority)
            .bind($instance)
    };
}

/// The batch as rows. A message is due after its delay, not before the moment
/// its producer names, and at the latest when it expires; what goes to review
/// is due now.
///
/// `unnest` stands among the columns, not in FROM: there it would first store
/// the whole batch with its payloads, on disk beyond `work_mem`.
macro_rules! incoming {
    () => {
        "WITH arrays AS (
            SELECT unnest($1::uuid[]) AS message_id, unnest($2::text[]) AS producer_id,
                   unnest($3::bytea[]) AS payload, unnest($4::text[]) AS queue,
                   unnest($5::bytea[]) AS properties, unnest($6::text[]) AS error,
                   unnest($7::text[]) AS class, unnest($8::int[]) AS retry_count,
                   unnest($9::int[]) AS max_retries, unnest($10::bool[]) AS free,
                   unnest($11::bigint[]) AS delay_ms, unnest($12::bigint[]) AS not_before_ms,
                   unnest($13::bigint[]) AS first_failed_at_ms, unnest($14::bigint[]) AS max_age_ms,
                   unnest($15::text[]) AS reason, unnest($16::text[]) AS policy,
                   unnest($17::text[]) AS category, unnest($18::text[]) AS tenant,
                   unnest($19::text[]) AS correlation_id, unnest($20::text[]) AS trace_id,
                   unnest($21::smallint[]) AS priority
        ), incoming AS (
            SELECT *, LEAST(now(), to_timestamp(first_failed_at_ms / 1000.0)) AS first_failed_at
            FROM arrays
        ), due AS (
            SELECT *,
                   first_failed_at + max_age_ms * interval '1 millisecond' AS expires_at,
                   CASE WHEN delay_ms IS NULL THEN now() ELSE GREATEST(
                       now() + delay_ms * interval '1 millisecond',
                       to_timestamp(not_before_ms / 1000.0)) END AS due_at
            FROM incoming
        )"
    };
}

/// Ids already present are left alone and not reported back: their rows must be
/// locked and looked at first.
const INSERT: &str = concat!(
    incoming!(),
    ", inserted AS (
        INSERT INTO retry_queue AS q (
            message_id, producer_id, original_payload, original_queue, properties, error_reason,
            error_class, retry_count, max_retries, free_attempt, next_retry_at, reason,
            first_failed_at, expires_at, policy, category, tenant_id, correlation_id, trace_id,
            priority)
        SELECT message_id, producer_id, payload, queue, properties, error, class, retry_count,
               max_retries, free, GREATEST(LEAST(due_at, expires_at), now()), reason, first_failed_at,
               expires_at, policy, category, tenant, correlation_id, trace_id, priority
        FROM due
        ON CONFLICT (message_id) DO NOTHING
        RETURNING q.message_id, q.error_reason, ",
    changed!(),
    "), events AS (",
    record_events!(from: "inserted", event: "'scheduled'", detail: "NULL", was: "NULL",
        delay_ms: "EXTRACT(EPOCH FROM c.next_retry_at - now()) * 1000",
        error: "c.error_reason", instance: "$22"),
    ") SELECT message_id FROM inserted"
);

/// A message that was sent back and failed again waits again. Its first failure
/// and its expiry stay.
pub const FAIL_AGAIN: &str = concat!(
    incoming!(),
    ", updated AS (
        UPDATE retry_queue q
        SET status = 'pending', producer_id = COALESCE(d.producer_id, q.producer_id),
            original_payload = d.payload, original_queue = d.queue, properties = d.properties,
            error_reason = d.error, error_class = d.class,
            retry_count = GREATEST(q.retry_count, d.retry_count), max_retries = d.max_retries,
            free_attempt = d.free,
            next_retry_at = GREATEST(LEAST(d.due_at, q.expires_at), now()),
            reason = d.reason, last_failed_at = now(), policy = d.policy, category = d.category,
            tenant_id = d.tenant, correlation_id = d.correlation_id, trace_id = d.trace_id,
            priority = d.priority
        FROM due d",
    place!("retry_queue", "message_id = d.message_id"),
    "WHERE q.ctid = place.ctid
        RETURNING q.error_reason, ",
    changed!(),
    ") ",
    record_events!(from: "updated", event: "'scheduled'", detail: "NULL", was: "'retried'",
        delay_ms: "EXTRACT(EPOCH FROM c.next_retry_at - now()) * 1000",
        error: "c.error_reason", instance: "$22"),
);

/// Waits for whoever holds a row: the dispatcher may be just about to say that
/// it was sent, and then this is not a duplicate but the next failure. In order of
/// id, as rows are stored.
pub const LOCK_KNOWN: &str = "
    SELECT q.id, q.message_id, q.status, q.retry_count,
           CASE WHEN q.status = 'pending'
                THEN q.original_queue = i.queue AND sha256(q.original_payload) = i.digest
                ELSE FALSE END AS same_message
    FROM (SELECT * FROM unnest($1::uuid[], $2::text[], $3::bytea[])
              AS i (message_id, queue, digest) ORDER BY message_id) i
    CROSS JOIN LATERAL (
        SELECT * FROM retry_queue WHERE message_id = i.message_id FOR UPDATE
    ) q";

/// Raises counts where the arrival's is higher; a row whose budget is thereby
/// spent need not wait any longer.
pub const NOTE_DUPLICATES: &str = concat!(
    "WITH updated AS (
        UPDATE retry_queue q
        SET retry_count = GREATEST(i.retry_count, q.retry_count),
            next_retry_at = CASE WHEN i.retry_count >= q.max_retries
                                 THEN LEAST(q.next_retry_at, now()) ELSE q.next_retry_at END
        FROM unnest($1::bigint[], $2::int[]) AS i (id, retry_count)",
    place!("retry_queue", "id = i.id"),
    "WHERE q.ctid = place.ctid
        RETURNING ",
    changed!(),
    ") ",
    record_events!(from: "updated", event: "'duplicate'", detail: "NULL", was: "'pending'",
        delay_ms: "NULL", error: "NULL", instance: "$3"),
);

impl Store {
    /// Opens a transaction for one batch.
    pub async fn begin_intake(&self) -> Result<IntakeTx, StoreError> {
        let mut tx = self.unbegun().await?;
        // One round trip: a simple query answers with the row of its last statement.
        let begin = format!("{}, {MARK}", self.begin);
        let row = tx
            .run(|c| sqlx::raw_sql(AssertSqlSafe(begin)).fetch_one(c))
            .await?;
        let mark = Mark::from_row(&row)?;
        Ok(IntakeTx { tx, mark })
    }

    /// After a COMMIT without an answer: whether it took place; `None` while
    /// Postgres has not decided. True only when a failure with one of `ids` and
    /// exactly that moment is stored: Postgres's own word on a transaction is not
    /// enough, because after a crash another one may have got the same name.
    pub async fn was_stored(&self, ids: &[Uuid], mark: &Mark) -> Result<Option<bool>, StoreError> {
        let (stored, undecided): (bool, bool) = self
            .within(
                sqlx::query_as(
                    "SELECT EXISTS (SELECT FROM retry_queue
                                    WHERE message_id = ANY($1) AND last_failed_at = $2),
                            pg_visible_in_snapshot($3::text::xid8, pg_current_snapshot()) IS FALSE
                                AND $3::text::xid8 < pg_snapshot_xmax(pg_current_snapshot())",
                )
                .bind(ids)
                .bind(mark.at)
                .bind(&mark.xid)
                .fetch_one(&self.pool),
            )
            .await?;
        Ok((stored || !undecided).then_some(stored))
    }
}

impl IntakeTx {
    /// Stores the messages whose ids are new, and returns those ids. Ids must
    /// be distinct.
    pub async fn insert_new(&mut self, batch: &[Planned<'_>]) -> Result<HashSet<Uuid>, StoreError> {
        let c = Columns::of(batch);
        let instance = self.tx.instance.clone();
        let query = bind_columns!(sqlx::query_scalar(INSERT), c, &*instance);
        let ids: Vec<Uuid> = self.tx.run(|conn| query.fetch_all(conn)).await?;
        Ok(ids.into_iter().collect())
    }

    /// Locks and returns the rows that have the ids of these messages.
    pub async fn lock_known(&mut self, tasks: &[&NewTask]) -> Result<Vec<Known>, StoreError> {
        let ids: Vec<Uuid> = tasks.iter().map(|t| t.message_id).collect();
        let queues: Vec<&str> = tasks.iter().map(|t| t.queue.as_str()).collect();
        let digests: Vec<Vec<u8>> = tasks
            .iter()
            .map(|t| Sha256::digest(&t.payload).to_vec())
            .collect();
        let query = sqlx::query_as(LOCK_KNOWN)
            .bind(&ids)
            .bind(&queues)
            .bind(&digests);
        self.tx.run(|c| query.fetch_all(c)).await
    }

    /// Sends locked `retried` rows back to `pending` with their new failure.
    pub async fn fail_again(&mut self, batch: &[Planned<'_>]) -> Result<(), StoreError> {
        let c = Columns::of(batch);
        let instance = self.tx.instance.clone();
        let query = bind_columns!(sqlx::query(FAIL_AGAIN), c, &*instance);
        self.tx.run(|conn| query.execute(conn)).await?;
        Ok(())
    }

    /// Notes that locked `pending` rows were reported again, with the counts
    /// they are to have.
    pub async fn note_duplicates(&mut self, counts: &[(i64, i32)]) -> Result<(), StoreError> {
        let (ids, counts): (Vec<i64>, Vec<i32>) = counts.iter().copied().unzip();
        let instance = self.tx.instance.clone();
        let query = sqlx::query(NOTE_DUPLICATES)
            .bind(&ids)
            .bind(&counts)
            .bind(&*instance);
        self.tx.run(|c| query.execute(c)).await?;
        Ok(())
    }

    /// After an error the outcome is unknown: ask [`Store::was_stored`].
    pub async fn commit(self) -> Result<(), StoreError> {
        Point::BeforeIntakeCommit.pass();
        self.tx.commit().await?;
        Point::AfterIntakeCommit.pass();
        Ok(())
    }
}

impl FromRow<'_, PgRow> for Known {
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            id: row.try_get("id")?,
            message_id: row.try_get("message_id")?,
            status: super::dispatch::parsed(row, "status")?,
            retry_count: row.try_get("retry_count")?,
            same_message: row.try_get("same_message")?,
        })
    }
}
