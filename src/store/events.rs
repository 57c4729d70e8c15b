//! The columns of history, in one place: every statement that changes a row writes
//! its event from the row as it left it.

use crate::domain::event::EventKind;

/// The actor of what the service does by itself.
const SERVICE: &str = "'service'";

/// The columns that an event takes over from its row.
const OF_THE_ROW: [&str; 13] = [
    "status",
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

/// What a statement that changes `retry_queue q` has to return for its event.
pub(super) fn changed() -> String {
    let columns = OF_THE_ROW.map(|column| format!("q.{column}"));
    format!("q.id, {}", columns.join(", "))
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
            detail: "NULL",
            was: "NULL",
            delay_ms: "NULL",
            error: "NULL",
            attempt_id: "NULL",
            actor: SERVICE,
            instance,
        }
    }

    /// The statement that writes the events.
    pub fn insert(&self) -> String {
        let Event {
            from,
            kind,
            detail,
            was,
            delay_ms,
            error,
            attempt_id,
            actor,
            instance,
        } = self;
        let columns = OF_THE_ROW.join(", ");
        let values = OF_THE_ROW.map(|column| format!("c.{column}")).join(", ");
        format!(
            "INSERT INTO retry_events (task_id, {columns}, event_type, detail, from_status, delay_ms, \
             error, attempt_id, actor, instance)
             SELECT c.id, {values}, {kind}, {detail}, {was}, {delay_ms}, {error}, {attempt_id}, \
             {actor}, {instance} FROM {from} AS c"
        )
    }
}

/// A kind of event as an SQL literal.
pub(super) fn literal(kind: EventKind) -> String {
    format!("'{kind}'")
}
