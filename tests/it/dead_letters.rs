//! Raw dead letters: a team lets its queues dead-letter into `DEAD_LETTER_QUEUE`, and
//! needs no dead-letter handler of its own.

use futures::StreamExt;
use lapin::{
    BasicProperties,
    options::BasicRejectOptions,
    types::{AMQPValue, FieldTable},
};

use crate::support::Bed;

async fn rejected_three_times_then_review(queue_type: &str) {
    let mut bed = Bed::new().await;
    let dead_letters = bed.queue("dead-letters");
    bed.set("DEAD_LETTER_QUEUE", &dead_letters)
        .set("BASE_DELAY_MS", "20");
    let service = bed.start().await;
    let queue = bed.queue("orders");
    let mut arguments = FieldTable::default();
    let text = |s: &str| AMQPValue::LongString(s.into());
    arguments.insert("x-queue-type".into(), text(queue_type));
    arguments.insert("x-dead-letter-exchange".into(), text(""));
    arguments.insert("x-dead-letter-routing-key".into(), text(&dead_letters));
    bed.client.declare_with(&queue, arguments).await;

    let mut headers = FieldTable::default();
    headers.insert("tenant".into(), text("acme"));
    headers.insert("weight".into(), AMQPValue::ShortInt(-3));
    let original = BasicProperties::default()
        .with_content_type("application/xml".into())
        .with_correlation_id("corr-1".into())
        .with_message_id("order-1".into())
        .with_headers(headers);
    bed.client.publish(&queue, b"<order/>", original).await;

    let channel = bed.client.channel().await;
    let mut consumer = testkit::amqp::subscribe(&channel, &queue).await.unwrap();
    for count in 0..=3 {
        let delivery = tokio::time::timeout(crate::support::PATIENCE, consumer.next())
            .await
            .expect("it comes back")
            .unwrap()
            .unwrap();
        assert_eq!(delivery.data, b"<order/>");
        let properties = &delivery.properties;
        assert_eq!(
            properties.content_type().as_ref().unwrap().as_str(),
            "application/xml"
        );
        assert_eq!(
            properties.correlation_id().as_ref().unwrap().as_str(),
            "corr-1"
        );
        let headers = properties.headers().as_ref().unwrap().inner();
        assert_eq!(headers["tenant"], text("acme"));
        assert_eq!(headers["weight"], AMQPValue::ShortInt(-3));
        assert_eq!(
            headers.get("x-retry-count"),
            (count > 0).then_some(&AMQPValue::LongInt(count))
        );
        assert!(!headers.contains_key("x-death"), "deaths are not replayed");
        delivery
            .reject(BasicRejectOptions { requeue: false })
            .await
            .unwrap();
    }
    let mut review = bed.client.consume(&bed.review()).await;
    let envelope = review.next().await.review();
    assert_eq!(envelope.reason, "exhausted");
    assert_eq!(envelope.original_queue, queue);
    assert_eq!(envelope.original_payload, b"<order/>");
    assert_eq!(envelope.retry_count, 3);
    assert!(envelope.error.contains("rejected"), "{}", envelope.error);
    assert_eq!(envelope.properties.unwrap().content_type, "application/xml");
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 1);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_rejected_on_a_classic_queue_comes_back_three_times_then_review() {
    rejected_three_times_then_review("classic").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_rejected_on_a_quorum_queue_comes_back_three_times_then_review() {
    rejected_three_times_then_review("quorum").await;
}
