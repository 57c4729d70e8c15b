//! Messages that come back under a new id each time, and those that only look so.

use futures::StreamExt;
use lapin::{
    BasicProperties, Consumer,
    options::{BasicAckOptions, BasicRejectOptions},
    types::{AMQPValue, FieldTable},
};
use prost::Message;
use retry_scheduler::wire::proto::RetryMessage;
use tokio::task::JoinHandle;

use crate::support::{Bed, Inbox, PATIENCE, Process, Received, Scrape, eventually, message};

const SUSPECTED: &str = "retry_suspected_loops_total";

/// A bed with delays of a tenth of a second and a policy file.
async fn bed_with(policies: &str) -> (Bed, std::path::PathBuf) {
    let mut bed = Bed::new().await;
    let file = std::env::temp_dir().join(bed.queue("loops.toml"));
    std::fs::write(&file, policies).unwrap();
    bed.set("POLICIES_FILE", file.to_str().unwrap())
        .set("BASE_DELAY_MS", "100")
        .set("JITTER_MS", "0");
    (bed, file)
}

/// A dead-letter handler that reports each message as failed under a new id, until it is
/// aborted.
async fn minting_handler(bed: &Bed, queue: &str) -> JoinHandle<()> {
    let channel = bed.client.channel().await;
    let mut inbox: Consumer = testkit::amqp::subscribe(&channel, queue).await.unwrap();
    let (queue, intake) = (queue.to_owned(), bed.intake());
    tokio::spawn(async move {
        while let Some(Ok(delivery)) = inbox.next().await {
            let failure = message(&queue, delivery.data.clone()).encode_to_vec();
            let properties = BasicProperties::default().with_delivery_mode(2);
            let published = channel
                .basic_publish(
                    "".into(),
                    intake.as_str().into(),
                    Default::default(),
                    &failure,
                    properties,
                )
                .await;
            published.expect("the failure is reported");
            delivery
                .ack(BasicAckOptions::default())
                .await
                .expect("acked");
        }
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_comes_back_under_new_ids_is_counted_and_told_of_once() {
    let (bed, file) = bed_with("").await;
    let queue = bed.declare("minted").await;
    let service = Process::spawn(bed.command());
    service.until_ready().await;
    let handler = minting_handler(&bed, &queue).await;
    bed.client
        .send(&bed.intake(), &message(&queue, "round and round"))
        .await;
    let line = service.until_logged("seems to loop").await;
    for word in [
        queue.as_str(),
        r#""times":4"#,
        r#"identity = \"payload\""#,
        r#"loops = \"review\""#,
    ] {
        assert!(line.contains(word), "{word} is not in {line}");
    }
    let sample = format!("{SUSPECTED}{{queue=\"{queue}\"}}");
    eventually("two more rounds are counted", || async {
        let scrape = Scrape::parse(&service.get("/metrics").await.1);
        (scrape.get(&sample) >= 3.0).then_some(())
    })
    .await;
    handler.abort();
    service.signal("TERM").await;
    let (_, log) = service.ended().await;
    assert_eq!(log.matches("seems to loop").count(), 1);
    // By default the loop is told of, and goes on.
    let looping = "SELECT count(*) FROM retry_queue WHERE reason = 'looping'";
    assert_eq!(bed.count(looping).await, 0);
    std::fs::remove_file(file).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_may_end_such_loops_in_review() {
    let (bed, file) = bed_with("[policy.default]\nloops = 'review'\n").await;
    let queue = bed.declare("minted").await;
    let service = bed.start().await;
    let handler = minting_handler(&bed, &queue).await;
    let mut review = bed.client.consume(&bed.review()).await;
    bed.client
        .send(&bed.intake(), &message(&queue, "round and round"))
        .await;
    let envelope = review.next().await.review();
    assert_eq!(envelope.reason, "looping");
    assert_eq!(envelope.original_payload, b"round and round");
    assert!(
        envelope.error.contains("4 times under new ids")
            && envelope.error.ends_with("the test said so"),
        "{}",
        envelope.error
    );
    // Nothing waits, and nothing is under way to the handler: the loop has ended.
    let waits = "SELECT count(*) FROM retry_queue WHERE status = 'pending'";
    bed.until_count(waits, 0).await;
    let ended = "SELECT count(*) FROM retry_queue WHERE status = 'failed' AND reason = 'looping'";
    assert_eq!(bed.count(ended).await, 1);
    let sent = bed.count("SELECT count(*) FROM retry_queue").await - 1;
    assert!(sent >= 3, "it was sent back only {sent} times");
    assert_eq!(service.scrape().await.sum(SUSPECTED), 1.0);
    handler.abort();
    service.stop().await;
    assert_eq!(bed.client.depth(&queue).await, Some(0));
    std::fs::remove_file(file).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn three_hundred_equal_bodies_at_once_are_no_loop() {
    let (bed, file) = bed_with("[policy.default]\nloops = 'review'\n").await;
    let queue = bed.declare("equal").await;
    let service = bed.start().await;
    let mut inbox: Inbox = bed.client.consume(&queue).await;
    let mut messages: Vec<RetryMessage> = (0..300).map(|_| message(&queue, "same")).collect();
    // They fail, come back, and fail again under the ids they have, until nothing is left.
    for round in 1..=3 {
        bed.client.send_all(&bed.intake(), &messages).await;
        let back: Vec<Received> = inbox.take(300).await;
        assert!(
            back.iter()
                .all(|m| m.number("x-retry-count") == Some(round))
        );
    }
    messages.truncate(1);
    bed.client.send_all(&bed.intake(), &messages).await;
    let mut review = bed.client.consume(&bed.review()).await;
    assert_eq!(review.next().await.review().reason, "exhausted");
    assert_eq!(service.scrape().await.sum(SUSPECTED), 0.0);
    service.stop().await;
    std::fs::remove_file(file).unwrap();
}

/// A team publishes the same body again and again, for instance as a heartbeat, while its
/// consumer is broken. Each publication fails under its own id, and ends.
#[tokio::test(flavor = "multi_thread")]
async fn equal_dead_letters_that_keep_their_ids_are_no_loop() {
    let (mut bed, file) = bed_with("[policy.default]\nloops = 'review'\n").await;
    let dead_letters = bed.queue("dead-letters");
    // Each publication waits for longer than a generation lasts.
    bed.set("DEAD_LETTER_QUEUE", &dead_letters)
        .set("BASE_DELAY_MS", "1100")
        .set("MAX_DELAY_MS", "1100");
    let service = bed.start().await;
    let queue = bed.queue("heartbeats");
    let text = |s: &str| AMQPValue::LongString(s.into());
    let mut arguments = FieldTable::default();
    arguments.insert("x-dead-letter-exchange".into(), text(""));
    arguments.insert("x-dead-letter-routing-key".into(), text(&dead_letters));
    bed.client.declare_with(&queue, arguments).await;
    let channel = bed.client.channel().await;
    let mut consumer = testkit::amqp::subscribe(&channel, &queue).await.unwrap();
    let publish = || bed.client.publish(&queue, b"tick", Default::default());
    publish().await;
    let mut published = 1;
    while published < 7 {
        let delivery = tokio::time::timeout(PATIENCE, consumer.next())
            .await
            .expect("it comes back")
            .unwrap()
            .unwrap();
        let headers = delivery.properties.headers().as_ref();
        let count = headers.and_then(|h| h.inner().get("x-retry-count").cloned());
        delivery
            .reject(BasicRejectOptions { requeue: false })
            .await
            .unwrap();
        if count == Some(AMQPValue::LongInt(1)) {
            publish().await;
            published += 1;
        }
    }
    assert_eq!(service.scrape().await.sum(SUSPECTED), 0.0);
    let looping = "SELECT count(*) FROM retry_queue WHERE reason = 'looping'";
    assert_eq!(bed.count(looping).await, 0);
    service.stop().await;
    std::fs::remove_file(file).unwrap();
}
