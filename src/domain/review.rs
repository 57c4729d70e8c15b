//! Why a task goes to people: the reasons, and the order in which they are looked for.
//!
//! | reason | decided by |
//! |---|---|
//! | `invalid` | [`crate::wire::decode`], or intake when Postgres refuses to store the message |
//! | `undelivered` | [`crate::wire::decode`], for a dead letter that is no consumer's failure, as its policy says |
//! | `conflict`, `late` | [`super::arrival`], when an arrival's id or key is taken |
//! | `looping` | intake, by [`super::loops`], when a failure is stored under a new id |
//! | all others | [`Evidence::reason`], when a failure arrives, when its task is claimed, and when its message could not be sent |

use super::{budget::Budget, classify::ErrorClass};

/// Why a message goes to people instead of back to its queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The retries are spent.
    Exhausted,
    /// The message is older than its policy allows.
    Expired,
    /// Another try cannot help: the class of the failure says so.
    Final,
    /// Another try cannot help: `[terminal]` stands in the error text.
    Terminal,
    /// The message could not be sent back (no such queue, or the broker refused its
    /// content) until the retries were spent.
    Unroutable,
    /// The message cannot be understood, or asks for what is not allowed.
    Invalid,
    /// The id belongs to another message that still waits, or to a row that a newer
    /// version wrote; or the idempotency key was applied to another message.
    Conflict,
    /// The id belongs to a message that has already ended.
    Late,
    /// The same body came to the same queue under new ids, more often than its retries
    /// allow.
    Looping,
    /// The broker took the message out of its queue before a consumer was done with it: it
    /// expired there, or was pushed out.
    Undelivered,
}

text_form!(Reason {
    Exhausted => "exhausted",
    Expired => "expired",
    Final => "final",
    Terminal => "terminal",
    Unroutable => "unroutable",
    Invalid => "invalid",
    Conflict => "conflict",
    Late => "late",
    Looping => "looping",
    Undelivered => "undelivered",
});

impl Reason {
    /// Whether the budget ran out, which `retries_exhausted_total` counts.
    pub fn is_spent_budget(self) -> bool {
        matches!(self, Self::Exhausted | Self::Unroutable)
    }
}

/// What is known of a task when it is decided whether it goes to review.
#[derive(Clone, Copy, Debug)]
pub struct Evidence {
    /// A reason that was decided earlier.
    pub decided: Option<Reason>,
    /// `[terminal]` stands in the error text of the failure that just arrived.
    pub terminal: bool,
    /// The class of the failure that just arrived.
    pub class: Option<ErrorClass>,
    /// The budget after all attempts so far.
    pub budget: Budget,
    /// The attempt just made could not be sent.
    pub returned: bool,
    /// The task is older than its policy's `max_age`.
    pub expired: bool,
}

impl Evidence {
    /// A task of which nothing is known but its budget.
    pub fn of(budget: Budget) -> Self {
        Self {
            decided: None,
            terminal: false,
            class: None,
            budget,
            returned: false,
            expired: false,
        }
    }

    /// The reason for review, if there is one. The first line that applies decides.
    pub fn reason(self) -> Option<Reason> {
        self.decided
            .or(self.terminal.then_some(Reason::Terminal))
            .or((self.class == Some(ErrorClass::Final)).then_some(Reason::Final))
            .or((self.budget.is_spent() && self.returned).then_some(Reason::Unroutable))
            .or(self.budget.is_spent().then_some(Reason::Exhausted))
            .or(self.expired.then_some(Reason::Expired))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_cause_that_applies_is_the_reason() {
        let budget = Budget {
            retry_count: 1,
            max_retries: 3,
        };
        let fine = Evidence {
            class: Some(ErrorClass::Retryable),
            ..Evidence::of(budget)
        };
        assert_eq!(fine.reason(), None);
        let mut evidence = Evidence {
            expired: true,
            ..fine
        };
        assert_eq!(evidence.reason(), Some(Reason::Expired));
        evidence.budget = budget.at_least(3);
        assert_eq!(evidence.reason(), Some(Reason::Exhausted));
        evidence.returned = true;
        assert_eq!(evidence.reason(), Some(Reason::Unroutable));
        evidence.class = Some(ErrorClass::Final);
        assert_eq!(evidence.reason(), Some(Reason::Final));
        evidence.terminal = true;
        assert_eq!(evidence.reason(), Some(Reason::Terminal));
        evidence.decided = Some(Reason::Invalid);
        assert_eq!(evidence.reason(), Some(Reason::Invalid));
    }
}
