//! A statement as a value, so that a test can prepare it and look at its plan; and the
//! pieces of SQL that several statements share.

use std::sync::LazyLock;

use crate::domain::{classify::ErrorClass, review::Reason, task::Status};

/// Planner settings of every transaction of ours.
///
/// A table that is small when a statement is planned is read whole, and goes on being
/// read whole while it grows: until the next ANALYZE, each row of a batch would be
/// compared with each row of the table. So no plan here may read a table whole, and
/// batches find their rows by [`place`], not by a join, which might begin with the
/// table. Compiling such short statements does not pay either.
const PLAN_SETTINGS: &str =
    "set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true)";

/// Planner settings of a claim's transaction, besides [`PLAN_SETTINGS`].
///
/// When the table was last analyzed in a quiet hour, Postgres believes that nothing
/// waits and that any index will do; later such a plan walks all that is due for each
/// lane and sorts it. Without sorting, only the index that has the right order is left.
const CLAIM_SETTINGS: &str = "set_config('enable_sort', 'off', true)";

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

    /// The SQL.
    pub fn text(&'static self) -> &'static str {
        &self.text
    }

    /// The planner settings of the transaction it runs in, as a list of expressions.
    pub fn settings(&self) -> String {
        settings(self.claims)
    }
}

/// The planner settings of a transaction, as a list of expressions.
pub(super) fn settings(claims: bool) -> String {
    if claims {
        format!("{PLAN_SETTINGS}, {CLAIM_SETTINGS}")
    } else {
        PLAN_SETTINGS.to_owned()
    }
}

/// Joins each row of a batch with the place of the row in `table` that has its key, and
/// with other `columns` of that row as they were: one look into the index, whatever Postgres believes of the table. `OFFSET 0` keeps
/// the planner from making a join of it. The update then says
/// `WHERE q.ctid = place.ctid`. Only for rows that this transaction has locked, since
/// those keep their place.
pub(super) fn place(table: &str, key: &str, columns: &str) -> String {
    format!(" CROSS JOIN LATERAL (SELECT {columns} FROM {table} WHERE {key} OFFSET 0) AS place ")
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
