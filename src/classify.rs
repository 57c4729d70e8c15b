//! What kind of failure a message tells of.

use crate::policy::{Policy, fold};

/// Seed 000's marker in an error text: a person or a program has decided that no retry will help.
const TERMINAL_MARKER: &str = "[terminal]";

/// The kinds of failure, as seed 002 has them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// No retry will help: to review at once.
    Final,
    /// May pass: retried with backoff.
    Retryable,
    /// Told to come later: waits for its `retry_after` without spending an attempt, else as retryable.
    RateLimited,
}

impl ErrorClass {
    /// The name in rows, events and on the wire.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Final => "final",
            Self::Retryable => "retryable",
            Self::RateLimited => "rate_limited",
        }
    }

    /// The class of a name, spelt exactly as [`ErrorClass::as_str`] gives it.
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Final, Self::Retryable, Self::RateLimited]
            .into_iter()
            .find(|class| class.as_str() == name)
    }
}

/// A failure's class and whether the marker decided it, which is a review reason of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Classified {
    /// What to do about the failure.
    pub class: ErrorClass,
    /// Final because of `[terminal]` in the error text.
    pub terminal: bool,
}

/// The class of a failure: the one stated on the message, else final by `[terminal]` in the error text, else final by
/// the policy's `non_retryable` patterns, else retryable.
///
/// The policy's `retryable` patterns come after the `non_retryable` ones and decide nothing more, since what neither
/// list knows is retried as well (seed 004): losing a retry is worse than one too many.
pub fn classify(stated: Option<ErrorClass>, error_text: &str, policy: &Policy) -> Classified {
    let by = |class| Classified {
        class,
        terminal: false,
    };
    if let Some(class) = stated {
        return by(class);
    }
    if error_text.contains(TERMINAL_MARKER) {
        return Classified {
            class: ErrorClass::Final,
            terminal: true,
        };
    }
    if !policy.non_retryable.is_empty() {
        let folded = fold(error_text);
        if policy
            .non_retryable
            .iter()
            .any(|pattern| pattern.matches_folded(&folded))
        {
            return by(ErrorClass::Final);
        }
    }
    by(ErrorClass::Retryable)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::policy::ErrorPattern;

    const CLASSES: [ErrorClass; 3] = [
        ErrorClass::Final,
        ErrorClass::Retryable,
        ErrorClass::RateLimited,
    ];

    fn policy(non_retryable: &[&str], retryable: &[&str]) -> Policy {
        let patterns = |list: &[&str]| {
            list.iter()
                .map(|text| ErrorPattern::parse(text).unwrap())
                .collect()
        };
        Policy {
            non_retryable: patterns(non_retryable),
            retryable: patterns(retryable),
            ..Policy::default()
        }
    }

    fn class(error_text: &str, policy: &Policy) -> ErrorClass {
        let classified = classify(None, error_text, policy);
        assert!(!classified.terminal);
        classified.class
    }

    #[test]
    fn seed_002_class_names() {
        assert_eq!(
            CLASSES.map(ErrorClass::as_str),
            ["final", "retryable", "rate_limited"]
        );
        for class in CLASSES {
            assert_eq!(ErrorClass::parse(class.as_str()), Some(class));
        }
        for unknown in ["", "Final", "rate-limited", "final "] {
            assert_eq!(ErrorClass::parse(unknown), None);
        }
    }

    #[test]
    fn a_stated_class_wins_over_marker_and_patterns() {
        let policy = policy(&["*"], &[]);
        for class in CLASSES {
            let classified = classify(Some(class), "[terminal] schema mismatch", &policy);
            assert_eq!(
                classified,
                Classified {
                    class,
                    terminal: false
                }
            );
        }
    }

    #[test]
    fn seed_000_terminal_marker_is_final_wherever_it_stands() {
        let policy = policy(&["schema"], &["schema"]);
        for text in [
            "[terminal]",
            "schema mismatch [terminal]",
            "[terminal] gone",
        ] {
            let classified = classify(None, text, &policy);
            assert_eq!(
                classified,
                Classified {
                    class: ErrorClass::Final,
                    terminal: true
                }
            );
        }
    }

    #[test]
    fn the_word_terminal_without_brackets_is_no_marker() {
        assert_eq!(
            class("terminal 4 is offline", &Policy::default()),
            ErrorClass::Retryable
        );
    }

    #[test]
    fn seed_004_non_retryable_is_checked_before_retryable() {
        let strict = policy(&["ValueError", "TypeError", "KeyError"], &[]);
        assert_eq!(class("KeyError: 'id'", &strict), ErrorClass::Final);
        assert_eq!(
            class("TimeoutError: Connection timeout", &strict),
            ErrorClass::Retryable
        );

        let both = policy(&["ValueError"], &["ValueError", "NetworkError"]);
        assert_eq!(class("ValueError: bad", &both), ErrorClass::Final);
        assert_eq!(class("NetworkError: reset", &both), ErrorClass::Retryable);
    }

    #[test]
    fn seed_004_an_error_in_neither_list_is_retried() {
        assert_eq!(class("anything", &Policy::default()), ErrorClass::Retryable);
        assert_eq!(
            class("anything", &policy(&[], &["NetworkError"])),
            ErrorClass::Retryable
        );
        assert_eq!(
            class("", &policy(&["KeyError"], &["NetworkError"])),
            ErrorClass::Retryable
        );
    }

    proptest! {
        #[test]
        fn only_the_marker_makes_an_unstated_failure_final_under_the_default(text: String) {
            let classified = classify(None, &text, &Policy::default());
            prop_assert_eq!(classified.terminal, text.contains("[terminal]"));
            prop_assert_eq!(classified.terminal, classified.class == ErrorClass::Final);
        }
    }
}
