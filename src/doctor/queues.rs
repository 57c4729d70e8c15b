//! Judges a queue by what the management API says of it. Pure.

use std::time::Duration;

use serde_json::Value;

use super::{
    finding::{Finding, Grade},
    routing::{Reach, Topology, keys_of},
};
use crate::broker::{Binding, QueueFacts};

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

/// From 4.0 on a quorum queue gives up on a message after this many deliveries, unless it is
/// told otherwise.
const DEFAULT_DELIVERY_LIMIT: i64 = 20;

/// What a quorum queue needs to hand dead letters over at least once, in a policy.
const AT_LEAST_ONCE: &str = r#""dead-letter-strategy":"at-least-once","overflow":"reject-publish""#;

/// A queue and all that decides over its messages.
pub(super) struct Examined<'a> {
    pub role: Role,
    pub facts: &'a QueueFacts,
    pub bindings: &'a [Binding],
    pub topology: &'a Topology,
    pub around: &'a Surroundings,
}

/// What becomes of a message that dies in a queue.
#[derive(Debug, PartialEq, Eq)]
enum Death {
    /// There is no dead-letter exchange.
    Dropped,
    /// The dead-letter exchange does not exist.
    NoExchange(String),
    /// For each key that a death may bear, the queues it reaches.
    Routed(Vec<(String, Reach)>),
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

