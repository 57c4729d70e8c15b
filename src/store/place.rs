//! The place that the database belongs to: taken, looked up, moved.

use sqlx::{FromRow, Row, postgres::PgRow};
use uuid::Uuid;

use super::{Store, StoreError, statement::Statement};
use crate::domain::place::Place;

/// The place that the database belongs to, and the mark by which its broker is recognised.
#[derive(Clone, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // the type's own comment says it
pub struct Kept {
    pub place: Place,
    pub mark: Uuid,
}

/// Writes the place down if there is none, and returns the one that is there. An update
/// that changes nothing returns the row that another instance has just written; DO NOTHING
/// would return none.
pub(super) static TAKE_PLACE: Statement = Statement::new("take the place", || {
    "INSERT INTO retry_place (broker, vhost, queue, mark, taken_by) VALUES ($1, $2, $3, $4, $5)
     ON CONFLICT (only_row) DO UPDATE SET only_row = TRUE
     RETURNING broker, vhost, queue, mark"
        .to_owned()
});

/// The place that is written down.
pub(super) static SHOW_PLACE: Statement = Statement::new("show the place", || {
    "SELECT broker, vhost, queue, mark FROM retry_place WHERE only_row".to_owned()
});

/// Writes another place down, unless somebody has done so since `$6` was read.
pub(super) static MOVE_PLACE: Statement = Statement::new("move the place", || {
    "INSERT INTO retry_place AS p (broker, vhost, queue, mark, taken_by)
     VALUES ($1, $2, $3, $4, $5)
     ON CONFLICT (only_row) DO UPDATE
         SET broker = EXCLUDED.broker, vhost = EXCLUDED.vhost, queue = EXCLUDED.queue,
             mark = EXCLUDED.mark, taken_at = now(), taken_by = EXCLUDED.taken_by
         WHERE p.mark = $6"
        .to_owned()
});

impl Store {
    /// Takes the database for a place if it has none, and returns the place that it has.
    pub async fn take_place(&self, wanted: &Kept) -> Result<Kept, StoreError> {
        let mut tx = self.begin().await?;
        let instance = tx.instance.clone();
        let query = sqlx::query_as(self.sql.of(&TAKE_PLACE))
            .bind(&wanted.place.broker)
            .bind(&wanted.place.vhost)
            .bind(&wanted.place.queue)
            .bind(wanted.mark)
            .bind(&*instance);
        let kept = tx.run(|c| query.fetch_one(c)).await?;
        tx.commit().await?;
        Ok(kept)
    }

    /// Returns the place that the database belongs to, if it was taken.
    pub async fn place(&self) -> Result<Option<Kept>, StoreError> {
        let query = sqlx::query_as(self.sql.of(&SHOW_PLACE));
        let mut tx = self.begin().await?;
        let kept = tx.run(|c| query.fetch_optional(c)).await?;
        tx.rollback().await?;
        Ok(kept)
    }

    /// Gives the database from one place to another in `actor`'s name. False, and nothing
    /// done, when it does not belong to `from` any more.
    pub async fn move_place(
        &self,
        from: Option<&Kept>,
        to: &Kept,
        actor: &str,
    ) -> Result<bool, StoreError> {
        let mut tx = self.begin().await?;
        let query = sqlx::query(self.sql.of(&MOVE_PLACE))
            .bind(&to.place.broker)
            .bind(&to.place.vhost)
            .bind(&to.place.queue)
            .bind(to.mark)
            .bind(actor)
            .bind(from.map(|kept| kept.mark));
        let moved = tx.run(|c| query.execute(c)).await?;
        tx.commit().await?;
        Ok(moved.rows_affected() == 1)
    }
}

impl FromRow<'_, PgRow> for Kept {
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        Ok(Self {
            place: Place {
                broker: row.try_get("broker")?,
                vhost: row.try_get("vhost")?,
                queue: row.try_get("queue")?,
            },
            mark: row.try_get("mark")?,
        })
    }
}
