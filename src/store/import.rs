//! The rows that wait in another scheduler's table: looked at, taken over, marked there.
//!
//! These statements are not in the list of the store's own, because an operator names the
//! table, and its columns decide how they are read.

use std::{collections::HashMap, time::Duration};

use anyhow::{Context, ensure};
use sqlx::{AssertSqlSafe, FromRow};

use super::{
    Store, StoreError, arrivals::IntakeTx, schema::OUR_COLUMN, statement::quoted, tx::within,
};

/// The status that a row gets in the other table once it is ours.
pub const IMPORTED: &str = "imported";

/// The columns without which there is nothing to take over.
const REQUIRED: [&str; 6] = [
    "id",
    "message_id",
    "original_payload",
    "original_queue",
    "next_retry_at",
    "status",
];

/// The most payload bytes of one batch; one row always fits.
const BATCH_BYTES: i64 = 8 << 20;

/// How long it may take to count the rows of a table, which may be large.
const COUNTING: Duration = Duration::from_secs(3600);

/// Another scheduler's table.
pub struct Source {
    /// Its name as SQL writes it.
    name: String,
    /// Its columns and their types.
    columns: HashMap<String, String>,
    /// The time zone of its times that name none.
    zone: String,
}

/// A row that waits there.
#[derive(Debug, FromRow)]
#[allow(missing_docs)] // the columns of the table
pub struct Waiting {
    pub id: i64,
    pub message_id: String,
    pub original_payload: Vec<u8>,
    pub original_queue: String,
    pub error_reason: Option<String>,
    pub retry_count: i32,
    /// None where the table does not say it.
    pub max_retries: Option<i32>,
    pub next_retry_at_ms: i64,
    /// 0 where the table does not say it.
    pub created_at_ms: i64,
}

impl Source {
    fn has(&self, column: &str) -> bool {
        self.columns.contains_key(column)
    }

    /// A moment in Unix time in ms. One that never comes, or always was, becomes one that no
    /// clock shows, so that people get to see the message.
    fn millis(&self, column: &str, round: &str) -> String {
        let moment = match self.columns.get(column).map(String::as_str) {
            None => return "0::bigint".to_owned(),
            Some("timestamp without time zone") => format!("({column} AT TIME ZONE $4::text)"),
            Some(_) => column.to_owned(),
        };
        format!(
            "CASE WHEN {column} IS NULL THEN 0 WHEN isfinite({column}) \
             THEN {round}(EXTRACT(EPOCH FROM {moment}) * 1000)::bigint ELSE {} END",
            i64::MAX
        )
    }

    /// Locks the next rows that wait, in the order of their ids.
    fn next_rows(&self) -> String {
        let or = |column: &str, cast: &str, else_: &str| match self.has(column) {
            true => format!("{column}::{cast}"),
            false => else_.to_owned(),
        };
        format!(
            "WITH locked AS MATERIALIZED (
                SELECT * FROM {table} WHERE status = 'pending' AND id > $1
                ORDER BY id LIMIT $2 FOR UPDATE
            ), measured AS (
                SELECT *, sum(octet_length(original_payload)) OVER (ORDER BY id)
                          - octet_length(original_payload) AS bytes_before
                FROM locked
            )
            SELECT id::bigint AS id, message_id::text AS message_id, original_payload,
                   original_queue::text AS original_queue, {error} AS error_reason,
                   COALESCE({count}, 0) AS retry_count, {most} AS max_retries,
                   {due} AS next_retry_at_ms, {created} AS created_at_ms
            FROM measured WHERE bytes_before < $3 AND $4::text IS NOT NULL ORDER BY id",
            table = self.name,
            error = or("error_reason", "text", "NULL::text"),
            count = or("retry_count", "int", "0"),
            most = or("max_retries", "int", "NULL::int"),
            // Rounded so that a message is not due too early, nor younger than it is.
            due = self.millis("next_retry_at", "ceil"),
            created = self.millis("created_at", "floor"),
        )
    }
}

impl Store {
    /// Looks at a table, and fails unless its rows can be taken over. Times that name no time
    /// zone are of `zone`.
    pub async fn source(&self, schema: &str, table: &str, zone: &str) -> anyhow::Result<Source> {
        let name = format!("{}.{}", quoted(schema), quoted(table));
        let columns = sqlx::query_as(
            "SELECT attname::text, format_type(atttypid, NULL) FROM pg_attribute
             WHERE attrelid = to_regclass($1) AND attnum > 0 AND NOT attisdropped",
        )
        .bind(&name);
        let columns: Vec<(String, String)> = self.within(columns.fetch_all(&self.pool)).await?;
        let columns: HashMap<String, String> = columns.into_iter().collect();
        ensure!(!columns.is_empty(), "there is no table {name}");
        ensure!(
            !columns.contains_key(OUR_COLUMN),
            "{name} is a retry-scheduler's own table, and needs no import"
        );
        for column in REQUIRED {
            ensure!(
                columns.contains_key(column),
                "{name} cannot be taken over: it has no column {column}"
            );
        }
        let payload = &columns["original_payload"];
        ensure!(
            payload == "bytea",
            "{name} cannot be taken over: original_payload is {payload}, not bytea"
        );
        let known = sqlx::query_scalar("SELECT now() AT TIME ZONE $1 IS NOT NULL").bind(zone);
        let _: bool = self
            .within(known.fetch_one(&self.pool))
            .await
            .context("--time-zone")?;
        Ok(Source {
            name,
            columns,
            zone: zone.to_owned(),
        })
    }

    /// How many rows of the table have which status.
    pub async fn statuses_in(&self, source: &Source) -> Result<Vec<(String, i64)>, StoreError> {
        let count = AssertSqlSafe(format!(
            "SELECT COALESCE(status::text, 'NULL'), count(*) FROM {} GROUP BY 1 ORDER BY 1",
            source.name
        ));
        within(COUNTING, sqlx::query_as(count).fetch_all(&self.pool)).await
    }
}

impl IntakeTx {
    /// Locks and returns up to `rows` rows that wait in the table, those after the id `after`.
    pub async fn next_rows(
        &mut self,
        source: &Source,
        after: i64,
        rows: i64,
    ) -> Result<Vec<Waiting>, StoreError> {
        let query = sqlx::query_as(AssertSqlSafe(source.next_rows()))
            .bind(after)
            .bind(rows)
            .bind(BATCH_BYTES)
            .bind(&source.zone);
        self.tx.run(|c| query.fetch_all(c)).await
    }

    /// Marks rows in the table as taken over, so that they are never taken or sent again.
    pub async fn mark_imported(&mut self, source: &Source, ids: &[i64]) -> Result<(), StoreError> {
        let mark = AssertSqlSafe(format!(
            "UPDATE {} SET status = '{IMPORTED}' WHERE id = ANY($1::bigint[])",
            source.name
        ));
        let query = sqlx::query(mark).bind(ids);
        self.tx.run(|c| query.execute(c)).await?;
        Ok(())
    }
}
