//! The tables: whether the server and the schema can have them, and the migrations that make
//! them.

use std::time::Duration;

use anyhow::Context;
use sqlx::{
    AssertSqlSafe, SqlSafeStr,
    migrate::{MigrateError, Migrator},
};

use super::{Store, Tx, error::Unfit};

pub(super) static MIGRATIONS: Migrator = sqlx::migrate!();

/// The advisory lock that instances hold while they migrate. Any number will do, as
/// long as only retry-schedulers on the same database use it.
const MIGRATION_LOCK: i64 = 0x7265_7472_795f_6d67;

/// How long to wait for another instance's migrations: it may be rewriting a large table.
const MIGRATION_DEADLINE: Duration = Duration::from_secs(3600);

/// The least version that has all that the statements use: `pg_current_xact_id` and
/// `gen_random_uuid` came with it.
const LEAST_VERSION: i32 = 13;

/// The version of the server, whether the schema `$1` exists, and the columns of the table
/// `retry_queue` in the schema where ours stands or would be made: without `$1`, the first of
/// the search path.
const INSPECTION: &str = "
    SELECT current_setting('server_version_num')::int, to_regnamespace($1) IS NOT NULL,
           (SELECT array_agg(a.attname::text ORDER BY a.attnum)
            FROM pg_class c JOIN pg_attribute a ON a.attrelid = c.oid
            WHERE c.relname = 'retry_queue'
              AND c.relnamespace = to_regnamespace(COALESCE($1, quote_ident(current_schema())))
              AND a.attnum > 0 AND NOT a.attisdropped)";

/// A column that `retry_queue` has had from the beginning, and that no one else's has.
pub(super) const OUR_COLUMN: &str = "lane";

impl Store {
    /// Fails with [`Unfit`] when the server is too old, or when a table of ours would stand
    /// where another program's stands.
    pub async fn inspect(&self) -> anyhow::Result<()> {
        self.has_schema().await.map(drop)
    }

    /// Inspects, and returns whether the schema that is set exists.
    async fn has_schema(&self) -> anyhow::Result<bool> {
        type Row = (i32, bool, Option<Vec<String>>);
        self.check_pooler().await?;
        let query = sqlx::query_as(INSPECTION).bind(self.sql.schema());
        let (version, exists, columns): Row = self.within(query.fetch_one(&self.pool)).await?;
        if let Some(problem) = too_old(version) {
            return Err(Unfit(problem).into());
        }
        match columns {
            Some(columns) if !columns.iter().any(|c| c == OUR_COLUMN) => {
                Err(Unfit(foreign(&columns)).into())
            }
            _ => Ok(exists),
        }
    }

    /// Brings the tables up to date. Any number of instances may do so at once: one
    /// transaction holds a lock (and so works behind a pooler) while the migrations
    /// run on another connection.
    pub async fn migrate(&self) -> anyhow::Result<()> {
        self.inspect().await?;
        let connection = self.within(self.pool.acquire()).await?;
        let mut lock = Tx::on(connection, MIGRATION_DEADLINE, self);
        lock.run(|c| sqlx::raw_sql("BEGIN").execute(c)).await?;
        let wait = sqlx::query("SELECT pg_advisory_xact_lock($1)").bind(MIGRATION_LOCK);
        lock.run(|c| wait.execute(c))
            .await
            .context("waiting for another instance's migrations")?;
        if let Some(schema) = self.sql.schema()
            && !self.has_schema().await?
        {
            let create = AssertSqlSafe(format!("CREATE SCHEMA {schema}"));
            self.within(sqlx::raw_sql(create).execute(&self.pool))
                .await
                .context("DATABASE_SCHEMA: making the schema")?;
        }
        migrator(self.sql.schema())
            .run(&self.pool)
            .await
            .map_err(in_the_way)
            .context("applying migrations")?;
        lock.rollback().await?;
        Ok(())
    }
}

/// The migrations, for tables in this schema. Their files name no schema: the search path
/// is set for the transaction of each, and so for nobody who gets the connection afterwards.
fn migrator(schema: Option<&str>) -> Migrator {
    let mut migrator = Migrator {
        migrations: MIGRATIONS.migrations.clone(),
        // An older instance may restart while a newer one is rolled out.
        ignore_missing: true,
        locking: false,
        ..Migrator::DEFAULT
    };
    if let Some(schema) = schema {
        migrator.dangerous_set_table_name(format!("{schema}._sqlx_migrations"));
        for migration in migrator.migrations.to_mut() {
            let sql = migration.sql.as_str();
            let sql = format!("SET LOCAL search_path = {schema};\n{sql}");
            migration.sql = AssertSqlSafe(sql).into_sql_str();
        }
    }
    migrator
}

/// What is wrong with a server of this version, if anything is.
fn too_old(server_version_num: i32) -> Option<String> {
    let version = server_version_num / 10_000;
    (version < LEAST_VERSION).then(|| {
        format!(
            "DATABASE_URL: this is Postgres {version}, and Postgres {LEAST_VERSION} is the least \
             that will do"
        )
    })
}

fn foreign(columns: &[String]) -> String {
    format!(
        "another program's table retry_queue stands where ours would be made (its columns: {}); \
         set DATABASE_SCHEMA to a schema for ours, which is made when it is absent; then \
         `retry-scheduler import` can take over what waits in that table",
        columns.join(", ")
    )
}

/// Tells an error of the migrations that would come again each time from one that may pass.
fn in_the_way(error: MigrateError) -> anyhow::Error {
    const DUPLICATE_TABLE: &str = "42P07";
    let names = match &error {
        MigrateError::ExecuteMigration(e, _) | MigrateError::Execute(e) => e
            .as_database_error()
            .is_some_and(|e| e.code().as_deref() == Some(DUPLICATE_TABLE)),
        // The migrations table has our numbers, and other contents.
        MigrateError::VersionMismatch(_) | MigrateError::Dirty(_) => true,
        _ => false,
    };
    if !names {
        return error.into();
    }
    let problem = format!(
        "another program's tables are in the way of ours ({error}); set DATABASE_SCHEMA to a \
         schema for ours, which is made when it is absent"
    );
    Unfit(problem.replace('\n', " ")).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_least_version_of_postgres_is_named_in_one_line() {
        for (number, shown) in [(90_624, "Postgres 9"), (120_022, "Postgres 12")] {
            let problem = too_old(number).expect("too old");
            assert!(problem.contains(shown), "{problem}");
            assert!(problem.contains("Postgres 13"), "{problem}");
            assert!(!problem.contains('\n'), "{problem}");
        }
        for number in [130_000, 130_023, 150_018, 180_001] {
            assert_eq!(too_old(number), None, "{number}");
        }
    }
}
