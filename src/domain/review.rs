//! Why a task goes to people: the reasons, and the one place that decides.
//!
//! | reason | decided by |
//! |---|---|
//! | `invalid` | [`crate::wire::decode`], or Postgres, which refused to store the message |
//! | `conflict`, `late` | [`Known::meets`](super::arrival::Known::meets), when an arrival's id or key is taken |
//! | all others | [`Evidence::reason`], when a failure arrives, when its task is claimed, and when a retry finds no queue |

use super::classify::ErrorClass;

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
    /// The queue does not exist, and the retries are spent on finding that out.
    Unroutable,
    /// The message cannot be understood, or asks for what is not allowed.
    Invalid,
    /// The id belongs to another message that still waits, or the row that has it
    /// cannot be understood.
    Conflict,
    /// The id belongs to a message that has already ended.
    Late,
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
});

impl Reason {
    /// Whether the budget ran out, which `retries_exhausted_total` counts.
    pub fn is_spent_budget(self) -> bool {
        matches!(self, Self::Exhausted | Self::Unroutable)
    }
}

/// Retries made, and retries allowed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[allow(missing_docs)] // the columns have the same names
pub struct Budget {
    pub retry_count: i32,
    pub max_retries: i32,
}

impl Budget {
    /// Whether no retry is left. Every decision about a spent budget asks here.
    pub fn is_spent(self) -> bool {
        self.retry_count >= self.max_retries
    }

    /// How often the message was executed so far: the first execution is no retry.
    pub fn executions(self) -> i32 {
        self.retry_count.saturating_add(1)
    }

    /// How often the message may be executed in all.
    pub fn max_executions(self) -> i32 {
        self.max_retries.saturating_add(1)
    }

    /// The same budget with at least `retry_count` retries made: a count never goes down.
    pub fn at_least(self, retry_count: i32) -> Self {
        Self {
            retry_count: self.retry_count.max(retry_count),
            ..self
        }
    }
}

/// What is known of a task when it is decided whether it goes to review. The default
/// is a task of which nothing is known but that its budget is spent.
#[derive(Clone, Copy, Debug, Default)]
pub struct Evidence {
    /// A reason that was decided earlier.
    pub decided: Option<Reason>,
    /// `[terminal]` stands in the error text of the failure that just arrived.
    pub terminal: bool,
    /// The class of the failure that just arrived.
    pub class: Option<ErrorClass>,
    /// The budget after all attempts so far.
    pub budget: Budget,
    /// The broker just returned the message: its queue does not exist.
    pub returned: bool,
    /// The task is older than its policy's `max_age`.
    pub expired: bool,
}

impl Evidence {
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
    fn the_first_cause_in_the_table_is_the_reason() {
        let budget = Budget {
            retry_count: 1,
            max_retries: 3,
        };
        let fine = Evidence {
            budget,
            class: Some(ErrorClass::Retryable),
            ..Evidence::default()
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

    #[test]
    fn a_count_never_goes_down_and_a_budget_of_none_is_spent_at_once() {
        let budget = Budget {
            retry_count: 2,
            max_retries: 3,
        };
        assert_eq!(budget.at_least(1), budget);
        assert!(!budget.is_spent());
        assert!(budget.at_least(3).is_spent());
        assert!(Budget::default().is_spent());
    }
}
