//! Asks RabbitMQ, by AMQP and by its management API, for what the judges need.

use std::{collections::HashMap, time::Duration};

use tokio::time::{Instant, sleep};

use super::{
    Doctor,
    database::CLOCKS_APART,
    finding::{Finding, Grade},
    queues::{Examined, Role, Surroundings},
    routing::{Exchange, Topology},
};
use crate::broker::{ApiError, Binding, BrokerError, Inspector, Overview, QueueFacts, Seen};

/// How long to wait until the API knows which policies apply to a new queue. The queue tells the
/// broker every five seconds, and the broker the plugin.
const GATHERING: Duration = Duration::from_secs(12);

/// The most exchanges that are followed from one dead-letter exchange.
const MOST_EXCHANGES: usize = 100;

const API: &str = "RabbitMQ's management API";

/// The queues that exist, as AMQP tells them.
type Look = HashMap<String, Option<Seen>>;

/// What the API says of one queue.
struct Told {
    role: Role,
    facts: QueueFacts,
    bindings: Vec<Binding>,
}

impl Doctor {
    /// Asks all that can be asked, and tries out what a republish needs.
    pub(super) async fn examine_broker(&self) -> Vec<Finding> {
        let subject = format!("RabbitMQ at {}", self.broker.address());
        let unreachable = |e: &BrokerError| {
            let cure = "see RABBITMQ_URL: host, port, user, password and vhost";
            vec![Finding::new(Grade::Problem, &subject, e.to_string(), cure)]
        };
        let greeting = match self.broker.greeting().await {
            Ok(greeting) => greeting,
            Err(e) => return unreachable(&e),
        };
        let mut inspector = match self.broker.inspector().await {
            Ok(inspector) => inspector,
            Err(e) => return unreachable(&e),
        };
        let version = format!("{} {}", greeting.product, greeting.version);
        let mut findings = vec![Finding::ok(&subject, version)];
        let look = match self.look(&mut inspector).await {
            Ok(look) => look,
            Err(e) => return unreachable(&e),
        };
        let may_bind = self.try_rights(&inspector, &look, &mut findings).await;
        inspector.close().await;
        self.judge_absence(&look, &mut findings);
        match self.management.overview().await {
            Ok(overview) if overview.cluster_name != greeting.cluster => {
                let fact = format!(
                    "{} belongs to the cluster {:?}, and RABBITMQ_URL to {:?}",
                    self.management.address(),
                    overview.cluster_name,
                    greeting.cluster
                );
                let cure = "set RABBITMQ_MANAGEMENT_URL";
                findings.push(Finding::new(Grade::Unknown, API, fact, cure));
                tell_seen(&self.all_queues(), &look, &mut findings);
            }
            Ok(overview) => {
                self.judge_clock(&overview, &mut findings);
                let around = self
                    .surroundings(&greeting.version, may_bind, &mut findings)
                    .await;
                match self.judge_queues(&around, &look, GATHERING).await {
                    Ok(judged) => findings.extend(judged),
                    Err(e) => findings.push(self.not_told(&e)),
                }
            }
            Err(e) => {
                findings.push(self.not_told(&e));
                tell_seen(&self.all_queues(), &look, &mut findings);
            }
        }
        findings
    }

    /// Asks what the check at start asks: what the API says of our own queues, if it answers.
    pub(super) async fn glance_at_broker(&self) -> Vec<Finding> {
        let Ok(overview) = self.management.overview().await else {
            return Vec::new();
        };
        // The usual port of this host may be that of another broker.
        let greeting = match self.broker.greeting().await {
            Ok(greeting) if greeting.cluster == overview.cluster_name => greeting,
            _ => return Vec::new(),
        };
        let mut unsaid = Vec::new();
        let around = self
            .surroundings(&greeting.version, true, &mut unsaid)
            .await;
        self.judge_queues(&around, &Look::new(), Duration::ZERO)
            .await
            .unwrap_or_default()
    }

    async fn look(&self, inspector: &mut Inspector) -> Result<Look, BrokerError> {
        let mut look = Look::new();
        for (_, queue) in self.all_queues() {
            let seen = inspector.look(&queue).await?;
            look.insert(queue, seen);
        }
        Ok(look)
    }

