//! A statement as a value, so that a test can prepare it and look at its plan; and the
//! pieces of SQL that several statements share.

use std::{
    borrow::Cow,
    collections::HashMap,
    sync::{Arc, LazyLock},
};

use sqlx::{AssertSqlSafe, SqlSafeStr, SqlStr};

use crate::domain::{classify::ErrorClass, review::Reason, task::Status};

/// Planner settings of every transaction of ours.
///
/// A table that is small when a statement is planned is read whole, and goes on being
/// read whole while it grows: until the next ANALYZE, each row of a batch would be
/// compared with each row of the table. So no plan here may read a table whole, and
/// batches find their rows by [`found_by_key`], not by a join, which might begin with the
/// table. Compiling such short statements does not pay either. With plans that depend on no
/// parameter, Postgres need not make one for each call: left to itself it does so for the first
/// five calls on each connection, and for some statements always.
const PLAN_SETTINGS: &str = "set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true), \
     set_config('plan_cache_mode', 'force_generic_plan', true)";

/// Planner settings of a claim's transaction, besides [`PLAN_SETTINGS`].
///
/// When the table was last analyzed in a quiet hour, Postgres believes that nothing
/// waits and that any index will do; later such a plan walks all that is due for each
/// lane and sorts it. Without sorting, and without bitmaps, which have no order, only the index
/// that has the right order is left.
const CLAIM_SETTINGS: &str =
    "set_config('enable_sort', 'off', true), set_config('enable_bitmapscan', 'off', true)";

/// Our tables and the function that statements call, as they name them.
const TABLES: [&str; 7] = [
    "retry_queue",
    "retry_due",
    "retry_history",
    "retry_rotate_history",
    "idempotency_keys",
    "retry_place",
    "_sqlx_migrations",
];

/// A statement of the store.
pub struct Statement {
    /// What the statement does, as a short name.
    pub name: &'static str,
    text: LazyLock<String>,
    claims: bool,
}

impl Statement {
    pub(super) const fn new(name: &'static str, text: fn() -> String) -> Self {
        Self::with(name, text, false)
    }

    /// A statement for the transaction of a claim.
    pub(super) const fn of_claim(name: &'static str, text: fn() -> String) -> Self {
        Self::with(name, text, true)
    }

    const fn with(name: &'static str, text: fn() -> String, claims: bool) -> Self {
        let text = LazyLock::new(text);
        Self { name, text, claims }
    }

