//! Failures arrive: insert what is new, lock what is known, apply decisions.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use chrono::{DateTime, Utc};
use sha2::{Digest, Sha256};
use sqlx::{FromRow, Row, postgres::PgRow};
use uuid::Uuid;

use super::{
    LARGE_BYTES, Store, StoreError, Tx,
    batch::{Columns, incoming, next_parameter},
    due::{KEEPS_DUE, waits, waits_no_longer},
    events::{Event, changed, literal},
    from_millis,
    statement::{Statement, found_by_key},
};
use crate::{
    domain::{
        UnknownText,
        arrival::Known,
        budget::Budget,
        classify::ErrorClass,
        event::EventKind,
        review::Reason,
        task::{NewTask, Next, Status},
    },
    plant::Point,
};

/// A task and what was decided to happen to it next.
pub struct Planned<'t> {
    /// The failure.
    pub task: &'t NewTask,
    /// The count to store: the higher of the producer's and ours.
    pub retry_count: i32,
    /// The next step.
    pub next: Next,
}

/// The wait until each stored failure is due, by its id.
pub type Delays = HashMap<Uuid, Duration>;

/// A transaction that stores one batch of failures.
pub struct IntakeTx {
    pub(super) tx: Tx,
    mark: Mark,
}

/// What is known of a transaction before it commits: the moment stamped on every
/// failure it stores, and Postgres's own name for it. It tells this transaction from all
/// others, should its COMMIT go unanswered.
#[derive(Clone, Debug, FromRow)]
pub struct Mark {
    at: DateTime<Utc>,
    xid: String,
}

/// The columns of a [`Mark`].
const MARK: &str = "now() AS at, pg_current_xact_id()::text AS xid";

/// How long the row `q` has to wait, in milliseconds.
const DELAY_MS: &str = "(date_part('epoch', q.next_retry_at - now()) * 1000)::bigint AS delay_ms";

/// How a row that is changed waited before.
const WAITED: &str = "found.next_retry_at AS due_before, found.priority AS priority_before";

/// Inserts the failures whose ids are new. Ids that are present are left alone and not
/// returned: their rows must be locked and looked at first.
pub(super) static INSERT: Statement = Statement::new("insert new", || {
    let (kind, instance) = (literal(EventKind::Scheduled), next_parameter());
    let events = Event {
        status: "'pending'",
        delay_ms: "c.delay_ms",
        error: "c.error_reason",
        ..Event::of("inserted", &kind, &instance)
    };
    format!(
        "{}, inserted AS (
            INSERT INTO retry_queue AS q (
                message_id, producer_id, original_payload, original_queue, properties,
                error_reason, error_class, retry_count, max_retries, free_attempt, next_retry_at,
                reason, first_failed_at, expires_at, policy, category, operation, error_type,
                tenant_id, correlation_id, trace_id, priority)
            SELECT message_id, producer_id, payload, queue, properties, error, class, retry_count,
                   max_retries, free, GREATEST(LEAST(due_at, expires_at), now()), reason,
                   first_failed_at, expires_at, policy, category, operation, error_type, tenant,
                   correlation_id, trace_id, priority
            FROM timed
            ON CONFLICT (message_id) DO NOTHING
            RETURNING q.message_id, q.error_reason, q.lane, q.priority, {DELAY_MS}, {}
        ), due AS ({}), events AS ({})
        SELECT message_id, delay_ms FROM inserted",
        incoming(),
        changed(),
        waits("inserted", "TRUE"),
        events.insert(),
    )
});

