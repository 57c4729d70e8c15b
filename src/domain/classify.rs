//! What kind of failure a message tells of.

use super::policy::{Policy, fold};

/// The marker in an error text by which a person or a program says that no retry will help.
const TERMINAL_MARKER: &str = "[terminal]";

/// The kinds of failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ErrorClass {
    /// No retry will help: the message goes to review at once.
    Final,
    /// The error may pass: the message is retried with backoff.
    Retryable,
    /// The other side asked for a pause. With a `retry_after` the task waits that long and spends no attempt; without
    /// one it is treated as retryable.
    RateLimited,
}

text_form!(ErrorClass {
    Final => "final",
    Retryable => "retryable",
    RateLimited => "rate_limited",
});

/// A failure's class and whether the marker decided it, which is a review reason of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Classified {
    /// The kind of failure.
    pub class: ErrorClass,
    /// Whether the failure is final because of `[terminal]` in the error text.
    pub terminal: bool,
}

/// The class of a failure: final if `[terminal]` stands in the error text, whatever class is stated; else the class
/// stated on the message; else final by the policy's `non_retryable` patterns; else retryable.
///
/// The policy's `retryable` patterns decide nothing: an error that neither list knows is retried as well, because
/// losing a retry is worse than making one too many.
pub fn classify(stated: Option<ErrorClass>, error_text: &str, policy: &Policy) -> Classified {
    let by = |class| Classified {
        class,
        terminal: false,
    };
    if error_text.contains(TERMINAL_MARKER) {
        return Classified {
            class: ErrorClass::Final,
            terminal: true,
        };
    }
    if let Some(class) = stated {
        return by(class);
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
    use crate::domain::policy::ErrorPattern;

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
    fn the_class_names_are_final_retryable_and_rate_limited() {
        let names: Vec<&str> = ErrorClass::ALL.iter().map(|class| class.as_str()).collect();
        assert_eq!(names, ["final", "retryable", "rate_limited"]);
        for class in ErrorClass::ALL {
            assert_eq!(class.as_str().parse(), Ok(*class));
        }
        for unknown in ["", "Final", "rate-limited", "final "] {
            assert!(unknown.parse::<ErrorClass>().is_err());
        }
    }

    #[test]
    fn a_stated_class_wins_over_patterns() {
        let policy = policy(&["*"], &[]);
        for class in ErrorClass::ALL {
            let classified = classify(Some(*class), "schema mismatch", &policy);
            let expected = Classified {
                class: *class,
                terminal: false,
            };
            assert_eq!(classified, expected);
        }
    }

    #[test]
    fn the_terminal_marker_outranks_any_stated_class() {
        for class in ErrorClass::ALL {
            let classified = classify(Some(*class), "[terminal] gone", &Policy::default());
            let expected = Classified {
                class: ErrorClass::Final,
                terminal: true,
            };
            assert_eq!(classified, expected);
        }
    }

    #[test]
    fn the_terminal_marker_is_final_wherever_it_stands() {
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
    fn non_retryable_is_checked_before_retryable() {
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
    fn an_error_in_neither_list_is_retried() {
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
