//! Whether what dies in a queue arrives somewhere: what the queue gives up on, what its consumers
//! reject, and what is on the way while a node is away.

use super::{
    Examined, Role,
    cure::AT_LEAST_ONCE,
    facts::{Death, is_lost},
};
use crate::doctor::{
    finding::{Finding, Grade},
    routing::Reach,
};

impl Examined<'_> {
    pub(super) fn judge_delivery_limit(&self, death: &Death, findings: &mut Vec<Finding>) {
        let Some(limit) = self.delivery_limit() else {
            return;
        };
        if !death.loses(None) {
            return;
        }
        let source = if self.is_default_limit() {
            ", RabbitMQ 4's default"
        } else {
            ""
        };
        let fact = format!(
            "gives up on a message after {limit} deliveries{source}, and then drops it: {}",
            death.why(None)
        );
        let target = match self.role {
            Role::Intake | Role::DeadLetters => self.around.review_queue.clone(),
            Role::Review => format!("{}.dropped", self.facts.name),
            Role::Work => match self.around.dead_letter_queues.first() {
                Some(queue) => queue.clone(),
                None => format!("{}.dead", self.facts.name),
            },
        };
        let definition = self.dead_letters_to(&target);
        let cure = match death {
            Death::Dropped => self.by_policy(&definition, "dead-letter-exchange"),
            Death::NoExchange(name) => {
                format!("declare the exchange {name:?} and bind a queue to it")
            }
            Death::Routed(_) => self.bind_cure(),
        };
        findings.push(self.finding(Grade::Problem, &fact, &cure));
    }

    /// Whether what dies in a team's queue comes to us, the first time and after a republish.
    pub(super) fn judge_way_back(&self, death: &Death, findings: &mut Vec<Finding>) {
        let ours = self.around.dead_letter_queues.as_slice();
        if ours.is_empty() {
            if *death == Death::Dropped && self.delivery_limit().is_none() {
                findings.push(self.finding(
                    Grade::Warning,
                    "has no dead-letter exchange: what its consumers reject is dropped",
                    "see that they publish a RetryMessage before they acknowledge; or set \
                     DEAD_LETTER_QUEUE, and a dead-letter exchange that leads there",
                ));
            }
            return;
        }
        let to_us = Some(ours);
        if !death.loses(to_us) {
            return;
        }
        // The same fault was told of the delivery limit already, with its cure.
        let told = self.delivery_limit().is_some() && death.loses(None);
        if told {
            return;
        }
        let by_name = self.facts.name.as_str();
        match death {
            // A republish bears the key that the message first had, so only those that are
            // published under the queue's own name are at risk.
            Death::Routed(ways)
                if self.around.may_bind && only_by_name_is_lost(ways, ours, by_name) =>
            {
                let fact = format!(
                    "{}; its other keys do, and a republish keeps them",
                    death.why(to_us)
                );
                findings.push(self.finding(Grade::Warning, &fact, &self.bind_cure()));
            }
            Death::Routed(_) => {
                let fact = format!("what dies in it is lost to us: {}", death.why(to_us));
                findings.push(self.finding(Grade::Problem, &fact, &self.bind_cure()));
            }
            Death::NoExchange(name) => {
                let fact = format!("what its consumers reject is dropped: {}", death.why(to_us));
                let cure = format!("declare the exchange {name:?} and bind {:?} to it", ours[0]);
                findings.push(self.finding(Grade::Problem, &fact, &cure));
            }
            Death::Dropped => {
                let definition = self.dead_letters_to(&ours[0]);
                let fact = "what its consumers reject is dropped: it has no dead-letter exchange";
                let cure = self.by_policy(&definition, "dead-letter-exchange");
                findings.push(self.finding(Grade::Problem, fact, &cure));
            }
        }
    }

    /// A quorum queue can hand dead letters over at least once; by default it does not.
    pub(super) fn judge_strategy(&self, findings: &mut Vec<Finding>) {
        if self.facts.kind != "quorum" || self.text("dead-letter-exchange").is_none() {
            return;
        }
        let asked = self.text("dead-letter-strategy").as_deref() == Some("at-least-once");
        let refuses = self.text("overflow").as_deref() == Some("reject-publish");
        let fact = match (asked, refuses) {
            (true, true) => return,
            (true, false) => {
                "asks for dead-lettering at least once, which is in force only with overflow reject-publish"
            }
            (false, _) => {
                "hands dead letters over at most once: one that dies while its target or a node is away is lost"
            }
        };
        let definition = format!("{{{AT_LEAST_ONCE}}}");
        let cure = self.by_policy(&definition, "dead-letter-strategy");
        findings.push(self.finding(Grade::Warning, fact, &cure));
    }
}