/// A message that was sent back and failed again waits again; one that waits, and of which
/// another report says that no try can help, waits for review. Its first failure and
/// its expiry stay. When its body is another one than before, the event says so.
pub(super) static FAIL_AGAIN: Statement = Statement::new("fail again", || {
    let (kind, instance) = (literal(EventKind::Scheduled), next_parameter());
    let events = Event {
        detail: "c.detail",
        was: "c.was",
        delay_ms: "c.delay_ms",
        error: "c.error_reason",
        ..Event::of("updated", &kind, &instance)
    };
    format!(
        "{}, updated AS (
            UPDATE retry_queue q
            SET status = 'pending', producer_id = COALESCE(d.producer_id, q.producer_id),
                original_payload = d.payload, original_queue = d.queue, properties = d.properties,
                error_reason = d.error, error_class = d.class,
                retry_count = GREATEST(q.retry_count, d.retry_count), max_retries = d.max_retries,
                free_attempt = d.free,
                next_retry_at = GREATEST(LEAST(d.due_at, q.expires_at), now()),
                reason = d.reason, last_failed_at = now(), policy = d.policy,
                category = d.category, operation = d.operation, error_type = d.error_type,
                tenant_id = d.tenant, correlation_id = d.correlation_id, trace_id = d.trace_id,
                priority = d.priority
            FROM timed d {}
            WHERE q.ctid = found.ctid
            RETURNING q.message_id, q.error_reason, q.lane, q.priority, {DELAY_MS},
                      found.status AS was, {WAITED},
                      CASE WHEN found.original_payload <> q.original_payload THEN
                          'body changed from sha256 ' || encode(sha256(found.original_payload), 'hex')
                          || ' to sha256 ' || encode(sha256(q.original_payload), 'hex')
                      END AS detail, {}
        ), due_before AS ({}), due AS ({}), events AS ({})
        SELECT message_id, delay_ms FROM updated",
        incoming(),
        found_by_key(
            "retry_queue",
            "message_id = d.message_id",
            "ctid, status, original_payload, next_retry_at, priority"
        ),
        changed(),
        waits_no_longer("updated", "c.was = 'pending'"),
        waits("updated", "TRUE"),
        events.insert(),
    )
});

/// Locks the rows that have the ids of a batch, in order of id, as rows are stored. It
/// waits for whoever holds one: the dispatcher may be about to commit that the message
/// was sent, and then this is no duplicate but the next failure.
pub(super) static LOCK_KNOWN: Statement = Statement::new("lock known", || {
    "SELECT q.id, q.message_id, q.status, q.reason, q.error_class, q.retry_count, q.max_retries,
            q.last_failed_at,
            CASE WHEN q.status = 'pending'
                 THEN q.original_queue = i.queue AND sha256(q.original_payload) = i.digest
                 ELSE FALSE END AS same_message
     FROM (SELECT * FROM unnest($1::uuid[], $2::text[], $3::bytea[])
               AS i (message_id, queue, digest) ORDER BY message_id) i
     CROSS JOIN LATERAL (
         SELECT * FROM retry_queue WHERE message_id = i.message_id FOR UPDATE
     ) q"
    .to_owned()
});

/// Raises counts where the arrival's is higher; a row whose budget is thereby spent
/// need not wait any longer. The moment of the report becomes that of the last failure:
/// the message may have been sent, and its confirm lost, and then the report is of that
/// attempt, so the next one must have another id.
pub(super) static NOTE_DUPLICATES: Statement = Statement::new("note duplicates", || {
    let kind = literal(EventKind::Duplicate);
    let events = Event {
        was: "'pending'",
        status: "'pending'",
        ..Event::of("updated", &kind, "$4")
    };
    format!(
        "WITH updated AS (
            UPDATE retry_queue q
            SET retry_count = GREATEST(i.retry_count, q.retry_count), last_failed_at = now(),
                next_retry_at = CASE WHEN i.spent
                                     THEN LEAST(q.next_retry_at, now()) ELSE q.next_retry_at END
            FROM unnest($1::bigint[], $2::int[], $3::bool[]) AS i (id, retry_count, spent)
            {}
            WHERE q.ctid = found.ctid
            RETURNING q.lane, q.priority, {WAITED}, {}
        ), due_before AS ({}), due AS ({}) {}",
        found_by_key("retry_queue", "id = i.id", "ctid, next_retry_at, priority"),
        changed(),
        waits_no_longer("updated", "c.due_before <> c.next_retry_at"),
        waits("updated", "due_before <> next_retry_at"),
        events.insert(),
    )
});

