//! Builds the parts, runs them under one token, and stops them under a deadline.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use anyhow::Context;
use tokio::{
    net::TcpListener,
    task::{JoinError, JoinSet},
};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use uuid::Uuid;

use crate::{
    backoff::Backoff,
    broker::Broker,
    config::Settings,
    dispatcher::{Dispatcher, DryRun, Wake},
    domain::policy::{Jitter, Policy, PolicyBook},
    http::Pages,
    intake::{Intake, Recorder},
    janitor::Janitor,
    observe::{
        health::{Health, Part},
        metrics::Metrics,
    },
    store::{Store, maintenance::Retention},
    wire::{Rules, Source},
};

/// A new name for an instance of the service: no two have the same.
pub fn instance_name(settings: &Settings) -> String {
    format!("{}-{}", settings.service_name, Uuid::new_v4().simple())
}

/// A service that holds its port and has started no loop yet.
pub struct App {
    settings: Settings,
    listener: TcpListener,
    broker: Broker,
    store: Store,
    book: PolicyBook,
    metrics: Arc<Metrics>,
}

impl App {
    /// Takes the port, and checks all that can be checked without Postgres and RabbitMQ.
    pub async fn new(settings: Settings, instance: &str) -> anyhow::Result<Self> {
        let address = SocketAddr::new(settings.http_host, settings.http_port);
        let listener = TcpListener::bind(address)
            .await
            .with_context(|| format!("HTTP_PORT: cannot listen on {address}"))?;
        Ok(Self {
            broker: Broker::new(&settings)?,
            store: Store::open(&settings, instance)?,
            book: policy_book(&settings)?,
            metrics: Arc::new(Metrics::new(settings.metrics_max_queues)?),
            listener,
            settings,
        })
    }

    /// The address where HTTP is served.
    pub fn address(&self) -> anyhow::Result<SocketAddr> {
        Ok(self.listener.local_addr()?)
    }

    /// Serves until `shutdown` resolves, then stops: what is in hand is finished
    /// or rolled back, and connections are closed, all within the deadline.
    pub async fn run(self, shutdown: impl Future<Output = ()>) -> anyhow::Result<()> {
        let cancelled = CancellationToken::new();
        let (deadline, store) = (self.settings.shutdown_timeout, self.store.clone());
        let parts = self.start(&cancelled);
        stop_in_time(parts, shutdown, cancelled, deadline, store).await
    }

    /// Says what would be sent, until `shutdown` resolves, and sends nothing.
    pub async fn dry_run(self, shutdown: impl Future<Output = ()>) -> anyhow::Result<()> {
        let cancelled = CancellationToken::new();
        let (deadline, store) = (self.settings.shutdown_timeout, self.store.clone());
        let health = Health::default();
        let dry_run = DryRun {
            store: self.store.clone(),
            part: health.part("dry-run"),
            poll_interval: self.settings.retry_poll_interval,
        };
        let mut parts = JoinSet::new();
        parts.spawn(dry_run.run(cancelled.clone()));
        self.serve_http(&mut parts, health, &cancelled);
        stop_in_time(parts, shutdown, cancelled, deadline, store).await
    }

    fn intake(&self, rules: Rules, wake: &Arc<Wake>, part: Part) -> Intake {
        Intake {
            broker: self.broker.clone(),
            recorder: Recorder::new(
                self.store.clone(),
                Arc::new(rules),
                wake.clone(),
                self.metrics.clone(),
                self.settings.idempotency_keys,
            ),
            metrics: self.metrics.clone(),
            part,
            review_queue: self.settings.manual_review_queue.clone(),
            prefetch: self.settings.intake_prefetch,
            memory: self.settings.intake_memory_bytes / self.settings.intake_queues(),
            batch: self.settings.intake_batch,
            linger: self.settings.intake_linger,
        }
    }

