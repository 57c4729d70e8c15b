//! The whole way of a message: it fails, waits, is sent back unchanged, and goes to review
//! when its retries are spent.

use std::{
    collections::HashMap,
    time::{Duration, Instant},
};

use retry_scheduler::wire::proto::RetryMessage;

use crate::support::{Bed, message};

#[tokio::test(flavor = "multi_thread")]
async fn a_failed_message_comes_back_byte_for_byte_not_before_its_backoff() {
    let bed = Bed::new().await;
    let queue = bed.declare("invoices").await;
    let service = bed.start().await;
    let payload: Vec<u8> = (0..=255).collect();
    let sent = RetryMessage {
        retry_count: 1,
        ..message(&queue, payload.clone())
    };
    let mut inbox = bed.client.consume(&queue).await;
    let start = Instant::now();
    bed.client.send(&bed.intake(), &sent).await;
    let back = inbox.next().await;
    assert!(back.at - start >= Duration::from_millis(400), "too early");
    assert_eq!(back.body, payload);
    assert_eq!(back.id(), sent.message_id);
    assert_eq!(back.text("x-retry-id").unwrap(), sent.message_id);
    assert_eq!(back.number("x-retry-count"), Some(2));
    assert_eq!(back.number("x-max-retries"), Some(3));
    assert_eq!(back.text("x-original-error").unwrap(), sent.error_reason);
    assert_eq!(back.text("x-retry-scheduler").unwrap(), "retry-scheduler");
    assert_eq!(*back.properties.delivery_mode(), Some(2));
    bed.until_count(
        "SELECT count(*) FROM retry_queue WHERE status = 'retried'",
        1,
    )
    .await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn three_hundred_messages_end_where_they_belong_and_all_numbers_agree() {
    let bed = Bed::new().await;
    let mut queues = Vec::new();
    for name in ["a", "b", "c"] {
        queues.push(bed.declare(name).await);
    }
    let service = bed.start().await;

    let mut sent: HashMap<String, (RetryMessage, Instant)> = HashMap::new();
    let mut messages = Vec::new();
    for n in 0..300_usize {
        // Sizes are from 0 bytes to 1 MB: most are small, and every 30th is large.
        let size = match n % 30 {
            0 => 0,
            29 => 1_000_000,
            k => k * 37,
        };
        let payload: Vec<u8> = (0..size).map(|i| (i * 31 + n) as u8).collect();
        messages.push(RetryMessage {
            retry_count: (n % 4) as i32,
            ..message(&queues[n % 3], payload)
        });
    }
    for m in &messages {
        bed.client.send(&bed.intake(), m).await;
        sent.insert(m.message_id.clone(), (m.clone(), Instant::now()));
    }

    let mut returned = 0;
    for queue in &queues {
        let expected = messages
            .iter()
            .filter(|m| m.original_queue == *queue && m.retry_count < 3)
            .count();
        let mut inbox = bed.client.consume(queue).await;
        for back in inbox.take(expected).await {
            let (m, confirmed_at) = &sent[&back.id()];
            assert_eq!(back.body, m.original_payload);
            assert_eq!(m.original_queue, *queue);
            assert_eq!(
                back.number("x-retry-count"),
                Some(i64::from(m.retry_count) + 1)
            );
            // The service may store a message, and so begin its wait, a moment before the test
            // gets the confirm. So the wait may seem a little too short.
            let least = Duration::from_millis(200 << m.retry_count);
            let early = least.saturating_sub(back.at - *confirmed_at);
            assert!(early < Duration::from_millis(150), "early by {early:?}");
            returned += 1;
        }
    }
    assert_eq!(returned, 225);
    let mut review = bed.client.consume(&bed.review()).await;
    for back in review.take(75).await {
        let envelope = back.review();
        let (m, _) = &sent[&envelope.message_id];
        assert_eq!(m.retry_count, 3);
        assert_eq!(envelope.reason, "exhausted");
        assert_eq!(envelope.original_payload, m.original_payload);
        assert_eq!(envelope.original_queue, m.original_queue);
    }

    bed.until_count(
        "SELECT count(*) FROM retry_queue WHERE status = 'retried'",
        225,
    )
    .await;
    bed.until_count(
        "SELECT count(*) FROM retry_queue WHERE status = 'failed' AND reason = 'exhausted'",
        75,
    )
    .await;
    let early = "SELECT count(*) FROM retry_queue WHERE settled_at < next_retry_at";
    assert_eq!(bed.count(early).await, 0);
    let metrics = service.scrape().await;
    for (i, queue) in queues.iter().enumerate() {
        let of = |keep: &dyn Fn(i32) -> bool| {
            (0..300)
                .filter(|n| n % 3 == i && keep((n % 4) as i32))
                .count() as f64
        };
        let (retried, spent) = (of(&|c| c < 3), of(&|c| c == 3));
        let sample = |s: String| metrics.get(&s);
        assert_eq!(
            sample(format!("retries_scheduled_total{{queue=\"{queue}\"}}")),
            retried
        );
        assert_eq!(
            sample(format!(
                "retries_executed_total{{queue=\"{queue}\",status=\"success\"}}"
            )),
            retried
        );
        assert_eq!(
            sample(format!("retries_exhausted_total{{queue=\"{queue}\"}}")),
            spent
        );
    }
    crate::support::eventually("the depth gauge shows 0", || async {
        (service.scrape().await.get("retry_queue_depth") == 0.0).then_some(())
    })
    .await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_consumer_that_always_fails_and_never_counts_gets_max_retries_then_review_once() {
    let mut bed = Bed::new().await;
    bed.set("BASE_DELAY_MS", "20").set("JITTER_MS", "10");
    let queue = bed.declare("broken").await;
    let service = bed.start().await;
    let messages: Vec<RetryMessage> = (0..20)
        .map(|n| message(&queue, format!("job {n}")))
        .collect();
    let mut inbox = bed.client.consume(&queue).await;
    bed.client.send_all(&bed.intake(), &messages).await;

    let mut times: HashMap<String, u32> = HashMap::new();
    for _ in 0..20 * 3 {
        let back = inbox.next().await;
        *times.entry(back.id()).or_default() += 1;
        // The consumer reports a count of 0, however often it has got the message.
        let again = RetryMessage {
            message_id: back.id(),
            original_payload: back.body,
            original_queue: queue.clone(),
            error_reason: "still broken".into(),
            ..Default::default()
        };
        bed.client.send(&bed.intake(), &again).await;
    }
    let mut review = bed.client.consume(&bed.review()).await;
    let reviewed: std::collections::HashSet<String> = review
        .take(20)
        .await
        .iter()
        .map(|r| r.review().message_id)
        .collect();
    assert_eq!(reviewed.len(), 20);
    assert!(times.values().all(|n| *n == 3), "{times:?}");
    bed.until_count(
        "SELECT count(*) FROM retry_queue WHERE status = 'failed'",
        20,
    )
    .await;
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 20);
    assert_eq!(bed.client.depth(&queue).await, Some(0));
    assert_eq!(bed.client.depth(&bed.review()).await, Some(0));
    service.stop().await;
}
