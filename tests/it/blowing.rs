//! "Blowing up": one bad thing harms only itself.

use std::collections::{BTreeMap, HashMap, HashSet};

use lapin::{
    BasicProperties,
    types::{AMQPValue, FieldTable},
};
use prost::Message;
use retry_scheduler::{
    store::Store,
    task::Settlement,
    wire::proto::{HeaderList, HeaderValue, Properties, RetryMessage, header_value::Kind},
};

use crate::support::{Bed, Process, Received, breakable, disturb, eventually, message};

const PENDING: &str = "SELECT count(*) FROM retry_queue WHERE status = 'pending'";
const RETRIED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'retried'";
const FAILED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'failed'";

fn header(name: &str, kind: Kind) -> BTreeMap<String, HeaderValue> {
    BTreeMap::from([(name.to_owned(), HeaderValue { kind: Some(kind) })])
}

fn with_properties(queue: &str, properties: Properties) -> RetryMessage {
    RetryMessage {
        properties: Some(properties),
        ..message(queue, "with properties")
    }
}

/// The AMQP message as it came back, by its id.
fn by_id(received: Vec<Received>) -> HashMap<String, Received> {
    received.into_iter().map(|r| (r.id(), r)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_used_goes_to_review_whole_and_its_neighbours_come_back() {
    let bed = Bed::new().await;
    let queue = bed.declare("neighbours").await;
    // More than 64 KiB on the wire, though protobuf writes each zero in 4 bytes.
    let wide = HeaderList {
        values: vec![
            HeaderValue {
                kind: Some(Kind::Int64(0)),
            };
            15_000
        ],
    };
    let bad: Vec<(&str, RetryMessage)> = vec![
        ("more than 255", message(&"q".repeat(256), "x")),
        ("more than 255", message(&"é".repeat(200), "x")),
        ("control characters", message("nul\0nul", "x")),
        ("original_queue is empty", message("", "x")),
        (
            "properties have",
            with_properties(
                &queue,
                Properties {
                    headers: header("huge", Kind::Text("h".repeat(70_000))),
                    ..Default::default()
                },
            ),
        ),
        (
            "properties have",
            with_properties(
                &queue,
                Properties {
                    headers: header("wide", Kind::List(wide)),
                    ..Default::default()
                },
            ),
        ),
        (
            "retry_count is negative",
            RetryMessage {
                retry_count: -1,
                ..message(&queue, "x")
            },
        ),
        (
            "max_retries is negative",
            RetryMessage {
                max_retries: i32::MIN,
                ..message(&queue, "x")
            },
        ),
        (
            "after the year 9999",
            RetryMessage {
                next_retry_at_ms: i64::MAX,
                ..message(&queue, "x")
            },
        ),
        (
            "out of range",
            RetryMessage {
                retry_after_ms: Some(i64::MIN),
                ..message(&queue, "x")
            },
        ),
    ];
    let garbage: [&[u8]; 4] = [b"\xff\xff\xff\xff", b"{not json", b"\0", b"{}"];
    // Sent before there is a service: they arrive as one batch.
    bed.client.declare(&bed.intake()).await;
    let mut good = Vec::new();
    for (_, message_) in &bad {
        let neighbour = message(&queue, "neighbour");
        bed.client
            .send_all(&bed.intake(), &[neighbour.clone(), message_.clone()])
            .await;
        good.push(neighbour.message_id);
    }
    for body in garbage {
        bed.client
            .publish(&bed.intake(), body, BasicProperties::default())
            .await;
    }

    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let back = by_id(inbox.take(good.len()).await);
    assert!(good.iter().all(|id| back.contains_key(id)));
    let mut review = bed.client.consume(&bed.review()).await;
    let mut reviewed: HashMap<Vec<u8>, String> = HashMap::new();
    for r in review.take(bad.len() + garbage.len()).await {
        let envelope = r.review();
        assert_eq!(envelope.reason, "invalid");
        assert_eq!(envelope.original_queue, bed.intake());
        reviewed.insert(envelope.original_payload, envelope.error);
    }
    for (why, message) in &bad {
        let error = &reviewed[&message.encode_to_vec()];
        assert!(error.contains(why), "{why}: {error}");
    }
    for body in garbage {
        assert!(reviewed.contains_key(body));
    }
    bed.until_count(FAILED, (bad.len() + garbage.len()) as i64)
        .await;
    bed.until_count(RETRIED, good.len() as i64).await;
    assert_eq!(bed.count(PENDING).await, 0);
    let invalid = service.scrape().await.get("retry_invalid_total");
    assert_eq!(invalid, (bad.len() + garbage.len()) as f64);
    service.until_ready().await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nul_in_any_text_is_made_visible_and_the_message_comes_back() {
    let bed = Bed::new().await;
    let queue = bed.declare("nul").await;
    let sent = RetryMessage {
        message_id: "order\0seven".into(),
        error_reason: "broke\0here".into(),
        category: "cat\0egory".into(),
        tenant_id: "ten\0ant".into(),
        correlation_id: "cor\0relation".into(),
        trace_id: "tra\0ce".into(),
        idempotency_key: "ke\0y".into(),
        properties: Some(Properties {
            app_id: "app\0".into(),
            headers: header("text", Kind::Text("a\0b".into())),
            ..Default::default()
        }),
        ..message(&queue, "pay\0load")
    };
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    bed.client.send(&bed.intake(), &sent).await;
    let back = inbox.next().await;
    assert_eq!(back.body, b"pay\0load");
    assert_eq!(back.text("x-original-error").unwrap(), "broke\u{2400}here");
    assert_eq!(back.text("text").unwrap(), "a\0b");
    bed.until_count(
        "SELECT count(*) FROM retry_queue
         WHERE status = 'retried' AND producer_id = 'order\u{2400}seven'
           AND tenant_id = 'ten\u{2400}ant' AND error_reason = 'broke\u{2400}here'",
        1,
    )
    .await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_error_text_of_300_kb_comes_back_cut_to_one_kibibyte() {
    let bed = Bed::new().await;
    let queue = bed.declare("verbose").await;
    let sent = RetryMessage {
        // Two bytes a letter, and the cut falls between them.
        error_reason: format!("x{}", "é".repeat(150_000)),
        ..message(&queue, "body")
    };
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    bed.client.send(&bed.intake(), &sent).await;
    let back = inbox.next().await;
    assert_eq!(back.id(), sent.message_id);
    let error = back.text("x-original-error").unwrap();
    assert_eq!(error.len(), 1023);
    assert!(sent.error_reason.starts_with(&error));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn properties_that_close_channels_are_not_replayed() {
    let bed = Bed::new().await;
    let queue = bed.declare("properties").await;
    let headers: BTreeMap<String, HeaderValue> = ["x-death", "CC", "BCC", "x-delivery-count"]
        .into_iter()
        .flat_map(|name| header(name, Kind::Text("elsewhere".into())))
        .chain(header("kept", Kind::Int32(7)))
        .chain(header(&"n".repeat(300), Kind::Boolean(true)))
        .collect();
    let sent = with_properties(
        &queue,
        Properties {
            reply_to: "amq.rabbitmq.reply-to".into(),
            // Longer than AMQP's short strings.
            content_type: "t".repeat(300),
            priority: Some(4711),
            timestamp: Some(u64::MAX),
            headers,
            ..Default::default()
        },
    );
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    bed.client.send(&bed.intake(), &sent).await;
    let back = inbox.next().await;
    assert_eq!(back.id(), sent.message_id);
    assert_eq!(*back.properties.reply_to(), None);
    assert_eq!(*back.properties.content_type(), None);
    assert_eq!(back.number("kept"), Some(7));
    let kept = back.properties.headers().as_ref().unwrap();
    assert!(!kept.inner().keys().any(|k| k.as_str() == "x-death"));
    let reconnects = service.scrape().await.sum("retry_reconnects_total");
    assert_eq!(reconnects, 0.0);
    service.stop().await;
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
    // Each attempt was counted, and waited for longer than the one before.
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
    assert!(delays[1] > delays[0] && delays[0] > 0, "{delays:?}");
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

/// A row that no version of ours wrote, due before all others.
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

/// A poison row at the head, neighbours behind it: they come back, it spends
/// its own attempts and ends in review.
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
        assert_ne!(back.body, b"poison");
        ids.remove(&back.id());
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

#[tokio::test(flavor = "multi_thread")]
async fn a_message_the_broker_closes_the_channel_over_spends_only_its_own_attempts() {
    let stack = breakable().await;
    let mut bed = Bed::on(&stack).await;
    bed.set("BASE_DELAY_MS", "50").set("DISPATCH_WORKERS", "1");
    let queue = bed.declare("size").await;
    bed.migrate().await;
    let limit = |bytes: usize| {
        let set = format!("application:set_env(rabbit, max_message_size, {bytes}).");
        disturb(|| stack.rabbitmq.ctl(&["eval", &set]));
    };
    let usual = 128 << 20;
    limit(50_000);
    let large = bed.insert_one(&queue, &vec![b'x'; 60_000]).await;
    let mut ids = HashSet::new();
    for n in 0..20 {
        let id = bed.insert_one(&queue, format!("{n}").as_bytes()).await;
        ids.insert(id.to_string());
    }
    let service = bed.start_unready().await;
    let mut inbox = bed.client.consume(&queue).await;
    while !ids.is_empty() {
        let back = inbox.next().await;
        assert_ne!(back.id(), large.to_string());
        ids.remove(&back.id());
    }
    bed.until_count(RETRIED, 20).await;
    // Its attempts are spent on it alone, and then review is too small for it
    // as well: it waits, visibly, and does not get lost.
    eventually("the large one is bound for review and deferred", || async {
        let deferred = "SELECT count(*) FROM retry_queue q JOIN retry_events e ON e.task_id = q.id
                        WHERE e.event_type = 'deferred' AND q.status = 'pending'
                          AND q.reason = 'unroutable' AND q.retry_count = 3";
        (bed.count(deferred).await > 0).then_some(())
    })
    .await;
    assert_eq!(
        bed.count("SELECT count(*) FROM retry_events WHERE event_type = 'returned'")
            .await,
        3
    );
    assert!(service.scrape().await.get("retries_deferred_total") >= 1.0);
    // Others are not held up by it meanwhile.
    let fresh = message(&queue, "fresh");
    bed.client.send(&bed.intake(), &fresh).await;
    while inbox.next().await.id() != fresh.message_id {}

    limit(usual);
    eventually("the large one is in review", || async {
        (bed.client.depth(&bed.review()).await == Some(1)).then_some(())
    })
    .await;
    let mut review = bed.client.consume(&bed.review()).await;
    let envelope = review.next().await.review();
    assert_eq!(envelope.original_payload.len(), 60_000);
    service.stop().await;
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
                    let end = Settlement::Retried { retry_count: 1 };
                    let ends: Vec<_> = tasks.iter().map(|t| (t.id, &end)).collect();
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
    // A claimer that meets only locked rows leaves; none is left unlocked.
    bed.until_count(RETRIED, taken.len() as i64).await;
    assert_eq!(taken.len() as i64, ROWS);
}

#[tokio::test(flavor = "multi_thread")]
async fn two_thousand_poison_messages_in_a_row_are_all_in_review() {
    let bed = Bed::new().await;
    let service = bed.start().await;
    let intake = bed.intake();
    let mut confirms = Vec::new();
    for n in 0..2000 {
        let body = format!("{{poison {n}");
        let sent = bed
            .client
            .publish_soon(&intake, body.as_bytes(), Default::default());
        confirms.push(sent.await);
    }
    for confirm in confirms {
        assert!(confirm.await.unwrap().is_ack());
    }
    let mut review = bed.client.consume(&bed.review()).await;
    let bodies: HashSet<Vec<u8>> = review
        .take(2000)
        .await
        .iter()
        .map(|r| r.review().original_payload)
        .collect();
    assert_eq!(bodies.len(), 2000);
    bed.until_count(FAILED, 2000).await;
    assert_eq!(bed.client.depth(&bed.intake()).await, Some(0));
    assert_eq!(bed.client.depth(&bed.review()).await, Some(0));
    service.until_ready().await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_postgres_refuses_goes_to_review_and_its_neighbours_are_stored() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let queue = bed.declare("picky").await;
    // Whatever Postgres may find wrong with a row that we did not foresee.
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

#[tokio::test(flavor = "multi_thread")]
async fn headers_nested_hundreds_deep_do_not_end_the_process() {
    let bed = Bed::new().await;
    let service = Process::spawn(bed.command());
    service.until_ready().await;
    let mut nested = lapin::types::AMQPValue::Void;
    for _ in 0..300 {
        nested = lapin::types::AMQPValue::FieldArray(vec![nested].into());
    }
    let mut headers = lapin::types::FieldTable::default();
    headers.insert("deep".into(), nested);
    let properties = lapin::BasicProperties::default().with_headers(headers);
    bed.client.publish(&bed.intake(), b"\xff", properties).await;
    let mut review = bed.client.consume(&bed.review()).await;
    assert_eq!(review.next().await.review().reason, "invalid");
    service.signal("TERM").await;
    assert!(service.ended().await.0.success());
}
