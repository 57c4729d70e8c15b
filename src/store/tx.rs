//! A transaction whose connection is never handed on while it is open.

use std::{future::Future, sync::Arc, time::Duration};

use sqlx::{Connection, Postgres, pool::PoolConnection};

use super::StoreError;
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
}

impl Tx {
    /// Takes the connection; the caller runs BEGIN.
    pub(super) fn on(
        connection: PoolConnection<Postgres>,
        deadline: Duration,
        instance: Arc<str>,
    ) -> Self {
        Self {
            connection: Some(connection),
            deadline,
            instance,
        }
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
        match &mut self.connection {
            Some(connection) => within(deadline, work(connection)).await,
            None => Err(StoreError::Ended),
        }
    }

    /// Gives back the memory that a large statement or a large answer took. A connection keeps
    /// its buffers as large as they ever were, and the pool hands out all connections in turn.
    pub(super) fn shrink_buffers(&mut self) {
        if let Some(connection) = &mut self.connection {
            connection.shrink_buffers();
        }
    }

    /// Commits. After an error the outcome is unknown: the answer may have been lost.
    pub(super) async fn commit(self) -> Result<(), StoreError> {
        self.end("COMMIT").await
    }

    /// Undoes everything and keeps the connection.
    pub(super) async fn rollback(self) -> Result<(), StoreError> {
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
