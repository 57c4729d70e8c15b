//! Producers are strangers: what they send must not flood the metrics with labels, nor put
//! payloads, secrets or control characters into the log.

use std::collections::HashMap;

use lapin::BasicProperties;
use retry_scheduler::wire::proto::RetryMessage;

use crate::support::{Bed, Process, eventually, message};

const FAILED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'failed'";

#[tokio::test(flavor = "multi_thread")]
async fn queues_beyond_the_cap_share_one_metric_label() {
    let mut bed = Bed::new().await;
    bed.set("METRICS_MAX_QUEUES", "3");
    let service = bed.start().await;
    let messages: Vec<RetryMessage> = (0..40)
        .map(|n| RetryMessage {
            retry_count: if n % 2 == 0 { 3 } else { 0 },
            // In the year 2096, so that no retry falls due during the test.
            next_retry_at_ms: 4_000_000_000_000,
            ..message(&bed.queue(&format!("stranger-{n}")), "x")
        })
        .collect();
    bed.client.send_all(&bed.intake(), &messages).await;
    bed.until_count("SELECT count(*) FROM retry_queue", 40)
        .await;
    bed.until_count(FAILED, 20).await;
    let text = eventually("all are counted", || async {
        let metrics = service.scrape().await;
        let scheduled = metrics.sum("retries_scheduled_total");
        let exhausted = metrics.sum("retries_exhausted_total");
        if scheduled == 20.0 && exhausted == 20.0 {
            Some(service.get("/metrics").await.1)
        } else {
            None
        }
    })
    .await;
    let mut labels: HashMap<&str, usize> = HashMap::new();
    for line in text.lines().filter(|l| !l.starts_with('#')) {
        if let Some((_, rest)) = line.split_once("queue=\"") {
            *labels.entry(rest.split('"').next().unwrap()).or_default() += 1;
        }
    }
    assert!(labels.contains_key("other"), "{labels:?}");
    assert_eq!(labels.len(), 4, "{labels:?}");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn payloads_and_secrets_are_never_logged_and_control_characters_are_escaped() {
    const MARKER: &str = "marker-nobody-may-see";
    let mut bed = Bed::new().await;
    bed.set("LOG_LEVEL", "debug")
        .set("LOG_FORMAT", "pretty")
        .set("BASE_DELAY_MS", "50");
    let queue = bed.declare("present").await;
    let missing = bed.queue("missing");
    let service = Process::spawn(bed.command());
    let marked = |queue: &str| RetryMessage {
        max_retries: 1,
        error_reason: "one\r\ntwo\u{1b}[31m three\0".into(),
        ..message(queue, MARKER)
    };
    let intake = bed.intake();
    bed.client.declare(&intake).await;
    let (there, gone) = (marked(&queue), marked(&missing));
    let terminal = RetryMessage {
        error_reason: "[terminal] one\r\ntwo\u{1b}[31m three\0".into(),
        ..marked(&queue)
    };
    bed.client
        .send_all(&intake, &[there.clone(), gone, terminal])
        .await;
    // None of these bodies is a message, and the error that says so must not quote them.
    for body in [
        format!("{{\"original_queue\":\"q\",\"original_payload\":\"{MARKER}!\"}}"),
        format!("{{\"original_queue\":\"q\",\"original_payload\":[\"{MARKER}\"]}}"),
        format!("{{\"original_queue\":\"q\",\"retry_count\":\"{MARKER}\"}}"),
        format!("{MARKER} is no message"),
    ] {
        let plain = BasicProperties::default();
        bed.client.publish(&intake, body.as_bytes(), plain).await;
    }
    let mut inbox = bed.client.consume(&queue).await;
    assert_eq!(inbox.next().await.body, MARKER.as_bytes());
    // In review are the terminal one, the one for the missing queue, and the four that are no
    // messages.
    bed.until_count(FAILED, 6).await;
    service.signal("TERM").await;
    let (status, log) = service.ended().await;
    assert_eq!(status.code(), Some(0));

    assert!(log.contains(&there.message_id), "something was logged");
    let lines = log.lines().filter(|l| l.contains(MARKER));
    assert_eq!(lines.collect::<Vec<_>>(), Vec::<&str>::new());
    let as_numbers = format!("{:?}", MARKER.as_bytes());
    assert!(!log.contains(as_numbers.trim_matches(['[', ']'])));
    // A URL may hold a password, so neither URL may be logged.
    for url in [bed.setting("DATABASE_URL"), bed.setting("RABBITMQ_URL")] {
        assert!(!log.contains(url), "the log shows {url}");
    }
    assert!(log.contains("one\\r\\ntwo\\u{1b}[31m three"), "{log}");
    assert!(!log.contains("\u{1b}[31m three"));
}
