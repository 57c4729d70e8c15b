//! Raw dead letters: a team lets its queues dead-letter into `DEAD_LETTER_QUEUE`, and
//! needs no dead-letter handler of its own.

use futures::StreamExt;
use lapin::{
    BasicProperties, ExchangeKind,
    message::Delivery,
    options::{BasicPublishOptions, BasicRejectOptions, ExchangeDeclareOptions, QueueBindOptions},
    types::{AMQPValue, FieldTable},
};
use retry_scheduler::wire::proto::{Properties, RetryMessage};

use crate::support::{Bed, Process, dead_letters_to, disturb, eventually, message};

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

/// A team's own topology: a topic exchange, a work queue bound to it by a pattern, and a
/// dead-letter exchange that is bound by the same pattern only.
struct Narrow {
    exchange: String,
    queue: String,
}

impl Narrow {
    async fn new(bed: &Bed, queue_type: &str) -> Self {
        let narrow = Self {
            exchange: bed.queue("events"),
            queue: bed.queue("orders"),
        };
        let dead_letters = bed.setting("DEAD_LETTER_QUEUE").to_owned();
        let dead_letter_exchange = bed.queue("dlx");
        let channel = bed.client.channel().await;
        for exchange in [&narrow.exchange, &dead_letter_exchange] {
            let options = ExchangeDeclareOptions {
                durable: true,
                ..ExchangeDeclareOptions::default()
            };
            let (name, none) = (exchange.as_str().into(), FieldTable::default());
            channel
                .exchange_declare(name, ExchangeKind::Topic, options, none)
                .await
                .expect("an exchange");
        }
        let text = |s: &str| AMQPValue::LongString(s.into());
        let mut arguments = FieldTable::default();
        arguments.insert("x-queue-type".into(), text(queue_type));
        arguments.insert("x-dead-letter-exchange".into(), text(&dead_letter_exchange));
        bed.client.declare_with(&narrow.queue, arguments).await;
        bed.client.declare(&dead_letters).await;
        for (queue, exchange) in [
            (&narrow.queue, &narrow.exchange),
            (&dead_letters, &dead_letter_exchange),
        ] {
            channel
                .queue_bind(
                    queue.as_str().into(),
                    exchange.as_str().into(),
                    "order.*".into(),
                    QueueBindOptions::default(),
                    FieldTable::default(),
                )
                .await
                .expect("a binding");
        }
        narrow
    }

    async fn publish(&self, bed: &Bed, id: &str, body: &[u8]) {
        let channel = bed.client.channel().await;
        let properties = BasicProperties::default().with_message_id(id.into());
        channel
            .basic_publish(
                self.exchange.as_str().into(),
                "order.created".into(),
                BasicPublishOptions::default(),
                body,
                properties,
            )
            .await
            .expect("published");
    }
}

async fn bed_with_dead_letters() -> Bed {
    let mut bed = Bed::new().await;
    let dead_letters = bed.queue("dead-letters");
    bed.set("DEAD_LETTER_QUEUE", &dead_letters)
        .set("BASE_DELAY_MS", "20")
        .set("JITTER_MS", "0");
    bed
}

/// Rejects every delivery until `count` have come, and gives them.
async fn reject(bed: &Bed, queue: &str, count: usize) -> Vec<Delivery> {
    let channel = bed.client.channel().await;
    let mut consumer = testkit::amqp::subscribe(&channel, queue).await.unwrap();
    let mut rejected = Vec::new();
    while rejected.len() < count {
        let delivery = tokio::time::timeout(crate::support::PATIENCE, consumer.next())
            .await
            .unwrap_or_else(|_| panic!("{} of {count} came", rejected.len()))
            .unwrap()
            .unwrap();
        delivery
            .reject(BasicRejectOptions { requeue: false })
            .await
            .unwrap();
        rejected.push(delivery);
    }
    rejected
}