/// Whether the queue's own name is the one key that leads astray, and there are others.
fn only_by_name_is_lost(ways: &[(String, Reach)], ours: &[String], name: &str) -> bool {
    ways.len() > 1
        && ways
            .iter()
            .all(|(key, reach)| is_lost(reach, Some(ours)) == (key == name))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::doctor::queues::set_up::*;

    #[test]
    fn a_delivery_limit_without_a_way_out_is_a_problem_for_every_role() {
        let explicit = queue("quorum", json!({"x-delivery-limit": 5}), json!({}));
        let by_policy = queue("quorum", json!({}), json!({"delivery-limit": 7}));
        let neither = queue("quorum", json!({}), json!({}));
        let lifted = queue("quorum", json!({"x-delivery-limit": -1}), json!({}));
        for role in [Role::Intake, Role::Review, Role::DeadLetters, Role::Work] {
            let old = set_up(3);
            old.expect(
                role,
                &explicit,
                Grade::Problem,
                "after 5 deliveries, and then drops it",
            );
            old.expect(role, &by_policy, Grade::Problem, "after 7 deliveries");
            let new = set_up(4);
            new.expect(
                role,
                &neither,
                Grade::Problem,
                "20 deliveries, RabbitMQ 4's default",
            );
            for (set_up, facts) in [(old, &neither), (new, &lifted)] {
                let found = set_up.judge(role, facts, &[]);
                assert!(
                    found.iter().all(|f| !f.fact.contains("deliveries")),
                    "{found:?}"
                );
            }
        }
    }

    #[test]
    fn a_dead_letter_exchange_that_is_gone_or_leads_nowhere_is_as_bad_as_none() {
        let set_up = set_up(4);
        let gone = queue(
            "quorum",
            json!({"x-dead-letter-exchange": "gone"}),
            json!({}),
        );
        set_up.expect(
            Role::Intake,
            &gone,
            Grade::Problem,
            "\"gone\" does not exist",
        );
        let narrow = queue(
            "quorum",
            json!({"x-dead-letter-exchange": "dlx"}),
            json!({}),
        );
        set_up.expect(
            Role::Intake,
            &narrow,
            Grade::Problem,
            "by the routing key \"orders\"",
        );
        let absent = json!({"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "nowhere"});
        let absent = queue("quorum", absent, json!({}));
        set_up.expect(Role::Intake, &absent, Grade::Problem, "\"nowhere\"");
    }

    #[test]
    fn at_most_once_is_worth_a_warning_and_at_least_once_needs_reject_publish() {
        let set_up = set_up(3);
        let mut arguments =
            json!({"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead"});
        let facts = queue("quorum", arguments.clone(), json!({}));
        set_up.expect(Role::Work, &facts, Grade::Warning, "at most once");
        arguments["x-dead-letter-strategy"] = "at-least-once".into();
        let facts = queue("quorum", arguments, json!({}));
        set_up.expect(Role::Work, &facts, Grade::Warning, "only with overflow");
    }

    #[test]
    fn a_team_s_queue_must_lead_to_us_by_every_key() {
        let mut set_up = set_up(3);
        let none = queue("classic", json!({}), json!({}));
        set_up.expect(Role::Work, &none, Grade::Problem, "no dead-letter exchange");
        let narrow = queue(
            "classic",
            json!({"x-dead-letter-exchange": "dlx"}),
            json!({}),
        );
        // Nothing tells of other keys than the queue's name.
        set_up.expect(Role::Work, &narrow, Grade::Problem, "\"orders\"");
        // Producers use `order.*`, which does lead to us, and republishes keep it.
        let bound = [
            binding("events", "orders", "order.*"),
            binding("s.republish", "orders", "ours"),
        ];
        let found = set_up.judge(Role::Work, &narrow, &bound);
        assert_eq!(found.len(), 1, "{found:?}");
        assert_eq!(found[0].grade, Grade::Warning);
        // Where we may not bind, the second death bears the queue's name.
        set_up.around.may_bind = false;
        let found = set_up.judge(Role::Work, &narrow, &bound);
        assert_eq!(found[0].grade, Grade::Problem, "{found:?}");
        set_up.around.may_bind = true;
        // A key of the producers that leads astray is a problem.
        let bound = [binding("events", "orders", "invoice.*")];
        let found = set_up.judge(Role::Work, &narrow, &bound);
        assert_eq!(found[0].grade, Grade::Problem, "{found:?}");
        assert!(
            found[0]
                .cure
                .as_ref()
                .unwrap()
                .contains("bind \"dead\" to \"dlx\" by \"#\"")
        );
    }

    #[test]
    fn without_a_dead_letter_queue_of_ours_a_handler_may_do_it() {
        let mut set_up = set_up(3);
        set_up.around.dead_letter_queues.clear();
        let none = queue("classic", json!({}), json!({}));
        set_up.expect(Role::Work, &none, Grade::Warning, "is dropped");
    }
}
