//! How to mend a queue, in words or as a command that can be typed as it is.

use serde_json::Value;

use super::{Examined, Role};

/// What a quorum queue needs to hand dead letters over at least once, in a policy.
pub(super) const AT_LEAST_ONCE: &str =
    r#""dead-letter-strategy":"at-least-once","overflow":"reject-publish""#;

impl Examined<'_> {
    /// The cure for a limit that somebody has set.
    pub(super) fn without(&self, name: &str) -> String {
        if self.argument(name).is_some() {
            format!("delete it when it is empty and declare it again without x-{name}")
        } else {
            let policy = self
                .facts
                .policy
                .as_deref()
                .unwrap_or("the operator policy");
            format!("take {name} out of the policy {policy:?}")
        }
    }

    /// The cure for what a policy can set. Only one policy applies to a queue, so where there is
    /// one it has to be changed; and an argument stands in a policy's way.
    pub(super) fn by_policy(&self, definition: &str, name: &str) -> String {
        if self.argument(name).is_some() {
            return format!(
                "delete it when it is empty and declare it again with {definition} as x- arguments"
            );
        }
        if let Some(policy) = &self.facts.policy {
            return format!("add {definition} to the policy {policy:?}");
        }
        let vhost = match self.around.vhost.as_str() {
            "/" => String::new(),
            vhost => format!(" -p {vhost}"),
        };
        let name: String = self
            .facts
            .name
            .chars()
            .map(|c| if c.is_ascii_alphanumeric() { c } else { '-' })
            .collect();
        format!(
            "rabbitmqctl set_policy{vhost} {name} '^{}$' '{definition}' --apply-to queues",
            escaped(&self.facts.name)
        )
    }

    /// The definition of a policy by which dead letters go to `target`.
    pub(super) fn dead_letters_to(&self, target: &str) -> String {
        let safely = match self.facts.kind.as_str() {
            "quorum" => format!(",{AT_LEAST_ONCE}"),
            _ => String::new(),
        };
        let target = Value::from(target);
        format!(r#"{{"dead-letter-exchange":"","dead-letter-routing-key":{target}{safely}}}"#)
    }

    pub(super) fn bind_cure(&self) -> String {
        let exchange = self.text("dead-letter-exchange").unwrap_or_default();
        let target = match self.around.dead_letter_queues.first() {
            Some(queue) if self.role == Role::Work => queue.as_str(),
            _ => self.around.review_queue.as_str(),
        };
        let key = self.text("dead-letter-routing-key");
        match (exchange.as_str(), key) {
            ("", Some(_)) => format!("set its dead-letter routing key to {target:?}"),
            ("", None) => format!("give it the dead-letter routing key {target:?}"),
            (exchange, Some(key)) => {
                format!("bind {target:?} to {exchange:?} by the key {key:?}")
            }
            (exchange, None) => {
                let all = match self.topology.exchanges.get(exchange) {
                    Some(Some(found)) if found.facts.kind == "topic" => "\"#\"".to_owned(),
                    Some(Some(found)) if found.facts.kind == "direct" => {
                        format!("{:?} too", self.facts.name)
                    }
                    _ => "every key".to_owned(),
                };
                format!("bind {target:?} to {exchange:?} by {all}")
            }
        }
    }
}

/// A name as a part of a regular expression.
fn escaped(name: &str) -> String {
    let mut text = String::new();
    for c in name.chars() {
        if !c.is_alphanumeric() && !"_-".contains(c) {
            text.push('\\');
        }
        text.push(c);
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::doctor::{finding::Grade, queues::set_up::*};

    #[test]
    fn the_cure_is_a_policy_or_the_place_where_it_was_set() {
        let set_up = set_up(4);
        let bare = queue("quorum", json!({}), json!({}));
        let cure = set_up
            .expect(Role::Intake, &bare, Grade::Problem, "20")
            .cure
            .unwrap();
        assert_eq!(
            cure,
            "rabbitmqctl set_policy orders '^orders$' \
             '{\"dead-letter-exchange\":\"\",\"dead-letter-routing-key\":\"review\",\
             \"dead-letter-strategy\":\"at-least-once\",\"overflow\":\"reject-publish\"}' \
             --apply-to queues"
        );
        let mut governed = bare.clone();
        governed.policy = Some("all".into());
        let cure = set_up
            .expect(Role::Intake, &governed, Grade::Problem, "20")
            .cure
            .unwrap();
        assert!(cure.contains("to the policy \"all\""), "{cure}");
        let expiring = queue("classic", json!({"x-message-ttl": 1000}), json!({}));
        let cure = set_up
            .expect(Role::Intake, &expiring, Grade::Problem, "after 1s")
            .cure;
        assert!(cure.unwrap().contains("without x-message-ttl"));
    }

    #[test]
    fn a_name_is_escaped_for_a_policy_s_pattern() {
        assert_eq!(escaped("retry.scheduled_a-b"), "retry\\.scheduled_a-b");
    }
}
