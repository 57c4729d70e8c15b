//! Every metric: its name, its help and its labels.

use std::{
    collections::HashSet,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use prometheus::{
    Encoder, Histogram, HistogramOpts, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder,
};

use crate::domain::review::Reason;

/// The label of queues beyond the cap.
const OTHER: &str = "other";

/// All metrics of one instance.
#[allow(missing_docs)] // each is documented by its help text below
pub struct Metrics {
    registry: Registry,
    queues: QueueLabels,
    scheduled: IntCounterVec,
    executed: IntCounterVec,
    exhausted: IntCounterVec,
    pub queue_depth: IntGauge,
    pub oldest_due_seconds: prometheus::Gauge,
    reviewed: IntCounterVec,
    pub deferred: IntCounter,
    intake: IntCounterVec,
    duplicates: IntCounter,
    invalid: IntCounter,
    idempotency_hits: IntCounter,
    suspected_loops: IntCounterVec,
    pub removed: IntCounterVec,
    pub rows_not_understood: IntGauge,
    pub reconnects: IntCounterVec,
    pub store_errors: IntCounter,
    up: IntGaugeVec,
    pool: IntGaugeVec,
    drift: Histogram,
    pub intake_batch: Histogram,
    pub dispatch_batch: Histogram,
    pub dispatch_seconds: Histogram,
}

/// What became of a delivery at intake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IntakeOutcome {
    /// The failure will be retried.
    Scheduled,
    /// The failure goes to review.
    Review,
    /// The failure was known already.
    Duplicate,
    /// The failure was applied already, by its key.
    IdempotencyHit,
}

struct QueueLabels {
    seen: Mutex<HashSet<String>>,
    most: usize,
}

impl QueueLabels {
    /// The label of a queue. Strangers choose queue names, and each label takes memory
    /// for ever, so only the first few queues get one of their own.
    fn label<'q>(&self, queue: &'q str) -> &'q str {
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        if seen.contains(queue) {
            queue
        } else if seen.len() < self.most {
            seen.insert(queue.to_owned());
            queue
        } else {
            OTHER
        }
    }
}

impl Metrics {
    /// Registers everything; at most `max_queues` queues get a label.
    #[rustfmt::skip]
    pub fn new(max_queues: usize) -> Result<Self, prometheus::Error> {
        let r = Registry::new();
        #[cfg(target_os = "linux")]
        r.register(Box::new(prometheus::process_collector::ProcessCollector::for_self()))?;
        let build = gauges(&r, "retry_scheduler_build_info", "Always 1; the version is a label", &["version"])?;
        build.with_label_values(&[env!("CARGO_PKG_VERSION")]).set(1);
        Ok(Self {
            queues: QueueLabels { seen: Mutex::default(), most: max_queues },
            scheduled: counters(&r, "retries_scheduled_total", "Failures that were given another retry", &["queue"])?,
            executed: counters(&r, "retries_executed_total", "Due retries: success (back in the queue) or failed (could not be sent: no such queue, or refused content)", &["queue", "status"])?,
            exhausted: counters(&r, "retries_exhausted_total", "Messages moved to manual review after max retries", &["queue"])?,
            queue_depth: gauge(&r, "retry_queue_depth", "Pending retry tasks")?,
            oldest_due_seconds: {
                let g = prometheus::Gauge::new("retry_oldest_due_seconds", "How long the oldest due task has been due; 0 when none is")?;
                r.register(Box::new(g.clone()))?;
                g
            },
            reviewed: counters(&r, "retries_reviewed_total", "Messages given to manual review, by reason", &["reason"])?,
            deferred: counter(&r, "retries_deferred_total", "Due tasks that the broker refused for now or did not confirm in time, or whose review queue could not be reached; they spend no attempt")?,
            intake: counters(&r, "retry_intake_total", "Deliveries by what became of them: scheduled, review, duplicate or idempotency_hit", &["outcome"])?,
            duplicates: counter(&r, "retry_duplicates_total", "Deliveries of a failure that was already waiting, or of an attempt before the last")?,
            invalid: counter(&r, "retry_invalid_total", "Deliveries that could not be understood or were not allowed")?,
            idempotency_hits: counter(&r, "retry_idempotency_hits_total", "Deliveries whose idempotency key was applied before")?,
            suspected_loops: counters(&r, "retry_suspected_loops_total", "Failures under a new id whose body had come to the same queue under other new ids more often than its retries allow; by what this instance saw", &["queue"])?,
            removed: counters(&r, "retry_removed_total", "Rows removed because they were older than their retention", &["kind"])?,
            rows_not_understood: gauge(&r, "retry_rows_not_understood", "Rows with a status, reason or class of a newer version, which this one leaves alone; by the last walk over the table")?,
            reconnects: counters(&r, "retry_reconnects_total", "Connections to RabbitMQ made after the first, by part", &["part"])?,
            store_errors: counter(&r, "retry_store_errors_total", "Database operations that failed")?,
            up: gauges(&r, "retry_up", "Whether a part works (1) or not (0)", &["part"])?,
            pool: gauges(&r, "retry_database_connections", "Connections of the pool, by state", &["state"])?,
            drift: histogram(&r, "retry_drift_seconds", "From a task's due time to its confirmed republish",
                &[0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 60.0, 600.0])?,
            intake_batch: histogram(&r, "retry_intake_batch_size", "Deliveries stored in one transaction", &SIZES)?,
            dispatch_batch: histogram(&r, "retry_dispatch_batch_size", "Tasks claimed in one transaction", &SIZES)?,
            dispatch_seconds: histogram(&r, "retry_dispatch_batch_seconds", "From claim to commit of one batch",
                &[0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0])?,
            registry: r,
        })
    }

