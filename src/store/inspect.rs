//! What can be asked of a Postgres server about itself, and of a probe about its way.

use std::time::Duration;

use sqlx::{AssertSqlSafe, FromRow};

use super::{Store, StoreError, schema::MIGRATIONS, statement::Statement};

/// What the server says of itself.
#[derive(Clone, Debug, Default, FromRow)]
#[allow(missing_docs)] // the names are those of Postgres's settings and columns
pub struct ServerFacts {
    pub version_num: i32,
    pub version: String,
    pub in_recovery: bool,
    pub read_only: bool,
    pub fsync: bool,
    pub full_page_writes: bool,
    pub autovacuum: bool,
    pub synchronous_commit: String,
    pub synchronous_standby_names: String,
    pub synchronous_standbys: i64,
    /// Standbys of which this user is not told whether they are synchronous.
    pub hidden_standbys: i64,
    /// Connections that ordinary users can have, and those in use.
    pub connections: i64,
    pub connections_used: i64,
    pub database_limit: i32,
    pub database_used: i32,
    pub role_limit: i32,
    /// The schema that new tables go to.
    pub schema: Option<String>,
    pub may_create: bool,
    /// The port that the server listens on; none by a socket file.
    pub port: Option<i32>,
    /// The server's clock, in seconds since 1970.
    pub clock: f64,
    /// The age of the oldest transaction, in seconds, of those that this user is told of.
    pub oldest_transaction: Option<f64>,
    pub oldest_prepared: Option<f64>,
}

/// One of our tables.
#[derive(Clone, Debug, FromRow)]
#[allow(missing_docs)]
pub struct TableFacts {
    pub name: String,
    pub present: bool,
    pub writable: bool,
    pub autovacuum_off: bool,
}

/// All that is asked of a server.
#[derive(Clone, Debug, Default)]
pub struct DatabaseFacts {
    /// What the server says of itself.
    pub server: ServerFacts,
    /// Our tables.
    pub tables: Vec<TableFacts>,
    /// Migrations that this version has and the database has not.
    pub migrations_missing: usize,
    /// Migrations that the database has and this version does not know.
    pub migrations_unknown: usize,
    /// The server's clock less ours, in seconds.
    pub clock_ahead: f64,
    /// How wrong that may be.
    pub clock_error: f64,
    /// Whether two transactions of one connection ran on different backends; `None` if that was
    /// not tried.
    pub pooled_by_transaction: Option<bool>,
}

/// A probe as the store has it.
#[derive(Clone, Debug, FromRow)]
#[allow(missing_docs)] // the columns have the same names
pub struct ProbeRow {
    pub id: i64,
    pub status: String,
    pub retry_count: i32,
}

/// The schema of our tables, as an SQL expression, unless DATABASE_SCHEMA names another.
const OUR_SCHEMA: &str = "quote_ident(current_schema())";

