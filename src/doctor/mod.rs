//! Tells whether a set-up can lose messages: asks RabbitMQ, its management API and Postgres, and
//! judges what they say.
//!
//! [`broker`](crate::broker) and [`store`](crate::store) ask; the modules here judge, and are
//! pure but for `probe`, which tries a dead-letter loop with a message of its own.

mod broker;
mod database;
mod finding;
mod probe;
mod queues;
mod routing;

use std::time::Duration;

use secrecy::ExposeSecret;
use tokio_util::sync::CancellationToken;
use tracing::warn;
use url::Url;

pub use finding::{Finding, Grade, Report};

use crate::{
    broker::{Broker, Management},
    config::Settings,
    domain::policy::PolicyBook,
    store::{Store, StoreError},
};
use database::Wanted;
use probe::Loop;
use queues::Role;

/// How long the API may take for one answer.
const API_TIMEOUT: Duration = Duration::from_secs(5);

/// How long the check at start may take in all.
const AT_START: Duration = Duration::from_secs(20);

/// What is examined, and by whom it is asked.
pub struct Doctor {
    settings: Settings,
    book: PolicyBook,
    broker: Broker,
    store: Store,
    management: Management,
    /// The teams' queues, to which messages go back.
    queues: Vec<String>,
}

impl Doctor {
    /// Examines the set-up that the settings describe, and the teams' `queues`.
    pub fn new(
        settings: Settings,
        book: PolicyBook,
        broker: Broker,
        store: Store,
        queues: Vec<String>,
    ) -> anyhow::Result<Self> {
        Ok(Self {
            management: Management::new(&settings, API_TIMEOUT)?,
            settings,
            book,
            broker,
            store,
            queues,
        })
    }

    /// Examines everything but dead-letter loops. Changes nothing, except that it declares the
    /// exchange and makes the bindings that a republish needs.
    pub async fn examine(&self) -> Report {
        let mut findings = self.examine_broker().await;
        findings.extend(self.examine_database(true).await);
        Report { findings }
    }

    /// Tries the dead-letter loop of a queue with a probe that bears this routing key.
    pub async fn probe(&self, queue: &str, key: Option<&str>) -> Finding {
        let dead_letter_queues = self.dead_letter_queues();
        let of = Loop {
            settings: &self.settings,
            book: &self.book,
            dead_letter_queues: &dead_letter_queues,
            queue,
            key: key.unwrap_or(queue),
        };
        Box::pin(of.run(&self.broker, &self.store)).await
    }

    /// Logs the problems of a set-up while the service starts on it. It asks little, changes
    /// nothing, and says nothing of what cannot be asked.
    pub async fn at_start(self, cancelled: CancellationToken) {
        let check = async {
            let mut findings = self.glance_at_broker().await;
            // An outage is told by the loops that need the database.
            findings.extend(self.ask_database(false).await.unwrap_or_default());
            Report { findings }
        };
        let checked = tokio::select! {
            () = cancelled.cancelled() => return,
            checked = tokio::time::timeout(AT_START, check) => checked,
        };
        let Ok(report) = checked else { return };
        for finding in report.of(Grade::Problem) {
            warn!(
                subject = finding.subject,
                fact = finding.fact,
                cure = finding.cure,
                "the set-up can lose messages; `retry-scheduler doctor` tells more"
            );
        }
    }

    fn dead_letter_queues(&self) -> Vec<String> {
        self.settings.dead_letter_queues.clone()
    }

    /// Every queue that is looked at, with its role.
    fn all_queues(&self) -> Vec<(Role, String)> {
        let settings = &self.settings;
        let mut all = vec![
            (Role::Intake, settings.retry_queue.clone()),
            (Role::Review, settings.manual_review_queue.clone()),
        ];
        let dead = self.dead_letter_queues().into_iter();
        all.extend(dead.map(|queue| (Role::DeadLetters, queue)));
        for queue in &self.queues {
            // One of our own is judged as what it is.
            if all.iter().all(|(_, own)| own != queue) {
                all.push((Role::Work, queue.clone()));
            }
        }
        all
    }

    async fn examine_database(&self, thoroughly: bool) -> Vec<Finding> {
        match self.ask_database(thoroughly).await {
            Ok(findings) => findings,
            Err(e) => {
                let fact = match std::error::Error::source(&e) {
                    Some(cause) => format!("{e}: {cause}"),
                    None => e.to_string(),
                };
                let cure = if fact.contains("unsupported startup parameter") {
                    "let PgBouncer take it: ignore_startup_parameters = extra_float_digits"
                } else {
                    "see DATABASE_URL, and whether the server runs"
                };
                vec![Finding::new(Grade::Problem, "Postgres", fact, cure)]
            }
        }
    }

    async fn ask_database(&self, thoroughly: bool) -> Result<Vec<Finding>, StoreError> {
        const USUAL_PORT: u16 = 5432;
        let facts = self.store.facts(thoroughly).await?;
        let url = Url::parse(self.settings.database_url.expose_secret()).ok();
        let wanted = Wanted {
            pool_size: self.settings.database_pool_size,
            migrate_on_start: self.settings.migrate_on_start,
            port: url.and_then(|url| url.port()).unwrap_or(USUAL_PORT),
        };
        Ok(database::judge(&facts, wanted))
    }
}
