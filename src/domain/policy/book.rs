//! Which policy a message gets.

use std::{collections::HashMap, sync::Arc};

use super::{
    Policy, PolicyError,
    file::{Chapter, DEFAULT, policy_tables},
};

const PRESETS: &str = include_str!("../../../policies.toml");

/// The named policies and who gets them.
#[derive(Debug, Clone)]
pub struct PolicyBook {
    default: Arc<Policy>,
    /// In file order, which decides between queue patterns.
    chapters: Vec<Chapter>,
    /// Category to its place in `chapters`.
    by_category: HashMap<String, usize>,
    /// Name to its place in `chapters`.
    by_name: HashMap<String, usize>,
}

impl PolicyBook {
    /// The shipped `policies.toml`.
    pub fn presets(default: Policy) -> Result<Self, PolicyError> {
        Self::parse(PRESETS, default)
    }

    /// Reads a policy file. A key a policy leaves out comes from the default: the file's own `[policy.default]` if
    /// it has one, itself completed from `default`, else `default`.
    pub fn parse(toml: &str, default: Policy) -> Result<Self, PolicyError> {
        default.validate()?;
        let mut book = Self {
            default: Arc::new(default),
            chapters: Vec::new(),
            by_category: HashMap::new(),
            by_name: HashMap::new(),
        };
        let tables = policy_tables(toml)?;
        // The default is read first, wherever it stands, because the others are completed from it.
        if let Some(table) = tables.get(DEFAULT) {
            book.default = Chapter::read(DEFAULT, table, &book.default)?.policy;
        }
        for (name, table) in &tables {
            let chapter = Chapter::read(name, table, &book.default)?;
            for category in &chapter.categories {
                let taken = book
                    .by_category
                    .insert(category.clone(), book.chapters.len());
                if let Some(owner) = taken {
                    let owner = book
                        .chapters
                        .get(owner)
                        .map_or(name, |owner| &owner.policy.name);
                    let problem = format!("{category:?} is already taken by policy {owner:?}");
                    return Err(PolicyError::at(name, "categories", problem));
                }
            }
            book.by_name.insert(name.clone(), book.chapters.len());
            book.chapters.push(chapter);
        }
        Ok(book)
    }

    /// The policy for a new message: by its category, else by the first queue pattern in the file that matches, else
    /// the default.
    pub fn choose(&self, category: &str, queue: &str) -> &Arc<Policy> {
        let by_category = self
            .by_category
            .get(category)
            .and_then(|&at| self.chapters.get(at));
        by_category
            .or_else(|| {
                self.chapters
                    .iter()
                    .find(|chapter| chapter.queues.is_match(queue))
            })
            .map_or(&self.default, |chapter| &chapter.policy)
    }

    /// The policy a stored row names; the default if the row names none, or if the file has lost it since.
    pub fn named(&self, name: Option<&str>) -> &Arc<Policy> {
        let chapter = name
            .and_then(|name| self.by_name.get(name))
            .and_then(|&at| self.chapters.get(at));
        chapter.map_or(&self.default, |chapter| &chapter.policy)
    }

