//! What can go wrong between us and Postgres.

use std::time::Duration;

/// Why the store did not do what it was asked. The cause is the error's source.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// Postgres refused the data itself, and would refuse it again.
    #[error("Postgres refused the data")]
    Data(#[source] sqlx::Error),
    /// Postgres could not be reached, or refused for now: try again later.
    #[error("Postgres is not available")]
    Unavailable(#[source] sqlx::Error),
    /// Postgres answered, but not in a form that this version can read.
    #[error("this version cannot read what Postgres answered")]
    Unreadable(#[source] sqlx::Error),
    /// Postgres did not answer in time.
    #[error("Postgres did not answer within {0:?}")]
    Silent(Duration),
    /// A pooler mixes up the prepared statements of its clients; what was seen of it.
    #[error(
        "DATABASE_URL leads to a pooler in transaction mode that mixes up the prepared statements of its \
         clients ({0}); so nothing is stored or sent: use PgBouncer 1.21 or later with \
         max_prepared_statements above 0, or pool_mode = session, or connect to Postgres directly"
    )]
    SharedServers(String),
    /// Rows that a claim holds were changed by somebody who did not hold them.
    #[error("rows were changed behind the back of the transaction that has locked them")]
    Moved,
    /// A statement was to run in a transaction that has already ended.
    #[error("the transaction has already ended")]
    Ended,
}

/// The database cannot be used, and waiting does not help: one line for people, with what to
/// do about it.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Unfit(pub(super) String);
impl StoreError {
    /// What Postgres or the client said, without our words around it.
    pub(super) fn cause(&self) -> String {
        std::error::Error::source(self).map_or_else(|| self.to_string(), ToString::to_string)
    }
}

impl From<sqlx::Error> for StoreError {
    fn from(error: sqlx::Error) -> Self {
        // Classes of SQLSTATE: 22 data exception, 23 constraint violation, 54 a limit exceeded.
        const OF_DATA: [&str; 3] = ["22", "23", "54"];
        let code = error.as_database_error().and_then(|e| e.code());
        match &error {
            _ if code.is_some_and(|code| OF_DATA.iter().any(|class| code.starts_with(class))) => {
                Self::Data(error)
            }
            sqlx::Error::RowNotFound
            | sqlx::Error::TypeNotFound { .. }
            | sqlx::Error::ColumnIndexOutOfBounds { .. }
            | sqlx::Error::ColumnNotFound(_)
            | sqlx::Error::ColumnDecode { .. }
            | sqlx::Error::Decode(_) => Self::Unreadable(error),
            _ => Self::Unavailable(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::error::Error;

    use super::*;

    #[test]
    fn an_answer_that_cannot_be_read_is_no_outage_and_keeps_its_cause() {
        let unknown = "paused".parse::<crate::domain::task::Status>().unwrap_err();
        let error = StoreError::from(sqlx::Error::Decode(unknown.into()));
        assert!(matches!(error, StoreError::Unreadable(_)), "{error:?}");
        let cause = error.source().expect("a source").to_string();
        assert!(cause.contains("paused"), "{cause}");
        let outage = StoreError::from(sqlx::Error::PoolTimedOut);
        assert!(matches!(outage, StoreError::Unavailable(_)), "{outage:?}");
    }
}
