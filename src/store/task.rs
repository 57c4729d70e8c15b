//! A task as a claim reads it from its row.

use std::{error::Error, str::FromStr, time::Duration};

use chrono::{DateTime, Utc};
use sqlx::{Decode, FromRow, Postgres, Row, Type, postgres::PgRow};

use crate::domain::{
    budget::Budget,
    task::{Labels, Task},
};

/// The columns of a [`Task`] `q`, in the order in which they are read. `body` gives payload and
/// properties, which a mere look leaves out.
pub(super) fn task_columns(body: &str) -> String {
    format!(
        "q.id, q.message_id, q.producer_id, {body}, q.original_queue, q.error_reason,
         q.error_class, q.retry_count, q.max_retries, q.free_attempt, q.policy, q.category,
         q.operation, q.error_type, q.tenant_id, q.correlation_id, q.trace_id, q.reason,
         q.expires_at <= statement_timestamp() AS expired, q.first_failed_at, q.last_failed_at,
         q.next_retry_at"
    )
}

/// The place of the moment of the answer, behind [`task_columns`].
pub(super) const ANSWERED_AT: usize = 23;

/// Reads the columns of a row one after the other: finding each by its name would take longer than
/// reading it.
struct InOrder<'r> {
    row: &'r PgRow,
    column: usize,
}

impl<'r> InOrder<'r> {
    fn next<T: Decode<'r, Postgres> + Type<Postgres>>(&mut self) -> Result<T, sqlx::Error> {
        let value = self.row.try_get(self.column)?;
        self.column += 1;
        Ok(value)
    }

    /// A text as the type it stands for; NULL is none.
    fn parsed<T>(&mut self) -> Result<Option<T>, sqlx::Error>
    where
        T: FromStr,
        T::Err: Error + Send + Sync + 'static,
    {
        let text: Option<&str> = self.next()?;
        text.map(str::parse)
            .transpose()
            .map_err(|e: T::Err| sqlx::Error::Decode(e.into()))
    }
}

impl FromRow<'_, PgRow> for Task {
    /// Reads the columns of a claim, or of a look at what is due, up to the moment of the answer.
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        let mut columns = InOrder { row, column: 0 };
        let mut task = Self {
            id: columns.next()?,
            message_id: columns.next()?,
            producer_id: columns.next()?,
            payload: columns.next()?,
            properties: columns.next::<Option<_>>()?.unwrap_or_default(),
            queue: columns.next()?,
            error: columns.next()?,
            class: columns.parsed()?,
            budget: Budget {
                retry_count: columns.next()?,
                max_retries: columns.next()?,
            },
            free: columns.next()?,
            policy: columns.next()?,
            labels: Labels {
                category: columns.next()?,
                operation: columns.next()?,
                error_type: columns.next()?,
                tenant: columns.next()?,
                correlation_id: columns.next()?,
                trace_id: columns.next()?,
            },
            reason: columns.parsed()?,
            expired: columns.next::<Option<bool>>()?.unwrap_or(false),
            first_failed_at: columns.next()?,
            last_failed_at: columns.next()?,
            due_at: columns.next()?,
            late: Duration::ZERO,
        };
        let now: DateTime<Utc> = columns.next()?;
        task.late = (now - task.due_at).to_std().unwrap_or_default();
        Ok(task)
    }
}
