//! The columns of history, in one place: every statement that changes a row
//! writes them from what it changed.

/// What a changing statement returns of `retry_queue q`.
macro_rules! changed {
    () => {
        "q.id, q.status, q.retry_count, q.max_retries, q.next_retry_at, q.reason, q.error_class, \
         q.policy, q.category, q.tenant_id, q.correlation_id, q.trace_id"
    };
}

/// Inserts an event for each row of `$from`, a relation with the columns of
/// [`changed!`] under the alias `c`. The other arguments are SQL expressions.
macro_rules! record_events {
    (from: $from:literal, event: $event:literal, detail: $detail:literal,
     was: $was:literal, delay_ms: $delay:literal, error: $error:literal,
     instance: $instance:literal) => {
        concat!(
            "INSERT INTO retry_events (task_id, event_type, detail, from_status, status, ",
            "retry_count, max_retries, next_retry_at, reason, error_class, policy, category, ",
            "tenant_id, correlation_id, trace_id, delay_ms, error, instance) ",
            "SELECT c.id, ",
            $event,
            ", ",
            $detail,
            ", ",
            $was,
            ", c.status, c.retry_count, c.max_retries, c.next_retry_at, c.reason, c.error_class, ",
            "c.policy, c.category, c.tenant_id, c.correlation_id, c.trace_id, ",
            $delay,
            ", ",
            $error,
            ", ",
            $instance,
            " FROM ",
            $from,
            " AS c"
        )
    };
}
