//! Whether a queue keeps what is in it: over a restart, a quiet night, a node's death, and when it
//! is full. And whether it is patient enough with its consumers.

use std::time::Duration;

use super::{Examined, Role};
use crate::doctor::finding::{Finding, Grade};

impl Examined<'_> {
    pub(super) fn judge_stream(&self) -> Finding {
        match self.role {
            Role::Intake | Role::DeadLetters => self.finding(
                Grade::Problem,
                "is a stream, from which we read only what comes after we have subscribed",
                "make it a quorum or a classic queue",
            ),
            Role::Review | Role::Work => self.finding(
                Grade::Warning,
                "is a stream: nothing that its consumers refuse is dead-lettered",
                "make it a quorum or a classic queue",
            ),
        }
    }

    /// Whether the queue and what is in it outlive a restart, a consumer and a quiet night.
    pub(super) fn judge_life(&self, findings: &mut Vec<Finding>) {
        let facts = self.facts;
        let again = "delete it when it is empty and declare it again, durable and without this";
        if !facts.durable {
            let fact = "is not durable: a restart of the broker loses all that is in it";
            findings.push(self.finding(Grade::Problem, fact, again));
        }
        if facts.auto_delete {
            let fact =
                "is auto-delete: with its last consumer it is deleted, and all that is in it";
            findings.push(self.finding(Grade::Problem, fact, again));
        }
        if facts.exclusive {
            let fact = "is exclusive: with the connection that declared it it is deleted";
            findings.push(self.finding(Grade::Problem, fact, again));
        }
        if let Some(expires) = self.least("expires") {
            let fact = format!(
                "expires after {} without a consumer, with all that is in it",
                told(expires)
            );
            findings.push(self.finding(Grade::Problem, &fact, &self.without("expires")));
        }
    }

    /// Messages that the queue itself gives up: too old, or too many.
    pub(super) fn judge_limits(&self, findings: &mut Vec<Finding>) {
        let ends = self.death();
        let lost = ends.loses(None);
        if let Some(ttl) = self.least("message-ttl") {
            let (grade, fate) = if lost {
                (Grade::Problem, "to nowhere")
            } else {
                (Grade::Warning, "to its dead-letter exchange")
            };
            let fact = format!("drops messages after {} ({fate})", told(ttl));
            let expiring_work = self.role == Role::Work && !lost;
            if !expiring_work {
                findings.push(self.finding(grade, &fact, &self.without("message-ttl")));
            }
        }
        let by_count = self.least("max-length");
        let by_bytes = self.least("max-length-bytes");
        let limit = match (by_count, by_bytes) {
            (None, None) => return,
            (Some(count), _) => format!("{count} messages"),
            (None, Some(bytes)) => format!("{bytes} bytes"),
        };
        match self.text("overflow").as_deref() {
            None | Some("drop-head") if lost => {
                let fact = format!("drops its oldest messages beyond {limit} (drop-head)");
                let cure = self.by_policy(r#"{"overflow":"reject-publish"}"#, "overflow");
                findings.push(self.finding(Grade::Problem, &fact, &cure));
            }
            None | Some("drop-head") => {}
            Some(_) => {
                let full = by_count.zip(self.facts.messages);
                let full = full.is_some_and(|(most, there)| i128::from(there) >= i128::from(most));
                let unread = self.facts.consumers == Some(0);
                if full && unread {
                    let fact = format!(
                        "is full ({limit}), and nobody consumes it: what is bound for it waits in Postgres"
                    );
                    let cure = "work it off, or raise its limit";
                    findings.push(self.finding(Grade::Warning, &fact, cure));
                } else if self.role == Role::Intake {
                    let fact = format!(
                        "refuses messages beyond {limit}: a producer that does not wait for confirms loses them"
                    );
                    let cure = "have producers wait for confirms, or raise the limit";
                    findings.push(self.finding(Grade::Warning, &fact, cure));
                }
            }
        }
    }

    /// Whether the queue outlives one node of a cluster.
    pub(super) fn judge_copies(&self, findings: &mut Vec<Finding>) {
        let Some(nodes) = self.around.nodes.filter(|&nodes| nodes > 1) else {
            return;
        };
        let copies = match self.facts.kind.as_str() {
            "quorum" => self.facts.members.len(),
            _ => 1 + self.facts.slave_nodes.len(),
        };
        if copies <= 1 {
            let fact = format!(
                "is on one of {nodes} nodes only: with that node it is away, and with its disk lost"
            );
            let cure = "make it a quorum queue with a member on each node";
            findings.push(self.finding(Grade::Warning, &fact, cure));
        }
    }

    /// A consumer that holds a delivery for too long is cut off, and its deliveries count.
    pub(super) fn judge_patience(&self, findings: &mut Vec<Finding>) {
        let Some(patience) = self.least("consumer-timeout") else {
            return;
        };
        let patience = Duration::from_millis(patience.unsigned_abs());
        let needed = self.around.database_timeout * 2;
        if matches!(self.role, Role::Intake | Role::DeadLetters) && patience < needed {
            let fact = format!(
                "cuts a consumer off after {patience:?}; a batch that Postgres is slow with may take longer"
            );
            let cure = format!("give it a consumer timeout of at least {needed:?}");
            findings.push(self.finding(Grade::Warning, &fact, &cure));
        }
    }
}

