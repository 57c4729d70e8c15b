//! The log as programs read it. Each line is a JSON object that names the service, its
//! version and the instance. The lines of events have the fields that an audit needs.

use std::collections::{BTreeMap, HashMap};

use lapin::types::{AMQPValue, FieldTable};
use retry_scheduler::{
    domain::event::{EventKind, KeyAction},
    wire::proto::RetryMessage,
};
use serde_json::Value;

use crate::support::{Bed, Process, eventually, message};

/// The fields that the line of every event has.
const OF_ALL: [&str; 10] = [
    "timestamp",
    "event_type",
    "retry_category",
    "operation",
    "tenant_id",
    "correlation_id",
    "trace_id",
    "message_id",
    "queue",
    "policy",
];

/// The fields of events that tell of an attempt.
const OF_AN_ATTEMPT: [&str; 5] = [
    "attempt_number",
    "max_attempts",
    "delay_seconds",
    "exception_type",
    "exception_message",
];

/// Each kind of event, the action if it is about a key, and the fields that its line has
/// besides [`OF_ALL`].
const OF_EACH: [(EventKind, Option<KeyAction>, &[&str]); 8] = [
    (EventKind::Scheduled, None, &OF_AN_ATTEMPT),
    (EventKind::SentBack, None, &OF_AN_ATTEMPT),
    (EventKind::Returned, None, &OF_AN_ATTEMPT),
    (EventKind::Deferred, None, &OF_AN_ATTEMPT),
    (
        EventKind::Reviewed,
        None,
        &[
            "total_attempts",
            "final_exception_type",
            "final_exception_message",
        ],
    ),
    (EventKind::Duplicate, None, &[]),
    (
        EventKind::Idempotency,
        Some(KeyAction::Record),
        &["idempotency_key", "action"],
    ),
    (
        EventKind::Idempotency,
        Some(KeyAction::Hit),
        &["idempotency_key", "action", "applied_to"],
    ),
];

fn parsed(log: &str) -> Vec<BTreeMap<String, Value>> {
    log.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        .collect()
}