/// Writes an event for each locked `retried` row whose message failed at an attempt before
/// the last, and returns its id. History must prove that: the message, with this queue and
/// body, was sent back at that attempt, and at another one later. Nothing else changes.
pub(super) static NOTE_OUTDATED: Statement = Statement::new("note outdated", || {
    let (kind, sent_back) = (literal(EventKind::Duplicate), literal(EventKind::SentBack));
    let events = Event {
        detail: "'of an earlier attempt'::text",
        was: "c.status",
        attempt_id: "c.attempt_id",
        ..Event::of("outdated", &kind, "$5")
    };
    format!(
        "WITH outdated AS (
            SELECT q.message_id, i.attempt_id, {}
            FROM unnest($1::bigint[], $2::uuid[], $3::text[], $4::bytea[])
                AS i (id, attempt_id, queue, digest)
            CROSS JOIN LATERAL (SELECT * FROM retry_queue WHERE id = i.id OFFSET 0) q
            WHERE q.original_queue = i.queue AND sha256(q.original_payload) = i.digest
              AND EXISTS (
                  SELECT FROM retry_history named
                  CROSS JOIN LATERAL (
                      SELECT FROM retry_history later
                      WHERE later.task_ids @> ARRAY[i.id] AND later.id > named.id
                        AND later.event_type = {sent_back}
                        AND later.attempt_id[array_position(later.task_ids, i.id)] <> i.attempt_id
                      OFFSET 0
                  ) later
                  WHERE named.task_ids @> ARRAY[i.id] AND named.event_type = {sent_back}
                    AND named.attempt_id[array_position(named.task_ids, i.id)] = i.attempt_id
                  OFFSET 0)
        ), events AS ({})
        SELECT message_id FROM outdated",
        changed(),
        events.insert(),
    )
});

/// Whether one of the failures `$1` is stored with the moment `$2`; and whether the
/// transaction `$3` is still undecided.
pub(super) static WAS_STORED: Statement = Statement::new("was stored", || {
    "SELECT EXISTS (SELECT FROM retry_queue
                    WHERE message_id = ANY($1::uuid[]) AND last_failed_at = $2::timestamptz),
            pg_visible_in_snapshot($3::text::xid8, pg_current_snapshot()) IS FALSE
                AND $3::text::xid8 < pg_snapshot_xmax(pg_current_snapshot())"
        .to_owned()
});

impl Store {
    /// Opens a transaction for one batch.
    pub async fn begin_intake(&self) -> Result<IntakeTx, StoreError> {
        let mut tx = self.unbegun().await?;
        let row = tx
            .begin(&format!("{}, {KEEPS_DUE}, {MARK}", self.begin))
            .await?;
        let mark = Mark::from_row(&row)?;
        Ok(IntakeTx { tx, mark })
    }

    /// After a COMMIT without an answer: whether it took place; `None` while Postgres
    /// has not decided. True only when a failure with one of `ids` and exactly that
    /// moment is stored: Postgres's own word on a transaction is not enough, because
    /// after a crash another one may have got the same name.
    pub async fn was_stored(&self, ids: &[Uuid], mark: &Mark) -> Result<Option<bool>, StoreError> {
        let query = sqlx::query_as(self.sql.of(&WAS_STORED))
            .bind(ids)
            .bind(mark.at)
            .bind(&mark.xid);
        let (stored, undecided): (bool, bool) = self.within(query.fetch_one(&self.pool)).await?;
        Ok((stored || !undecided).then_some(stored))
    }
}

impl IntakeTx {
    /// What tells this transaction from all others.
    pub fn mark(&self) -> Mark {
        self.mark.clone()
    }