    fn judge_stream(&self) -> Finding {
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
    fn judge_life(&self, findings: &mut Vec<Finding>) {
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
    fn judge_limits(&self, findings: &mut Vec<Finding>) {
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

    fn judge_delivery_limit(&self, death: &Death, findings: &mut Vec<Finding>) {
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
    fn judge_way_back(&self, death: &Death, findings: &mut Vec<Finding>) {
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
    fn judge_strategy(&self, findings: &mut Vec<Finding>) {
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

    /// Whether the queue outlives one node of a cluster.
    fn judge_copies(&self, findings: &mut Vec<Finding>) {
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
    fn judge_patience(&self, findings: &mut Vec<Finding>) {
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

    fn death(&self) -> Death {
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
    pub(super) fn dead_letter_exchange(&self) -> Option<String> {
        self.text("dead-letter-exchange")
    }

    /// The queue names that dead letters would be routed by on the default exchange.
    pub(super) fn dead_letter_keys(&self) -> Vec<String> {
        match self.text("dead-letter-routing-key") {
            Some(key) => vec![key],
            None => self.keys(),
        }
    }

    fn is_default_limit(&self) -> bool {
        self.numbers("delivery-limit").is_empty()
    }

    /// How often a message may be delivered, if there is a limit.
    fn delivery_limit(&self) -> Option<i64> {
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
    fn least(&self, name: &str) -> Option<i64> {
        self.numbers(name).into_iter().min()
    }

    fn numbers(&self, name: &str) -> Vec<i64> {
        let values = [self.argument(name), self.by_definition(name)];
        values.iter().flatten().filter_map(|v| v.as_i64()).collect()
    }

    /// A text; an argument wins over a policy.
    fn text(&self, name: &str) -> Option<String> {
        let value = self.argument(name).or_else(|| self.by_definition(name))?;
        value.as_str().map(str::to_owned)
    }

    fn argument(&self, name: &str) -> Option<&Value> {
        self.facts.arguments.get(&format!("x-{name}"))
    }

    fn by_definition(&self, name: &str) -> Option<&Value> {
        let policy = self.facts.effective_policy_definition.as_ref()?;
        policy.get(name)
    }

    fn finding(&self, grade: Grade, fact: &str, cure: &str) -> Finding {
        Finding::new(grade, self.role.subject(&self.facts.name), fact, cure)
    }

    /// The cure for a limit that somebody has set.
    fn without(&self, name: &str) -> String {
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
    fn by_policy(&self, definition: &str, name: &str) -> String {
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
    fn dead_letters_to(&self, target: &str) -> String {
        let safely = match self.facts.kind.as_str() {
            "quorum" => format!(",{AT_LEAST_ONCE}"),
            _ => String::new(),
        };
        let target = Value::from(target);
        format!(r#"{{"dead-letter-exchange":"","dead-letter-routing-key":{target}{safely}}}"#)
    }

    fn bind_cure(&self) -> String {
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

impl Death {
    /// Whether a death may reach no queue, or none of `ours`.
    fn loses(&self, ours: Option<&[String]>) -> bool {
        match self {
            Self::Dropped | Self::NoExchange(_) => true,
            Self::Routed(ways) => ways.iter().any(|(_, reach)| is_lost(reach, ours)),
        }
    }

    fn why(&self, ours: Option<&[String]>) -> String {
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

fn is_lost(reach: &Reach, ours: Option<&[String]>) -> bool {
    let reaches = match ours {
        Some(ours) => ours.iter().any(|queue| reach.queues.contains(queue)),
        None => !reach.queues.is_empty(),
    };
    !reaches && !reach.uncertain
}

/// Whether the queue's own name is the one key that leads astray, and there are others.
fn only_by_name_is_lost(ways: &[(String, Reach)], ours: &[String], name: &str) -> bool {
    ways.len() > 1
        && ways
            .iter()
            .all(|(key, reach)| is_lost(reach, Some(ours)) == (key == name))
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

/// Milliseconds, for people.
fn told(millis: i64) -> String {
    humantime::format_duration(Duration::from_millis(millis.unsigned_abs())).to_string()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{broker::ExchangeFacts, doctor::routing::Exchange};

    /// A set-up with a dead-letter exchange `dlx` that is bound to `dead` by `order.*`, and an
    /// exchange `events` that teams publish to.
    struct SetUp {
        topology: Topology,
        around: Surroundings,
    }

    fn binding(source: &str, destination: &str, key: &str) -> Binding {
        Binding {
            source: source.into(),
            destination: destination.into(),
            destination_type: "queue".into(),
            routing_key: key.into(),
            ..Binding::default()
        }
    }

    fn set_up(major: u32) -> SetUp {
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

    fn queue(kind: &str, arguments: Value, policy: Value) -> QueueFacts {
        serde_json::from_value(json!({
            "name": "orders", "type": kind, "durable": true,
            "arguments": arguments, "effective_policy_definition": policy,
        }))
        .unwrap()
    }

    impl SetUp {
        fn judge(&self, role: Role, facts: &QueueFacts, bindings: &[Binding]) -> Vec<Finding> {
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
        fn expect(&self, role: Role, facts: &QueueFacts, grade: Grade, words: &str) -> Finding {
            let found = self.judge(role, facts, &[]);
            let right = |f: &&Finding| f.grade == grade && f.fact.contains(words);
            let found_it = found.iter().find(right);
            found_it
                .unwrap_or_else(|| panic!("{words}: {found:?}"))
                .clone()
        }
    }

    #[test]
    fn a_plain_durable_queue_is_ok() {
        for role in [Role::Intake, Role::Review, Role::DeadLetters] {
            let found = set_up(4).judge(role, &queue("classic", json!({}), json!({})), &[]);
            assert_eq!(found.len(), 1, "{found:?}");
            assert_eq!(found[0].grade, Grade::Ok);
        }
    }

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

    #[test]
    fn a_short_consumer_timeout_is_told() {
        let facts = queue("quorum", json!({"x-consumer-timeout": 10_000}), json!({}));
        set_up(3).expect(Role::Intake, &facts, Grade::Warning, "cuts a consumer off");
    }

    #[test]
    fn what_is_not_told_yet_is_unknown() {
        let mut facts = queue("classic", json!({}), json!({}));
        facts.effective_policy_definition = None;
        set_up(3).expect(Role::Intake, &facts, Grade::Unknown, "not told yet");
    }

    #[test]
    fn a_name_is_escaped_for_a_policy_s_pattern() {
        assert_eq!(escaped("retry.scheduled_a-b"), "retry\\.scheduled_a-b");
    }
}
