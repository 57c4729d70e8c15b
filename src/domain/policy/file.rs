//! Reading a policy file.

use std::{sync::Arc, time::Duration};

use globset::{Glob, GlobSet, GlobSetBuilder};
use serde::de::DeserializeOwned;
use toml::{Table, Value};

use super::{
    ErrorPattern, Identity, Jitter, Loops, MOST_RETRIES, Policy, PolicyError, WhenUndelivered,
};

/// The table that replaces the default.
pub(super) const DEFAULT: &str = "default";

/// The tables under `policy`, in file order.
pub(super) fn policy_tables(toml: &str) -> Result<Table, PolicyError> {
    let file: Table = toml.parse().map_err(|error: toml::de::Error| {
        let before = error
            .span()
            .and_then(|span| toml.get(..span.start))
            .unwrap_or_default();
        let line = before.matches('\n').count() + 1;
        PolicyError::line(format!("line {line}: {}", error.message()))
    })?;
    let mut tables = Table::new();
    for (key, value) in file {
        match value {
            Value::Table(policies) if key == "policy" => tables = policies,
            _ => {
                return Err(PolicyError::line(format!(
                    "{key:?}: only [policy.NAME] tables belong here"
                )));
            }
        }
    }
    Ok(tables)
}

/// One `[policy.NAME]` table: the policy, and the messages it is for.
#[derive(Debug, Clone)]
pub(super) struct Chapter {
    pub(super) policy: Arc<Policy>,
    pub(super) categories: Vec<String>,
    /// The queue patterns as they stand in the file, for people.
    pub(super) queue_patterns: Vec<String>,
    /// The same patterns, for matching.
    pub(super) queues: GlobSet,
}

impl Chapter {
    pub(super) fn read(name: &str, table: &Value, default: &Policy) -> Result<Self, PolicyError> {
        let Value::Table(table) = table else {
            return Err(PolicyError::line(format!(
                "policy {name:?}: must be a table, [policy.{name}]"
            )));
        };
        let mut policy = Policy {
            name: name.to_owned(),
            ..default.clone()
        };
        let mut categories = Vec::new();
        let mut queue_patterns = Vec::new();
        let mut queues = GlobSet::empty();
        for (key, value) in table {
            let entry = Entry {
                policy: name,
                key,
                value,
            };
            match key.as_str() {
                "max_retries" => policy.max_retries = entry.read()?,
                "max_attempts" if table.contains_key("max_retries") => {
                    return Err(entry.refuse("max_retries says the same; give one of the two"));
                }
                "max_attempts" => policy.max_retries = entry.retries_of_attempts()?,
                "base_delay" => policy.base_delay = entry.duration(value)?,
                "multiplier" => policy.multiplier = entry.read()?,
                "max_delay" => policy.max_delay = entry.duration(value)?,
                "max_age" => policy.max_age = entry.duration(value)?,
                "jitter" => policy.jitter = entry.jitter()?,
                "retryable" => policy.retryable = entry.patterns()?,
                "non_retryable" => policy.non_retryable = entry.patterns()?,
                "identity" => policy.identity = entry.identity()?,
                "loops" => policy.loops = entry.loops()?,
                "expired" => policy.expired = entry.when_undelivered()?,
                "maxlen" => policy.maxlen = entry.when_undelivered()?,
                "categories" => categories = entry.categories()?,
                // The default takes what nothing else matches: a pattern of its own could only mislead.
                "queues" if name == DEFAULT => {
                    return Err(entry.refuse("the default has no queue patterns"));
                }
                "queues" => (queue_patterns, queues) = entry.queues()?,
                _ => return Err(entry.refuse("unknown key")),
            }
        }
        policy.validate()?;
        Ok(Self {
            policy: Arc::new(policy),
            categories,
            queue_patterns,
            queues,
        })
    }
}

/// One key of a policy. Keys are read one by one, rather than the table as a whole, so that every refusal can say
/// which one it is about.
struct Entry<'a> {
    policy: &'a str,
    key: &'a str,
    value: &'a Value,
}