/// Asks the server about itself. Like the next two it is sent unprepared, since a pooler
/// may stand in the way of prepared statements.
pub(super) static SERVER: Statement = Statement::new("ask about the server", || {
    let on = |name: &str| format!("current_setting('{name}') = 'on' AS {name}");
    format!(
        "SELECT current_setting('server_version_num')::int AS version_num,
                current_setting('server_version') AS version,
                pg_is_in_recovery() AS in_recovery,
                current_setting('transaction_read_only') = 'on' AS read_only,
                {}, {}, {},
                current_setting('synchronous_commit') AS synchronous_commit,
                current_setting('synchronous_standby_names') AS synchronous_standby_names,
                (SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum'))
                    AS synchronous_standbys,
                (SELECT count(*) FROM pg_stat_replication WHERE sync_state IS NULL) AS hidden_standbys,
                current_setting('max_connections')::bigint
                    - current_setting('superuser_reserved_connections')::bigint AS connections,
                (SELECT sum(numbackends)::bigint FROM pg_stat_database) AS connections_used,
                (SELECT datconnlimit FROM pg_database WHERE datname = current_database())
                    AS database_limit,
                (SELECT numbackends FROM pg_stat_database WHERE datname = current_database())
                    AS database_used,
                (SELECT rolconnlimit FROM pg_roles WHERE rolname = current_user) AS role_limit,
                {OUR_SCHEMA} AS schema,
                COALESCE(has_schema_privilege(to_regnamespace({OUR_SCHEMA}), 'CREATE'),
                         {OUR_SCHEMA} IS NOT NULL AND has_database_privilege(current_database(), 'CREATE'))
                    AS may_create,
                inet_server_port() AS port,
                EXTRACT(EPOCH FROM clock_timestamp())::float8 AS clock,
                (SELECT EXTRACT(EPOCH FROM now() - min(xact_start))::float8 FROM pg_stat_activity
                 WHERE pid <> pg_backend_pid() AND backend_type = 'client backend')
                    AS oldest_transaction,
                (SELECT EXTRACT(EPOCH FROM now() - min(prepared))::float8 FROM pg_prepared_xacts)
                    AS oldest_prepared",
        on("fsync"),
        on("full_page_writes"),
        on("autovacuum"),
    )
});

/// Asks about our tables.
pub(super) static TABLES: Statement = Statement::new("ask about the tables", || {
    "SELECT t.name, c.oid IS NOT NULL AS present,
            COALESCE(has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'INSERT')
                AND has_table_privilege(c.oid, 'UPDATE') AND has_table_privilege(c.oid, 'DELETE'), FALSE)
                AS writable,
            COALESCE(c.reloptions::text ~* 'autovacuum_enabled=(false|off|no|0)', FALSE)
                AS autovacuum_off
     FROM unnest(ARRAY['retry_queue', 'retry_due', 'retry_history', 'idempotency_keys']) AS t(name)
     LEFT JOIN pg_class c ON c.oid = to_regclass(t.name)"
        .to_owned()
});

/// The migrations that were applied; an error where there never were any.
pub(super) static MIGRATED: Statement = Statement::new("list migrations", || {
    "SELECT version FROM _sqlx_migrations WHERE success".to_owned()
});

/// The newest task, before a probe is sent.
pub(super) static NEWEST_TASK: Statement = Statement::new("find the newest task", || {
    "SELECT max(id) FROM retry_queue".to_owned()
});

/// The probe's task among those that are newer than `$1`. Producers' ids have no index.
pub(super) static FIND_PROBE: Statement = Statement::new("find a probe", || {
    "SELECT id, status::text AS status, retry_count FROM retry_queue
     WHERE id > $1 AND producer_id = $2 ORDER BY id LIMIT 1"
        .to_owned()
});

/// Makes a probe due now.
pub(super) static HURRY_PROBE: Statement = Statement::new("make a probe due", || {
    "UPDATE retry_queue SET next_retry_at = now()
     WHERE id = $1 AND producer_id = $2 AND status = 'pending'"
        .to_owned()
});

/// Removes a probe, and the history that tells of it alone. It waits for whoever holds the row, so
/// that afterwards nobody sends it any more.
pub(super) static REMOVE_PROBE: Statement = Statement::new("remove a probe", || {
    "WITH removed AS (
        DELETE FROM retry_queue WHERE id = $1 AND producer_id = $2 RETURNING id
     )
     DELETE FROM retry_history WHERE task_ids @> ARRAY(SELECT id FROM removed)
         AND task_ids <@ ARRAY(SELECT id FROM removed)"
        .to_owned()
});

impl Store {
    /// Asks the server about itself. `thoroughly` also finds out, on two connections, whether a
    /// pooler hands our connection to others between transactions.
    pub async fn facts(&self, thoroughly: bool) -> Result<DatabaseFacts, StoreError> {
        // The first query on a connection also waits for the connection.
        drop(self.within(self.pool.acquire()).await?);
        let before = chrono::Utc::now();
        let mut question = SERVER.text().to_owned();
        if let Some(schema) = self.sql.schema() {
            let literal = format!("'{}'", schema.replace('\'', "''"));
            question = question.replace(OUR_SCHEMA, &literal);
        }
        let question = sqlx::raw_sql(AssertSqlSafe(question));
        let server = self.within(question.fetch_one(&self.pool)).await?;
        let after = chrono::Utc::now();
        let server = ServerFacts::from_row(&server)?;
        let seconds = |t: chrono::DateTime<chrono::Utc>| t.timestamp_micros() as f64 / 1e6;
        let error = (seconds(after) - seconds(before)) / 2.0;
        let clock_ahead = server.clock - (seconds(before) + error);
        let tables = self
            .within(sqlx::raw_sql(self.sql.of(&TABLES)).fetch_all(&self.pool))
            .await?;
        let tables: Vec<TableFacts> = tables
            .iter()
            .map(TableFacts::from_row)
            .collect::<Result<_, _>>()?;
        let applied = self
            .within(sqlx::raw_sql(self.sql.of(&MIGRATED)).fetch_all(&self.pool))
            .await;
        let applied: Vec<i64> = match applied {
            Ok(rows) => rows
                .iter()
                .map(<(i64,)>::from_row)
                .map(|row| row.map(|(version,)| version))
                .collect::<Result<_, _>>()?,
            Err(_) => Vec::new(),
        };
        let ours: Vec<i64> = MIGRATIONS.iter().map(|m| m.version).collect();
        Ok(DatabaseFacts {
            migrations_missing: ours.iter().filter(|v| !applied.contains(v)).count(),
            migrations_unknown: applied.iter().filter(|v| !ours.contains(v)).count(),
            clock_ahead,
            clock_error: error,
            pooled_by_transaction: match thoroughly {
                true => Some(self.is_pooled_by_transaction().await?),
                false => None,
            },
            server,
            tables,
        })
    }

