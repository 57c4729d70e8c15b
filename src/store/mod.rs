//! All SQL, as a short list of verbs.
//!
//! - [`intake`]: insert what is new, lock what is known, apply what was decided
//! - [`idempotency`]: which failures were applied already
//! - [`dispatch`]: claim what is due, settle it, ask when to look again
//! - [`maintenance`]: what the gauges show, and what is too old to keep
//!
//! Time is Postgres's throughout: durations come in, moments are made here.

#[macro_use]
mod place;
#[macro_use]
mod events;
pub mod dispatch;
pub mod idempotency;
pub mod intake;
pub mod maintenance;

use std::{future::Future, sync::Arc, time::Duration};

use anyhow::Context;
use secrecy::ExposeSecret;
use sqlx::{
    AssertSqlSafe, PgPool, Postgres,
    migrate::Migrator,
    pool::PoolConnection,
    postgres::{PgConnectOptions, PgPoolOptions},
};

use crate::{config::Settings, plant::Bug};

static MIGRATIONS: Migrator = sqlx::migrate!();

/// Any number; only retry-schedulers on the same database share it.
const MIGRATION_LOCK: i64 = 0x7265_7472_795f_6d67;

/// Others may be migrating a large table.
const MIGRATION_DEADLINE: Duration = Duration::from_secs(3600);

/// Writes nothing, and fails where writing would: on a read-only server, without
/// the right to write, without our tables.
const WRITES_NOTHING: &str = "
    INSERT INTO retry_queue (message_id, original_payload, original_queue)
        SELECT gen_random_uuid(), '', 'nowhere' WHERE FALSE;
    UPDATE retry_queue SET status = status WHERE FALSE;
    INSERT INTO retry_events (task_id, event_type, status, retry_count, max_retries,
                              next_retry_at, instance)
        SELECT 0, '', '', 0, 0, now(), '' WHERE FALSE;
    INSERT INTO idempotency_keys (scope, key, expires_at, retry_count, digest)
        SELECT '', '', now(), 0, '' WHERE FALSE";

/// Reads nothing, and fails where migrations have not been applied: somebody
/// else may be the one to apply them.
const HAS_SCHEMA: &str = "SELECT FROM retry_queue, retry_events LIMIT 0";

/// For all transactions. A table that is small when a statement is planned is
/// read whole, and goes on being so while it grows: until the next ANALYZE, each
/// row of a batch would be compared with each of the table. So no table is read
/// whole here, and batches find their rows by `place!`, not by a join, which
/// might begin with the table. Nor does it pay to compile them.
pub const PLAN_SETTINGS: &str =
    "set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true)";

/// Why the store did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Postgres refused the data itself, and would refuse it again.
    #[error("Postgres refused the data: {0}")]
    Data(String),
    /// Nothing is known to be wrong with the data: try again later.
    #[error("Postgres is not available: {0}")]
    Unavailable(String),
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        // 22: data exception, 23: constraint violation, 54: a limit exceeded.
        let by_data = error
            .as_database_error()
            .and_then(|e| e.code())
            .is_some_and(|code| {
                ["22", "23", "54"]
                    .iter()
                    .any(|class| code.starts_with(class))
            });
        let text = error.to_string().replace('\n', " ");
        if by_data {
            Self::Data(text)
        } else {
            Self::Unavailable(text)
        }
    }
}

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
    /// Makes the pool; connects only when first used, so that start order does
    /// not matter.
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
            begin_claim: format!("{begin}, {}", dispatch::CLAIM_SETTINGS).into(),
            begin: begin.into(),
            instance: instance.into(),
        })
    }

    /// Brings the schema up to date. Safe with any number of instances at once:
    /// one transaction holds a lock (so it also works behind a pooler) while the
    /// migrations run on another connection.
    pub async fn migrate(&self) -> anyhow::Result<()> {
        let mut turn = Tx {
            connection: Some(self.within(self.pool.acquire()).await?),
            deadline: MIGRATION_DEADLINE,
            instance: self.instance.clone(),
        };
        turn.run(|c| sqlx::raw_sql("BEGIN").execute(c)).await?;
        let lock = sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(MIGRATION_LOCK);
        turn.run(|c| lock.execute(c))
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
        turn.rollback().await?;
        Ok(())
    }

    /// Whether Postgres answers and has our tables.
    pub async fn ping(&self) -> Result<(), StoreError> {
        self.within(sqlx::query(HAS_SCHEMA).execute(&self.pool))
            .await?;
        Ok(())
    }

    /// Whether Postgres can make a write durable: a full disk answers a ping
    /// but not this, and neither does one without our tables. Writes a WAL
    /// record and no table.
    pub async fn prove_durable(&self) -> Result<(), StoreError> {
        let mut tx = self.begin().await?;
        tx.run(|c| sqlx::raw_sql(WRITES_NOTHING).execute(c)).await?;
        let probe =
            sqlx::query("SELECT pg_logical_emit_message(true, 'retry-scheduler', 'probe')::text");
        tx.run(|c| probe.execute(c)).await?;
        tx.commit().await
    }

    /// Connections open and connections in use.
    pub fn pool_usage(&self) -> (u32, u32) {
        let open = self.pool.size();
        let idle = u32::try_from(self.pool.num_idle()).unwrap_or(u32::MAX);
        (open, open.saturating_sub(idle))
    }

    /// Closes what is idle and waits for what is not.
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

    /// A connection for a transaction, which is to begin with `self.begin`.
    async fn unbegun(&self) -> Result<Tx, StoreError> {
        Ok(Tx {
            connection: Some(self.within(self.pool.acquire()).await?),
            deadline: self.deadline,
            instance: self.instance.clone(),
        })
    }

    async fn within<T>(
        &self,
        work: impl Future<Output = Result<T, sqlx::Error>>,
    ) -> Result<T, StoreError> {
        within(self.deadline, work).await
    }
}

