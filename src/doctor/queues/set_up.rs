//! A small set-up, by which the tests of all judgements try queues.

use std::time::Duration;

use serde_json::{Value, json};

use super::{Examined, Role, Surroundings};
use crate::{
    broker::{Binding, ExchangeFacts, QueueFacts},
    doctor::{
        finding::{Finding, Grade},
        routing::{Exchange, Topology},
    },
};

/// A set-up with a dead-letter exchange `dlx` that is bound to `dead` by `order.*`, and an
/// exchange `events` that teams publish to.
pub(super) struct SetUp {
    pub(super) topology: Topology,
    pub(super) around: Surroundings,
}

pub(super) fn binding(source: &str, destination: &str, key: &str) -> Binding {
    Binding {
        source: source.into(),
        destination: destination.into(),
        destination_type: "queue".into(),
        routing_key: key.into(),
        ..Binding::default()
    }
}

pub(super) fn set_up(major: u32) -> SetUp {
    let mut topology = Topology::default();
    let dlx = Exchange {
        facts: ExchangeFacts {
            kind: "topic".into(),
            ..ExchangeFacts::default()
        },
        bindings: vec![binding("dlx", "dead", "order.*")],
    };
    topology.exchanges.insert("dlx".into(), Some(dlx));
    topology.exchanges.insert("gone".into(), None);
    topology.kinds.insert("events".into(), "topic".into());
    topology.queues.insert("dead".into(), true);
    topology.queues.insert("nowhere".into(), false);
    let around = Surroundings {
        vhost: "/".into(),
        major: Some(major),
        nodes: Some(1),
        dead_letter_queues: vec!["dead".into(), "dead.too".into()],
        review_queue: "review".into(),
        own_exchange: "s.republish".into(),
        may_bind: true,
        database_timeout: Duration::from_secs(15),
    };
    SetUp { topology, around }
}

pub(super) fn queue(kind: &str, arguments: Value, policy: Value) -> QueueFacts {
    serde_json::from_value(json!({
        "name": "orders", "type": kind, "durable": true,
        "arguments": arguments, "effective_policy_definition": policy,
    }))
    .unwrap()
}

impl SetUp {
    pub(super) fn judge(
        &self,
        role: Role,
        facts: &QueueFacts,
        bindings: &[Binding],
    ) -> Vec<Finding> {
        let examined = Examined {
            role,
            facts,
            bindings,
            topology: &self.topology,
            around: &self.around,
        };
        examined.judge()
    }

    /// Checks that there is one finding of this grade, which has these words.
    pub(super) fn expect(
        &self,
        role: Role,
        facts: &QueueFacts,
        grade: Grade,
        words: &str,
    ) -> Finding {
        let found = self.judge(role, facts, &[]);
        let right = |f: &&Finding| f.grade == grade && f.fact.contains(words);
        let found_it = found.iter().find(right);
        found_it
            .unwrap_or_else(|| panic!("{words}: {found:?}"))
            .clone()
    }
}
