//! How many retries a message has had, and how many it may have.

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

#[cfg(test)]
mod tests {
    use super::*;

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