/// `BEGIN` and the settings of the transaction in one round trip.
///
/// Should this instance vanish, the limits free its locks. All are local to
/// the transaction: a pooler may hand the connection to others. Postgres gives a
/// statement up a little before we give up Postgres: its answer says which of the
/// two it was. A server with `synchronous_commit = off` would lose rows that we
/// acknowledged.
fn begin_statement(settings: &Settings) -> String {
    let deadline = settings.database_timeout.as_millis();
    // None at all would be without limit.
    let statement = (deadline * 9 / 10).max(1);
    let idle = settings.confirm_timeout.as_millis() + deadline;
    format!(
        "BEGIN; SELECT set_config('statement_timeout', '{statement}', true), \
         set_config('idle_in_transaction_session_timeout', '{idle}', true), \
         set_config('synchronous_commit', CASE current_setting('synchronous_commit') \
         WHEN 'off' THEN 'on' ELSE current_setting('synchronous_commit') END, true), \
         {PLAN_SETTINGS}"
    )
}

async fn within<T>(
    deadline: Duration,
    work: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, StoreError> {
    match tokio::time::timeout(deadline, work).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(StoreError::Unavailable(format!(
            "no answer within {deadline:?}"
        ))),
    }
}

/// An open transaction.
///
/// Its connection goes back to the pool only after Postgres has answered COMMIT
/// or ROLLBACK. Dropped in any other way (an error, a timeout, a cancelled
/// future, even inside BEGIN) the connection is closed: a connection in the
/// pool with an open transaction would swallow the next write.
pub struct Tx {
    connection: Option<PoolConnection<Postgres>>,
    deadline: Duration,
    instance: Arc<str>,
}

impl Tx {
    async fn run<'t, T, F>(
        &'t mut self,
        work: impl FnOnce(&'t mut sqlx::PgConnection) -> F,
    ) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, sqlx::Error>>,
    {
        let deadline = self.deadline;
        match &mut self.connection {
            Some(connection) => within(deadline, work(connection)).await,
            None => Err(StoreError::Unavailable("the transaction has ended".into())),
        }
    }

    /// After an error the outcome is unknown: the answer may have been lost.
    pub async fn commit(self) -> Result<(), StoreError> {
        self.end("COMMIT").await
    }

    /// Undoes everything and keeps the connection.
    pub async fn rollback(self) -> Result<(), StoreError> {
        self.end("ROLLBACK").await
    }

    async fn end(mut self, how: &'static str) -> Result<(), StoreError> {
        self.run(|c| sqlx::raw_sql(how).execute(c)).await?;
        drop(self.connection.take());
        Ok(())
    }
}

impl Drop for Tx {
    fn drop(&mut self) {
        if let Some(connection) = self.connection.take() {
            if Bug::TxNotDetached.planted() {
                return;
            }
            drop(connection.detach());
        }
    }
}

fn millis(duration: Duration) -> i64 {
    i64::try_from(duration.as_millis()).unwrap_or(i64::MAX)
}