    /// Whether a connection has another backend in its next transaction. While one connection is
    /// in a transaction, another gets a second backend; then the first lets go of its own, which a
    /// pooler hands to whoever asks next.
    async fn is_pooled_by_transaction(&self) -> Result<bool, StoreError> {
        const PID: &str = "SELECT pg_backend_pid()";
        async fn pid(connection: &mut sqlx::PgConnection) -> Result<i32, sqlx::Error> {
            let row = sqlx::raw_sql(PID).fetch_one(connection).await?;
            Ok(<(i32,)>::from_row(&row)?.0)
        }
        let mut one = self.unbegun().await?;
        let mut other = self.unbegun().await?;
        one.run(|c| sqlx::raw_sql("BEGIN").execute(c)).await?;
        let first = one.run(pid).await?;
        let second = other.run(pid).await?;
        one.run(|c| sqlx::raw_sql("ROLLBACK").execute(c)).await?;
        other.run(|c| sqlx::raw_sql("BEGIN").execute(c)).await?;
        let second_again = other.run(pid).await?;
        let first_again = one.run(pid).await?;
        other.rollback().await?;
        one.rollback().await?;
        Ok(first != first_again || second != second_again)
    }

    /// The newest task's id, for [`Store::find_probe`].
    pub async fn newest_task(&self) -> Result<i64, StoreError> {
        let query = sqlx::query_scalar::<_, Option<i64>>(self.sql.of(&NEWEST_TASK));
        let mut tx = self.begin().await?;
        let newest = tx.run(|c| query.fetch_one(c)).await?;
        tx.rollback().await?;
        Ok(newest.unwrap_or(0))
    }

    /// The task of a probe whose producer's id is `name`, if it was stored after `newest`.
    pub async fn find_probe(
        &self,
        newest: i64,
        name: &str,
    ) -> Result<Option<ProbeRow>, StoreError> {
        let query = sqlx::query_as(self.sql.of(&FIND_PROBE))
            .bind(newest)
            .bind(name);
        let mut tx = self.begin().await?;
        let found = tx.run(|c| query.fetch_optional(c)).await?;
        tx.rollback().await?;
        Ok(found)
    }

    /// Makes a probe due, whatever its policy says.
    pub async fn hurry_probe(&self, id: i64, name: &str) -> Result<(), StoreError> {
        let mut tx = self.begin().await?;
        let query = sqlx::query(self.sql.of(&HURRY_PROBE)).bind(id).bind(name);
        tx.run(|c| query.execute(c)).await?;
        tx.commit().await
    }

    /// Removes a probe's task and its history.
    pub async fn remove_probe(&self, id: i64, name: &str) -> Result<(), StoreError> {
        let mut tx = self.begin().await?;
        let query = sqlx::query(self.sql.of(&REMOVE_PROBE)).bind(id).bind(name);
        tx.run(|c| query.execute(c)).await?;
        tx.commit().await
    }
}

impl DatabaseFacts {
    /// The server's clock less ours, as far as it is sure.
    pub fn clock_off_by(&self) -> Duration {
        Duration::from_secs_f64((self.clock_ahead.abs() - self.clock_error).max(0.0))
    }
}