    /// The SQL, for tables that are found by the connection's search path.
    pub fn text(&'static self) -> &'static str {
        &self.text
    }

    /// The planner settings of the transaction it runs in, as a list of expressions.
    pub fn settings(&self) -> String {
        settings(self.claims)
    }
}

/// The statements as a store runs them: as they are written, or, where DATABASE_SCHEMA is
/// set, with that schema before each of our tables. A search path would do it too, but it
/// belongs to a connection, and behind a pooler the connection is others' as well.
#[derive(Clone)]
pub(super) struct Sql(Option<Arc<InSchema>>);

struct InSchema {
    /// The schema as an SQL identifier.
    quoted: String,
    /// The rewritten statements by their names.
    texts: HashMap<&'static str, Arc<str>>,
}

impl Sql {
    /// Rewrites the statements, once.
    pub(super) fn new(schema: Option<&str>, statements: &[&'static Statement]) -> Self {
        Self(schema.map(|schema| {
            let quoted = quoted(schema);
            let texts = statements
                .iter()
                .map(|s| (s.name, qualified(s.text(), &quoted).into()))
                .collect();
            Arc::new(InSchema { quoted, texts })
        }))
    }

    /// The schema that our tables are in, as an SQL identifier; none when the search path
    /// finds them.
    pub(super) fn schema(&self) -> Option<&str> {
        self.0.as_ref().map(|in_schema| in_schema.quoted.as_str())
    }

    /// A statement of the list.
    pub(super) fn of(&self, statement: &'static Statement) -> SqlStr {
        let text = self.0.as_ref().and_then(|s| s.texts.get(statement.name));
        match text {
            Some(text) => AssertSqlSafe(text.clone()).into_sql_str(),
            None => self.probe(statement.text()),
        }
    }

    /// Other SQL that names our tables.
    pub(super) fn probe(&self, sql: &'static str) -> SqlStr {
        let sql: Cow<'static, str> = match self.schema() {
            Some(schema) => qualified(sql, schema).into(),
            None => sql.into(),
        };
        AssertSqlSafe(sql).into_sql_str()
    }
}

/// Any text as an SQL identifier.
pub(super) fn quoted(identifier: &str) -> String {
    format!("\"{}\"", identifier.replace('"', "\"\""))
}

/// The same SQL with `schema` before each of our tables.
fn qualified(sql: &str, schema: &str) -> String {
    let in_a_word = |c: char| c.is_alphanumeric() || c == '_';
    let mut text = String::with_capacity(sql.len() * 2);
    let mut rest = sql;
    while !rest.is_empty() {
        let end = rest.find(|c| !in_a_word(c)).unwrap_or(rest.len());
        let (word, after) = rest.split_at(end);
        if TABLES.contains(&word) {
            text.push_str(schema);
            text.push('.');
        }
        text.push_str(word);
        let next = after.find(in_a_word).unwrap_or(after.len());
        let (between, after) = after.split_at(next);
        text.push_str(between);
        rest = after;
    }
    text
}

/// The planner settings of a transaction, as a list of expressions.
pub(super) fn settings(claims: bool) -> String {
    if claims {
        format!("{PLAN_SETTINGS}, {CLAIM_SETTINGS}")
    } else {
        PLAN_SETTINGS.to_owned()
    }
}

/// Joins each row of a batch with the row in `table` that has its key, as `found`: with its
/// `ctid` and other `columns` as they were. This is one look into the index, whatever Postgres
/// believes of the table. `OFFSET 0` keeps the planner from making a join of it. The update then
/// says `WHERE q.ctid = found.ctid`. Only for rows that this transaction has locked, since
/// those keep their `ctid`.
pub(super) fn found_by_key(table: &str, key: &str, columns: &str) -> String {
    format!(" CROSS JOIN LATERAL (SELECT {columns} FROM {table} WHERE {key} OFFSET 0) AS found ")
}

/// The condition that this version knows reason and class of the row with the alias `q`.
///
/// A row with a text that only a newer version knows is that version's: while a
/// rollout lasts, ours leaves it alone.
pub(super) fn understood(q: &str) -> String {
    let (reasons, classes) = (
        list(Reason::ALL.iter().map(|reason| reason.as_str())),
        list(ErrorClass::ALL.iter().map(|class| class.as_str())),
    );
    format!(
        "({q}.reason IS NULL OR {q}.reason IN ({reasons})) \
         AND ({q}.error_class IS NULL OR {q}.error_class IN ({classes}))"
    )
}

/// The texts of all statuses that this version knows, as a list for `IN`.
pub(super) fn statuses() -> String {
    list(Status::ALL.iter().map(|status| status.as_str()))
}

fn list<'t>(texts: impl Iterator<Item = &'t str>) -> String {
    let quoted: Vec<String> = texts.map(|text| format!("'{text}'")).collect();
    quoted.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_stands_before_each_table_and_before_nothing_else() {
        let sql = "UPDATE retry_queue q SET x = 'retry_queue_x' FROM retry_history, my_retry_place";
        assert_eq!(
            qualified(sql, "\"s\""),
            "UPDATE \"s\".retry_queue q SET x = 'retry_queue_x' FROM \"s\".retry_history, my_retry_place"
        );
        assert_eq!(qualified("retry_place", "s"), "s.retry_place");
        assert_eq!(qualified("", "s"), "");
        assert_eq!(quoted("a\"b"), "\"a\"\"b\"");
    }

    #[test]
    fn without_a_schema_a_statement_is_run_as_it_is_written() {
        let sql = Sql::new(None, super::super::STATEMENTS);
        for statement in super::super::STATEMENTS {
            assert_eq!(sql.of(statement).as_str(), statement.text());
        }
    }
}
