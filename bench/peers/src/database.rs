//! A database of its own for the comparison: the peers choose the names of their schemas themselves.

use anyhow::Context;
use bench::scheduler::Setup;
use sqlx::{Connection, PgConnection};
use url::Url;

const NAME: &str = "bench_peers";

/// The database, which [`Database::remove`] removes. One that was left behind is removed by the next
/// [`Database::create`].
pub struct Database {
    connection: PgConnection,
    pub url: String,
}

impl Database {
    /// Creates it, empty, beside the database of `setup`.
    pub async fn create(setup: &Setup) -> anyhow::Result<Self> {
        let connection = PgConnection::connect(&setup.database_url)
            .await
            .context("connecting to Postgres (DATABASE_URL)")?;
        let mut url = Url::parse(&setup.database_url).context("DATABASE_URL")?;
        url.set_path(NAME);
        let mut database = Self {
            connection,
            url: url.into(),
        };
        database.drop_it().await?;
        database.execute(&format!("CREATE DATABASE {NAME}")).await?;
        Ok(database)
    }

    /// Where Postgres's write-ahead log ends, in bytes.
    pub async fn wal_end(&mut self) -> anyhow::Result<f64> {
        let sql = "SELECT (pg_current_wal_insert_lsn() - '0/0')::float8";
        let end = sqlx::query_scalar(sql).fetch_one(&mut self.connection);
        Ok(end.await?)
    }

    /// After a checkpoint, the first change of a page writes the whole page into the log. One before
    /// each race makes that part of it the same for all.
    pub async fn checkpoint(&mut self) -> anyhow::Result<()> {
        self.execute("CHECKPOINT").await
    }

    pub async fn remove(mut self) -> anyhow::Result<()> {
        self.drop_it().await
    }

    async fn drop_it(&mut self) -> anyhow::Result<()> {
        let sql = format!("DROP DATABASE IF EXISTS {NAME} WITH (FORCE)");
        self.execute(&sql).await
    }

    async fn execute(&mut self, sql: &str) -> anyhow::Result<()> {
        sqlx::raw_sql(sql).execute(&mut self.connection).await?;
        Ok(())
    }
}
