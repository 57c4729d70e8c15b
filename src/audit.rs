//! The events of history as log lines, in one shape: `event_type`,
//! `retry_category`, `attempt_number`, `delay_seconds` and so on. Error text is a
//! stranger's and made fit for a line; payloads are never logged.

use std::time::Duration;

use tracing::{debug, info, warn};

use crate::{
    task::{NewTask, Reason, Task},
    telemetry::one_line,
};

/// A failure was given another retry.
pub fn scheduled(task: &NewTask, retry_count: i32, delay: Duration) {
    info!(
        event_type = "scheduled",
        message_id = %task.message_id,
        queue = task.queue,
        attempt_number = retry_count + 1,
        max_attempts = task.max_retries,
        delay_seconds = delay.as_secs_f64(),
        error_class = task.class.as_str(),
        exception_message = %one_line(&task.error),
        policy = task.policy,
        retry_category = task.labels.category,
        tenant_id = task.labels.tenant,
        correlation_id = task.labels.correlation_id,
        trace_id = task.labels.trace_id,
        "retry scheduled"
    );
}

/// A failure will not be retried.
pub fn bound_for_review(task: &NewTask, retry_count: i32, reason: Reason) {
    warn!(
        event_type = "scheduled",
        message_id = %task.message_id,
        queue = task.queue,
        reason = reason.as_str(),
        total_attempts = retry_count,
        error_class = task.class.as_str(),
        exception_message = %one_line(&task.error),
        policy = task.policy,
        retry_category = task.labels.category,
        tenant_id = task.labels.tenant,
        correlation_id = task.labels.correlation_id,
        trace_id = task.labels.trace_id,
        "goes to review"
    );
}

/// A failure was already waiting.
pub fn duplicate(task: &NewTask) {
    debug!(
        event_type = "duplicate",
        message_id = %task.message_id,
        queue = task.queue,
        "already waiting; nothing changes"
    );
}

/// A failure with this key was applied before.
pub fn idempotency_hit(task: &NewTask) {
    info!(
        event_type = "idempotency",
        action = "hit",
        message_id = %task.message_id,
        queue = task.queue,
        idempotency_key = task.idempotency_key,
        retry_category = task.labels.category,
        tenant_id = task.labels.tenant,
        correlation_id = task.labels.correlation_id,
        trace_id = task.labels.trace_id,
        "applied before; nothing changes"
    );
}

/// A message is back in its queue.
pub fn sent_back(task: &Task, retry_count: i32) {
    info!(
        event_type = "retry_attempt",
        message_id = %task.message_id,
        queue = task.queue,
        attempt_number = retry_count,
        max_attempts = task.max_retries,
        late_seconds = task.late.as_secs_f64(),
        exception_message = task.error.as_deref().map(one_line).as_deref(),
        policy = task.policy,
        retry_category = task.labels.category,
        tenant_id = task.labels.tenant,
        correlation_id = task.labels.correlation_id,
        trace_id = task.labels.trace_id,
        "sent back to its queue"
    );
}

/// A message was given to people.
pub fn reviewed(task: &Task, reason: Reason) {
    warn!(
        event_type = "retry_exhausted",
        message_id = %task.message_id,
        queue = task.queue,
        reason = reason.as_str(),
        total_attempts = task.retry_count,
        max_attempts = task.max_retries,
        final_exception_message = task.error.as_deref().map(one_line).as_deref(),
        policy = task.policy,
        retry_category = task.labels.category,
        tenant_id = task.labels.tenant,
        correlation_id = task.labels.correlation_id,
        trace_id = task.labels.trace_id,
        "given to review"
    );
}

/// A message could not be sent back: no such queue.
pub fn returned(task: &Task, retry_count: i32, delay: Duration, error: &str) {
    warn!(
        event_type = "returned",
        message_id = %task.message_id,
        queue = task.queue,
        attempt_number = retry_count,
        max_attempts = task.max_retries,
        delay_seconds = delay.as_secs_f64(),
        exception_message = %one_line(error),
        "could not be sent back"
    );
}

/// The broker would not take a message for now.
pub fn deferred(task: &Task, delay: Duration) {
    info!(
        event_type = "deferred",
        message_id = %task.message_id,
        queue = task.queue,
        attempt_number = task.retry_count,
        delay_seconds = delay.as_secs_f64(),
        "the broker would not take it now"
    );
}
