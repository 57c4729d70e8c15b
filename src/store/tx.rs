//! A transaction whose connection is never handed on while it is open.

use std::{future::Future, pin::pin, sync::Arc, time::Duration};

use sqlx::{AssertSqlSafe, Connection, FromRow, Postgres, pool::PoolConnection, postgres::PgRow};

use super::{
    Store, StoreError,
    pooler::{Pooler, tells_of_strangers},
    statement::Sql,
    waits::{Backend, Watch},
};
use crate::plant::Bug;

/// An open transaction.
///
/// Its connection goes back to the pool only after Postgres has answered COMMIT or
/// ROLLBACK. When a transaction is dropped in any other way (an error, a timeout, a
/// cancelled future, even inside BEGIN) its connection is closed: a connection in
/// the pool with an open transaction would swallow the next write.
pub struct Tx {
    connection: Option<PoolConnection<Postgres>>,
    deadline: Duration,
    pub(super) instance: Arc<str>,
    pub(super) sql: Sql,
    part: Arc<str>,
    watch: Arc<Watch>,
    pooler: Arc<Pooler>,
    /// Who runs this transaction, once it has begun.
    backend: Option<Backend>,
}

impl Tx {
    /// Takes the connection; the caller runs BEGIN.
    pub(super) fn on(
        connection: PoolConnection<Postgres>,
        deadline: Duration,
        store: &Store,
    ) -> Self {
        Self {
            connection: Some(connection),
            deadline,
            instance: store.instance.clone(),
            sql: store.sql.clone(),
            part: store.part.clone(),
            watch: store.watch.clone(),
            pooler: store.pooler.clone(),
            backend: None,
        }
    }

    /// Begins, and returns the row that `statement` answers with, which has the columns of
    /// a [`Backend`]. This is one round trip: a simple query answers with the row of its
    /// last statement.
    pub(super) async fn begin(&mut self, statement: &str) -> Result<PgRow, StoreError> {
        let begin = sqlx::raw_sql(AssertSqlSafe(statement.to_owned()));
        let row = self.run(|c| begin.fetch_one(c)).await?;
        self.backend = Some(Backend::from_row(&row)?);
        Ok(row)
    }

    /// Runs one statement under the transaction's deadline.
    pub(super) async fn run<'t, T, F>(
        &'t mut self,
        work: impl FnOnce(&'t mut sqlx::PgConnection) -> F,
    ) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, sqlx::Error>>,
    {
        let deadline = self.deadline;
        let Some(connection) = &mut self.connection else {
            return Err(StoreError::Ended);
        };
        let done = within(deadline, work(connection)).await;
        if done.as_ref().is_err_and(tells_of_strangers) {
            self.pooler.suspect();
        }
        done
    }

    /// Gives back the memory that a large statement or a large answer took. A connection keeps
    /// its buffers as large as they ever were, and the pool hands out all connections in turn.
    pub(super) fn shrink_buffers(&mut self) {
        if let Some(connection) = &mut self.connection {
            connection.shrink_buffers();
        }
    }

    /// Commits. After an error the outcome is unknown: the answer may have been lost. A
    /// COMMIT that waits for a synchronous standby is waited for beyond the deadline.
    pub(super) async fn commit(mut self) -> Result<(), StoreError> {
        let (Some(connection), Some(backend)) = (&mut self.connection, &self.backend) else {
            return Err(StoreError::Ended);
        };
        {
            let commit = pin!(sqlx::raw_sql("COMMIT").execute(&mut **connection));
            self.watch.answer(commit, backend, &self.part).await?;
        }
        self.release();
        Ok(())
    }

    /// Undoes everything and keeps the connection.
    pub(super) async fn rollback(mut self) -> Result<(), StoreError> {
        self.run(|c| sqlx::raw_sql("ROLLBACK").execute(c)).await?;
        self.release();
        Ok(())
    }

    /// Gives the connection back to the pool. No transaction may be open on it.
    pub(super) fn release(mut self) {
        drop(self.connection.take());
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

/// Waits for Postgres, but not beyond the deadline.
pub(super) async fn within<T>(
    deadline: Duration,
    work: impl Future<Output = Result<T, sqlx::Error>>,
) -> Result<T, StoreError> {
    match tokio::time::timeout(deadline, work).await {
        Ok(result) => Ok(result?),
        Err(_) => Err(StoreError::Silent(deadline)),
    }
}
