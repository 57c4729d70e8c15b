//! The words of history: what can happen to a task.

/// What an entry of `retry_events` tells, and the `event_type` of its log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EventKind {
    /// A failure was stored: the task is new, or came back after a retry.
    Scheduled,
    /// A failure was reported again while its task still waits.
    Duplicate,
    /// The message was sent back to its queue.
    SentBack,
    /// The message could not be sent back: its queue does not exist, the broker closed the
    /// channel over it, or it could not be made.
    Returned,
    /// The broker refused the message for now or did not confirm it in time, or review
    /// could not be reached.
    Deferred,
    /// The message was given to people, whatever the reason.
    Reviewed,
    /// An idempotency key was recorded, hit or cleared; the detail says which.
    Idempotency,
}

text_form!(EventKind {
    Scheduled => "scheduled",
    Duplicate => "duplicate",
    SentBack => "retry_attempt",
    Returned => "returned",
    Deferred => "deferred",
    Reviewed => "retry_exhausted",
    Idempotency => "idempotency",
});

/// What happened to an idempotency key: the detail of an
/// [`EventKind::Idempotency`] event, and the `action` of its log line.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KeyAction {
    /// The key was applied to a task and is remembered from now on.
    Record,
    /// The same failure came again and changed nothing.
    Hit,
    /// An operator made the service forget the key.
    Clear,
}

text_form!(KeyAction {
    Record => "record",
    Hit => "hit",
    Clear => "clear",
});