    /// Does what a republish needs. False if our exchange cannot be used.
    async fn try_rights(
        &self,
        inspector: &Inspector,
        look: &Look,
        findings: &mut Vec<Finding>,
    ) -> bool {
        const SUBJECT: &str = "rights in RabbitMQ";
        if let Err(e) = inspector.try_publishing().await {
            let fact = format!("nothing can be published: {e}");
            let cure = "end the alarm, if there is one; else let the user write to amq.default";
            findings.push(Finding::new(Grade::Problem, SUBJECT, fact, cure));
            return false;
        }
        let there = |queue: &&String| look.get(*queue).is_some_and(Option::is_some);
        let existing: Vec<String> = self.queues.iter().filter(there).cloned().collect();
        match inspector.try_binding(&existing).await {
            Ok(()) => {
                let fact = "we may declare our exchange, bind queues to it, and publish";
                findings.push(Finding::ok(SUBJECT, fact));
                true
            }
            Err(e) => {
                let exchange = self.broker.own_exchange();
                let fact = format!(
                    "the exchange {exchange:?} cannot be used, so republished messages bear their queue's name as routing key ({e})"
                );
                let cure = format!(
                    "let the user configure, write and read {exchange:?} and write to the queues (rabbitmqctl set_permissions)"
                );
                findings.push(Finding::new(Grade::Warning, SUBJECT, fact, cure));
                false
            }
        }
    }

    fn judge_absence(&self, look: &Look, findings: &mut Vec<Finding>) {
        for (role, queue) in self.all_queues() {
            if look.get(&queue).is_none_or(Option::is_some) {
                continue;
            }
            let (fact, cure) = match role {
                Role::Intake => (
                    "does not exist: what is published to it now is dropped",
                    "start the service, which declares it, before the producers",
                ),
                Role::DeadLetters => (
                    "does not exist: what dies now is dropped",
                    "start the service, which declares it, before the consumers",
                ),
                Role::Review => (
                    "does not exist yet",
                    "none needed: the service declares it when it starts",
                ),
                Role::Work => (
                    "does not exist: what should go back to it goes to review as unroutable",
                    "declare it, or see whether the name and the vhost are right",
                ),
            };
            findings.push(Finding::new(
                Grade::Warning,
                role.subject(&queue),
                fact,
                cure,
            ));
        }
    }

    fn judge_clock(&self, overview: &Overview, findings: &mut Vec<Finding>) {
        let Some(ahead) = overview.clock_ahead else {
            return;
        };
        let off_by = ahead.abs().to_std().unwrap_or_default();
        if off_by > CLOCKS_APART {
            let fact = format!(
                "its clock differs from this machine's by {} s",
                off_by.as_secs()
            );
            let cure = "run NTP on both";
            findings.push(Finding::new(Grade::Warning, "RabbitMQ", fact, cure));
        }
    }

    /// What holds for all queues, and what the nodes say of themselves.
    async fn surroundings(
        &self,
        version: &str,
        may_bind: bool,
        findings: &mut Vec<Finding>,
    ) -> Surroundings {
        let nodes = match self.management.nodes().await {
            Ok(nodes) => {
                for node in &nodes {
                    let alarm = match (node.mem_alarm, node.disk_free_alarm) {
                        (true, _) => "memory",
                        (_, true) => "disk",
                        _ => continue,
                    };
                    let fact = format!(
                        "node {:?} has raised a {alarm} alarm: nothing can be published",
                        node.name
                    );
                    let cure = format!("give it more {alarm}, or work off what fills it");
                    findings.push(Finding::new(Grade::Warning, "RabbitMQ", fact, cure));
                }
                Some(nodes.len())
            }
            Err(e) => {
                let fact = format!("does not tell of nodes and alarms: {e}");
                let cure = "give the user the tag monitoring (rabbitmqctl set_user_tags)";
                findings.push(Finding::new(Grade::Unknown, API, fact, cure));
                None
            }
        };
        Surroundings {
            vhost: self.broker.vhost().to_owned(),
            major: version.split('.').next().and_then(|n| n.parse().ok()),
            nodes,
            dead_letter_queues: self.dead_letter_queues(),
            review_queue: self.settings.manual_review_queue.clone(),
            own_exchange: self.broker.own_exchange(),
            may_bind,
            database_timeout: self.settings.database_timeout,
        }
    }

