//! All SQL, as a short list of verbs.
//!
//! - [`arrivals`]: insert what is new, lock what is known, apply what was decided
//! - [`idempotency`]: which failures were applied already
//! - [`dispatch`]: claim what is due, settle it, ask when to look again
//! - [`maintenance`]: what the gauges show, and what is too old to keep
//!
//! They share `tx` (a transaction), `batch` (the columns of a batch of failures), `events`
//! (the columns of history) and `statement` (a statement as a value). Time is Postgres's throughout: durations come in, moments are made here.

pub mod arrivals;
mod batch;
pub mod dispatch;
mod error;
mod events;
pub mod idempotency;
pub mod maintenance;
mod statement;
mod tx;

use std::{future::Future, sync::Arc, time::Duration};

use anyhow::Context;
use secrecy::ExposeSecret;
use sqlx::{
    AssertSqlSafe, PgPool,
    migrate::Migrator,
    postgres::{PgConnectOptions, PgPoolOptions},
};

pub use error::StoreError;
pub use statement::Statement;
use tx::{Tx, within};

use crate::config::Settings;

static MIGRATIONS: Migrator = sqlx::migrate!();

/// The advisory lock that instances hold while they migrate. Any number will do, as
/// long as only retry-schedulers on the same database use it.
const MIGRATION_LOCK: i64 = 0x7265_7472_795f_6d67;

/// How long to wait for another instance's migrations: it may be rewriting a large table.
const MIGRATION_DEADLINE: Duration = Duration::from_secs(3600);

/// A statement or an answer with more bytes of payload than this leaves the connection with
/// buffers that are worth giving back.
const LARGE_BYTES: usize = 1 << 20;

/// Writes nothing, and fails where writing would fail: on a read-only server, without
/// the right to write, without our tables or their newest columns.
const WRITES_NOTHING: &str = "
    INSERT INTO retry_queue (message_id, original_payload, original_queue, operation, error_type)
        SELECT gen_random_uuid(), '', 'nowhere', '', '' WHERE FALSE;
    UPDATE retry_queue SET status = status WHERE FALSE;
    INSERT INTO retry_events (task_id, event_type, status, retry_count, max_retries, next_retry_at,
                              operation, error_type, attempt_id, instance)
        SELECT 0, '', '', 0, 0, now(), '', '', gen_random_uuid(), '' WHERE FALSE;
    INSERT INTO idempotency_keys (scope, key, expires_at, retry_count, digest)
        SELECT '', '', now(), 0, '' WHERE FALSE;
    UPDATE idempotency_keys SET task_id = task_id WHERE FALSE";

/// Reads nothing, and fails where the tables or their newest columns are missing: with
/// MIGRATE_ON_START=false somebody else makes them.
const HAS_SCHEMA: &str =
    "SELECT q.operation, e.attempt_id FROM retry_queue q, retry_events e, idempotency_keys LIMIT 0";

/// Every statement of the store but `BEGIN` and the probes.
pub static STATEMENTS: &[&Statement] = &[
    &arrivals::INSERT,
    &arrivals::LOCK_KNOWN,
    &arrivals::FAIL_AGAIN,
    &arrivals::NOTE_DUPLICATES,
    &arrivals::WAS_STORED,
    &idempotency::TAKE,
    &idempotency::LOOK_UP,
    &idempotency::ATTACH,
    &idempotency::HITS,
    &idempotency::SHOW,
    &idempotency::CLEAR,
    &dispatch::CLAIM,
    &dispatch::CLAIM_FAIRLY,
    &dispatch::SETTLE,
    &dispatch::LOOK,
    &dispatch::NEXT_DUE,
    &maintenance::BACKLOG,
    &maintenance::REMOVE_TASKS,
    &maintenance::REMOVE_EVENTS,
    &maintenance::REMOVE_KEYS,
];

/// The database, shared by all parts of one instance.
#[derive(Clone)]
pub struct Store {
    pool: PgPool,
    deadline: Duration,
    begin: Arc<str>,
    begin_claim: Arc<str>,
    instance: Arc<str>,
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
        let options = options.application_name(&settings.service_name);
        let pool = PgPoolOptions::new()
            .max_connections(settings.database_pool_size)
            .acquire_timeout(settings.database_timeout)
            .connect_lazy_with(options);
        let begin = begin_statement(settings);
        Ok(Self {
            pool,
            deadline: settings.database_timeout,
            begin_claim: format!("{begin}, {}", statement::settings(true)).into(),
            begin: format!("{begin}, {}", statement::settings(false)).into(),
            instance: instance.into(),
        })
    }

    /// Brings the schema up to date. Any number of instances may do so at once: one
    /// transaction holds a lock (and so works behind a pooler) while the migrations
    /// run on another connection.
    pub async fn migrate(&self) -> anyhow::Result<()> {
        let connection = self.within(self.pool.acquire()).await?;
        let mut lock = Tx::on(connection, MIGRATION_DEADLINE, self.instance.clone());
        lock.run(|c| sqlx::raw_sql("BEGIN").execute(c)).await?;
        let wait = sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(MIGRATION_LOCK);
        lock.run(|c| wait.execute(c))
            .await
            .context("waiting for another instance's migrations")?;
        Migrator {
            migrations: MIGRATIONS.migrations.clone(),
            // An older instance may restart while a newer one is rolled out.
            ignore_missing: true,
            locking: false,
            ..Migrator::DEFAULT
        }
        .run(&self.pool)
        .await
        .context("applying migrations")?;
        lock.rollback().await?;
        Ok(())
    }

    /// Asks whether Postgres answers and has our tables.
    pub async fn ping(&self) -> Result<(), StoreError> {
        self.within(sqlx::query(HAS_SCHEMA).execute(&self.pool))
            .await?;
        Ok(())
    }

    /// Asks whether Postgres can make a write durable. A server with a full disk
    /// answers a ping but not this. Writes a WAL record and no table.
    pub async fn prove_durable(&self) -> Result<(), StoreError> {
        let mut tx = self.begin().await?;
        tx.run(|c| sqlx::raw_sql(WRITES_NOTHING).execute(c)).await?;
        let probe =
            sqlx::query("SELECT pg_logical_emit_message(true, 'retry-scheduler', 'probe')::text");
        tx.run(|c| probe.execute(c)).await?;
        tx.commit().await
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
    }

    async fn begin(&self) -> Result<Tx, StoreError> {
        self.begin_with(&self.begin).await
    }

    async fn begin_with(&self, statement: &str) -> Result<Tx, StoreError> {
        let mut tx = self.unbegun().await?;
        let begin = sqlx::raw_sql(AssertSqlSafe(statement.to_owned()));
        tx.run(|c| begin.execute(c)).await?;
        Ok(tx)
    }

    /// A connection for a transaction; the caller begins it with `self.begin`.
    async fn unbegun(&self) -> Result<Tx, StoreError> {
        let connection = self.within(self.pool.acquire()).await?;
        Ok(Tx::on(connection, self.deadline, self.instance.clone()))
    }

    async fn within<T>(
        &self,
        work: impl Future<Output = Result<T, sqlx::Error>>,
    ) -> Result<T, StoreError> {
        within(self.deadline, work).await
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
        "BEGIN; SELECT set_config('statement_timeout', '{statement}', true), \
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
