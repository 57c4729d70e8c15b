//! Each test takes one way in which work could be lost, such as an answer that is lost, a
//! crash or an outage, and shows that nothing is.

use std::{collections::HashSet, pin::pin, task::Poll};

use lapin::{
    BasicProperties,
    types::{AMQPValue, FieldTable},
};
use retry_scheduler::{
    broker::{Broker, Outcome},
    domain::settlement::Settlement,
    store::Store,
    wire::{
        Outgoing,
        proto::{HeaderList, HeaderValue, Properties, RetryMessage, header_value::Kind},
    },
};
use testkit::{Fault, Trap, Way};
use uuid::Uuid;

use crate::support::{Bed, PATIENCE, Received, breakable, eventually, message};

const RETRIED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'retried'";

/// Sets delays of ten minutes, so that a retry falls due only when the test calls
/// [`Bed::make_due`].
fn wait_for_the_test(bed: &mut Bed) {
    bed.set("BASE_DELAY_MS", "600000")
        .set("MAX_DELAY_MS", "600000");
}

/// Lets `work` wait `waits` times. If it then has to wait once more, it is dropped half-way
/// and the result is `None`.
async fn cancelled_after<F: Future>(waits: usize, work: F) -> Option<F::Output> {
    let mut work = pin!(work);
    let mut left = waits;
    std::future::poll_fn(|context| match work.as_mut().poll(context) {
        Poll::Ready(output) => Poll::Ready(Some(output)),
        Poll::Pending if left == 0 => Poll::Ready(None),
        Poll::Pending => {
            left -= 1;
            Poll::Pending
        }
    })
    .await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_transaction_cancelled_anywhere_leaves_no_open_one_in_the_pool() {
    let mut bed = Bed::new().await;
    // The limit on idle transactions is a little more than CONFIRM_TIMEOUT_MS. It is set so
    // high that Postgres does not end a forgotten transaction during the test.
    bed.set("DISPATCH_WORKERS", "1")
        .set("DATABASE_POOL_SIZE", "3")
        .set("CONFIRM_TIMEOUT_MS", "3600000");
    bed.migrate().await;
    bed.insert_due("nowhere", 50).await;
    let store = Store::open(&bed.settings(), "test").expect("a store");
    let all = || store.claim(100, usize::MAX);

    let (mut cut_short, mut completed) = (0, 0);
    for round in 0..2 {
        // The first transaction on a new connection waits most often, since it looks for a pooler.
        for waits in 0..80 {
            // A transaction that was begun in full is dropped here as well, without COMMIT or
            // ROLLBACK.
            let done = if round % 2 == 0 {
                cancelled_after(waits, all()).await.is_some()
            } else {
                cancelled_after(waits, store.begin_intake()).await.is_some()
            };
            *(if done { &mut completed } else { &mut cut_short }) += 1;
        }
    }
    assert!(cut_short > 20, "only {cut_short} were cancelled half-way");
    assert!(completed > 20, "only {completed} got through");

    bed.until_count(
        "SELECT count(*) FROM pg_stat_activity
         WHERE datname = current_database() AND state LIKE 'idle in transaction%'",
        0,
    )
    .await;
    // If a transaction were still open it would hold rows, and this claim would not get all
    // of them.
    let mut claim = all().await.expect("a claim");
    let tasks = std::mem::take(&mut claim.tasks);
    assert_eq!(tasks.len(), 50);
    let end = Settlement::SentBack { retry_count: 1 };
    let ends: Vec<_> = tasks.iter().map(|task| (task, &end)).collect();
    claim.settle(&ends).await.expect("settled");
    assert_eq!(bed.count(RETRIED).await, 50);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_begin_that_timed_out_swallows_no_later_write() {
    let mut bed = Bed::new().await;
    let proxy = bed.proxy_postgres().await;
    bed.set("DATABASE_TIMEOUT_MS", "1000")
        .set("DISPATCH_WORKERS", "1")
        .set("DATABASE_POOL_SIZE", "3");
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let messages: Vec<_> = (0..20).map(|n| message(&queue, format!("{n}"))).collect();

    // Postgres runs the statements, but its answers do not arrive, and the service gives up
    // waiting for them.
    proxy.set(Way::NoAnswers);
    bed.client.send_all(&bed.intake(), &messages).await;
    service.until_down("consumer").await;
    proxy.set(Way::Open);

    let mut inbox = bed.client.consume(&queue).await;
    let back = inbox.take(20).await;
    let ids: HashSet<String> = back.iter().map(|m| m.id()).collect();
    assert_eq!(ids.len(), 20);
    assert!(back.iter().all(|m| m.number("x-retry-count") == Some(1)));
    bed.until_count(RETRIED, 20).await;
    service.stop().await;
    assert_eq!(bed.client.depth(&bed.intake()).await, Some(0));
    assert_eq!(bed.client.depth(&queue).await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn every_return_is_told_of_the_message_it_belongs_to() {
    let bed = Bed::new().await;
    let queue = bed.declare("here").await;
    let settings = bed.settings();
    let broker = Broker::new(&settings).expect("a broker");
    let mut publisher = broker.publisher(&bed.review()).await.expect("connected");
    // One message in seven is for a queue that does not exist. While many messages are in
    // flight, lapin hands a return to the confirm of another message.
    let (here, nowhere) = (queue.as_str(), bed.queue("nowhere"));
    let batch: Vec<Outgoing> = (0..6000)
        .map(|n| {
            let id = Uuid::now_v7();
            Outgoing {
                message_id: id,
                queue: if n % 7 == 0 { &*nowhere } else { here }.into(),
                routing_key: None,
                properties: BasicProperties::default().with_message_id(id.to_string().into()),
                body: vec![b'x'; 100],
            }
        })
        .collect();
    let mut in_queue = HashSet::new();
    let mut returned = 0;
    for batch in batch.chunks(250) {
        let (outcomes, fault) = publisher.publish(batch).await;
        assert!(fault.is_none(), "{fault:?}");
        for (message, outcome) in batch.iter().zip(outcomes) {
            if message.queue.as_str() == here {
                assert_eq!(outcome, Outcome::Confirmed);
                in_queue.insert(message.message_id.to_string());
            } else {
                assert!(matches!(outcome, Outcome::Returned(_)), "{outcome:?}");
                returned += 1;
            }
        }
    }
    publisher.close().await;
    assert_eq!(returned, 858);
    assert_eq!(bed.client.depth(&queue).await, Some(5142));
    let mut inbox = bed.client.consume(&queue).await;
    let found: HashSet<String> = inbox.take(5142).await.iter().map(|m| m.id()).collect();
    assert_eq!(found, in_queue);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_would_hurt_in_the_target_queue_is_not_replayed_and_the_rest_is() {
    let bed = Bed::new().await;
    let queue = bed.declare("target").await;
    let stranger = bed.declare("stranger").await;
    let text = |s: &str| HeaderValue {
        kind: Some(Kind::Text(s.into())),
    };
    let list = |values| HeaderValue {
        kind: Some(Kind::List(HeaderList { values })),
    };
    let headers = [
        ("x-death", list(vec![])),
        ("x-first-death-queue", text(&queue)),
        ("x-last-death-reason", text("expired")),
        ("x-delivery-count", text("7")),
        ("CC", list(vec![text(&stranger)])),
        ("BCC", list(vec![text(&stranger)])),
        ("x-retry-count", text("forged")),
        ("mine", text("kept")),
        (
            "short",
            HeaderValue {
                kind: Some(Kind::Int16(-3)),
            },
        ),
        ("list", list(vec![text("a")])),
    ];
    let sent = RetryMessage {
        properties: Some(Properties {
            content_type: "text/plain".into(),
            correlation_id: "c-1".into(),
            headers: headers.map(|(k, v)| (k.to_owned(), v)).into(),
            ..Properties::default()
        }),
        ..message(&queue, "body")
    };
    // The contract has no fields for these two properties, but JSON can carry them.
    let mut json = serde_json::to_value(&sent).expect("JSON");
    json["properties"]["expiration"] = "0".into();
    json["properties"]["userId"] = "stranger".into();
    let delivery = BasicProperties::default()
        .with_content_type("application/json".into())
        .with_expiration("60000".into())
        .with_user_id("guest".into());
    let service = bed.start().await;
    let body = json.to_string();
    bed.client
        .publish(&bed.intake(), body.as_bytes(), delivery)
        .await;
    bed.until_count(RETRIED, 1).await;
    service.stop().await;

    // The message waits in its queue until somebody consumes it. With the expiration it
    // would be gone, and with `CC` or `BCC` there would be copies.
    assert_eq!(bed.client.depth(&queue).await, Some(1));
    assert_eq!(bed.client.depth(&stranger).await, Some(0));
    let back = bed.client.consume(&queue).await.next().await;
    assert_eq!(back.body, b"body");
    assert_eq!(back.properties.expiration(), &None);
    assert_eq!(back.properties.user_id(), &None);
    assert_eq!(back.properties.content_type(), &Some("text/plain".into()));
    assert_eq!(back.properties.correlation_id(), &Some("c-1".into()));
    let kept = back.properties.headers().clone().expect("headers");
    let kept = kept.inner();
    for gone in ["x-death", "x-first-death-queue", "x-last-death-reason"] {
        assert!(!kept.contains_key(gone), "{gone}");
    }
    for gone in ["x-delivery-count", "CC", "BCC"] {
        assert!(!kept.contains_key(gone), "{gone}");
    }
    assert_eq!(back.number("x-retry-count"), Some(1));
    assert_eq!(kept["mine"], AMQPValue::LongString("kept".into()));
    assert_eq!(kept["short"], AMQPValue::ShortInt(-3));
    let expected = vec![AMQPValue::LongString("a".into())];
    assert_eq!(kept["list"], AMQPValue::FieldArray(expected.into()));
}

#[tokio::test(flavor = "multi_thread")]
async fn while_postgres_is_down_nothing_is_consumed_and_no_delivery_limit_is_burnt() {
    let stack = breakable().await;
    let mut bed = Bed::on(&stack).await;
    bed.set("DATABASE_TIMEOUT_MS", "1000");
    let queue = bed.declare("target").await;
    // With this limit the broker drops a message that was handed back three times.
    let mut arguments = FieldTable::default();
    arguments.insert(
        "x-queue-type".into(),
        AMQPValue::LongString("quorum".into()),
    );
    arguments.insert("x-delivery-limit".into(), AMQPValue::LongInt(2));
    bed.client.declare_with(&bed.intake(), arguments).await;
    let service = bed.start().await;
    let messages: Vec<_> = (0..50).map(|n| message(&queue, format!("{n}"))).collect();
    bed.client.send_all(&bed.intake(), &messages[..10]).await;
    bed.until_count("SELECT count(*) FROM retry_queue", 10)
        .await;

    tokio::task::block_in_place(|| stack.postgres.stop()).expect("Postgres stops");
    bed.client.send_all(&bed.intake(), &messages[10..]).await;
    let failures = service.scrape().await.sum("retry_store_errors_total");
    eventually("each loop has failed several times", || async {
        let now = service.scrape().await.sum("retry_store_errors_total");
        (now >= failures + 12.0).then_some(())
    })
    .await;
    eventually(
        "all are back in the queue, and nobody takes them",
        || async {
            let depth = bed.client.depth(&bed.intake()).await;
            let consumers = bed.client.consumers(&bed.intake()).await;
            (depth == Some(40) && consumers == Some(0)).then_some(())
        },
    )
    .await;
    tokio::task::block_in_place(|| stack.postgres.start_again()).expect("Postgres starts");

    let mut inbox = bed.client.consume(&queue).await;
    let mut expected: HashSet<String> = messages.into_iter().map(|m| m.message_id).collect();
    for back in inbox.take(50).await {
        assert!(expected.remove(&back.id()), "twice: {}", back.id());
    }
    bed.until_count(RETRIED, 50).await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stored_batch_whose_commit_was_not_answered_is_stored_once() {
    let mut bed = Bed::new().await;
    let proxy = bed.proxy_postgres().await;
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let marker = Uuid::new_v4().to_string();
    let trap = Trap::on_request(b"COMMIT", Fault::LoseAnswer).after(marker.as_bytes());
    let sprung = proxy.set_trap(trap);
    let messages: Vec<_> = (0..20)
        .map(|n| message(&queue, format!("{marker} {n}")))
        .collect();
    bed.client.send_all(&bed.intake(), &messages).await;
    assert!(sprung.within(PATIENCE).await);
    let mut expected: HashSet<String> = messages.into_iter().map(|m| m.message_id).collect();
    for back in inbox.take(20).await {
        assert!(expected.remove(&back.id()), "twice: {}", back.id());
        assert_eq!(back.number("x-retry-count"), Some(1));
    }
    // If one of the messages had been sent again, it would come before this later one.
    bed.client
        .send(&bed.intake(), &message(&queue, "last"))
        .await;
    assert_eq!(inbox.next().await.body, b"last");
    bed.until_count(RETRIED, 21).await;
    // There are two events a message: it was scheduled, and it was sent back. The service
    // found the batch by looking it up; had it handed the deliveries back to the queue, each
    // would have a third event.
    bed.until_count("SELECT count(*) FROM retry_events", 42)
        .await;
    service.stop().await;
    assert_eq!(bed.client.depth(&bed.intake()).await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conflict_whose_commit_was_not_answered_is_reviewed_once() {
    let mut bed = Bed::new().await;
    wait_for_the_test(&mut bed);
    let proxy = bed.proxy_postgres().await;
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let first = message(&queue, "first");
    bed.client.send(&bed.intake(), &first).await;
    bed.until_count("SELECT count(*) FROM retry_queue", 1).await;
    let marker = Uuid::new_v4().to_string();
    let trap = Trap::on_request(b"COMMIT", Fault::LoseAnswer).after(marker.as_bytes());
    let sprung = proxy.set_trap(trap);
    let newcomer = RetryMessage {
        original_payload: marker.clone().into(),
        ..first.clone()
    };
    bed.client.send(&bed.intake(), &newcomer).await;
    assert!(sprung.within(PATIENCE).await);
    let mut review = bed.client.consume(&bed.review()).await;
    assert_eq!(
        review.next().await.review().original_payload,
        marker.as_bytes()
    );
    let last = RetryMessage {
        original_payload: b"last".to_vec(),
        ..first
    };
    bed.client.send(&bed.intake(), &last).await;
    assert_eq!(review.next().await.review().original_payload, b"last");
    bed.until_count(
        "SELECT count(*) FROM retry_queue WHERE status = 'failed' AND reason = 'conflict'",
        2,
    )
    .await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_settled_batch_whose_commit_was_not_answered_is_not_sent_again() {
    let mut bed = Bed::new().await;
    wait_for_the_test(&mut bed);
    let proxy = bed.proxy_postgres().await;
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let marker = Uuid::new_v4().to_string();
    let messages: Vec<_> = (0..20)
        .map(|n| message(&queue, format!("{marker} {n}")))
        .collect();
    bed.client.send_all(&bed.intake(), &messages).await;
    bed.until_count("SELECT count(*) FROM retry_queue", 20)
        .await;
    let trap = Trap::on_request(b"COMMIT", Fault::LoseAnswer).after(marker.as_bytes());
    let sprung = proxy.set_trap(trap);
    bed.make_due().await;
    assert!(sprung.within(PATIENCE).await);
    let mut expected: HashSet<String> = messages.into_iter().map(|m| m.message_id).collect();
    for back in inbox.take(20).await {
        assert!(expected.remove(&back.id()), "twice: {}", back.id());
    }
    bed.until_count(RETRIED, 20).await;
    bed.client
        .send(&bed.intake(), &message(&queue, "last"))
        .await;
    bed.until_count("SELECT count(*) FROM retry_queue", 21)
        .await;
    bed.make_due().await;
    assert_eq!(inbox.next().await.body, b"last");
    bed.until_count(RETRIED, 21).await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_between_confirm_and_commit_republishes_once_more() {
    let mut bed = Bed::new().await;
    wait_for_the_test(&mut bed);
    let direct = bed.setting("DATABASE_URL").to_owned();
    let proxy = bed.proxy_postgres().await;
    let queue = bed.declare("target").await;
    let marker = Uuid::new_v4().to_string();
    let sent = message(&queue, marker.clone());
    let mut victim = bed.spawn();
    bed.client.declare(&bed.intake()).await;
    bed.client.send(&bed.intake(), &sent).await;
    eventually("it is stored", || async {
        let stored = sqlx::query_scalar::<_, i64>("SELECT count(*) FROM retry_queue")
            .fetch_one(&bed.db)
            .await;
        // The query fails until the service has made the tables.
        (stored.ok()? == 1).then_some(())
    })
    .await;
    let trap = Trap::on_request(b"COMMIT", Fault::Hold).after(marker.as_bytes());
    let sprung = proxy.set_trap(trap);
    bed.make_due().await;
    assert!(sprung.within(PATIENCE).await);
    victim.kill().await.expect("SIGKILL");

    let mut inbox = bed.client.consume(&queue).await;
    let first = inbox.next().await;
    assert_eq!(first.id(), sent.message_id);
    assert_eq!(bed.count(RETRIED).await, 0);
    bed.set("DATABASE_URL", &direct);
    let service = bed.start().await;
    let again = inbox.next().await;
    assert_eq!(again.id(), sent.message_id);
    assert_eq!(again.body, marker.as_bytes());
    assert_eq!(again.number("x-retry-count"), Some(1));
    // Both messages are the same attempt, so they carry the same attempt id.
    let attempt = |received: &Received| received.text("x-retry-attempt-id").expect("an id");
    assert_eq!(attempt(&first), attempt(&again));
    bed.until_count(RETRIED, 1).await;
    service.stop().await;
    assert_eq!(bed.client.depth(&queue).await, Some(0));
    let count = "SELECT retry_count::bigint FROM retry_queue";
    assert_eq!(bed.count(count).await, 1);
    let attempts = "SELECT count(*) FROM retry_events WHERE event_type = 'retry_attempt'";
    assert_eq!(bed.count(attempts).await, 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_with_synchronous_commit_off_still_commits_our_writes_synchronously() {
    let bed = Bed::new().await;
    bed.migrate().await;
    sqlx::raw_sql(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off',
                                    current_database()); END $$",
    )
    .execute(&bed.db)
    .await
    .expect("the server is unsafe");
    bed.witness("synchronous_commit").await;
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    bed.client
        .send(&bed.intake(), &message(&queue, "body"))
        .await;
    bed.until_count(RETRIED, 1).await;
    let stranger = sqlx::PgPool::connect(bed.setting("DATABASE_URL")).await;
    let setting: String = sqlx::query_scalar("SHOW synchronous_commit")
        .fetch_one(&stranger.expect("connected"))
        .await
        .expect("a setting");
    assert_eq!(setting, "off", "for anybody else");
    let on = |what: &str| (what.to_owned(), "on".to_owned());
    assert_eq!(bed.witnessed().await, [on("INSERT"), on("UPDATE")]);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_understood_stays_in_the_queue_until_it_can_be_stored_whole() {
    let mut bed = Bed::new().await;
    let proxy = bed.proxy_postgres().await;
    bed.set("DATABASE_TIMEOUT_MS", "1000");
    let service = bed.start().await;
    proxy.set(Way::Down);
    let undecodable = b"{ this is no RetryMessage \0\xff".as_slice();
    let refused = prost::Message::encode_to_vec(&message("amq.somewhere", "body"));
    let properties = BasicProperties::default().with_app_id("a producer".into());
    for body in [undecodable, &refused] {
        bed.client
            .publish(&bed.intake(), body, properties.clone())
            .await;
    }
    service.until_down("consumer").await;
    eventually("both are back in the queue", || async {
        let depth = bed.client.depth(&bed.intake()).await;
        (depth == Some(2)).then_some(())
    })
    .await;
    assert_eq!(bed.client.depth(&bed.review()).await, Some(0));
    proxy.set(Way::Open);

    let mut review = bed.client.consume(&bed.review()).await;
    let found: HashSet<Vec<u8>> = review
        .take(2)
        .await
        .iter()
        .map(|m| {
            let envelope = m.review();
            assert_eq!(envelope.reason, "invalid");
            assert!(!envelope.error.is_empty());
            assert_eq!(envelope.properties.expect("kept").app_id, "a producer");
            envelope.original_payload
        })
        .collect();
    assert_eq!(found, HashSet::from([undecodable.to_vec(), refused]));
    service.stop().await;
    assert_eq!(bed.client.depth(&bed.intake()).await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_queue_costs_no_attempt_and_gets_its_message_when_there_is_room() {
    let bed = Bed::new().await;
    let queue = bed.queue("full");
    let mut arguments = FieldTable::default();
    arguments.insert("x-max-length".into(), AMQPValue::LongInt(1));
    arguments.insert(
        "x-overflow".into(),
        AMQPValue::LongString("reject-publish".into()),
    );
    bed.client.declare_with(&queue, arguments).await;
    bed.client
        .publish(&queue, b"in the way", Default::default())
        .await;
    let service = bed.start().await;
    bed.client
        .send(&bed.intake(), &message(&queue, "body"))
        .await;
    eventually("it was refused twice", || async {
        let deferred = "SELECT count(*) FROM retry_events WHERE event_type = 'deferred'";
        (bed.count(deferred).await >= 2).then_some(())
    })
    .await;
    let untouched = "SELECT count(*) FROM retry_queue WHERE status = 'pending' AND retry_count = 0";
    assert_eq!(bed.count(untouched).await, 1);
    assert_eq!(bed.client.depth(&queue).await, Some(1));
    let mut inbox = bed.client.consume(&queue).await;
    assert_eq!(inbox.next().await.body, b"in the way");
    let back = inbox.next().await;
    assert_eq!(back.body, b"body");
    assert_eq!(back.number("x-retry-count"), Some(1));
    bed.until_count(
        "SELECT count(*) FROM retry_queue WHERE status = 'retried' AND retry_count = 1",
        1,
    )
    .await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn while_nothing_can_be_settled_one_message_is_sent_again_and_not_all_of_them() {
    const MESSAGES: usize = 50;
    let mut bed = Bed::new().await;
    bed.set("DISPATCH_WORKERS", "1");
    bed.migrate().await;
    // The trigger acts like a full disk: rows can be read and locked, but not changed.
    sqlx::raw_sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$
         BEGIN
             RAISE EXCEPTION 'could not extend file' USING ERRCODE = 'disk_full';
         END $$;
         CREATE TRIGGER refuse BEFORE UPDATE ON retry_queue
             FOR EACH ROW EXECUTE FUNCTION refuse();",
    )
    .execute(&bed.db)
    .await
    .expect("the disk is full");
    let queue = bed.declare("target").await;
    bed.insert_due(&queue, MESSAGES as i32).await;
    let service = bed.start_unready().await;
    let mut inbox = bed.client.consume(&queue).await;
    let first: HashSet<String> = inbox.take(MESSAGES).await.iter().map(|m| m.id()).collect();
    assert_eq!(first.len(), MESSAGES);
    let again: HashSet<String> = inbox.take(4).await.iter().map(|m| m.id()).collect();
    assert_eq!(again.len(), 1, "of a batch that cannot be settled");
    // Postgres answers, and rows can be read; only the dispatcher knows.
    service.until_down("publisher").await;
    sqlx::raw_sql("DROP TRIGGER refuse ON retry_queue")
        .execute(&bed.db)
        .await
        .expect("there is room");
    bed.until_count(RETRIED, MESSAGES as i64).await;
    service.until_ready().await;
    service.stop().await;
}
