//! Where the broker would take a message that is published to an exchange. Pure: the exchanges
//! and bindings were asked before.

use std::collections::{BTreeSet, HashMap, HashSet};

use crate::broker::{Binding, ExchangeFacts};

/// A word that no binding names, for keys that a pattern matches.
const ANY_WORD: &str = "doctor-probe";

/// An exchange and what is bound to it.
#[derive(Clone, Debug, Default)]
pub(super) struct Exchange {
    pub facts: ExchangeFacts,
    pub bindings: Vec<Binding>,
}

impl Exchange {
    /// The exchange that gets what no binding matches.
    pub(super) fn alternate(&self) -> Option<&str> {
        let by_policy = self.facts.effective_policy_definition.as_ref();
        let argument = self.facts.arguments.get("alternate-exchange");
        argument
            .or_else(|| by_policy?.get("alternate-exchange"))
            .and_then(|name| name.as_str())
    }
}

/// The exchanges of a vhost, as far as they were asked for.
#[derive(Clone, Debug, Default)]
pub(super) struct Topology {
    /// Those that exist, and `None` for those that do not.
    pub exchanges: HashMap<String, Option<Exchange>>,
    /// The kinds of exchanges that queues are bound to.
    pub kinds: HashMap<String, String>,
    /// Whether queues exist that were asked for by name.
    pub queues: HashMap<String, bool>,
}

/// The queues that a message would reach.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Reach {
    pub queues: BTreeSet<String>,
    /// Set where the way depends on more than the routing key: on headers, or on a kind of
    /// exchange that a plugin brings. The message may reach queues that are not listed.
    pub uncertain: bool,
}

impl Topology {
    /// Whether an exchange exists; the default exchange always does.
    pub(super) fn has_exchange(&self, name: &str) -> bool {
        name.is_empty() || self.exchanges.get(name).is_some_and(Option::is_some)
    }

    /// Follows the bindings from an exchange.
    pub(super) fn reach(&self, exchange: &str, key: &str) -> Reach {
        let mut reach = Reach::default();
        self.follow(exchange, key, &mut reach, &mut HashSet::new());
        reach
    }

    fn follow(&self, name: &str, key: &str, reach: &mut Reach, seen: &mut HashSet<String>) {
        if name.is_empty() {
            match self.queues.get(key) {
                Some(true) => {
                    reach.queues.insert(key.to_owned());
                }
                Some(false) => {}
                None => reach.uncertain = true,
            }
            return;
        }
        if !seen.insert(name.to_owned()) {
            return;
        }
        let exchange = match self.exchanges.get(name) {
            Some(Some(exchange)) => exchange,
            Some(None) => return,
            None => {
                reach.uncertain = true;
                return;
            }
        };
        let mut matched = false;
        for binding in &exchange.bindings {
            match takes(&exchange.facts.kind, binding, key) {
                Some(true) => {
                    matched = true;
                    if binding.destination_type == "queue" {
                        reach.queues.insert(binding.destination.clone());
                    } else {
                        self.follow(&binding.destination, key, reach, seen);
                    }
                }
                Some(false) => {}
                None => reach.uncertain = true,
            }
        }
        if !matched && let Some(alternate) = exchange.alternate() {
            self.follow(alternate, key, reach, seen);
        }
    }
}

/// Whether a binding takes a message with this key; `None` if that depends on more.
fn takes(kind: &str, binding: &Binding, key: &str) -> Option<bool> {
    match kind {
        "direct" => Some(binding.routing_key == key),
        "fanout" => Some(true),
        "topic" => Some(matches(&binding.routing_key, key)),
        // A binding without conditions takes everything.
        "headers" => {
            let conditions = binding.arguments.keys().any(|name| name != "x-match");
            (!conditions).then_some(true)
        }
        _ => None,
    }
}

/// Whether a topic pattern matches a key: `*` is one word, `#` any number of them.
fn matches(pattern: &str, key: &str) -> bool {
    fn words(text: &str) -> Vec<&str> {
        if text.is_empty() {
            Vec::new()
        } else {
            text.split('.').collect()
        }
    }
    let (pattern, key) = (words(pattern), words(key));
    // `reached[n]`: the pattern so far matches the first n words of the key.
    let mut reached = vec![false; key.len() + 1];
    reached[0] = true;
    for part in pattern {
        if part == "#" {
            let mut before = false;
            for here in &mut reached {
                before |= *here;
                *here = before;
            }
        } else {
            for n in (1..reached.len()).rev() {
                reached[n] = reached[n - 1] && (part == "*" || part == key[n - 1]);
            }
            reached[0] = false;
        }
    }
    reached[key.len()]
}

