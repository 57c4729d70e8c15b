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
    doctor::Doctor,
    domain::policy::{Jitter, Policy, PolicyBook},
    http::Pages,
    intake::{Intake, Loops, Recorder},
    janitor::Janitor,
    observe::{
        health::{Health, Part},
        metrics::Metrics,
        telemetry::chain,
    },
    place::{self, Unsettled},
    store::{Store, Unfit, maintenance::Retention, place::Kept},
    wire::{Rules, Source},
};

/// The tasks of the service. An error ends it.
type Parts = JoinSet<anyhow::Result<()>>;

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
    loops: Arc<Loops>,
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
            loops: Arc::default(),
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
        let run = dry_run.run(cancelled.clone());
        parts.spawn(async move {
            run.await;
            Ok(())
        });
        self.serve_http(&mut parts, health, &cancelled);
        stop_in_time(parts, shutdown, cancelled, deadline, store).await
    }

    fn intake(&self, rules: Rules, wake: &Arc<Wake>, health: &Health, part: &str) -> Intake {
        Intake {
            broker: self.broker.clone(),
            recorder: Recorder::new(
                self.store.of_part(part),
                Arc::new(rules),
                wake.clone(),
                self.metrics.clone(),
                self.loops.clone(),
                self.settings.idempotency_keys,
            ),
            metrics: self.metrics.clone(),
            part: health.part(part),
            review_queue: self.settings.manual_review_queue.clone(),
            prefetch: self.settings.intake_prefetch,
            memory: self.settings.intake_memory_bytes / self.settings.intake_queues(),
            batch: self.settings.intake_batch,
            linger: self.settings.intake_linger,
        }
    }

    fn start(self, cancelled: &CancellationToken) -> Parts {
        let health = Health::default();
        let wake = Arc::new(Wake::default());
        let settings = &self.settings;
        let rules = rules(settings, self.book.clone());
        let mut intakes = vec![self.intake(rules.clone(), &wake, &health, "consumer")];
        for queue in &settings.dead_letter_queues {
            let rules = Rules {
                intake_queue: queue.clone(),
                source: Source::DeadLetters,
                ..rules.clone()
            };
            let part = match settings.dead_letter_queues.len() {
                1 => "dead-letter-consumer".to_owned(),
                _ => format!("dead-letter-consumer {queue}"),
            };
            intakes.push(self.intake(rules, &wake, &health, &part));
        }
        let dispatchers: Vec<Dispatcher> = (1..=settings.dispatch_workers)
            .map(|n| format!("publisher-{n}"))
            .map(|part| Dispatcher {
                broker: self.broker.clone(),
                store: self.store.of_part(&part),
                book: self.book.clone(),
                wake: wake.clone(),
                metrics: self.metrics.clone(),
                part: health.part(part),
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
        let waiting = intakes.iter().map(|intake| intake.part.clone());
        let waiting = waiting.chain(dispatchers.iter().map(|dispatcher| dispatcher.part.clone()));
        let start = Start {
            store: self.store.clone(),
            broker: self.broker.clone(),
            queue: settings.retry_queue.clone(),
            migrate: settings.migrate_on_start,
            waiting: waiting.collect(),
        };
        let doctor = Doctor::new(
            settings.clone(),
            self.book.clone(),
            self.broker.clone(),
            self.store.clone(),
            Vec::new(),
        );
        let mut parts = JoinSet::new();
        self.serve_http(&mut parts, health, cancelled);
        let token = cancelled.clone();
        parts.spawn(async move {
            let Some(kept) = start.done(&token).await? else {
                return Ok(());
            };
            // It only logs: it is no part, and nothing waits for it.
            if let Ok(doctor) = doctor {
                tokio::spawn(doctor.at_start(token.clone()));
            }
            let mut loops = JoinSet::new();
            for intake in intakes {
                loops.spawn(unfailing(intake.run(token.clone())));
            }
            loops.spawn(place::stay(start.store, kept, token.clone()));
            loops.spawn(unfailing(janitor.run(token.clone())));
            for dispatcher in dispatchers {
                loops.spawn(unfailing(dispatcher.run(token.clone())));
            }
            while let Some(ended) = loops.join_next().await {
                match ended.map_err(JoinError::try_into_panic) {
                    Ok(ended) => ended?,
                    Err(Ok(panic)) => std::panic::resume_unwind(panic),
                    Err(Err(_)) => {}
                }
            }
            Ok(())
        });
        parts
    }

    fn serve_http(self, parts: &mut Parts, health: Health, cancelled: &CancellationToken) {
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
            Ok(())
        });
    }
}

/// Waits for `shutdown`, then for all parts to stop, but not beyond the deadline.
async fn stop_in_time(
    mut parts: Parts,
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
                Some(Ok(Err(e))) => return Err(e),
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

/// What has to be done before any loop runs.
struct Start {
    store: Store,
    broker: Broker,
    queue: String,
    /// Whether to apply the migrations, or to leave that to somebody else.
    migrate: bool,
    /// The parts that wait for it, and say for what.
    waiting: Vec<Part>,
}

impl Start {
    /// Makes the tables, and takes the database for the place where this instance is. Each
    /// is tried again until it works, because Postgres and RabbitMQ may start after us. An
    /// error says that waiting does not help. None when cancelled before.
    async fn done(&self, cancelled: &CancellationToken) -> anyhow::Result<Option<Kept>> {
        let mut backoff = Backoff::default();
        while let Err(e) = self.tables().await {
            if e.is::<Unfit>() {
                return Err(e);
            }
            let error = format!("{e:#}");
            self.wait_for(&error);
            warn!(error, "the tables are not ready yet");
            backoff.wait(cancelled).await;
            if cancelled.is_cancelled() {
                return Ok(None);
            }
        }
        backoff.reset();
        while !cancelled.is_cancelled() {
            match place::settle(&self.store, &self.broker, &self.queue).await {
                Ok(kept) => return Ok(Some(kept)),
                Err(e @ Unsettled::Refused(_)) => return Err(e.into()),
                Err(e) => {
                    self.wait_for(&chain(&e));
                    warn!(
                        error = chain(&e),
                        "it is not settled yet which place the database belongs to"
                    );
                }
            }
            backoff.wait(cancelled).await;
        }
        Ok(None)
    }

    async fn tables(&self) -> anyhow::Result<()> {
        if self.migrate {
            self.store.migrate().await
        } else {
            self.store.inspect().await
        }
    }

    fn wait_for(&self, what: &str) {
        for part in &self.waiting {
            part.down(what);
        }
    }
}

async fn unfailing(run: impl Future<Output = ()>) -> Result<(), Unsettled> {
    run.await;
    Ok(())
}

/// What RetryMessages are judged by.
pub(crate) fn rules(settings: &Settings, book: PolicyBook) -> Rules {
    Rules {
        book,
        allowed: settings.allowed_queues.clone(),
        intake_queue: settings.retry_queue.clone(),
        source: Source::RetryMessages,
        max_retries_limit: settings.max_retries_limit,
        max_payload_bytes: settings.max_payload_bytes,
    }
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
