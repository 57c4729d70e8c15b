//! How long a failed message waits, how often it may come back, and which rules apply to it.
//!
//! Pure: the random number is an argument, so any delay ever chosen can be computed again.

mod book;
mod delay;
mod file;
mod pattern;
#[cfg(test)]
mod presets;

use std::{fmt, time::Duration};

pub use book::PolicyBook;
pub use pattern::ErrorPattern;
pub(crate) use pattern::fold;

use super::limits::{LONGEST_DURATION, MOST_RETRIES};

/// The rules for one kind of failed message.
#[derive(Debug, Clone, PartialEq)]
pub struct Policy {
    /// How rows, events and the policy file call it.
    pub name: String,
    /// Automatic republishes before the message goes to manual review.
    pub max_retries: i32,
    /// The wait before the first retry.
    pub base_delay: Duration,
    /// What each further wait is multiplied by; at least 1.
    pub multiplier: f64,
    /// The wait never grows beyond this, jitter apart.
    pub max_delay: Duration,
    /// How long after its first failure a message may still be retried.
    pub max_age: Duration,
    /// How the wait is spread, so that what failed together does not come back together.
    pub jitter: Jitter,
    /// Errors known to pass by themselves. They decide nothing: an error in neither list is retried too.
    pub retryable: Vec<ErrorPattern>,
    /// Errors that no retry will cure: the message goes straight to review.
    pub non_retryable: Vec<ErrorPattern>,
    /// What makes two failures the same message.
    pub identity: Identity,
    /// What happens to a message that comes back under new ids.
    pub loops: Loops,
    /// What becomes of a dead letter that expired in its queue: its time to live was over before a consumer had done
    /// with it.
    pub expired: WhenUndelivered,
    /// What becomes of a dead letter that was pushed out of a full queue.
    pub maxlen: WhenUndelivered,
}

/// How one random number changes the capped delay.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Jitter {
    /// The delay as computed.
    None,
    /// Longer by zero up to `up_to`, also beyond `max_delay`: it never shortens a wait.
    Additive {
        /// The most that is added.
        up_to: Duration,
    },
    /// Shorter or longer by up to `by`, never below zero.
    PlusMinus {
        /// The most that is added or taken away.
        by: Duration,
    },
    /// Shorter or longer by up to `by` times the delay: 0.1 is ±10 %.
    Factor {
        /// The share of the delay, from 0 to 1.
        by: f64,
    },
    /// Anything from zero to the delay.
    Full,
}

/// What makes two failures the same message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Identity {
    /// The producer's `message_id`.
    MessageId,
    /// Queue and payload, for producers that mint a new id at every failure: by id, their retries would never end.
    Payload,
}

/// What happens to a message that comes back under new ids more often than its retries allow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Loops {
    /// It is retried, counted, and told of in the log.
    Warn,
    /// It goes to review, too.
    Review,
}

/// What becomes of a dead letter that is no consumer's failure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WhenUndelivered {
    /// It is retried, as a failure is.
    Retry,
    /// It goes to review at once.
    Review,
}

text_form!(WhenUndelivered {
    Retry => "retry",
    Review => "review",
});

/// Why a policy or a policy file is refused, in one line that names the policy and the key.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct PolicyError(String);

impl Default for Policy {
    /// 3 retries within a week, 2 s doubling to 60 s, up to 1 s added.
    fn default() -> Self {
        Self {
            name: "default".to_owned(),
            max_retries: 3,
            base_delay: Duration::from_secs(2),
            multiplier: 2.0,
            max_delay: Duration::from_secs(60),
            max_age: Duration::from_secs(7 * 24 * 60 * 60),
            jitter: Jitter::Additive {
                up_to: Duration::from_secs(1),
            },
            retryable: Vec::new(),
            non_retryable: Vec::new(),
            identity: Identity::MessageId,
            loops: Loops::Warn,
            // Who sets a time to live says that the message must not be worked on later.
            expired: WhenUndelivered::Review,
            // A full queue has room again after a while.
            maxlen: WhenUndelivered::Retry,
        }
    }
}