    async fn judge_queues(
        &self,
        around: &Surroundings,
        look: &Look,
        patience: Duration,
    ) -> Result<Vec<Finding>, ApiError> {
        let deadline = Instant::now() + patience;
        let mut told = Vec::new();
        let mut findings = Vec::new();
        let mut topology = Topology::default();
        for (role, queue) in self.all_queues() {
            let Some(mut facts) = self.policies_told(&queue, deadline).await? else {
                if look.get(&queue).is_some_and(Option::is_some) {
                    let fact = "exists, but the management API does not know it";
                    let cure = "see whether RABBITMQ_MANAGEMENT_URL is that of the same broker";
                    let subject = role.subject(&queue);
                    findings.push(Finding::new(Grade::Unknown, subject, fact, cure));
                }
                continue;
            };
            // The API's numbers are some seconds old.
            if let Some(Some(seen)) = look.get(&queue) {
                facts.messages = Some(seen.messages.into());
                facts.consumers = Some(seen.consumers.into());
            }
            let bindings = self.management.bindings_to(&queue).await?;
            for binding in &bindings {
                if !topology.kinds.contains_key(&binding.source)
                    && let Some(source) = self.management.exchange(&binding.source).await?
                {
                    topology.kinds.insert(binding.source.clone(), source.kind);
                }
            }
            told.push(Told {
                role,
                facts,
                bindings,
            });
        }
        for told in &told {
            let examined = told.examined(&topology, around);
            if let Some(exchange) = examined.dead_letter_exchange() {
                let keys = examined.dead_letter_keys();
                self.explore(&mut topology, exchange, &keys).await?;
            }
        }
        for told in &told {
            findings.extend(told.examined(&topology, around).judge());
        }
        Ok(findings)
    }

    /// A queue with the policies that apply to it, for which it waits until the deadline.
    async fn policies_told(
        &self,
        queue: &str,
        deadline: Instant,
    ) -> Result<Option<QueueFacts>, ApiError> {
        const PAUSE: Duration = Duration::from_millis(250);
        loop {
            let facts = self.management.queue(queue).await?;
            let told = facts
                .as_ref()
                .is_none_or(|facts| facts.effective_policy_definition.is_some());
            if told || Instant::now() > deadline {
                return Ok(facts);
            }
            sleep(PAUSE).await;
        }
    }

    /// Asks for an exchange and all that can be reached from it.
    async fn explore(
        &self,
        topology: &mut Topology,
        from: String,
        keys: &[String],
    ) -> Result<(), ApiError> {
        let mut open = vec![from];
        let mut asked = 0;
        while let Some(name) = open.pop() {
            if name.is_empty() {
                // By the default exchange a message reaches the queue that its key names.
                for key in keys.iter().filter(|key| !key.is_empty()) {
                    if !topology.queues.contains_key(key) {
                        let there = self.management.queue(key).await?.is_some();
                        topology.queues.insert(key.clone(), there);
                    }
                }
                continue;
            }
            if topology.exchanges.contains_key(&name) || asked >= MOST_EXCHANGES {
                continue;
            }
            asked += 1;
            let Some(facts) = self.management.exchange(&name).await? else {
                topology.exchanges.insert(name, None);
                continue;
            };
            let bindings = self.management.bindings_from(&name).await?;
            let exchange = Exchange { facts, bindings };
            let onward = exchange.bindings.iter();
            let onward = onward.filter(|binding| binding.destination_type == "exchange");
            open.extend(onward.map(|binding| binding.destination.clone()));
            open.extend(exchange.alternate().map(str::to_owned));
            topology.exchanges.insert(name, Some(exchange));
        }
        Ok(())
    }

    fn not_told(&self, error: &ApiError) -> Finding {
        let fact = format!(
            "{} cannot be asked for the queues' arguments, policies and bindings: {error}",
            self.management.address()
        );
        let cure = match error {
            ApiError::Refused(_) => {
                "give the user of RABBITMQ_URL the tag monitoring (rabbitmqctl set_user_tags)"
            }
            ApiError::Unreachable(_) | ApiError::Unreadable(_) => {
                "enable it (rabbitmq-plugins enable rabbitmq_management), or set RABBITMQ_MANAGEMENT_URL"
            }
        };
        Finding::new(Grade::Unknown, API, fact, cure)
    }
}

impl Told {
    fn examined<'a>(&'a self, topology: &'a Topology, around: &'a Surroundings) -> Examined<'a> {
        Examined {
            role: self.role,
            facts: &self.facts,
            bindings: &self.bindings,
            topology,
            around,
        }
    }
}

/// Says what AMQP alone tells of the queues.
fn tell_seen(queues: &[(Role, String)], look: &Look, findings: &mut Vec<Finding>) {
    for (role, queue) in queues {
        if let Some(Some(seen)) = look.get(queue) {
            let fact = format!("{} messages, {} consumers", seen.messages, seen.consumers);
            findings.push(Finding::ok(role.subject(queue), fact));
        }
    }
}