    fn start(self, cancelled: &CancellationToken) -> JoinSet<()> {
        let health = Health::default();
        let wake = Arc::new(Wake::default());
        let settings = &self.settings;
        let rules = Rules {
            book: self.book.clone(),
            allowed: settings.allowed_queues.clone(),
            intake_queue: settings.retry_queue.clone(),
            source: Source::RetryMessages,
            max_retries_limit: settings.max_retries_limit,
            max_payload_bytes: settings.max_payload_bytes,
        };
        let mut intakes = vec![self.intake(rules.clone(), &wake, health.part("consumer"))];
        if let Some(queue) = &settings.dead_letter_queue {
            let rules = Rules {
                intake_queue: queue.clone(),
                source: Source::DeadLetters,
                ..rules
            };
            intakes.push(self.intake(rules, &wake, health.part("dead-letter-consumer")));
        }
        let dispatchers: Vec<Dispatcher> = (1..=settings.dispatch_workers)
            .map(|n| Dispatcher {
                broker: self.broker.clone(),
                store: self.store.clone(),
                book: self.book.clone(),
                wake: wake.clone(),
                metrics: self.metrics.clone(),
                part: health.part(format!("publisher-{n}")),
                service: settings.service_name.clone(),
                review_queue: settings.manual_review_queue.clone(),
                review_format: settings.review_format,
                batch: settings.dispatch_batch,
                batch_bytes: settings.dispatch_batch_bytes,
                poll_interval: settings.retry_poll_interval,
            })
            .collect();
        let janitor = Janitor {
            store: self.store.clone(),
            metrics: self.metrics.clone(),
            retention: Retention {
                retried: settings.retain_retried,
                reviewed: settings.retain_reviewed,
                events: settings.retain_events,
            },
        };
        let mut parts = JoinSet::new();
        let migrate = settings.migrate_on_start;
        let store = self.store.clone();
        self.serve_http(&mut parts, health, cancelled);
        let token = cancelled.clone();
        parts.spawn(async move {
            if migrate && !migrated(&store, &token).await {
                return;
            }
            let mut loops = JoinSet::new();
            for intake in intakes {
                loops.spawn(intake.run(token.clone()));
            }
            loops.spawn(janitor.run(token.clone()));
            for dispatcher in dispatchers {
                loops.spawn(dispatcher.run(token.clone()));
            }
            while let Some(ended) = loops.join_next().await {
                if let Err(panic) = ended.map_err(JoinError::try_into_panic)
                    && let Ok(panic) = panic
                {
                    std::panic::resume_unwind(panic);
                }
            }
        });
        parts
    }

    fn serve_http(self, parts: &mut JoinSet<()>, health: Health, cancelled: &CancellationToken) {
        let router = Pages {
            store: self.store,
            health,
            metrics: self.metrics,
        }
        .router();
        let (listener, stop) = (self.listener, cancelled.clone().cancelled_owned());
        parts.spawn(async move {
            let served = axum::serve(listener, router).with_graceful_shutdown(stop);
            if let Err(e) = served.await {
                warn!(error = %e, "HTTP ended");
            }
        });
    }
}

/// Waits for `shutdown`, then for all parts to stop, but not beyond the deadline.
async fn stop_in_time(
    mut parts: JoinSet<()>,
    shutdown: impl Future<Output = ()>,
    cancelled: CancellationToken,
    deadline: Duration,
    store: Store,
) -> anyhow::Result<()> {
    tokio::select! {
        () = shutdown => {}
        // A part that ends unasked has panicked or failed. Then the service stops as a whole,
        // without finishing what is in hand, and whoever watches this process starts it anew.
        ended = parts.join_next() => {
            cancelled.cancel();
            match ended {
                Some(Err(e)) => anyhow::bail!("a part of the service failed: {e}"),
                _ => anyhow::bail!("a part of the service ended unasked"),
            }
        }
    }
    info!("stopping: finishing what is in hand");
    cancelled.cancel();
    let drained = tokio::time::timeout(deadline, async {
        while parts.join_next().await.is_some() {}
        store.close().await;
    });
    if drained.await.is_err() {
        warn!(?deadline, "not all parts stopped in time; leaving the rest");
    }
    info!("stopped");
    Ok(())
}

/// Applies the migrations, and tries again until that works: Postgres may start after
/// us. False when cancelled before.
async fn migrated(store: &Store, cancelled: &CancellationToken) -> bool {
    let mut backoff = Backoff::default();
    while !cancelled.is_cancelled() {
        match store.migrate().await {
            Ok(()) => return true,
            Err(e) => warn!(error = format!("{e:#}"), "migrations are not applied yet"),
        }
        backoff.wait(cancelled).await;
    }
    false
}

/// The policies in force: the default comes from the settings, the others from the file
/// that POLICIES_FILE names, or from the presets.
pub(crate) fn policy_book(settings: &Settings) -> anyhow::Result<PolicyBook> {
    let default = Policy {
        max_retries: settings.default_max_retries,
        base_delay: settings.base_delay,
        max_delay: settings.max_delay,
        jitter: Jitter::Additive {
            up_to: settings.jitter,
        },
        max_age: settings.max_age,
        ..Policy::default()
    };
    let Some(path) = &settings.policies_file else {
        return Ok(PolicyBook::presets(default)?);
    };
    let named = || format!("POLICIES_FILE: {}", path.display());
    let text = std::fs::read_to_string(path).with_context(named)?;
    PolicyBook::parse(&text, default).with_context(named)
}