impl Entry<'_> {
    fn refuse(&self, problem: impl std::fmt::Display) -> PolicyError {
        PolicyError::at(self.policy, self.key, problem)
    }

    fn read<T: DeserializeOwned>(&self) -> Result<T, PolicyError> {
        let read = self.value.clone().try_into();
        read.map_err(|error| self.refuse(error.message()))
    }

    /// Turns a number of attempts into one of retries: the first execution is an attempt, but no retry.
    fn retries_of_attempts(&self) -> Result<i32, PolicyError> {
        match self.read::<i32>()? {
            attempts @ 1.. if attempts <= MOST_RETRIES => Ok(attempts - 1),
            attempts => {
                let problem = format!("must be 1 to {MOST_RETRIES}, not {attempts}");
                Err(self.refuse(problem))
            }
        }
    }

    fn duration(&self, value: &Value) -> Result<Duration, PolicyError> {
        let Some(text) = value.as_str() else {
            return Err(self.refuse("must be a duration in quotes, such as \"5m\" or \"500ms\""));
        };
        humantime::parse_duration(text).map_err(|error| self.refuse(format!("{text:?}: {error}")))
    }

    fn jitter(&self) -> Result<Jitter, PolicyError> {
        const SHAPE: &str = "must be \"none\", \"full\", { additive = \"1s\" }, { plus_minus = \"30s\" } \
                             or { factor = 0.1 }";
        match self.value {
            Value::String(kind) if kind == "none" => Ok(Jitter::None),
            Value::String(kind) if kind == "full" => Ok(Jitter::Full),
            Value::Table(table) if table.len() == 1 => {
                let (kind, by) = table.iter().next().ok_or_else(|| self.refuse(SHAPE))?;
                match (kind.as_str(), by) {
                    ("additive", up_to) => Ok(Jitter::Additive {
                        up_to: self.duration(up_to)?,
                    }),
                    ("plus_minus", by) => Ok(Jitter::PlusMinus {
                        by: self.duration(by)?,
                    }),
                    ("factor", Value::Float(by)) => Ok(Jitter::Factor { by: *by }),
                    ("factor", Value::Integer(0)) => Ok(Jitter::Factor { by: 0.0 }),
                    ("factor", Value::Integer(1)) => Ok(Jitter::Factor { by: 1.0 }),
                    ("factor", _) => Err(self.refuse("factor must be 0 to 1")),
                    _ => Err(self.refuse(SHAPE)),
                }
            }
            _ => Err(self.refuse(SHAPE)),
        }
    }

    fn identity(&self) -> Result<Identity, PolicyError> {
        match self.value.as_str() {
            Some("message_id") => Ok(Identity::MessageId),
            Some("payload") => Ok(Identity::Payload),
            _ => Err(self.refuse("must be \"message_id\" or \"payload\"")),
        }
    }

    fn loops(&self) -> Result<Loops, PolicyError> {
        match self.value.as_str() {
            Some("warn") => Ok(Loops::Warn),
            Some("review") => Ok(Loops::Review),
            _ => Err(self.refuse("must be \"warn\" or \"review\"")),
        }
    }

    fn when_undelivered(&self) -> Result<WhenUndelivered, PolicyError> {
        let word = self.value.as_str().and_then(|word| word.parse().ok());
        word.ok_or_else(|| self.refuse("must be \"retry\" or \"review\""))
    }

    fn patterns(&self) -> Result<Vec<ErrorPattern>, PolicyError> {
        let patterns: Vec<String> = self.read()?;
        let parsed = patterns.iter().map(|pattern| ErrorPattern::parse(pattern));
        parsed
            .collect::<Result<_, _>>()
            .map_err(|error| self.refuse(error))
    }

    fn categories(&self) -> Result<Vec<String>, PolicyError> {
        let categories: Vec<String> = self.read()?;
        // A message without a category has an empty one, so an empty name here would match all of those.
        if categories.iter().any(String::is_empty) {
            return Err(self.refuse("a category must not be empty"));
        }
        Ok(categories)
    }

    fn queues(&self) -> Result<(Vec<String>, GlobSet), PolicyError> {
        let globs: Vec<String> = self.read()?;
        let mut set = GlobSetBuilder::new();
        for glob in &globs {
            if glob.is_empty() {
                return Err(self.refuse("a queue pattern must not be empty"));
            }
            set.add(Glob::new(glob).map_err(|error| self.refuse(error))?);
        }
        let set = set.build().map_err(|error| self.refuse(error))?;
        Ok((globs, set))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::domain::policy::PolicyBook;

    fn parse(toml: &str) -> PolicyBook {
        PolicyBook::parse(toml, Policy::default()).unwrap()
    }

    fn refused(toml: &str) -> String {
        PolicyBook::parse(toml, Policy::default())
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn every_key_is_read() {
        let book = parse(
            r#"
            [policy.billing]
            max_retries = 7
            base_delay = "500ms"
            multiplier = 1.5
            max_delay = "1h 30m"
            max_age = "2days"
            jitter = { plus_minus = "30s" }
            retryable = ["timeout"]
            non_retryable = ["http 4*"]
            identity = "payload"
            loops = "review"
            expired = "retry"
            maxlen = "review"
            categories = ["BILLING"]
            queues = ["billing.*"]
            "#,
        );
        let expected = Policy {
            name: "billing".into(),
            max_retries: 7,
            base_delay: Duration::from_millis(500),
            multiplier: 1.5,
            max_delay: Duration::from_secs(5400),
            max_age: Duration::from_secs(172_800),
            jitter: Jitter::PlusMinus {
                by: Duration::from_secs(30),
            },
            retryable: vec![ErrorPattern::parse("timeout").unwrap()],
            non_retryable: vec![ErrorPattern::parse("http 4*").unwrap()],
            identity: Identity::Payload,
            loops: Loops::Review,
            expired: WhenUndelivered::Retry,
            maxlen: WhenUndelivered::Review,
        };
        assert_eq!(**book.choose("BILLING", "any"), expected);
        assert_eq!(**book.choose("", "billing.invoices.v2"), expected);
    }

    #[test]
    fn max_attempts_counts_the_first_execution() {
        for (attempts, retries) in [(1, 0), (3, 2), (1000, 999)] {
            let book = parse(&format!("[policy.a]\nmax_attempts = {attempts}"));
            assert_eq!(book.named(Some("a")).max_retries, retries);
        }
    }

    #[test]
    fn every_kind_of_jitter_is_read() {
        let second = Duration::from_secs(1);
        for (text, jitter) in [
            ("\"none\"", Jitter::None),
            ("\"full\"", Jitter::Full),
            ("{ additive = \"1s\" }", Jitter::Additive { up_to: second }),
            ("{ plus_minus = \"1s\" }", Jitter::PlusMinus { by: second }),
            ("{ factor = 0.1 }", Jitter::Factor { by: 0.1 }),
            ("{ factor = 1 }", Jitter::Factor { by: 1.0 }),
        ] {
            let book = parse(&format!("[policy.a]\njitter = {text}\nmultiplier = 3"));
            assert_eq!(book.named(Some("a")).jitter, jitter);
        }
    }

    #[test]
    fn refusals_are_one_line_and_name_policy_and_key() {
        for (text, expected) in [
            ("max_retrys = 3", "max_retrys: unknown key"),
            (
                "expired = \"drop\"",
                "expired: must be \"retry\" or \"review\"",
            ),
            ("maxlen = true", "maxlen: must be \"retry\" or \"review\""),
            ("max_retries = -1", "max_retries: must be 0 to 1000, not -1"),
            (
                "max_retries = 1001",
                "max_retries: must be 0 to 1000, not 1001",
            ),
            ("max_retries = 99999999999", "max_retries: "),
            ("max_retries = \"3\"", "max_retries: "),
            ("max_attempts = 0", "max_attempts: must be 1 to 1000, not 0"),
            (
                "max_attempts = 1001",
                "max_attempts: must be 1 to 1000, not 1001",
            ),
            (
                "max_retries = 2\nmax_attempts = 3",
                "max_attempts: max_retries says the same; give one of the two",
            ),
            (
                "multiplier = 0",
                "multiplier: must be a number of at least 1, not 0",
            ),
            (
                "multiplier = -2.0",
                "multiplier: must be a number of at least 1, not -2",
            ),
            (
                "multiplier = 0.99",
                "multiplier: must be a number of at least 1, not 0.99",
            ),
            (
                "multiplier = nan",
                "multiplier: must be a number of at least 1, not NaN",
            ),
            (
                "multiplier = inf",
                "multiplier: must be a number of at least 1, not inf",
            ),
            ("base_delay = 5", "base_delay: must be a duration in quotes"),
            ("base_delay = \"-5s\"", "base_delay: \"-5s\": "),
            ("base_delay = \"5 parsecs\"", "base_delay: \"5 parsecs\": "),
            (
                "base_delay = \"61s\"",
                "base_delay: must not be longer than max_delay (61s > 60s)",
            ),
            (
                "max_delay = \"11y\"",
                "max_delay: must not be longer than ten years",
            ),
            ("max_age = \"0s\"", "max_age: must be longer than zero"),
            ("jitter = \"some\"", "jitter: must be \"none\", \"full\""),
            (
                "jitter = { factor = 0.1, additive = \"1s\" }",
                "jitter: must be",
            ),
            ("jitter = { up_to = \"1s\" }", "jitter: must be"),
            (
                "jitter = { factor = 1.5 }",
                "jitter: factor must be 0 to 1, not 1.5",
            ),
            (
                "jitter = { factor = nan }",
                "jitter: factor must be 0 to 1, not NaN",
            ),
            ("jitter = { factor = -1 }", "jitter: factor must be 0 to 1"),
            (
                "jitter = { additive = 1 }",
                "jitter: must be a duration in quotes",
            ),
            ("retryable = \"timeout\"", "retryable: "),
            (
                "non_retryable = [\"\"]",
                "non_retryable: an error pattern must not be empty",
            ),
            (
                "identity = \"body\"",
                "identity: must be \"message_id\" or \"payload\"",
            ),
            ("loops = true", "loops: must be \"warn\" or \"review\""),
            (
                "categories = [\"\"]",
                "categories: a category must not be empty",
            ),
            (
                "categories = [\"A\", \"A\"]",
                "categories: \"A\" is already taken by policy \"p\"",
            ),
            ("queues = [\"[a\"]", "queues: error parsing glob '[a'"),
            (
                "queues = [\"\"]",
                "queues: a queue pattern must not be empty",
            ),
        ] {
            let error = refused(&format!("[policy.p]\n{text}"));
            assert!(
                error.starts_with(&format!("policy \"p\": {expected}")),
                "{text}: {error}"
            );
            assert_eq!(error.lines().count(), 1, "{error}");
        }
    }

    #[test]
    fn a_file_that_is_not_a_policy_file_is_refused() {
        assert!(refused("[policy.a]\n\nmax_retries = = 3").starts_with("line 3: "));
        assert!(refused("[policy.a]\n[policy.a]").starts_with("line 2: "));
        assert_eq!(
            refused("[polcy.a]"),
            "\"polcy\": only [policy.NAME] tables belong here"
        );
        assert_eq!(
            refused("policy = 3"),
            "\"policy\": only [policy.NAME] tables belong here"
        );
        assert_eq!(
            refused("[policy]\na = 3"),
            "policy \"a\": must be a table, [policy.a]"
        );
        assert!(refused("[policy.\"a b\"]").starts_with("policy \"a b\": name: "));
        assert!(
            refused("[policy.default]\nqueues = [\"*\"]")
                .starts_with("policy \"default\": queues: ")
        );
    }

    proptest! {
        #[test]
        fn parse_never_panics(text: String) {
            let _ = PolicyBook::parse(&text, Policy::default());
        }

        #[test]
        fn parse_never_panics_on_what_looks_like_a_policy(
            key in "max_retries|max_attempts|base_delay|multiplier|max_delay|max_age|jitter|retryable|identity|loops|categories|queues",
            value in prop_oneof![
                "[-0-9.a-z\"'\\[\\]{}=, *?!\\\\]{0,24}",
                "-?[0-9]{1,25}",
                "\"[^\"]*\"",
                "\\[\"[^\"]*\"\\]",
                "\\{[a-z_]{1,8} = \"[^\"]*\"\\}",
            ],
        ) {
            if let Err(error) = PolicyBook::parse(&format!("[policy.p]\n{key} = {value}"), Policy::default()) {
                prop_assert_eq!(error.to_string().lines().count(), 1);
            }
        }
    }
}
