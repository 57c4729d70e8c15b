//! Messages that the AMQP client cannot read: they go to review, and harm nobody else.

use lapin::{ExchangeKind, options::ExchangeDeclareOptions, types::FieldTable};
use retry_scheduler::wire::proto::header_value::Kind;

use crate::support::{
    Bed, eventually, message, quorum,
    raw::{RawMessage, long, publish_raw, short},
};

const GOOD: &str =
    "SELECT count(DISTINCT original_payload) FROM retry_queue WHERE original_payload LIKE 'job %'";

/// The property `content_type` with bytes that are no UTF-8, then `message_id`.
fn bad_content_type(id: &str) -> Vec<u8> {
    [
        &[0b1000_0000, 0b1000_0000][..],
        &short(b"\xff\xfe"),
        &short(id.as_bytes()),
    ]
    .concat()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_that_the_client_cannot_read_goes_to_review_and_those_behind_it_are_stored() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let (intake, work) = (bed.intake(), bed.declare("work").await);
    bed.client.declare_with(&intake, quorum(Some(20))).await;
    let bad = RawMessage {
        properties: &bad_content_type("bad-1"),
        body: b"the body of the bad one",
    };
    publish_raw(bed.setting("RABBITMQ_URL"), "", intake.as_bytes(), &[bad]);
    let good: Vec<_> = (0..200)
        .map(|n| message(&work, format!("job {n}")))
        .collect();
    bed.client.send_all(&intake, &good).await;

    let service = bed.start_unready().await;
    bed.until_count("SELECT count(*) FROM retry_queue", 201)
        .await;
    let mut review = bed.client.consume(&bed.review()).await;
    let envelope = review.next().await.review();
    assert_eq!(envelope.original_payload, b"the body of the bad one");
    assert_eq!(envelope.producer_id, "bad-1");
    assert_eq!(envelope.reason, "invalid");
    assert_eq!(
        envelope.error,
        "the AMQP client cannot read this message: content_type is not UTF-8: fffe"
    );
    let properties = envelope.properties.expect("properties");
    assert_eq!(properties.content_type, "\u{fffd}\u{fffd}");
    eventually("all is acknowledged", || async {
        (bed.client.depth(&intake).await == Some(0)).then_some(())
    })
    .await;
    service.until_ready().await;
    service.stop().await;
    assert_eq!(
        bed.client.depth(&intake).await,
        Some(0),
        "nothing came back"
    );
    assert_eq!(bed.count(GOOD).await, 200);
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 201);
}

#[tokio::test(flavor = "multi_thread")]
async fn unreadable_messages_between_others_are_taken_out_whatever_is_wrong_with_them() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let (intake, work) = (bed.intake(), bed.declare("work").await);
    bed.client.declare_with(&intake, quorum(Some(20))).await;
    let good: Vec<_> = (0..900)
        .map(|n| message(&work, format!("job {n}")))
        .collect();
    let url = bed.setting("RABBITMQ_URL");
    // A header's name, and one in a table within; the rest is fine.
    let table = [
        &short(b"\xe9t\xe9")[..],
        b"S",
        &long(b"summer"),
        &short(b"inner"),
        b"F",
        &long(&[&short(b"\xff")[..], b"t\x01"].concat()),
        &short(b"last"),
        b"I\x00\x00\x00\x07",
    ]
    .concat();
    let headers = [&[0b0010_0000, 0][..], &long(&table)].concat();
    // Every short text there is.
    let texts = [&[0b1100_0110, 0b1010_1000][..], &short(b"\xc0").repeat(7)].concat();
    bed.client.send_all(&intake, &good[..300]).await;
    let (small, large) = (b"small", vec![b'x'; 300_000]);
    let content_type = bad_content_type("a");
    let bad = |properties, body| RawMessage { properties, body };
    publish_raw(
        url,
        "",
        intake.as_bytes(),
        &[
            bad(&headers, small),
            bad(&texts, &large),
            bad(&content_type, small),
        ],
    );
    bed.client.send_all(&intake, &good[300..600]).await;
    publish_raw(url, "", intake.as_bytes(), &[bad(&content_type, b"")]);
    bed.client.send_all(&intake, &good[600..]).await;
    // A routing key is not part of the properties, but of the delivery.
    let fanout = bed.queue("fanout");
    fan_out(&bed, &fanout, &intake).await;
    publish_raw(url, &fanout, b"k\xff", &[bad(&[0, 0], b"by key")]);

    let service = bed.start_unready().await;
    bed.until_count("SELECT count(*) FROM retry_queue", 905)
        .await;
    assert_eq!(bed.count(GOOD).await, 900);
    let mut review = bed.client.consume(&bed.review()).await;
    let mut envelopes = Vec::new();
    for received in review.take(5).await {
        envelopes.push(received.review());
    }
    envelopes.sort_by_key(|e| e.error.clone());
    let errors: Vec<&str> = envelopes.iter().map(|e| e.error.as_str()).collect();
    assert!(
        errors[1].ends_with(": content_type is not UTF-8: fffe"),
        "{errors:?}"
    );
    let named = |error: &str, name: &str| error.contains(&format!("{name} is not UTF-8: "));
    let all = [
        "content_type",
        "content_encoding",
        "correlation_id",
        "reply_to",
        "message_id",
        "type",
        "app_id",
    ];
    let every = envelopes
        .iter()
        .find(|e| all.iter().all(|name| named(&e.error, name)));
    assert_eq!(
        every.expect("the one with all texts").original_payload,
        large
    );
    let by_key = envelopes.iter().find(|e| named(&e.error, "routing_key"));
    assert_eq!(
        by_key.expect("the one with the key").original_payload,
        b"by key"
    );
    let summer = envelopes
        .iter()
        .find(|e| named(&e.error, "the name of a header"));
    let headers = summer
        .expect("the one with headers")
        .properties
        .clone()
        .expect("properties")
        .headers;
    assert_eq!(headers["last"].kind, Some(Kind::Int32(7)));
    assert_eq!(
        headers["\u{fffd}t\u{fffd}"].kind,
        Some(Kind::Text("summer".into()))
    );
    eventually("all is acknowledged", || async {
        (bed.client.depth(&intake).await == Some(0)).then_some(())
    })
    .await;
    service.stop().await;
    assert_eq!(
        bed.client.depth(&intake).await,
        Some(0),
        "nothing came back"
    );
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 905);
}

/// Declares an exchange that sends everything to `queue`.
async fn fan_out(bed: &Bed, exchange: &str, queue: &str) {
    let channel = bed.client.channel().await;
    let options = ExchangeDeclareOptions {
        auto_delete: true,
        ..Default::default()
    };
    let kind = ExchangeKind::Fanout;
    channel
        .exchange_declare(exchange.into(), kind, options, FieldTable::default())
        .await
        .expect("an exchange");
    channel
        .queue_bind(
            queue.into(),
            exchange.into(),
            "".into(),
            Default::default(),
            FieldTable::default(),
        )
        .await
        .expect("a binding");
}
