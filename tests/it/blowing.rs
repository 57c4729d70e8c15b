//! One bad message, row or queue harms only itself: all others are stored and sent as
//! usual.

use std::collections::{BTreeMap, HashSet};

use devstack::Stack;
use futures::StreamExt;
use lapin::{
    BasicProperties,
    options::BasicRejectOptions,
    types::{AMQPValue, FieldTable},
};
use prost::Message;
use retry_scheduler::{
    broker::{Broker, Fault, Outcome},
    domain::settlement::Settlement,
    store::Store,
    wire::{
        Outgoing, header_frame_size,
        proto::{HeaderValue, Properties, RetryMessage, ReviewMessage, header_value::Kind},
    },
};
use sha2::{Digest, Sha256};
use sqlx::AssertSqlSafe;
use uuid::Uuid;

use crate::support::{Bed, PATIENCE, breakable, dead_letters_to, disturb, eventually, message};

const RETRIED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'retried'";
const FAILED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'failed'";

fn header(name: &str, kind: Kind) -> BTreeMap<String, HeaderValue> {
    BTreeMap::from([(name.to_owned(), HeaderValue { kind: Some(kind) })])
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_the_broker_fails_over_is_suspect_and_no_outage() {
    let bed = Bed::new().await;
    let queue = bed.declare("target").await;
    let broker = Broker::new(&bed.settings()).expect("a broker");
    let mut publisher = broker.publisher(&bed.review()).await.expect("connected");
    // RabbitMQ fails with an internal error over a NaN. The service never sends one, so the
    // test hands it to the publisher.
    let mut headers = FieldTable::default();
    headers.insert("x".into(), AMQPValue::Double(f64::NAN));
    let message = Outgoing {
        message_id: Uuid::now_v7(),
        queue: queue.as_str().into(),
        routing_key: None,
        properties: BasicProperties::default().with_headers(headers),
        body: Vec::new(),
    };
    let (outcomes, fault) = publisher.publish(&[message]).await;
    assert_eq!(outcomes, [Outcome::Unconfirmed]);
    assert!(matches!(fault, Some(Fault::Internal(_))), "{fault:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn queues_that_exist_with_other_arguments_are_used_as_they_are() {
    let bed = Bed::new().await;
    let mut quorum = FieldTable::default();
    quorum.insert(
        "x-queue-type".into(),
        AMQPValue::LongString("quorum".into()),
    );
    let mut bounded = FieldTable::default();
    bounded.insert("x-max-length".into(), AMQPValue::LongInt(1000));
    let queue = bed.queue("target");
    bed.client.declare_with(&bed.intake(), quorum.clone()).await;
    bed.client.declare_with(&bed.review(), bounded).await;
    bed.client.declare_with(&queue, quorum).await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let mut review = bed.client.consume(&bed.review()).await;
    let fresh = message(&queue, "again");
    let spent = RetryMessage {
        retry_count: 3,
        ..message(&queue, "enough")
    };
    bed.client
        .send_all(&bed.intake(), &[fresh.clone(), spent.clone()])
        .await;
    assert_eq!(inbox.next().await.id(), fresh.message_id);
    assert_eq!(review.next().await.review().message_id, spent.message_id);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_missing_target_queue_spends_the_budget_and_ends_in_review_as_unroutable() {
    let mut bed = Bed::new().await;
    bed.set("BASE_DELAY_MS", "50").set("JITTER_MS", "0");
    let queue = bed.queue("nowhere");
    let service = bed.start().await;
    let sent = message(&queue, "homeless");
    bed.client.declare(&bed.review()).await;
    let mut review = bed.client.consume(&bed.review()).await;
    bed.client.send(&bed.intake(), &sent).await;
    let envelope = review.next().await.review();
    assert_eq!(envelope.message_id, sent.message_id);
    assert_eq!(envelope.reason, "unroutable");
    assert!(envelope.error.contains(&queue), "{}", envelope.error);
    assert_eq!(envelope.retry_count, 3);
    assert_eq!(envelope.original_payload, b"homeless");
    assert_eq!(envelope.original_queue, queue);
    bed.until_count(FAILED, 1).await;
    // Each attempt was counted, and the wait after it is longer than the one before.
    assert_eq!(
        bed.count("SELECT count(*) FROM retry_events WHERE event_type = 'returned'")
            .await,
        3
    );
    let delays: Vec<i64> = sqlx::query_scalar(
        "SELECT delay_ms FROM retry_events WHERE event_type = 'returned' ORDER BY id",
    )
    .fetch_all(&bed.db)
    .await
    .unwrap();
    // The first wait, of 50 ms, was decided when the failure was stored. After the third
    // attempt the task is due for review at once.
    assert_eq!(delays, [100, 200, 0]);
    let metrics = service.scrape().await;
    let failed = format!("retries_executed_total{{queue=\"{queue}\",status=\"failed\"}}");
    assert_eq!(metrics.get(&failed), 3.0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_queue_that_appears_in_between_gets_its_message() {
    let mut bed = Bed::new().await;
    bed.set("BASE_DELAY_MS", "50")
        .set("DEFAULT_MAX_RETRIES", "1000");
    let queue = bed.queue("later");
    let service = bed.start().await;
    let sent = message(&queue, "early");
    bed.client.send(&bed.intake(), &sent).await;
    eventually("it was returned at least once", || async {
        let returned = "SELECT count(*) FROM retry_events WHERE event_type = 'returned'";
        (bed.count(returned).await > 0).then_some(())
    })
    .await;
    bed.client.declare(&queue).await;
    let mut inbox = bed.client.consume(&queue).await;
    let back = inbox.next().await;
    assert_eq!(back.id(), sent.message_id);
    assert_eq!(back.body, b"early");
    assert!(back.number("x-retry-count").unwrap() >= 2);
    bed.until_count(RETRIED, 1).await;
    service.stop().await;
}

/// Inserts a row with properties that no version of the service would write. It has been
/// due for an hour, so it is claimed before all others.
async fn poison(bed: &Bed, queue: &str, properties: &[u8]) {
    sqlx::query(
        "INSERT INTO retry_queue (message_id, original_payload, original_queue, properties,
                                  next_retry_at)
         VALUES (gen_random_uuid(), 'poison', $1, $2, now() - interval '1 hour')",
    )
    .bind(queue)
    .bind(properties)
    .execute(&bed.db)
    .await
    .expect("a poison row");
}

/// Puts a poison row before twenty good ones. The good ones are sent back; the poison row
/// spends its own attempts and ends in review.
async fn harms_only_itself(properties: &[u8]) {
    let mut bed = Bed::new().await;
    bed.set("BASE_DELAY_MS", "50").set("DISPATCH_WORKERS", "1");
    let queue = bed.declare("head").await;
    bed.migrate().await;
    poison(&bed, &queue, properties).await;
    let mut ids = HashSet::new();
    for n in 0..20 {
        let id = bed.insert_one(&queue, format!("{n}").as_bytes()).await;
        ids.insert(id.to_string());
    }
    let service = bed.start_unready().await;
    let mut inbox = bed.client.consume(&queue).await;
    while !ids.is_empty() {
        let back = inbox.next().await;
        assert!(ids.remove(&back.id()), "the poison, or one of them twice");
    }
    eventually("the poison is in review", || async {
        (bed.client.depth(&bed.review()).await == Some(1)).then_some(())
    })
    .await;
    let mut review = bed.client.consume(&bed.review()).await;
    let envelope = review.next().await.review();
    assert_eq!(envelope.original_payload, b"poison");
    assert_eq!(envelope.retry_count, 3);
    bed.until_count(FAILED, 1).await;
    bed.until_count(RETRIED, 20).await;
    service.until_ready().await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_whose_properties_cannot_be_read_harms_only_itself() {
    harms_only_itself(b"\xff\xff\xff\xff").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_row_whose_headers_fit_no_frame_harms_only_itself() {
    let properties = Properties {
        headers: header("huge", Kind::Text("h".repeat(200_000))),
        ..Default::default()
    };
    harms_only_itself(&properties.encode_to_vec()).await;
}

/// A limit on the size of messages, which the broker forgets when this is dropped.
struct SizeLimit<'s>(&'s Stack);

impl<'s> SizeLimit<'s> {
    fn new(stack: &'s Stack, bytes: usize) -> Self {
        Self::set(stack, bytes);
        Self(stack)
    }

    /// RabbitMQ 4 reads the setting only when it starts, and keeps it as a persistent term.
    fn set(stack: &Stack, bytes: usize) {
        let set = format!(
            "application:set_env(rabbit, max_message_size, {bytes}),
             persistent_term:put(max_message_size, {bytes})."
        );
        disturb(|| stack.rabbitmq.ctl(&["eval", &set]));
    }
}

impl Drop for SizeLimit<'_> {
    fn drop(&mut self) {
        Self::set(self.0, 32 << 20);
    }
}

/// Asserts that an envelope leaves its body out and says truly where it is.
async fn assert_left_out(bed: &Bed, envelope: &ReviewMessage, payload: &[u8]) {
    assert_eq!(envelope.original_payload, b"");
    let left_out = envelope
        .left_out
        .as_ref()
        .expect("it says what is left out");
    assert_eq!(left_out.payload_bytes, payload.len() as u64);
    assert_eq!(
        left_out.payload_sha256,
        format!("{:x}", Sha256::digest(payload))
    );
    // People type what the envelope says.
    let sql = format!(
        "SELECT {}, status, reason FROM {} WHERE id = $1",
        left_out.column, left_out.table
    );
    let (stored, status, reason): (Vec<u8>, String, String) = sqlx::query_as(AssertSqlSafe(sql))
        .bind(left_out.id)
        .fetch_one(&bed.db)
        .await
        .expect("the row");
    assert!(stored == payload, "it is where the envelope says");
    assert_eq!((status, reason), ("failed".into(), envelope.reason.clone()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_is_too_large_harms_no_neighbour_and_ends_in_review_without_its_body() {
    let stack = breakable().await;
    let mut bed = Bed::on(&stack).await;
    bed.set("BASE_DELAY_MS", "50").set("DISPATCH_WORKERS", "1");
    let queue = bed.declare("size").await;
    bed.migrate().await;
    let _limit = SizeLimit::new(&stack, 50_000);
    let payload = vec![b'x'; 60_000];
    let mut ids = HashSet::new();
    for n in 0..40 {
        if n == 20 {
            bed.insert_one(&queue, &payload).await;
        }
        let id = bed.insert_one(&queue, format!("{n}").as_bytes()).await;
        ids.insert(id.to_string());
    }
    let service = bed.start().await;
    // The large message spends its own attempts. Its review envelope would be too large for
    // the broker as well.
    bed.until_count(FAILED, 1).await;
    bed.until_count(RETRIED, 40).await;
    assert_eq!(
        bed.count("SELECT count(*) FROM retry_events WHERE event_type = 'returned'")
            .await,
        3
    );
    assert_eq!(
        bed.count("SELECT count(*) FROM retry_events WHERE event_type = 'deferred'")
            .await,
        0
    );
    assert_eq!(bed.client.depth(&queue).await, Some(40), "each came once");
    let mut inbox = bed.client.consume(&queue).await;
    for back in inbox.take(40).await {
        assert!(ids.remove(&back.id()), "another one");
    }
    assert_eq!(bed.client.depth(&bed.review()).await, Some(1));
    let mut review = bed.client.consume(&bed.review()).await;
    let envelope = review.next().await.review();
    assert_eq!(envelope.reason, "unroutable");
    assert!(
        envelope.error.contains("message size"),
        "{}",
        envelope.error
    );
    assert_left_out(&bed, &envelope, &payload).await;
    assert!(service.ready().await.0);
    let lost = "retry_reconnects_total{part=\"dispatch\"}";
    assert_eq!(service.scrape().await.get(lost), 0.0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_envelope_without_its_body_names_the_table_with_its_schema() {
    let stack = breakable().await;
    let mut bed = Bed::on(&stack).await;
    bed.set("DATABASE_SCHEMA", "Our own");
    bed.migrate().await;
    let _limit = SizeLimit::new(&stack, 50_000);
    let payload = "x".repeat(60_000);
    bed.arrange(&format!(
        "INSERT INTO \"Our own\".retry_queue (message_id, original_payload, original_queue, reason)
         VALUES (gen_random_uuid(), '{payload}', 'nowhere', 'final')"
    ))
    .await;
    let service = bed.start().await;
    bed.until_count(
        "SELECT count(*) FROM \"Our own\".retry_queue WHERE status = 'failed'",
        1,
    )
    .await;
    let mut review = bed.client.consume(&bed.review()).await;
    let envelope = review.next().await.review();
    let table = envelope.left_out.as_ref().map(|left| left.table.as_str());
    assert_eq!(table, Some("\"Our own\".retry_queue"));
    assert_left_out(&bed, &envelope, payload.as_bytes()).await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_spent_dead_letter_near_the_brokers_limit_ends_in_review_once_without_its_body() {
    let stack = breakable().await;
    let mut bed = Bed::on(&stack).await;
    let dead_letters = bed.declare("dead-letters").await;
    bed.set("BASE_DELAY_MS", "50")
        .set("DEFAULT_MAX_RETRIES", "1")
        .set("DEAD_LETTER_QUEUE", &dead_letters);
    let queue = bed.queue("work");
    bed.client
        .declare_with(&queue, dead_letters_to(&dead_letters))
        .await;
    let neighbours = bed.declare("neighbours").await;
    // RabbitMQ 4 takes as much by default.
    const LIMIT: usize = 16 << 20;
    let _limit = SizeLimit::new(&stack, LIMIT);
    let service = bed.start().await;
    let payload = vec![b'x'; LIMIT - 64];
    let properties = BasicProperties::default().with_message_id("large".into());
    bed.client.publish(&queue, &payload, properties).await;
    let channel = bed.client.channel().await;
    let mut consumer = testkit::amqp::subscribe(&channel, &queue).await.unwrap();
    for _ in 0..2 {
        let delivery = tokio::time::timeout(PATIENCE, consumer.next()).await;
        let delivery = delivery.expect("it comes").unwrap().unwrap();
        assert_eq!(delivery.data.len(), payload.len());
        let small: Vec<RetryMessage> = (0..50).map(|_| message(&neighbours, "small")).collect();
        bed.client.send_all(&bed.intake(), &small).await;
        let no = BasicRejectOptions { requeue: false };
        delivery.reject(no).await.unwrap();
    }
    bed.until_count(FAILED, 1).await;
    bed.until_count(RETRIED, 100).await;
    assert_eq!(bed.client.depth(&neighbours).await, Some(100));
    assert_eq!(bed.client.depth(&bed.review()).await, Some(1));
    let mut review = bed.client.consume(&bed.review()).await;
    let envelope = review.next().await.review();
    assert_eq!(envelope.reason, "exhausted");
    assert_eq!(envelope.retry_count, 1);
    assert_eq!(envelope.properties.as_ref().unwrap().message_id, "large");
    assert_left_out(&bed, &envelope, &payload).await;
    assert_eq!(
        bed.count("SELECT count(*) FROM retry_events WHERE event_type = 'deferred'")
            .await,
        0
    );
    assert!(service.ready().await.0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn properties_that_fit_no_frame_are_not_sent_and_those_that_just_fit_are() {
    let bed = Bed::new().await;
    let queue = bed.declare("target").await;
    let broker = Broker::new(&bed.settings()).expect("a broker");
    let mut publisher = broker.publisher(&bed.review()).await.expect("connected");
    const FRAME: usize = 131_072;
    let with = |text: usize| {
        let mut headers = FieldTable::default();
        headers.insert(
            "text".into(),
            AMQPValue::LongString("h".repeat(text).into()),
        );
        headers.insert("number".into(), AMQPValue::LongInt(7));
        BasicProperties::default()
            .with_message_id(Uuid::now_v7().to_string().into())
            .with_timestamp(1)
            .with_priority(2)
            .with_headers(headers)
    };
    let others = header_frame_size(&with(0));
    let outgoing = |properties: BasicProperties| Outgoing {
        message_id: Uuid::now_v7(),
        queue: queue.as_str().into(),
        routing_key: None,
        properties,
        body: b"x".to_vec(),
    };
    let fits = with(FRAME - others);
    assert_eq!(header_frame_size(&fits), FRAME);
    let batch = [fits, with(FRAME - others + 1), with(1)].map(outgoing);
    let (outcomes, fault) = publisher.publish(&batch).await;
    assert!(fault.is_none(), "{fault:?}");
    assert_eq!(outcomes[0], Outcome::Confirmed);
    assert!(matches!(outcomes[1], Outcome::Unacceptable(_)));
    assert_eq!(outcomes[2], Outcome::Confirmed);
    assert_eq!(bed.client.depth(&queue).await, Some(2));
}

#[tokio::test(flavor = "multi_thread")]
async fn concurrent_claims_never_take_more_than_their_limit_nor_a_row_twice() {
    const LIMIT: usize = 7;
    const ROWS: i64 = 300;
    let bed = Bed::new().await;
    bed.migrate().await;
    sqlx::query(
        "INSERT INTO retry_queue (message_id, original_payload, original_queue)
         SELECT gen_random_uuid(), 'x', 'q' FROM generate_series(1, $1)",
    )
    .bind(ROWS)
    .execute(&bed.db)
    .await
    .unwrap();
    let store = Store::open(&bed.settings(), "test").unwrap();
    let claimers: Vec<_> = (0..4)
        .map(|_| {
            let store = store.clone();
            tokio::spawn(async move {
                let mut taken = Vec::new();
                loop {
                    let mut claim = store.claim(LIMIT, usize::MAX).await.unwrap();
                    let tasks = std::mem::take(&mut claim.tasks);
                    assert!(tasks.len() <= LIMIT, "{} rows", tasks.len());
                    if tasks.is_empty() {
                        return taken;
                    }
                    taken.extend(tasks.iter().map(|t| t.id));
                    let end = Settlement::SentBack { retry_count: 1 };
                    let ends: Vec<_> = tasks.iter().map(|t| (t, &end)).collect();
                    claim.settle(&ends).await.unwrap();
                }
            })
        })
        .collect();
    let mut taken = Vec::new();
    for claimer in claimers {
        taken.extend(claimer.await.unwrap());
    }
    assert_eq!(taken.len(), taken.iter().collect::<HashSet<_>>().len());
    // A claimer stops when it finds only rows that others have locked. Those others settle
    // them, so in the end no row is left over.
    bed.until_count(RETRIED, taken.len() as i64).await;
    assert_eq!(taken.len() as i64, ROWS);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_postgres_refuses_goes_to_review_and_its_neighbours_are_stored() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let queue = bed.declare("picky").await;
    // The trigger stands for any objection to a row that the service does not foresee. It
    // accepts the row once that has a reason for review.
    sqlx::raw_sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             IF NEW.original_payload = 'poison' AND NEW.reason IS NULL THEN
                 RAISE EXCEPTION 'not in this house' USING ERRCODE = 'data_exception';
             END IF;
             RETURN NEW;
         END $$;
         CREATE TRIGGER refuse BEFORE INSERT ON retry_queue
             FOR EACH ROW EXECUTE FUNCTION refuse()",
    )
    .execute(&bed.db)
    .await
    .unwrap();
    let messages = [
        message(&queue, "one"),
        message(&queue, "poison"),
        message(&queue, "two"),
    ];
    bed.client.declare(&bed.intake()).await;
    bed.client.send_all(&bed.intake(), &messages).await;
    let service = bed.start().await;

    let mut review = bed.client.consume(&bed.review()).await;
    let envelope = review.next().await.review();
    assert_eq!(envelope.reason, "invalid");
    assert_eq!(envelope.original_payload, b"poison");
    assert_eq!(envelope.producer_id, messages[1].message_id);
    assert!(
        envelope.error.contains("not in this house"),
        "{}",
        envelope.error
    );
    let mut inbox = bed.client.consume(&queue).await;
    let back: std::collections::BTreeSet<Vec<u8>> =
        inbox.take(2).await.into_iter().map(|r| r.body).collect();
    assert_eq!(back, [b"one".to_vec(), b"two".to_vec()].into());
    service.stop().await;
}
