//! Judges a queue by what the management API says of it. Pure.
//!
//! This file has what is judged, and the judgement as a whole. `facts` reads from arguments,
//! policies and bindings how the queue is set up, and what becomes of a message that dies in it.
//! `keeping` judges whether the queue keeps what is in it, `dead_letters` whether what dies in it
//! arrives somewhere. `cure` says how to mend it. The tests of all of them try queues on the set-up
//! in `set_up`.

mod cure;
mod dead_letters;
mod facts;
mod keeping;
#[cfg(test)]
mod set_up;

use std::time::Duration;

use super::{
    finding::{Finding, Grade},
    routing::Topology,
};
use crate::broker::{Binding, QueueFacts};
use facts::Death;

/// What a queue is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Intake,
    Review,
    DeadLetters,
    /// A team's queue, to which messages go back.
    Work,
}

impl Role {
    pub(super) fn subject(self, queue: &str) -> String {
        let role = match self {
            Self::Intake => "intake queue",
            Self::Review => "review queue",
            Self::DeadLetters => "dead letter queue",
            Self::Work => "queue",
        };
        format!("{role} {queue:?}")
    }
}

/// What holds for all queues of the set-up.
#[derive(Clone, Debug)]
pub(super) struct Surroundings {
    pub vhost: String,
    /// The first number of the broker's version.
    pub major: Option<u32>,
    /// How many nodes the cluster has, where that is told.
    pub nodes: Option<usize>,
    pub dead_letter_queues: Vec<String>,
    pub review_queue: String,
    /// The exchange by which a republish keeps its routing key.
    pub own_exchange: String,
    /// Whether that exchange can be used.
    pub may_bind: bool,
    pub database_timeout: Duration,
}

/// A queue and all that decides over its messages.
pub(super) struct Examined<'a> {
    pub role: Role,
    pub facts: &'a QueueFacts,
    pub bindings: &'a [Binding],
    pub topology: &'a Topology,
    pub around: &'a Surroundings,
}

impl Examined<'_> {
    /// All findings; a single one that says `ok` if there is nothing to say.
    pub(super) fn judge(&self) -> Vec<Finding> {
        let mut findings = Vec::new();
        if self.facts.kind == "stream" {
            findings.push(self.judge_stream());
            return findings;
        }
        if self.facts.effective_policy_definition.is_none() {
            findings.push(self.finding(
                Grade::Unknown,
                "which policies apply to it is not told yet",
                "ask again in some seconds: the broker gathers this only every five",
            ));
        }
        self.judge_life(&mut findings);
        self.judge_limits(&mut findings);
        let death = self.death();
        self.judge_delivery_limit(&death, &mut findings);
        if self.role == Role::Work {
            self.judge_way_back(&death, &mut findings);
        }
        self.judge_strategy(&mut findings);
        self.judge_copies(&mut findings);
        self.judge_patience(&mut findings);
        if findings.is_empty() {
            let subject = self.role.subject(&self.facts.name);
            findings.push(Finding::ok(subject, self.describe(&death)));
        }
        findings
    }

    fn describe(&self, death: &Death) -> String {
        let mut text = format!("{}, durable", self.facts.kind);
        if let Some(limit) = self.delivery_limit() {
            text.push_str(&format!(", at most {limit} deliveries"));
        }
        if let Death::Routed(ways) = death {
            let mut queues: Vec<&str> = ways
                .iter()
                .flat_map(|(_, reach)| reach.queues.iter().map(String::as_str))
                .collect();
            queues.sort_unstable();
            queues.dedup();
            if !queues.is_empty() {
                text.push_str(&format!(", dead letters go to {}", queues.join(", ")));
            }
        }
        text
    }

    fn finding(&self, grade: Grade, fact: &str, cure: &str) -> Finding {
        Finding::new(grade, self.role.subject(&self.facts.name), fact, cure)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::{set_up::*, *};

    #[test]
    fn a_plain_durable_queue_is_ok() {
        for role in [Role::Intake, Role::Review, Role::DeadLetters] {
            let found = set_up(4).judge(role, &queue("classic", json!({}), json!({})), &[]);
            assert_eq!(found.len(), 1, "{found:?}");
            assert_eq!(found[0].grade, Grade::Ok);
        }
    }

    #[test]
    fn a_sound_quorum_queue_is_ok_and_says_where_its_dead_go() {
        let arguments = json!({
            "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead",
            "x-dead-letter-strategy": "at-least-once", "x-overflow": "reject-publish",
        });
        let facts = queue("quorum", arguments, json!({}));
        for role in [Role::Intake, Role::Work] {
            let found = set_up(4).judge(role, &facts, &[]);
            assert_eq!(found.len(), 1, "{found:?}");
            assert!(
                found[0].fact.contains("dead letters go to dead"),
                "{found:?}"
            );
        }
    }

    #[test]
    fn what_is_not_told_yet_is_unknown() {
        let mut facts = queue("classic", json!({}), json!({}));
        facts.effective_policy_definition = None;
        set_up(3).expect(Role::Intake, &facts, Grade::Unknown, "not told yet");
    }
}