    /// Counts a failure of `queue` that will be retried.
    pub fn scheduled(&self, queue: &str) {
        self.scheduled
            .with_label_values(&[self.queues.label(queue)])
            .inc();
        self.intake(IntakeOutcome::Scheduled);
    }

    /// Counts a delivery that will not be retried.
    pub fn bound_for_review(&self, reason: Reason) {
        if reason == Reason::Invalid {
            self.invalid.inc();
        }
        self.intake(IntakeOutcome::Review);
    }

    /// Counts a delivery by what became of it.
    pub fn intake(&self, outcome: IntakeOutcome) {
        let label = match outcome {
            IntakeOutcome::Scheduled => "scheduled",
            IntakeOutcome::Review => "review",
            IntakeOutcome::Duplicate => {
                self.duplicates.inc();
                "duplicate"
            }
            IntakeOutcome::IdempotencyHit => {
                self.idempotency_hits.inc();
                "idempotency_hit"
            }
        };
        self.intake.with_label_values(&[label]).inc();
    }

    /// Counts a failure of `queue` that seems to be one round of an endless loop, and returns
    /// the queue's label.
    pub fn suspected_loop<'q>(&self, queue: &'q str) -> &'q str {
        let label = self.queues.label(queue);
        self.suspected_loops.with_label_values(&[label]).inc();
        label
    }

    /// Counts a message that is back in `queue`, `drift` after it was due.
    pub fn sent_back(&self, queue: &str, drift: Duration) {
        self.executed
            .with_label_values(&[self.queues.label(queue), "success"])
            .inc();
        self.drift.observe(drift.as_secs_f64());
    }

    /// Counts a message that could not be sent back.
    pub fn returned(&self, queue: &str) {
        self.executed
            .with_label_values(&[self.queues.label(queue), "failed"])
            .inc();
    }

    /// Counts a message of `queue` that was given to people.
    pub fn reviewed(&self, queue: &str, reason: Reason) {
        self.reviewed.with_label_values(&[reason.as_str()]).inc();
        if reason.is_spent_budget() {
            self.exhausted
                .with_label_values(&[self.queues.label(queue)])
                .inc();
        }
    }

    /// The text that Prometheus scrapes.
    pub fn render(
        &self,
        parts: &[(String, bool)],
        pool: (u32, u32),
    ) -> Result<String, prometheus::Error> {
        for (part, up) in parts {
            self.up
                .with_label_values(&[part.as_str()])
                .set((*up).into());
        }
        let (open, busy) = pool;
        self.pool.with_label_values(&["open"]).set(open.into());
        self.pool.with_label_values(&["busy"]).set(busy.into());
        let mut text = Vec::new();
        TextEncoder::new().encode(&self.registry.gather(), &mut text)?;
        String::from_utf8(text).map_err(|e| prometheus::Error::Msg(e.to_string()))
    }
}

const SIZES: [f64; 10] = [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0];

fn counter(r: &Registry, name: &str, help: &str) -> Result<IntCounter, prometheus::Error> {
    let metric = IntCounter::new(name, help)?;
    r.register(Box::new(metric.clone()))?;
    Ok(metric)
}

fn gauge(r: &Registry, name: &str, help: &str) -> Result<IntGauge, prometheus::Error> {
    let metric = IntGauge::new(name, help)?;
    r.register(Box::new(metric.clone()))?;
    Ok(metric)
}

fn counters(
    r: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> Result<IntCounterVec, prometheus::Error> {
    let metric = IntCounterVec::new(Opts::new(name, help), labels)?;
    r.register(Box::new(metric.clone()))?;
    Ok(metric)
}

fn gauges(
    r: &Registry,
    name: &str,
    help: &str,
    labels: &[&str],
) -> Result<IntGaugeVec, prometheus::Error> {
    let metric = IntGaugeVec::new(Opts::new(name, help), labels)?;
    r.register(Box::new(metric.clone()))?;
    Ok(metric)
}

fn histogram(
    r: &Registry,
    name: &str,
    help: &str,
    buckets: &[f64],
) -> Result<Histogram, prometheus::Error> {
    let options = HistogramOpts::new(name, help).buckets(buckets.to_vec());
    let metric = Histogram::with_opts(options)?;
    r.register(Box::new(metric.clone()))?;
    Ok(metric)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queues_beyond_the_cap_share_one_label() {
        let metrics = Metrics::new(2).unwrap();
        for queue in ["a", "b", "c", "d", "a"] {
            metrics.scheduled(queue);
        }
        let text = metrics.render(&[], (0, 0)).unwrap();
        assert!(text.contains(r#"retries_scheduled_total{queue="a"} 2"#));
        assert!(text.contains(r#"retries_scheduled_total{queue="other"} 2"#));
        assert!(!text.contains(r#"queue="c""#));
    }
}