async fn narrow_bindings_lose_nothing(queue_type: &str) {
    let bed = bed_with_dead_letters().await;
    let narrow = Narrow::new(&bed, queue_type).await;
    let service = bed.start().await;
    for n in 0..10 {
        narrow
            .publish(&bed, &format!("order-{n}"), b"<order/>")
            .await;
    }
    // Each message comes once, and back three times.
    for delivery in reject(&bed, &narrow.queue, 40).await {
        assert_eq!(delivery.routing_key.as_str(), "order.created");
        let id = delivery.properties.message_id().as_ref().expect("an id");
        assert!(id.as_str().starts_with("order-"), "{id}");
        let headers = delivery.properties.headers().clone().unwrap_or_default();
        for header in ["BCC", "CC"] {
            assert!(!headers.contains_key(header), "{header}");
        }
        let text = |name: &str| headers.inner().get(name).cloned();
        if text("x-retry-id").is_some() {
            let exchange = AMQPValue::LongString(narrow.exchange.as_str().into());
            assert_eq!(text("x-original-exchange"), Some(exchange));
        }
    }
    let mut review = bed.client.consume(&bed.review()).await;
    let mut ids = std::collections::HashSet::new();
    for received in review.take(10).await {
        let envelope = received.review();
        assert_eq!(envelope.reason, "exhausted");
        assert_eq!(envelope.retry_count, 3);
        let properties = envelope.properties.expect("properties");
        assert_eq!(properties.exchange, narrow.exchange);
        assert_eq!(properties.routing_key.as_deref(), Some("order.created"));
        ids.insert(properties.message_id);
    }
    assert_eq!(ids.len(), 10);
    assert_eq!(bed.client.depth(&narrow.queue).await, Some(0));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_narrow_bindings_every_death_of_a_classic_queue_takes_the_way_of_the_first() {
    narrow_bindings_lose_nothing("classic").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn behind_narrow_bindings_every_death_of_a_quorum_queue_takes_the_way_of_the_first() {
    narrow_bindings_lose_nothing("quorum").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_id_that_a_producer_uses_again_is_a_new_message_with_retries_of_its_own() {
    let bed = bed_with_dead_letters().await;
    let narrow = Narrow::new(&bed, "classic").await;
    let service = bed.start().await;
    // Spent, then the same order once more; and a job that always sends the same.
    narrow.publish(&bed, "order-11", b"created").await;
    reject(&bed, &narrow.queue, 4).await;
    narrow.publish(&bed, "order-11", b"paid").await;
    reject(&bed, &narrow.queue, 4).await;
    for _ in 0..3 {
        narrow.publish(&bed, "cron", b"tick").await;
    }
    reject(&bed, &narrow.queue, 12).await;
    let mut review = bed.client.consume(&bed.review()).await;
    let mut bodies: Vec<Vec<u8>> = Vec::new();
    for received in review.take(5).await {
        let envelope = received.review();
        assert_eq!(envelope.reason, "exhausted");
        assert_eq!(envelope.retry_count, 3);
        bodies.push(envelope.original_payload);
    }
    bodies.sort();
    let expected: [&[u8]; 5] = [b"created", b"paid", b"tick", b"tick", b"tick"];
    assert_eq!(bodies, expected);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_was_deleted_and_made_again_gets_its_messages_and_spends_nothing() {
    let bed = bed_with_dead_letters().await;
    let narrow = Narrow::new(&bed, "classic").await;
    let service = bed.start().await;
    narrow.publish(&bed, "order-1", b"<order/>").await;
    reject(&bed, &narrow.queue, 2).await;
    // Our binding goes with the queue; the team makes both again, but not ours.
    bed.until_count(
        "SELECT count(*) FROM retry_queue WHERE status = 'retried'",
        1,
    )
    .await;
    bed.client.delete(&narrow.queue).await;
    let narrow = Narrow::new(&bed, "classic").await;
    narrow.publish(&bed, "order-2", b"<order/>").await;
    let deliveries = reject(&bed, &narrow.queue, 4).await;
    assert_eq!(deliveries.len(), 4, "once, and three times back");
    let returned = "SELECT count(*) FROM retry_events WHERE event_type = 'returned'";
    assert_eq!(bed.count(returned).await, 0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_with_a_key_whose_queue_is_gone_ends_in_review_as_unroutable() {
    let bed = bed_with_dead_letters().await;
    let service = bed.start().await;
    let sent = RetryMessage {
        properties: Some(Properties {
            routing_key: Some("order.created".into()),
            ..Properties::default()
        }),
        ..message(&bed.queue("nowhere"), "homeless")
    };
    bed.client.send(&bed.intake(), &sent).await;
    let mut review = bed.client.consume(&bed.review()).await;
    let envelope = review.next().await.review();
    assert_eq!(envelope.reason, "unroutable");
    assert_eq!(envelope.message_id, sent.message_id);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn where_queues_cannot_be_bound_it_is_said_once_and_shown_and_messages_go_back_by_name() {
    let mut bed = bed_with_dead_letters().await;
    let name = bed.queue("shy");
    bed.set("SERVICE_NAME", &name);
    // An exchange of that name and another kind is as little ours as one that we may not use.
    let channel = bed.client.channel().await;
    channel
        .exchange_declare(
            format!("{name}.republish").into(),
            ExchangeKind::Fanout,
            ExchangeDeclareOptions::default(),
            FieldTable::default(),
        )
        .await
        .expect("an exchange");
    let queue = bed.declare("target").await;
    let service = Process::spawn(bed.command());
    service.until_ready().await;
    let mut inbox = bed.client.consume(&queue).await;
    for n in 0..3 {
        let sent = RetryMessage {
            properties: Some(Properties {
                routing_key: Some("order.created".into()),
                message_id: format!("mine-{n}"),
                ..Properties::default()
            }),
            ..message(&queue, "by name")
        };
        bed.client.send(&bed.intake(), &sent).await;
        let back = inbox.next().await;
        assert_eq!(back.id(), format!("mine-{n}"));
        assert_eq!(back.text("x-retry-id"), Some(sent.message_id));
        assert_eq!(
            back.text("x-original-routing-key").as_deref(),
            Some("order.created")
        );
    }
    eventually("it is shown", || async {
        let (status, body) = service.get("/health").await;
        (status == 200 && body.contains("may not bind queues")).then_some(())
    })
    .await;
    service.signal("TERM").await;
    let (_, log) = service.ended().await;
    let told = log.matches("our exchange cannot be used");
    assert_eq!(told.count(), 1, "{log}");
}

/// A user who may declare the exchange and bind to it, but not publish to it.
#[tokio::test(flavor = "multi_thread")]
async fn without_the_right_to_publish_to_our_exchange_messages_go_back_by_name() {
    let mut bed = bed_with_dead_letters().await;
    let user = bed.queue("shy");
    let rabbitmq = &crate::support::shared().await.rabbitmq;
    let vhost = url::Url::parse(bed.setting("RABBITMQ_URL")).expect("a URL");
    let vhost = vhost.path().trim_start_matches('/').replace("%2f", "/");
    let vhost = if vhost.is_empty() { "/" } else { &vhost };
    disturb(|| rabbitmq.ctl(&["add_user", &user, "secret"]));
    // The names of this bed's queues begin with its prefix, and the exchange's with "x".
    let write = format!("^(amq\\.default|{}.*)$", bed.queue(""));
    disturb(|| rabbitmq.ctl(&["set_permissions", "-p", vhost, &user, ".*", &write, ".*"]));
    let mut url = url::Url::parse(bed.setting("RABBITMQ_URL")).expect("a URL");
    url.set_username(&user).expect("a user");
    url.set_password(Some("secret")).expect("a password");
    bed.set("RABBITMQ_URL", url.as_str())
        .set("SERVICE_NAME", &format!("x-{user}"));
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let sent = RetryMessage {
        properties: Some(Properties {
            routing_key: Some("order.created".into()),
            ..Properties::default()
        }),
        ..message(&queue, "by name")
    };
    bed.client.send(&bed.intake(), &sent).await;
    assert_eq!(inbox.next().await.id(), sent.message_id);
    // Another publisher may have been refused last, and is shown without this until it is connected again.
    eventually("it is shown", || async {
        let (_, health) = service.get("/health").await;
        health.contains("may not bind queues").then_some(())
    })
    .await;
    service.stop().await;
}

/// Declares a queue whose dead letters go to the bed's dead-letter queue.
async fn dying(bed: &Bed, name: &str, arguments: &[(&str, AMQPValue)]) -> String {
    let queue = bed.queue(name);
    let mut all = dead_letters_to(bed.setting("DEAD_LETTER_QUEUE"));
    for (name, value) in arguments {
        all.insert((*name).into(), value.clone());
    }
    bed.client.declare_with(&queue, all).await;
    queue
}

#[tokio::test(flavor = "multi_thread")]
async fn what_expired_in_its_queue_goes_to_review_and_what_was_pushed_out_comes_back() {
    let mut bed = bed_with_dead_letters().await;
    // Two messages may push each other out many times before somebody consumes them.
    bed.set("DEFAULT_MAX_RETRIES", "100");
    let service = bed.start().await;
    let mut review = bed.client.consume(&bed.review()).await;
    for (name, kind) in [("short", "classic"), ("short-quorum", "quorum")] {
        let arguments = [
            ("x-queue-type", AMQPValue::LongString(kind.into())),
            ("x-message-ttl", AMQPValue::LongInt(10)),
        ];
        let short = dying(&bed, name, &arguments).await;
        let plain = BasicProperties::default();
        bed.client.publish(&short, b"stale", plain).await;
        let envelope = review.next().await.review();
        assert_eq!(envelope.reason, "undelivered");
        let said = format!("expired in queue {short} after waiting");
        assert_eq!(envelope.error, said);
        assert_eq!(envelope.original_payload, b"stale");
        assert_eq!(envelope.retry_count, 0);
    }

    let small = dying(&bed, "small", &[("x-max-length", AMQPValue::LongInt(1))]).await;
    for body in [b"one", b"two"] {
        let plain = BasicProperties::default();
        bed.client.publish(&small, body, plain).await;
    }
    eventually("one was pushed out", || async {
        let pushed_out = "SELECT count(*) FROM retry_queue WHERE error_reason LIKE 'pushed out%'";
        (bed.count(pushed_out).await > 0).then_some(())
    })
    .await;
    let mut inbox = bed.client.consume(&small).await;
    let mut bodies = std::collections::HashSet::new();
    while bodies.len() < 2 {
        bodies.insert(inbox.next().await.body);
    }
    bed.until_count(
        "SELECT count(*) FROM retry_queue WHERE status = 'failed'",
        2,
    )
    .await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_policy_may_retry_what_expired_and_send_what_was_pushed_out_to_review() {
    let mut bed = bed_with_dead_letters().await;
    let policies = "[policy.mine]\nqueues = [\"*\"]\nexpired = \"retry\"\nmaxlen = \"review\"";
    let file = std::env::temp_dir().join(bed.queue("policies.toml"));
    std::fs::write(&file, policies).expect("policies are written");
    bed.set("POLICIES_FILE", file.to_str().expect("a path"))
        .set("DEFAULT_MAX_RETRIES", "100");
    let service = bed.start().await;
    std::fs::remove_file(file).expect("they are read once");
    let short = dying(&bed, "short", &[("x-message-ttl", AMQPValue::LongInt(500))]).await;
    let plain = BasicProperties::default();
    bed.client.publish(&short, b"stale", plain.clone()).await;
    bed.until_count("SELECT count(*) FROM retry_queue", 1).await;
    let mut inbox = bed.client.consume(&short).await;
    let back = inbox.next().await;
    assert_eq!(back.body, b"stale");
    let said = format!("expired in queue {short} after waiting");
    assert_eq!(back.text("x-original-error"), Some(said));

    let small = dying(&bed, "small", &[("x-max-length", AMQPValue::LongInt(1))]).await;
    for body in [b"one", b"two"] {
        bed.client.publish(&small, body, plain.clone()).await;
    }
    let mut review = bed.client.consume(&bed.review()).await;
    let envelope = review.next().await.review();
    assert_eq!(envelope.reason, "undelivered");
    assert_eq!(envelope.original_payload, b"one");
    let said = format!("pushed out of the full queue {small}");
    assert_eq!(envelope.error, said);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_was_delivered_too_often_is_a_failure_and_comes_back() {
    let bed = bed_with_dead_letters().await;
    let service = bed.start().await;
    let arguments = [
        ("x-queue-type", AMQPValue::LongString("quorum".into())),
        ("x-delivery-limit", AMQPValue::LongInt(1)),
    ];
    let queue = dying(&bed, "limited", &arguments).await;
    let plain = BasicProperties::default();
    bed.client.publish(&queue, b"heavy", plain).await;
    let channel = bed.client.channel().await;
    let mut consumer = testkit::amqp::subscribe(&channel, &queue).await.unwrap();
    let back = loop {
        let delivery = tokio::time::timeout(crate::support::PATIENCE, consumer.next())
            .await
            .expect("it comes back")
            .unwrap()
            .unwrap();
        let headers = delivery.properties.headers().clone().unwrap_or_default();
        if let Some(error) = headers.inner().get("x-original-error") {
            break error.as_long_string().expect("a text").to_string();
        }
        let again = BasicRejectOptions { requeue: true };
        delivery.reject(again).await.unwrap();
    };
    assert_eq!(back, format!("dead-lettered from {queue}: delivery_limit"));
    service.stop().await;
}

/// Dramatiq declares three queues for each of its own: `default`, from which it works;
/// `default.DQ`, where messages wait for their time; and `default.XQ`, where both let their
/// dead letters go and where they stay for a week.
async fn dramatiq(bed: &Bed, name: &str) -> String {
    let (queue, dead) = (bed.queue(name), bed.queue(&format!("{name}.XQ")));
    let mut week = FieldTable::default();
    week.insert("x-message-ttl".into(), AMQPValue::LongInt(604_800_000));
    bed.client.declare_with(&dead, week).await;
    for queue in [&queue, &format!("{queue}.DQ")] {
        bed.client.declare_with(queue, dead_letters_to(&dead)).await;
    }
    queue
}

#[tokio::test(flavor = "multi_thread")]
async fn each_of_several_dead_letter_queues_has_a_consumer_that_is_shown_and_is_no_target() {
    let mut bed = bed_with_dead_letters().await;
    let names = ["default", "mail"];
    let dead = names.map(|name| bed.queue(&format!("{name}.XQ")));
    bed.set("DEAD_LETTER_QUEUE", &dead.join(", "));
    let mut queues = Vec::new();
    for name in names {
        queues.push(dramatiq(&bed, name).await);
    }
    let service = bed.start().await;
    let (_, health) = service.get("/health").await;
    for dead in &dead {
        let part = format!("dead-letter-consumer {dead}");
        assert!(health.contains(&part), "{part} in {health}");
    }
    for queue in queues.iter().map(String::as_str) {
        for queue in [queue, &format!("{queue}.DQ")] {
            let properties = BasicProperties::default().with_message_id("job-1".into());
            bed.client.publish(queue, b"{}", properties).await;
            // Once, and three times back to the queue where it died.
            reject(&bed, queue, 4).await;
        }
    }
    let mut review = bed.client.consume(&bed.review()).await;
    for received in review.take(4).await {
        let envelope = received.review();
        assert_eq!(envelope.reason, "exhausted");
        assert_eq!(envelope.properties.unwrap().message_id, "job-1");
    }
    for dead in &dead {
        assert_eq!(bed.client.depth(dead).await, Some(0));
        bed.client
            .send(&bed.intake(), &message(dead, "round"))
            .await;
        let envelope = review.next().await.review();
        assert_eq!(envelope.reason, "invalid");
        assert!(envelope.error.contains("own queues"), "{}", envelope.error);
    }
    service.stop().await;
}
