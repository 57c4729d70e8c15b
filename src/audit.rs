//! The events of history as log lines, in one shape: `event_type`,
//! `retry_category`, `attempt_number`, `delay_seconds` and so on. Error text is a
//! stranger's and made fit for a line; payloads are never logged.

use std::time::Duration;

use tracing::{info, warn};

use crate::{
    task::{NewTask, Reason, Task},
    telemetry::one_line,
};

/// A line with what every event has, and `$fields` of its own.
macro_rules! event {
    ($level:ident, $event_type:literal, $task:expr, $text:literal, $($fields:tt)*) => {
        $level!(
            event_type = $event_type,
            message_id = %$task.message_id,
            queue = $task.queue,
            $($fields)*
            policy = $task.policy,
            retry_category = $task.labels.category,
            tenant_id = $task.labels.tenant,
            correlation_id = $task.labels.correlation_id,
            trace_id = $task.labels.trace_id,
            $text
        )
    };
}

/// A failure was given another retry.
pub fn scheduled(task: &NewTask, retry_count: i32, delay: Duration) {
    event!(info, "scheduled", task, "retry scheduled",
        attempt_number = retry_count + 1,
        max_attempts = task.max_retries,
        delay_seconds = delay.as_secs_f64(),
        error_class = task.class.as_str(),
        exception_message = %one_line(&task.error),
    );
}

/// A failure will not be retried.
pub fn bound_for_review(task: &NewTask, retry_count: i32, reason: Reason) {
    event!(warn, "scheduled", task, "goes to review",
        reason = reason.as_str(),
        total_attempts = retry_count,
        error_class = task.class.as_str(),
        exception_message = %one_line(&task.error),
    );
}

/// A failure was already waiting.
pub fn duplicate(task: &NewTask) {
    event!(info, "duplicate", task, "already waiting; nothing changes",);
}

/// A failure with this key was applied before.
pub fn idempotency_hit(task: &NewTask) {
    event!(
        info,
        "idempotency",
        task,
        "applied before; nothing changes",
        action = "hit",
        idempotency_key = task.idempotency_key,
    );
}

/// A failure's key is remembered from now on.
pub fn idempotency_record(task: &NewTask) {
    event!(
        info,
        "idempotency",
        task,
        "its key is remembered",
        action = "record",
        idempotency_key = task.idempotency_key,
    );
}

/// A message is back in its queue.
pub fn sent_back(task: &Task, retry_count: i32) {
    event!(
        info,
        "retry_attempt",
        task,
        "sent back to its queue",
        attempt_number = retry_count,
        max_attempts = task.max_retries,
        late_seconds = task.late.as_secs_f64(),
        exception_message = task.error.as_deref().map(one_line).as_deref(),
    );
}

/// A message was given to people.
pub fn reviewed(task: &Task, reason: Reason) {
    event!(
        warn,
        "retry_exhausted",
        task,
        "given to review",
        reason = reason.as_str(),
        total_attempts = task.retry_count,
        max_attempts = task.max_retries,
        final_exception_message = task.error.as_deref().map(one_line).as_deref(),
    );
}

/// A message could not be sent back: no such queue.
pub fn returned(task: &Task, retry_count: i32, delay: Duration, error: &str) {
    event!(warn, "returned", task, "could not be sent back",
        attempt_number = retry_count,
        max_attempts = task.max_retries,
        delay_seconds = delay.as_secs_f64(),
        exception_message = %one_line(error),
    );
}

/// The broker would not take a message for now.
pub fn deferred(task: &Task, delay: Duration) {
    event!(
        info,
        "deferred",
        task,
        "the broker would not take it now",
        attempt_number = task.retry_count,
        max_attempts = task.max_retries,
        delay_seconds = delay.as_secs_f64(),
    );
}
