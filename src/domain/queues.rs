//! Queue names, and the queues that a message may go back to.

use globset::GlobSet;

use super::limits::MAX_QUEUE_NAME_BYTES;

/// The queues that a message may go back to.
#[derive(Clone, Debug)]
pub struct AllowedQueues {
    own: Vec<String>,
    allowed: Option<GlobSet>,
}

impl AllowedQueues {
    /// Refuses the service's `own` queues, those of the broker, and, where `allowed`
    /// patterns are given, all that match none of them.
    pub fn new(own: Vec<String>, allowed: Option<GlobSet>) -> Self {
        Self { own, allowed }
    }

    /// Why nothing may be sent to `queue`, if that is so.
    pub fn refusal(&self, queue: &str) -> Option<&'static str> {
        if self.own.iter().any(|own| own == queue) {
            Some("it is one of the scheduler's own queues")
        } else if queue.starts_with("amq.") {
            Some("names beginning with amq. belong to the broker")
        } else if self
            .allowed
            .as_ref()
            .is_some_and(|set| !set.is_match(queue))
        {
            Some("it is not among ALLOWED_QUEUES")
        } else {
            None
        }
    }
}

/// What is wrong with `name` as the name of a queue, if anything is.
pub fn name_problem(name: &str) -> Option<String> {
    if name.is_empty() {
        Some("is empty".into())
    } else if name.len() > MAX_QUEUE_NAME_BYTES {
        let bytes = name.len();
        Some(format!(
            "has {bytes} bytes, more than {MAX_QUEUE_NAME_BYTES}"
        ))
    } else if name.chars().any(char::is_control) {
        Some("has control characters".into())
    } else {
        None
    }
}
