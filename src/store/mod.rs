//! All SQL, as a short list of verbs.
//!
//! - [`arrivals`]: insert what is new, lock what is known, apply what was decided
//! - [`idempotency`]: which failures were applied already
//! - [`dispatch`] and `settle`: claim what is due, settle it, ask when to look again
//! - [`import`]: what waits in another scheduler's table
//! - [`place`]: which place the database belongs to
//! - [`maintenance`]: what the gauges show, and what is too old to keep
//! - [`inspect`]: what a server says of itself, for `doctor`
//!
//! `schema` makes the tables. All share `tx` (a transaction), `waits` (what its COMMIT waits for),
//! `pooler` (whether statements are safe on the way), `batch` (the columns of a batch of failures), `task` (a task as it is read), `due` (what waits), `events`
//! (the columns of history) and `statement` (a statement as a value). Time is Postgres's throughout: durations come in, moments are made here.

pub mod arrivals;
mod batch;
pub mod dispatch;
mod due;
mod error;
mod events;
pub mod idempotency;
pub mod import;
pub mod inspect;
pub mod maintenance;
pub mod place;
mod pooler;
mod schema;
mod settle;
mod statement;
mod task;
mod tx;
mod waits;

use std::{future::Future, sync::Arc, time::Duration};

use anyhow::Context;
use secrecy::ExposeSecret;
use sqlx::{
    PgPool,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::time::Instant;

use due::KEEPS_DUE;
pub use error::{StoreError, Unfit};
use pooler::Pooler;
use statement::Sql;
pub use statement::Statement;
use tx::{Tx, within};
pub use waits::Wait;
use waits::{BACKEND, Watch};

use crate::config::Settings;

/// A statement or an answer with more bytes of payload than this leaves the connection with
/// buffers that are worth giving back.
const LARGE_BYTES: usize = 1 << 20;

/// Writes nothing, and fails where writing would fail: on a read-only server, without
/// the right to write, without our tables or their newest columns.
const WRITES_NOTHING: &str = "
    INSERT INTO retry_queue (message_id, original_payload, original_queue, operation, error_type)
        SELECT gen_random_uuid(), '', 'nowhere', '', '' WHERE FALSE;
    UPDATE retry_queue SET status = status WHERE FALSE;
    INSERT INTO retry_due (task_id, next_retry_at, lane, priority) SELECT 0, now(), 0, 0 WHERE FALSE;
    DELETE FROM retry_due WHERE FALSE;
    INSERT INTO retry_history (task_ids, event_type, status, retry_count, max_retries, next_retry_at,
                               attempt_id, instance)
        SELECT '{}', '', '', '{}', '{}', '{}', '{}', '' WHERE FALSE;
    INSERT INTO idempotency_keys (scope, key, expires_at, retry_count, digest)
        SELECT '', '', now(), 0, '' WHERE FALSE;
    UPDATE idempotency_keys SET task_id = task_id WHERE FALSE";

/// Reads nothing, and fails where the tables or their newest columns are missing: with
/// MIGRATE_ON_START=false somebody else makes them.
const HAS_SCHEMA: &str = "SELECT q.operation, e.attempt_id
     FROM retry_queue q, retry_due, retry_history e, idempotency_keys, retry_place LIMIT 0";

/// Every statement of the store but `BEGIN`, the probes and those of [`import`].
pub static STATEMENTS: &[&Statement] = &[
    &arrivals::INSERT,
    &arrivals::LOCK_KNOWN,
    &arrivals::FAIL_AGAIN,
    &arrivals::NOTE_DUPLICATES,
    &arrivals::NOTE_OUTDATED,
    &arrivals::WAS_STORED,
    &idempotency::TAKE,
    &idempotency::LOOK_UP,
    &idempotency::ATTACH,
    &idempotency::HITS,
    &idempotency::SHOW,
    &idempotency::CLEAR,
    &dispatch::CLAIM,
    &dispatch::CLAIM_FAIRLY,
    &settle::SETTLE,
    &dispatch::LOOK,
    &dispatch::NEXT_DUE,
    &place::TAKE_PLACE,
    &place::SHOW_PLACE,
    &place::MOVE_PLACE,
    &maintenance::BACKLOG,
    &maintenance::REMOVE_TASKS,
    &maintenance::ROTATE_HISTORY,
    &maintenance::REMOVE_KEYS,
    &inspect::SERVER,
    &inspect::TABLES,
    &inspect::MIGRATED,
    &inspect::NEWEST_TASK,
    &inspect::FIND_PROBE,
    &inspect::HURRY_PROBE,
    &inspect::REMOVE_PROBE,
];

/// The database, shared by all parts of one instance.
#[derive(Clone)]
pub struct Store {
    pool: PgPool,
    deadline: Duration,
    begin: Arc<str>,
    begin_claim: Arc<str>,
    instance: Arc<str>,
    sql: Sql,
    /// The part of the service that uses this handle.
    part: Arc<str>,
    watch: Arc<Watch>,
    pooler: Arc<Pooler>,
}

impl Store {
    /// Makes the pool. It connects when it is first used, so that the order in which
    /// Postgres and the service start does not matter.
    pub fn open(settings: &Settings, instance: &str) -> anyhow::Result<Self> {
        let options: PgConnectOptions = settings
            .database_url
            .expose_secret()
            .parse()
            .context("DATABASE_URL")?;
        let options = options
            .application_name(&settings.service_name)
            // PgBouncer refuses this parameter. It is about numbers with a fraction in text
            // form, and no statement of ours answers with one.
            .extra_float_digits(None);
        let pooler = Arc::new(Pooler::new());
        let connects = pooler.clone();
        let pool = PgPoolOptions::new()
            .after_connect(move |_, _| {
                connects.suspect();
                Box::pin(async { Ok(()) })
            })
            .max_connections(settings.database_pool_size)
            .acquire_timeout(settings.database_timeout)
            .connect_lazy_with(options.clone());
        let begin = begin_statement(settings);
        Ok(Self {
            pool,
            deadline: settings.database_timeout,
            begin_claim: format!("{begin}, {KEEPS_DUE}, {}", statement::settings(true)).into(),
            begin: format!("{begin}, {}", statement::settings(false)).into(),
            instance: instance.into(),
            sql: Sql::new(settings.database_schema.as_deref(), STATEMENTS),
            part: "postgres".into(),
            watch: Arc::new(Watch::new(options, settings.database_timeout)),
            pooler,
        })
    }

    /// The same store for a part of the service, which [`Store::waits`] then names.
    pub fn of_part(&self, part: &str) -> Self {
        Self {
            part: part.into(),
            ..self.clone()
        }
    }

    /// The COMMITs that wait for a synchronous standby now.
    pub fn waits(&self) -> Vec<Wait> {
        self.watch.waits()
    }

    /// Asks whether Postgres answers and has our tables, and is no pooler that does harm.
    pub async fn ping(&self) -> Result<(), StoreError> {
        self.pooler.harmless()?;
        self.within(sqlx::raw_sql(self.sql.probe(HAS_SCHEMA)).execute(&self.pool))
            .await?;
        Ok(())
    }

    /// Asks whether Postgres can make a write durable. A server with a full disk
    /// answers a ping but not this. Writes a WAL record and no table.
    pub async fn prove_durable(&self) -> Result<(), StoreError> {
        let mut tx = self.begin().await?;
        let writes = sqlx::raw_sql(self.sql.probe(WRITES_NOTHING));
        tx.run(|c| writes.execute(c)).await?;
        let probe =
            sqlx::query("SELECT pg_logical_emit_message(true, 'retry-scheduler', 'probe')::text");
        tx.run(|c| probe.execute(c)).await?;
        tx.commit().await
    }

    /// A statement as this store runs it.
    pub fn text(&self, statement: &'static Statement) -> String {
        self.sql.of(statement).as_str().to_owned()
    }

    /// The table of tasks, as people can type it into a statement: with its schema before it
    /// where DATABASE_SCHEMA is set.
    pub fn task_table(&self) -> String {
        self.sql.probe("retry_queue").as_str().to_owned()
    }

    /// The number of open connections, and of those in use.
    pub fn pool_usage(&self) -> (u32, u32) {
        let open = self.pool.size();
        let idle = u32::try_from(self.pool.num_idle()).unwrap_or(u32::MAX);
        (open, open.saturating_sub(idle))
    }

    /// Closes idle connections and waits for those in use.
    pub async fn close(&self) {
        self.pool.close().await;
        self.watch.close().await;
    }

    async fn begin(&self) -> Result<Tx, StoreError> {
        self.begin_with(&self.begin).await
    }

    async fn begin_with(&self, statement: &str) -> Result<Tx, StoreError> {
        let mut tx = self.unbegun().await?;
        tx.begin(statement).await?;
        Ok(tx)
    }

    /// A connection for a transaction; the caller begins it with `self.begin`.
    async fn unbegun(&self) -> Result<Tx, StoreError> {
        repeated(self.deadline, || async {
            self.check_pooler().await?;
            let connection = self.within(self.pool.acquire()).await?;
            // The pool may have made this very connection since the look, because the old ones
            // had ended: then a pooler that mixes up statements may have taken the old one's place.
            let checked = self.pooler.is_checked();
            Ok(checked.then(|| Tx::on(connection, self.deadline, self)))
        })
        .await
    }

    async fn within<T>(
        &self,
        work: impl Future<Output = Result<T, sqlx::Error>>,
    ) -> Result<T, StoreError> {
        within(self.deadline, work).await
    }
}

/// Tries until a try gives a connection. No try begins after the deadline: on a way on which every
/// connection dies soon and is made anew, none is ever there long enough. A try that has begun is
/// not cut short, because each of its steps has a deadline of its own, and a slow way needs many.
async fn repeated<T, F>(deadline: Duration, mut attempt: impl FnMut() -> F) -> Result<T, StoreError>
where
    F: Future<Output = Result<Option<T>, StoreError>>,
{
    let start = Instant::now();
    loop {
        if let Some(connection) = attempt().await? {
            return Ok(connection);
        }
        if start.elapsed() >= deadline {
            return Err(sqlx::Error::PoolTimedOut.into());
        }
    }
}

/// `BEGIN` and the limits of the transaction, to be sent in one round trip.
///
/// Should this instance vanish, the limits free its locks. All are local to the
/// transaction, because a pooler may hand the connection to others. Postgres gives up
/// a statement a little before we give up Postgres, so that its answer tells a slow
/// statement from a silent server. A server with `synchronous_commit = off` would lose
/// rows that we acknowledged, so it is switched on.
fn begin_statement(settings: &Settings) -> String {
    let deadline = settings.database_timeout.as_millis();
    // A time-out of 0 would mean none at all.
    let statement = (deadline * 9 / 10).max(1);
    let idle = settings.confirm_timeout.as_millis() + deadline;
    format!(
        "BEGIN; SELECT {BACKEND}, set_config('statement_timeout', '{statement}', true), \
         set_config('idle_in_transaction_session_timeout', '{idle}', true), \
         set_config('synchronous_commit', CASE current_setting('synchronous_commit') \
         WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, true)"
    )
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}

/// A time that Postgres gave in milliseconds; a negative one has passed.
fn from_millis(ms: i64) -> Duration {
    Duration::from_millis(u64::try_from(ms).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEADLINE: Duration = Duration::from_secs(5);
    const ROUND: Duration = Duration::from_secs(2);

    #[tokio::test(start_paused = true)]
    async fn a_way_on_which_every_connection_is_new_is_given_up_at_the_deadline() {
        let start = Instant::now();
        let given: Result<(), StoreError> = repeated(DEADLINE, || async {
            tokio::time::sleep(ROUND).await;
            Ok(None)
        })
        .await;
        assert!(
            matches!(given, Err(StoreError::Unavailable(_))),
            "{given:?}"
        );
        assert_eq!(start.elapsed(), 3 * ROUND, "no try begins after 5 s");
    }

    #[tokio::test(start_paused = true)]
    async fn a_connection_that_lasts_is_taken_however_long_its_try_took() {
        let given = repeated(DEADLINE, || async {
            tokio::time::sleep(2 * DEADLINE).await;
            Ok(Some("a connection"))
        })
        .await;
        assert_eq!(given.ok(), Some("a connection"));
    }
}