/// Routing keys that reach a queue by a binding of an exchange of this kind. None where any
/// key may.
pub(super) fn keys_of(kind: &str, binding: &Binding) -> Vec<String> {
    match kind {
        "direct" => vec![binding.routing_key.clone()],
        "topic" => {
            let filled = |any_number: &str| {
                let words: Vec<&str> = binding
                    .routing_key
                    .split('.')
                    .map(|word| match word {
                        "*" => ANY_WORD,
                        "#" => any_number,
                        word => word,
                    })
                    .filter(|word| !word.is_empty())
                    .collect();
                words.join(".")
            };
            let mut keys = vec![filled(ANY_WORD)];
            if binding.routing_key.contains('#') {
                keys.push(filled(""));
                keys.push(filled(&format!("{ANY_WORD}.{ANY_WORD}")));
            }
            keys
        }
        _ => Vec::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bound(to: &str, kind: &str, key: &str) -> Binding {
        Binding {
            destination: to.into(),
            destination_type: kind.into(),
            routing_key: key.into(),
            ..Binding::default()
        }
    }

    fn exchange(kind: &str, bindings: Vec<Binding>) -> Option<Exchange> {
        Some(Exchange {
            facts: ExchangeFacts {
                kind: kind.into(),
                ..ExchangeFacts::default()
            },
            bindings,
        })
    }

    fn queues(reach: &Reach) -> Vec<&str> {
        reach.queues.iter().map(String::as_str).collect()
    }

    #[test]
    fn a_pattern_matches_as_the_broker_does() {
        for (pattern, key, expected) in [
            ("order.*", "order.created", true),
            ("order.*", "order", false),
            ("order.*", "order.a.b", false),
            ("order.*", "orders", false),
            ("order.#", "order", true),
            ("order.#", "order.a.b", true),
            ("#", "", true),
            ("#", "a.b", true),
            ("*", "", false),
            ("", "", true),
            ("", "a", false),
            ("#.b", "a.a.b", true),
            ("#.b", "b.a", false),
            ("a.#.b.#", "a.x.b", true),
            ("*.#", "", false),
            ("a..b", "a..b", true),
        ] {
            assert_eq!(matches(pattern, key), expected, "{pattern} {key}");
        }
    }

    #[test]
    fn bindings_are_followed_through_exchanges_and_round_in_circles() {
        let mut topology = Topology::default();
        topology.exchanges.extend([
            (
                "dlx".into(),
                exchange("topic", vec![bound("inner", "exchange", "order.*")]),
            ),
            (
                "inner".into(),
                exchange(
                    "fanout",
                    vec![bound("dlx", "exchange", ""), bound("dead", "queue", "")],
                ),
            ),
            ("gone".into(), None),
        ]);
        assert_eq!(queues(&topology.reach("dlx", "order.x")), ["dead"]);
        assert!(queues(&topology.reach("dlx", "orders")).is_empty());
        assert!(!topology.has_exchange("gone"));
        assert!(topology.has_exchange("dlx") && topology.has_exchange(""));
    }

    #[test]
    fn the_default_exchange_leads_to_the_queue_of_that_name() {
        let mut topology = Topology::default();
        topology.queues.insert("there".into(), true);
        topology.queues.insert("gone".into(), false);
        assert_eq!(queues(&topology.reach("", "there")), ["there"]);
        assert_eq!(topology.reach("", "gone"), Reach::default());
        assert!(topology.reach("", "never asked").uncertain);
    }

    #[test]
    fn an_alternate_exchange_takes_what_no_binding_does() {
        let mut topology = Topology::default();
        let mut dlx = exchange("direct", vec![bound("dead", "queue", "a")]).unwrap();
        dlx.facts
            .arguments
            .insert("alternate-exchange".into(), "rest".into());
        topology.exchanges.insert("dlx".into(), Some(dlx));
        let rest = exchange("fanout", vec![bound("others", "queue", "")]);
        topology.exchanges.insert("rest".into(), rest);
        assert_eq!(queues(&topology.reach("dlx", "a")), ["dead"]);
        assert_eq!(queues(&topology.reach("dlx", "b")), ["others"]);
    }

    #[test]
    fn headers_and_strange_exchanges_leave_it_open() {
        let mut topology = Topology::default();
        let mut by_header = bound("dead", "queue", "");
        by_header.arguments.insert("kind".into(), "a".into());
        topology
            .exchanges
            .insert("h".into(), exchange("headers", vec![by_header]));
        let strange = exchange("x-consistent-hash", vec![bound("dead", "queue", "1")]);
        topology.exchanges.insert("s".into(), strange);
        for name in ["h", "s"] {
            let reach = topology.reach(name, "k");
            assert!(reach.uncertain && reach.queues.is_empty(), "{name}");
        }
    }

    #[test]
    fn keys_are_made_that_a_binding_takes() {
        for pattern in ["order.*", "order.#", "#", "*", "a.#.b", "plain"] {
            let binding = bound("q", "queue", pattern);
            for key in keys_of("topic", &binding) {
                assert!(matches(pattern, &key), "{pattern} {key}");
            }
        }
        assert!(keys_of("fanout", &bound("q", "queue", "")).is_empty());
    }
}