    /// Every policy in one line each: the default, then those of the file in its order.
    pub fn describe(&self) -> String {
        let mut text = String::new();
        if !self.chapters.iter().any(|c| c.policy.name == DEFAULT) {
            text.push_str(&format!("policy {}\n", self.default));
        }
        for chapter in &self.chapters {
            text.push_str(&format!("policy {}", chapter.policy));
            for (what, names) in [
                ("categories", &chapter.categories),
                ("queues", &chapter.queue_patterns),
            ] {
                if !names.is_empty() {
                    text.push_str(&format!("; {what} {}", names.join(", ")));
                }
            }
            text.push('\n');
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn parse(toml: &str) -> PolicyBook {
        PolicyBook::parse(toml, Policy::default()).unwrap()
    }

    fn refused(toml: &str) -> String {
        PolicyBook::parse(toml, Policy::default())
            .unwrap_err()
            .to_string()
    }

    #[test]
    fn category_wins_over_queue_and_queue_over_default() {
        let book = parse(
            r#"
            [policy.by_queue]
            queues = ["orders", "billing.*"]
            [policy.by_category]
            categories = ["KV", "RPC"]
            "#,
        );
        assert_eq!(book.choose("KV", "orders").name, "by_category");
        assert_eq!(book.choose("RPC", "elsewhere").name, "by_category");
        assert_eq!(book.choose("", "orders").name, "by_queue");
        assert_eq!(book.choose("UNKNOWN", "billing.x").name, "by_queue");
        assert_eq!(book.choose("kv", "elsewhere").name, "default");
        assert_eq!(book.choose("", "orders.eu").name, "default");
    }

    // Fails if toml loses its `preserve_order` feature: tables would then come by name.
    #[test]
    fn the_first_queue_pattern_in_the_file_wins() {
        let book = parse(
            "[policy.z]\nqueues = [\"a.b\"]\n[policy.m]\nqueues = [\"a.*\"]\n[policy.a]\nqueues = [\"*\"]",
        );
        assert_eq!(book.choose("", "a.b").name, "z");
        assert_eq!(book.choose("", "a.c").name, "m");
        assert_eq!(book.choose("", "c").name, "a");
        let names: Vec<&str> = book.chapters.iter().map(|c| &*c.policy.name).collect();
        assert_eq!(names, ["z", "m", "a"]);
    }

    #[test]
    fn what_a_policy_leaves_out_comes_from_the_default() {
        let default = Policy {
            max_retries: 9,
            ..Policy::default()
        };
        let book = PolicyBook::parse("[policy.a]\nbase_delay = \"1s\"", default.clone()).unwrap();
        let expected = Policy {
            name: "a".into(),
            base_delay: Duration::from_secs(1),
            ..default
        };
        assert_eq!(**book.named(Some("a")), expected);
    }

    #[test]
    fn a_default_in_the_file_replaces_the_default_wherever_it_stands() {
        let book = parse(
            "[policy.a]\nbase_delay = \"1s\"\n[policy.default]\nmax_retries = 5\ncategories = [\"PLAIN\"]",
        );
        assert_eq!(book.named(None).max_retries, 5);
        assert_eq!(book.choose("PLAIN", ""), book.named(None));
        assert_eq!(book.named(Some("default")), book.named(None));
        assert_eq!(book.named(Some("a")).max_retries, 5);
    }

    #[test]
    fn a_name_no_longer_in_the_file_means_the_default() {
        assert_eq!(**parse("").named(Some("gone")), Policy::default());
        assert_eq!(**parse("").choose("GONE", "q"), Policy::default());
    }

    #[test]
    fn two_policies_cannot_claim_one_category() {
        let error = refused("[policy.a]\ncategories = [\"X\"]\n[policy.b]\ncategories = [\"X\"]");
        assert_eq!(
            error,
            "policy \"b\": categories: \"X\" is already taken by policy \"a\""
        );
    }

    #[test]
    fn every_policy_is_described_in_one_line() {
        let book = parse(
            "[policy.a]\nmax_attempts = 3\nmax_age = \"2h\"\ncategories = [\"X\", \"Y\"]\nqueues = [\"q.*\"]\n\
             [policy.b]\njitter = { factor = 0.1 }\nidentity = \"payload\"\n\
             [policy.c]\njitter = { plus_minus = \"30s\" }\nnon_retryable = [\"HTTP 4*\", \"gone\"]\n\
             [policy.d]\njitter = \"full\"\nloops = \"review\"\nretryable = [\"timeout\"]\n[policy.e]\njitter = \"none\"\n\
             [policy.f]\nexpired = \"retry\"\nmaxlen = \"review\"\n[policy.g]\nexpired = \"review\"",
        );
        assert_eq!(
            book.describe(),
            "policy default: 3 retries, 2s growing 2x to 1m, plus up to 1s, within 7days\n\
             policy a: 2 retries, 2s growing 2x to 1m, plus up to 1s, within 2h; categories X, Y; queues q.*\n\
             policy b: 3 retries, 2s growing 2x to 1m, plus or minus 10 %, within 7days, identity payload\n\
             policy c: 3 retries, 2s growing 2x to 1m, plus or minus 30s, within 7days, \
             non_retryable http 4* | gone\n\
             policy d: 3 retries, 2s growing 2x to 1m, or anything less, within 7days, loops review, \
             retryable timeout\n\
             policy e: 3 retries, 2s growing 2x to 1m, within 7days\n\
             policy f: 3 retries, 2s growing 2x to 1m, plus up to 1s, within 7days, expired retry, maxlen review\n\
             policy g: 3 retries, 2s growing 2x to 1m, plus up to 1s, within 7days\n"
        );
    }

    #[test]
    fn a_default_that_makes_no_sense_is_refused_too() {
        let default = Policy {
            multiplier: f64::NAN,
            ..Policy::default()
        };
        assert!(PolicyBook::presets(default).is_err());
    }
}
