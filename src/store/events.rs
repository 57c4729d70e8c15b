//! The columns of history, in one place: every statement that changes a row writes
//! its event from the row as it left it.

use crate::domain::event::EventKind;

/// The actor of what the service does by itself.
const SERVICE: &str = "'service'";

/// What an event does not tell.
const NOTHING: &str = "NULL";

/// The columns that an event takes over from its row, besides the status. History always has the
/// first three.
const OF_THE_ROW: [&str; 12] = [
    "retry_count",
    "max_retries",
    "next_retry_at",
    "reason",
    "error_class",
    "policy",
    "category",
    "operation",
    "error_type",
    "tenant_id",
    "correlation_id",
    "trace_id",
];
const ALWAYS_THERE: usize = 3;

/// What a statement that changes `retry_queue q` has to return for its event.
pub(super) fn changed() -> String {
    let columns = OF_THE_ROW.map(|column| format!("q.{column}"));
    format!("q.id, q.status, {}", columns.join(", "))
}

/// The event of each row of a relation: every field is an SQL expression, in which
/// `c` is the row.
pub(super) struct Event<'s> {
    /// The relation; it has the columns of [`changed`].
    pub from: &'s str,
    pub kind: &'s str,
    pub detail: &'s str,
    /// The status before; `NULL` for a new row.
    pub was: &'s str,
    pub status: &'s str,
    pub delay_ms: &'s str,
    pub error: &'s str,
    pub attempt_id: &'s str,
    /// Who did it: the service, or an operator.
    pub actor: &'s str,
    pub instance: &'s str,
}

impl<'s> Event<'s> {
    /// The events of this kind for the rows of `from`, by the service on `instance`.
    pub fn of(from: &'s str, kind: &'s str, instance: &'s str) -> Self {
        Self {
            from,
            kind,
            detail: NOTHING,
            was: NOTHING,
            status: "c.status",
            delay_ms: NOTHING,
            error: NOTHING,
            attempt_id: NOTHING,
            actor: SERVICE,
            instance,
        }
    }

    /// The statement that writes the events: one row of history for those of one kind and the same
    /// change of status, which holds their other values as arrays.
    pub fn insert(&self) -> String {
        let Event {
            from,
            kind,
            detail,
            was,
            status,
            delay_ms,
            error,
            attempt_id,
            actor,
            instance,
        } = self;
        let (always, sometimes) = OF_THE_ROW.split_at(ALWAYS_THERE);
        let own = [
            ("detail", *detail),
            ("delay_ms", *delay_ms),
            ("error", *error),
            ("attempt_id", *attempt_id),
        ];
        let own = own.iter().filter(|(_, value)| *value != NOTHING);
        let (mut columns, mut values) = (String::new(), String::new());
        let mut add = |column: &str, value: String| {
            columns.push_str(&format!(", {column}"));
            values.push_str(&format!(", {value}"));
        };
        for column in always {
            add(column, format!("array_agg(c.{column})"));
        }
        for column in sometimes {
            add(column, unless_null(&format!("c.{column}")));
        }
        for (column, value) in own {
            add(column, unless_null(value));
        }
        // Grouping costs as much as the rest where there is only one group.
        let several = [kind, was, status]
            .iter()
            .any(|value| value.starts_with("c."));
        let together = match several {
            true => "GROUP BY 1, 2, 3",
            false => "HAVING count(*) > 0",
        };
        format!(
            "INSERT INTO retry_history (event_type, from_status, status, actor, instance, task_ids{columns})
             SELECT {kind}, {was}, {status}, {actor}, {instance}, array_agg(c.id){values}
             FROM {from} AS c {together}"
        )
    }
}

/// The values as an array, or NULL if all of them are.
fn unless_null(value: &str) -> String {
    format!("CASE WHEN count({value}) > 0 THEN array_agg({value}) END")
}

/// A kind of event as an SQL literal.
pub(super) fn literal(kind: EventKind) -> String {
    format!("'{kind}'")
}