    /// Stores the messages whose ids are new, and returns how long each of those has
    /// to wait. Ids must be distinct.
    pub async fn insert_new(&mut self, batch: &[Planned<'_>]) -> Result<Delays, StoreError> {
        self.store(&INSERT, batch).await
    }

    /// Makes locked rows `pending` with their new failure, and returns how long each has
    /// to wait.
    pub async fn fail_again(&mut self, batch: &[Planned<'_>]) -> Result<Delays, StoreError> {
        self.store(&FAIL_AGAIN, batch).await
    }

    async fn store(
        &mut self,
        statement: &'static Statement,
        batch: &[Planned<'_>],
    ) -> Result<Delays, StoreError> {
        let instance = self.tx.instance.clone();
        let query = Columns::of(batch).bind(sqlx::query(self.tx.sql.of(statement)));
        let query = query.bind(&*instance);
        let stored = self.tx.run(|c| query.fetch_all(c)).await?;
        let bytes: usize = batch.iter().map(|p| p.task.payload.len()).sum();
        if bytes > LARGE_BYTES {
            self.tx.shrink_buffers();
        }
        let delays = stored.iter().map(|row| {
            let delay = from_millis(row.try_get("delay_ms")?);
            Ok((row.try_get("message_id")?, delay))
        });
        Ok(delays.collect::<Result<_, sqlx::Error>>()?)
    }

    /// Locks and returns the rows that have the ids of these messages.
    pub async fn lock_known(&mut self, tasks: &[&NewTask]) -> Result<Vec<Known>, StoreError> {
        let ids: Vec<Uuid> = tasks.iter().map(|t| t.message_id).collect();
        let queues: Vec<&str> = tasks.iter().map(|t| t.queue.as_str()).collect();
        let digests: Vec<Vec<u8>> = tasks.iter().map(|t| digest(t)).collect();
        let query = sqlx::query_as(self.tx.sql.of(&LOCK_KNOWN))
            .bind(&ids)
            .bind(&queues)
            .bind(&digests);
        self.tx.run(|c| query.fetch_all(c)).await
    }

    /// Notes that locked `pending` rows were reported again, with the budgets they
    /// are to have.
    pub async fn note_duplicates(&mut self, rows: &[(i64, Budget)]) -> Result<(), StoreError> {
        let ids: Vec<i64> = rows.iter().map(|(id, _)| *id).collect();
        let counts: Vec<i32> = rows.iter().map(|(_, budget)| budget.retry_count).collect();
        let spent: Vec<bool> = rows.iter().map(|(_, budget)| budget.is_spent()).collect();
        let instance = self.tx.instance.clone();
        let query = sqlx::query(self.tx.sql.of(&NOTE_DUPLICATES))
            .bind(&ids)
            .bind(&counts)
            .bind(&spent)
            .bind(&*instance);
        self.tx.run(|c| query.execute(c)).await?;
        Ok(())
    }

    /// Of failures that name an attempt other than the last one of their locked row, notes
    /// those that name an earlier one, and returns their ids.
    pub async fn note_outdated(
        &mut self,
        failures: &[(i64, Uuid, &NewTask)],
    ) -> Result<HashSet<Uuid>, StoreError> {
        let ids: Vec<i64> = failures.iter().map(|(id, _, _)| *id).collect();
        let attempts: Vec<Uuid> = failures.iter().map(|(_, attempt, _)| *attempt).collect();
        let queues: Vec<&str> = failures.iter().map(|(_, _, t)| t.queue.as_str()).collect();
        let digests: Vec<Vec<u8>> = failures.iter().map(|(_, _, t)| digest(t)).collect();
        let instance = self.tx.instance.clone();
        let query = sqlx::query_scalar(self.tx.sql.of(&NOTE_OUTDATED))
            .bind(&ids)
            .bind(&attempts)
            .bind(&queues)
            .bind(&digests)
            .bind(&*instance);
        let outdated: Vec<Uuid> = self.tx.run(|c| query.fetch_all(c)).await?;
        Ok(outdated.into_iter().collect())
    }

    /// Commits. After an error the outcome is unknown: ask [`Store::was_stored`].
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
            status: status_if_understood(row)?,
            budget: Budget {
                retry_count: row.try_get("retry_count")?,
                max_retries: row.try_get("max_retries")?,
            },
            same_message: row.try_get("same_message")?,
            last_failed_at: row.try_get("last_failed_at")?,
            for_review: row.try_get::<Option<&str>, _>("reason")?.is_some(),
        })
    }
}

fn digest(task: &NewTask) -> Vec<u8> {
    Sha256::digest(&task.payload).to_vec()
}

/// The status, if this version knows it, and the reason and class beside it.
fn status_if_understood(row: &PgRow) -> Result<Result<Status, UnknownText>, sqlx::Error> {
    let status: &str = row.try_get("status")?;
    let reason: Option<&str> = row.try_get("reason")?;
    let class: Option<&str> = row.try_get("error_class")?;
    let unknown = reason
        .and_then(|reason| reason.parse::<Reason>().err())
        .or_else(|| class.and_then(|class| class.parse::<ErrorClass>().err()));
    Ok(unknown.map_or_else(|| status.parse(), Err))
}