/// A failure with all the fields that an audit asks for.
fn failure(queue: &str, payload: &str) -> RetryMessage {
    RetryMessage {
        category: "RETRY_NATS_PUBLISH".into(),
        operation: "Publish to audit.append.v1".into(),
        error_reason: "Connection timeout".into(),
        error_type: "TimeoutError".into(),
        tenant_id: "tenant-123".into(),
        correlation_id: "corr-456".into(),
        trace_id: "trace-789".into(),
        ..message(queue, payload)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn every_kind_of_event_is_a_line_with_the_fields_an_audit_needs() {
    let mut bed = Bed::new().await;
    bed.set("SERVICE_NAME", "retries-of-billing");
    let (queue, full) = (bed.declare("target").await, bed.queue("full"));
    let mut arguments = FieldTable::default();
    arguments.insert("x-max-length".into(), AMQPValue::LongInt(0));
    arguments.insert(
        "x-overflow".into(),
        AMQPValue::LongString("reject-publish".into()),
    );
    bed.client.declare_with(&full, arguments).await;
    let service = Process::spawn(bed.command());
    service.until_ready().await;
    let mut inbox = bed.client.consume(&queue).await;

    let first = RetryMessage {
        idempotency_key: "abc123def456".into(),
        ..failure(&queue, "first")
    };
    bed.client.send(&bed.intake(), &first).await;
    service.until_logged("\"retry_attempt\"").await;
    inbox.next().await;
    let far_off = RetryMessage {
        next_retry_at_ms: chrono::Utc::now().timestamp_millis() + 3_600_000,
        ..failure(&queue, "waits")
    };
    let spent = RetryMessage {
        retry_count: 2,
        ..failure(&queue, "spent")
    };
    let homeless = failure(&bed.queue("nowhere"), "homeless");
    let refused = failure(&full, "refused");
    for failure in [&first, &far_off, &far_off, &spent, &homeless, &refused] {
        bed.client.send(&bed.intake(), failure).await;
    }
    for (kind, action, _) in OF_EACH {
        let text = match action {
            Some(action) => format!("\"action\":\"{action}\""),
            None => format!("\"event_type\":\"{kind}\""),
        };
        service.until_logged(&text).await;
    }
    service.signal("TERM").await;
    let (status, log) = service.ended().await;
    assert!(status.success(), "{log}");

    let lines = parsed(&log);
    let instances: std::collections::HashSet<&str> = lines
        .iter()
        .filter_map(|l| l["instance"].as_str())
        .collect();
    assert_eq!(instances.len(), 1, "one instance wrote all lines");
    for line in &lines {
        assert_eq!(line["service"], "retries-of-billing", "{line:?}");
        assert_eq!(line["version"], env!("CARGO_PKG_VERSION"), "{line:?}");
    }
    for (kind, action, fields) in OF_EACH {
        let said = |line: &&BTreeMap<String, Value>| {
            let is = |field: &str, text: &str| line.get(field).is_some_and(|value| value == text);
            is("event_type", kind.as_str()) && action.is_none_or(|a| is("action", a.as_str()))
        };
        let line = lines.iter().find(said).expect("a line");
        for field in OF_ALL.iter().chain(fields) {
            let value = line.get(*field);
            let of_its_type = match *field {
                "attempt_number" | "max_attempts" | "total_attempts" => {
                    value.is_some_and(Value::is_i64)
                }
                "delay_seconds" => value.is_some_and(Value::is_f64),
                _ => value.is_some_and(Value::is_string),
            };
            assert!(of_its_type, "{kind} {action:?}: {field}: {line:?}");
        }
        assert_eq!(line["retry_category"], "RETRY_NATS_PUBLISH");
        assert_eq!(line["operation"], "Publish to audit.append.v1");
    }
    let one = |field: &str, text: &str, kind: EventKind| -> &BTreeMap<String, Value> {
        let mut found = lines.iter().filter(|line| {
            line.get(field).is_some_and(|v| v == text)
                && line.get("event_type").is_some_and(|v| v == kind.as_str())
        });
        found.next().expect("a line")
    };
    // Attempts are counted as executions: the first one has failed, and three are allowed.
    let sent_back = one("message_id", &first.message_id, EventKind::SentBack);
    assert_eq!(sent_back["attempt_number"], 1);
    assert_eq!(sent_back["max_attempts"], 3);
    assert_eq!(sent_back["exception_type"], "TimeoutError");
    assert!(sent_back["attempt_id"].is_string(), "{sent_back:?}");
    let reviewed = one("message_id", &spent.message_id, EventKind::Reviewed);
    assert_eq!(reviewed["total_attempts"], 3);
    let hit = one("action", "hit", EventKind::Idempotency);
    assert_eq!(hit["applied_to"], first.message_id.as_str());
    // The delay is the one that the producer asked for, not the shorter one of the policy.
    let waits = one("message_id", &far_off.message_id, EventKind::Scheduled);
    let delay = waits["delay_seconds"].as_f64().expect("a number");
    assert!((3000.0..=3600.0).contains(&delay), "{delay}");

    // The log line and the event tell the same delay.
    let events: Vec<(String, String, Option<i64>)> = sqlx::query_as(
        "SELECT q.message_id::text, e.event_type, e.delay_ms
         FROM retry_events e JOIN retry_queue q ON q.id = e.task_id
         WHERE e.event_type IN ('scheduled', 'retry_attempt') AND e.reason IS NULL ORDER BY e.id",
    )
    .fetch_all(&bed.db)
    .await
    .expect("events");
    let mut compared = HashMap::new();
    for (message_id, kind, delay_ms) in events {
        let kind: EventKind = kind.parse().expect("a kind");
        let told = one("message_id", &message_id, kind)["delay_seconds"].as_f64();
        let told = told.expect("a delay") * 1000.0;
        let stored = delay_ms.expect("a delay") as f64;
        assert!((told - stored).abs() <= 1.0, "{kind}: {told} {stored}");
        *compared.entry(kind).or_insert(0) += 1;
    }
    assert!(compared[&EventKind::SentBack] >= 1 && compared[&EventKind::Scheduled] >= 4);
    // The rows and the events have the operation and the error type, too.
    let named = "SELECT count(*) FROM retry_queue
                 WHERE operation IS NULL OR error_type IS DISTINCT FROM 'TimeoutError'";
    assert_eq!(bed.count(named).await, 0);
    let named = "SELECT count(*) FROM retry_events
                 WHERE operation IS NULL OR error_type IS DISTINCT FROM 'TimeoutError'";
    assert_eq!(bed.count(named).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_janitor_cannot_do_is_a_warning_that_names_the_cause() {
    let bed = Bed::new().await;
    bed.migrate().await;
    sqlx::raw_sql("ALTER TABLE idempotency_keys RENAME COLUMN expires_at TO gone")
        .execute(&bed.db)
        .await
        .expect("the table is broken");
    let service = Process::spawn(bed.command());
    let line = service.until_logged("old rows could not be removed").await;
    let line: Value = serde_json::from_str(&line).expect("JSON");
    assert_eq!(line["level"], "WARN");
    let error = line["error"].as_str().expect("an error");
    assert!(error.contains("expires_at"), "{error}");
    eventually("it is counted", || async {
        let (_, metrics) = service.get("/metrics").await;
        (!metrics.contains("retry_store_errors_total 0")).then_some(())
    })
    .await;
    service.signal("TERM").await;
    service.ended().await;
}