/// The policy in one line, for people.
impl fmt::Display for Policy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let time = humantime::format_duration;
        let (name, retries) = (&self.name, self.max_retries);
        let (base, max) = (time(self.base_delay), time(self.max_delay));
        write!(
            f,
            "{name}: {retries} retries, {base} growing {}x to {max}",
            self.multiplier
        )?;
        match self.jitter {
            Jitter::None => {}
            Jitter::Additive { up_to } => write!(f, ", plus up to {}", time(up_to))?,
            Jitter::PlusMinus { by } => write!(f, ", plus or minus {}", time(by))?,
            Jitter::Factor { by } => write!(f, ", plus or minus {} %", by * 100.0)?,
            Jitter::Full => write!(f, ", or anything less")?,
        }
        write!(f, ", within {}", time(self.max_age))?;
        if self.identity == Identity::Payload {
            write!(f, ", identity payload")?;
        }
        if self.loops == Loops::Review {
            write!(f, ", loops review")?;
        }
        for (what, then, default) in [
            ("expired", self.expired, WhenUndelivered::Review),
            ("maxlen", self.maxlen, WhenUndelivered::Retry),
        ] {
            if then != default {
                write!(f, ", {what} {then}")?;
            }
        }
        for (what, patterns) in [
            ("non_retryable", &self.non_retryable),
            ("retryable", &self.retryable),
        ] {
            if !patterns.is_empty() {
                let patterns: Vec<String> = patterns.iter().map(ToString::to_string).collect();
                write!(f, ", {what} {}", patterns.join(" | "))?;
            }
        }
        Ok(())
    }
}

impl Policy {
    /// Refuses numbers no operator can mean.
    fn validate(&self) -> Result<(), PolicyError> {
        let named = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-' | '.');
        if self.name.is_empty() || self.name.len() > 64 || !self.name.chars().all(named) {
            return Err(self.refuse("name", "must be 1 to 64 letters, digits, `_`, `-` or `.`"));
        }
        if !(0..=MOST_RETRIES).contains(&self.max_retries) {
            return Err(self.refuse(
                "max_retries",
                format!("must be 0 to {MOST_RETRIES}, not {}", self.max_retries),
            ));
        }
        if !(self.multiplier.is_finite() && self.multiplier >= 1.0) {
            return Err(self.refuse(
                "multiplier",
                format!("must be a number of at least 1, not {}", self.multiplier),
            ));
        }
        let jitter = match self.jitter {
            Jitter::Additive { up_to } => up_to,
            Jitter::PlusMinus { by } => by,
            Jitter::Factor { by } if !(0.0..=1.0).contains(&by) => {
                return Err(self.refuse("jitter", format!("factor must be 0 to 1, not {by}")));
            }
            Jitter::Factor { .. } | Jitter::None | Jitter::Full => Duration::ZERO,
        };
        let durations = [
            ("base_delay", self.base_delay),
            ("max_delay", self.max_delay),
            ("max_age", self.max_age),
            ("jitter", jitter),
        ];
        for (key, duration) in durations {
            if duration > LONGEST_DURATION {
                return Err(self.refuse(key, "must not be longer than ten years"));
            }
        }
        if self.base_delay > self.max_delay {
            return Err(self.refuse(
                "base_delay",
                format!(
                    "must not be longer than max_delay ({:?} > {:?})",
                    self.base_delay, self.max_delay
                ),
            ));
        }
        if self.max_age == Duration::ZERO {
            return Err(self.refuse("max_age", "must be longer than zero"));
        }
        Ok(())
    }

    fn refuse(&self, key: &str, problem: impl std::fmt::Display) -> PolicyError {
        PolicyError::at(&self.name, key, problem)
    }
}

impl PolicyError {
    fn at(policy: &str, key: &str, problem: impl std::fmt::Display) -> Self {
        Self::line(format!("policy {policy:?}: {key}: {problem}"))
    }

    /// Joins the lines of a text: parsers explain themselves over several, and a log entry has one.
    fn line(text: impl AsRef<str>) -> Self {
        let lines = text
            .as_ref()
            .split(char::is_control)
            .filter(|line| !line.is_empty());
        Self(lines.collect::<Vec<_>>().join("; "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_policy_made_in_code_is_held_to_the_same_rules() {
        assert_eq!(Policy::default().validate(), Ok(()));
        let refused = |policy: Policy| policy.validate().unwrap_err().to_string();
        assert_eq!(
            refused(Policy {
                max_retries: -1,
                ..Policy::default()
            }),
            "policy \"default\": max_retries: must be 0 to 1000, not -1"
        );
        assert_eq!(
            refused(Policy {
                name: "two\nlines".into(),
                ..Policy::default()
            }),
            "policy \"two\\nlines\": name: must be 1 to 64 letters, digits, `_`, `-` or `.`"
        );
        assert_eq!(
            refused(Policy {
                max_delay: Duration::MAX,
                ..Policy::default()
            }),
            "policy \"default\": max_delay: must not be longer than ten years"
        );
    }
}
