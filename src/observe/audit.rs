//! The events of history as log lines, in one shape: `event_type`, `retry_category`,
//! `operation`, `attempt_number`, `delay_seconds` and so on. Error text is a stranger's
//! and made fit for a line; payloads are never logged.
//!
//! Attempts are counted as executions: a message that has just failed for the first
//! time is at attempt 1, and with `max_retries` 2 it has 3.

use std::time::Duration;

use tracing::{info, warn};
use uuid::Uuid;

use super::telemetry::one_line;
use crate::{
    domain::{
        event::{EventKind, KeyAction},
        review::Reason,
        task::{NewTask, Task},
    },
    wire::LeftOut,
};

/// Writes a line with what every event has, and `$fields` of its own.
macro_rules! event {
    ($level:ident, $kind:ident, $task:expr, policy: $policy:expr, $text:literal, $($fields:tt)*) => {
        $level!(
            event_type = EventKind::$kind.as_str(),
            message_id = %$task.message_id,
            queue = $task.queue,
            $($fields)*
            policy = $policy,
            retry_category = $task.labels.category,
            operation = $task.labels.operation,
            tenant_id = $task.labels.tenant,
            correlation_id = $task.labels.correlation_id,
            trace_id = $task.labels.trace_id,
            $text
        )
    };
}

/// A failure was given another retry.
pub fn scheduled(task: &NewTask, retry_count: i32, delay: Duration) {
    let budget = task.budget.at_least(retry_count);
    event!(info, Scheduled, task, policy: task.policy.name, "retry scheduled",
        attempt_number = budget.executions(),
        max_attempts = budget.max_executions(),
        delay_seconds = delay.as_secs_f64(),
        error_class = task.class.as_str(),
        exception_type = task.labels.error_type,
        exception_message = %one_line(&task.error),
    );
}

/// A failure will not be retried. It is stored, and goes to review, under the id
/// `stored_as`, which is another one when its own is taken.
pub fn bound_for_review(task: &NewTask, retry_count: i32, reason: Reason, stored_as: Uuid) {
    event!(warn, Scheduled, task, policy: task.policy.name, "goes to review",
        reason = reason.as_str(),
        stored_as = %stored_as,
        total_attempts = task.budget.at_least(retry_count).executions(),
        error_class = task.class.as_str(),
        exception_type = task.labels.error_type,
        exception_message = %one_line(&task.error),
    );
}

/// A failure was already waiting.
pub fn duplicate(task: &NewTask) {
    event!(info, Duplicate, task, policy: task.policy.name, "already waiting",);
}

/// A failure was of an attempt before the last.
pub fn outdated(task: &NewTask) {
    event!(info, Duplicate, task, policy: task.policy.name, "of an earlier attempt; nothing changes",
        attempt_id = task.attempt.map(tracing::field::display),
    );
}

/// A failure with this key was applied before, to the message with the id `applied_to`.
pub fn key_hit(task: &NewTask, applied_to: Option<Uuid>) {
    event!(info, Idempotency, task, policy: task.policy.name, "applied before; nothing changes",
        action = KeyAction::Hit.as_str(),
        idempotency_key = task.idempotency_key,
        applied_to = applied_to.map(tracing::field::display),
    );
}

/// A failure's key is remembered from now on.
pub fn key_recorded(task: &NewTask) {
    event!(info, Idempotency, task, policy: task.policy.name, "its key is remembered",
        action = KeyAction::Record.as_str(),
        idempotency_key = task.idempotency_key,
    );
}

/// A message is back in its queue.
pub fn sent_back(task: &Task) {
    event!(info, SentBack, task, policy: task.policy, "sent back to its queue",
        attempt_id = %task.attempt_id(),
        attempt_number = task.budget.executions(),
        max_attempts = task.budget.max_executions(),
        delay_seconds = task.delay().as_secs_f64(),
        late_seconds = task.late.as_secs_f64(),
        exception_type = task.labels.error_type,
        exception_message = task.error.as_deref().map(one_line).as_deref(),
    );
}

/// A message was given to people.
pub fn reviewed(task: &Task, reason: Reason, left_out: LeftOut) {
    let left_out = match left_out {
        LeftOut::Nothing => None,
        LeftOut::Payload => Some("payload"),
        LeftOut::PayloadAndProperties => Some("payload, properties"),
    };
    event!(warn, Reviewed, task, policy: task.policy, "given to review",
        left_out,
        reason = reason.as_str(),
        total_attempts = task.budget.executions(),
        max_attempts = task.budget.max_executions(),
        final_exception_type = task.labels.error_type,
        final_exception_message = task.error.as_deref().map(one_line).as_deref(),
    );
}

/// A message could not be sent back.
pub fn returned(task: &Task, delay: Duration, error: &str) {
    event!(warn, Returned, task, policy: task.policy, "could not be sent back",
        attempt_id = %task.attempt_id(),
        attempt_number = task.budget.executions(),
        max_attempts = task.budget.max_executions(),
        delay_seconds = delay.as_secs_f64(),
        exception_type = task.labels.error_type,
        exception_message = %one_line(error),
    );
}

/// The broker would not take a message for now.
pub fn deferred(task: &Task, delay: Duration) {
    let to_its_queue = task.review_reason().is_none();
    let attempt_id = to_its_queue.then(|| task.attempt_id());
    event!(info, Deferred, task, policy: task.policy, "the broker would not take it now",
        attempt_id = attempt_id.map(tracing::field::display),
        attempt_number = task.budget.executions(),
        max_attempts = task.budget.max_executions(),
        delay_seconds = delay.as_secs_f64(),
        exception_type = task.labels.error_type,
        exception_message = task.error.as_deref().map(one_line).as_deref(),
    );
}
