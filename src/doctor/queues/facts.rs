//! What arguments, policies and bindings together say of a queue: its limits, the routing keys that
//! its messages bear, and what becomes of one that dies in it. Whether that is good enough is for
//! the judgements to say.

use serde_json::Value;

use super::Examined;
use crate::doctor::routing::{Reach, keys_of};

/// From 4.0 on a quorum queue gives up on a message after this many deliveries, unless it is
/// told otherwise.
const DEFAULT_DELIVERY_LIMIT: i64 = 20;

/// What becomes of a message that dies in a queue.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Death {
    /// There is no dead-letter exchange.
    Dropped,
    /// The dead-letter exchange does not exist.
    NoExchange(String),
    /// For each key that a death may bear, the queues it reaches.
    Routed(Vec<(String, Reach)>),
}

impl Examined<'_> {
    pub(super) fn death(&self) -> Death {
        let Some(exchange) = self.text("dead-letter-exchange") else {
            return Death::Dropped;
        };
        if !self.topology.has_exchange(&exchange) {
            return Death::NoExchange(exchange);
        }
        let keys = match self.text("dead-letter-routing-key") {
            Some(key) => vec![key],
            None => self.keys(),
        };
        let routed = keys.into_iter().map(|key| {
            let reach = self.topology.reach(&exchange, &key);
            (key, reach)
        });
        Death::Routed(routed.collect())
    }

    /// The routing keys that messages in this queue bear, as far as bindings tell. Everybody may
    /// publish to a queue by its name.
    fn keys(&self) -> Vec<String> {
        let mut keys = vec![self.facts.name.clone()];
        for binding in self.bindings {
            if binding.source == self.around.own_exchange {
                continue;
            }
            let Some(kind) = self.topology.kinds.get(&binding.source) else {
                continue;
            };
            for key in keys_of(kind, binding) {
                if !keys.contains(&key) {
                    keys.push(key);
                }
            }
        }
        keys
    }

    /// The exchange that dead letters go to.
    pub(in crate::doctor) fn dead_letter_exchange(&self) -> Option<String> {
        self.text("dead-letter-exchange")
    }

    /// The queue names that dead letters would be routed by on the default exchange.
    pub(in crate::doctor) fn dead_letter_keys(&self) -> Vec<String> {
        match self.text("dead-letter-routing-key") {
            Some(key) => vec![key],
            None => self.keys(),
        }
    }

    pub(super) fn is_default_limit(&self) -> bool {
        self.numbers("delivery-limit").is_empty()
    }

    /// How often a message may be delivered, if there is a limit.
    pub(super) fn delivery_limit(&self) -> Option<i64> {
        if self.facts.kind != "quorum" {
            return None;
        }
        let set = self.numbers("delivery-limit");
        match set.iter().copied().filter(|&limit| limit >= 0).min() {
            Some(limit) => Some(limit),
            // A negative number means that there is none.
            None if !set.is_empty() => None,
            None => (self.around.major? >= 4).then_some(DEFAULT_DELIVERY_LIMIT),
        }
    }

    /// The smaller of argument and policy, which is what the broker applies to limits.
    pub(super) fn least(&self, name: &str) -> Option<i64> {
        self.numbers(name).into_iter().min()
    }

    fn numbers(&self, name: &str) -> Vec<i64> {
        let values = [self.argument(name), self.by_definition(name)];
        values.iter().flatten().filter_map(|v| v.as_i64()).collect()
    }

    /// A text; an argument wins over a policy.
    pub(super) fn text(&self, name: &str) -> Option<String> {
        let value = self.argument(name).or_else(|| self.by_definition(name))?;
        value.as_str().map(str::to_owned)
    }

    pub(super) fn argument(&self, name: &str) -> Option<&Value> {
        self.facts.arguments.get(&format!("x-{name}"))
    }

    fn by_definition(&self, name: &str) -> Option<&Value> {
        let policy = self.facts.effective_policy_definition.as_ref()?;
        policy.get(name)
    }
}

impl Death {
    /// Whether a death may reach no queue, or none of `ours`.
    pub(super) fn loses(&self, ours: Option<&[String]>) -> bool {
        match self {
            Self::Dropped | Self::NoExchange(_) => true,
            Self::Routed(ways) => ways.iter().any(|(_, reach)| is_lost(reach, ours)),
        }
    }

    pub(super) fn why(&self, ours: Option<&[String]>) -> String {
        match self {
            Self::Dropped => "it has no dead-letter exchange".into(),
            Self::NoExchange(name) => format!("its dead-letter exchange {name:?} does not exist"),
            Self::Routed(ways) => {
                let lost: Vec<String> = ways
                    .iter()
                    .filter(|(_, reach)| is_lost(reach, ours))
                    .map(|(key, _)| format!("{key:?}"))
                    .collect();
                let target = match ours {
                    Some(ours) => ours.join(", "),
                    None => "any queue".into(),
                };
                format!(
                    "its dead-letter exchange does not lead to {target} by the routing key {}",
                    lost.join(", ")
                )
            }
        }
    }
}

pub(super) fn is_lost(reach: &Reach, ours: Option<&[String]>) -> bool {
    let reaches = match ours {
        Some(ours) => ours.iter().any(|queue| reach.queues.contains(queue)),
        None => !reach.queues.is_empty(),
    };
    !reaches && !reach.uncertain
}