/// Milliseconds, for people.
fn told(millis: i64) -> String {
    humantime::format_duration(Duration::from_millis(millis.unsigned_abs())).to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{broker::QueueFacts, doctor::queues::set_up::*};

    #[test]
    fn limits_of_length_and_age_are_problems_where_the_dropped_go_nowhere() {
        let set_up = set_up(3);
        let dropping = queue("classic", json!({"x-max-length": 10}), json!({}));
        let ageing = queue("classic", json!({}), json!({"message-ttl": 60000}));
        for role in [Role::Intake, Role::Review, Role::DeadLetters, Role::Work] {
            set_up.expect(role, &dropping, Grade::Problem, "drop-head");
            set_up.expect(role, &ageing, Grade::Problem, "after 1m");
        }
        let way_out = json!({
            "x-max-length": 10, "x-message-ttl": 60000,
            "x-dead-letter-exchange": "", "x-dead-letter-routing-key": "dead",
        });
        let found = set_up.judge(Role::Work, &queue("classic", way_out, json!({})), &[]);
        assert!(found.iter().all(|f| f.grade == Grade::Ok), "{found:?}");
    }

    #[test]
    fn a_full_review_queue_that_nobody_reads_is_told() {
        let arguments = json!({"x-max-length": 10, "x-overflow": "reject-publish"});
        let mut facts = queue("classic", arguments, json!({}));
        (facts.messages, facts.consumers) = (Some(10), Some(0));
        set_up(3).expect(Role::Review, &facts, Grade::Warning, "is full");
        facts.messages = Some(9);
        let found = set_up(3).judge(Role::Review, &facts, &[]);
        assert!(found.iter().all(|f| f.grade == Grade::Ok), "{found:?}");
    }

    #[test]
    fn a_queue_that_does_not_last_is_a_problem() {
        let set_up = set_up(3);
        let sound = queue("classic", json!({}), json!({}));
        type Change = fn(&mut QueueFacts);
        let changes: [(&str, Change); 4] = [
            ("not durable", |q| q.durable = false),
            ("auto-delete", |q| q.auto_delete = true),
            ("exclusive", |q| q.exclusive = true),
            ("expires after 30m", |q| {
                q.arguments.insert("x-expires".into(), 1_800_000.into());
            }),
        ];
        for (words, change) in changes {
            let mut facts = sound.clone();
            change(&mut facts);
            set_up.expect(Role::Intake, &facts, Grade::Problem, words);
        }
        let stream = queue("stream", json!({}), json!({}));
        set_up.expect(Role::Intake, &stream, Grade::Problem, "is a stream");
    }

    #[test]
    fn on_a_cluster_a_queue_on_one_node_is_told() {
        let mut set_up = set_up(3);
        set_up.around.nodes = Some(3);
        let mut facts = queue("classic", json!({}), json!({}));
        set_up.expect(Role::Intake, &facts, Grade::Warning, "one of 3 nodes");
        facts.slave_nodes = vec!["b".into()];
        let found = set_up.judge(Role::Intake, &facts, &[]);
        assert!(found.iter().all(|f| f.grade == Grade::Ok), "{found:?}");
    }

    #[test]
    fn a_short_consumer_timeout_is_told() {
        let facts = queue("quorum", json!({"x-consumer-timeout": 10_000}), json!({}));
        set_up(3).expect(Role::Intake, &facts, Grade::Warning, "cuts a consumer off");
    }
}
