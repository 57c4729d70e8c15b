//! Bad and odd input from producers, and where each piece of it must end.
//!
//! The tables in the files beside this one say what is sent and where it must end: back
//! in its queue byte for byte, or in review, with a reason and an error text that names
//! what is wrong. All cases go to one instance of the binary at once, so that each could
//! harm the others, and a good message must pass after them.

mod dead_letters;
mod identities;
mod json;
mod properties;
mod protobuf;
mod table;

use std::{collections::HashSet, time::Instant};

use lapin::{
    BasicProperties,
    options::{BasicAckOptions, BasicGetOptions, BasicPublishOptions, ConfirmSelectOptions},
};
use prost::Message;
use retry_scheduler::wire::proto::ReviewMessage;
use sha2::{Digest, Sha256};

use crate::support::{Bed, PATIENCE, Process, Received, Scrape, message};
use table::{At, Case, End};

const FAILED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'failed'";

#[tokio::test(flavor = "multi_thread")]
async fn every_bad_input_has_its_end_and_a_good_one_passes_after_it() {
    let mut bed = Bed::new().await;
    // Nothing may be sent back before everything is stored: two messages with one id are a
    // conflict only while the first one waits.
    bed.set("BASE_DELAY_MS", "600000")
        .set("MAX_DELAY_MS", "600000")
        .set("RETRY_POLL_INTERVAL_MS", "50");
    bed.set("ALLOWED_QUEUES", &bed.queue("*"));
    bed.set("DEAD_LETTER_QUEUE", &bed.queue("dead-letters"));
    let at = At::in_bed(&bed);
    for queue in at.all() {
        bed.client.declare(queue).await;
    }
    let mut cases = protobuf::table(&at);
    cases.extend(identities::table(&at));
    cases.extend(properties::table(&at));
    cases.extend(json::table(&at));
    cases.extend(dead_letters::table(&at));
    let ends: HashSet<_> = cases.iter().map(|c| (c.place(&at), &c.arrives)).collect();
    assert_eq!(
        ends.len(),
        cases.len(),
        "each case is known by what arrives"
    );

    let service = Process::spawn(bed.command());
    service.until_ready().await;
    send(&bed, &cases).await;
    until_none("not stored", async || not_stored(&bed, &cases).await).await;

    let mut arrived = Vec::new();
    until_none("not at an end", async || {
        bed.make_due().await;
        collect(&bed, &at, &mut arrived).await;
        let missing = cases.iter().filter(|c| !arrived.iter().any(|a| a.is(c)));
        missing.map(|c| c.name.clone()).collect()
    })
    .await;
    let good = message(&at.target, "a good one after them");
    bed.client.send(&at.intake, &good).await;
    until_none("not passed", async || {
        bed.make_due().await;
        collect(&bed, &at, &mut arrived).await;
        let passed = arrived.iter().any(|a| a.body == good.original_payload);
        Vec::from_iter((!passed).then_some("a good one after them"))
    })
    .await;

    for case in &cases {
        let mut found = arrived.iter().filter(|a| a.body == case.arrives);
        found.find(|a| a.is(case)).expect(&case.name).check(case);
    }
    let names: Vec<_> = arrived.iter().map(Arrival::to_string).collect();
    assert_eq!(
        arrived.len(),
        cases.len() + 1,
        "exactly one each: {names:?}"
    );
    for queue in [&at.intake, &at.dead_letters] {
        assert_eq!(bed.client.depth(queue).await, Some(0), "{queue}");
    }
    assert_eq!(service.get("/ready").await.0, 200);
    let metrics = Scrape::parse(&service.get("/metrics").await.1);
    let invalid = cases.iter().filter(|c| c.end.is_invalid()).count();
    assert_eq!(metrics.get("retry_invalid_total"), invalid as f64);
    assert_eq!(
        metrics.sum("retry_reconnects_total"),
        0.0,
        "none cost a connection"
    );
    service.signal("TERM").await;
    let (status, log) = service.ended().await;
    assert!(status.success(), "{status}");
    assert!(!log.contains("panicked"), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_poison_messages_in_a_row_are_all_in_review() {
    const POISON: usize = 10_000;
    let bed = Bed::new().await;
    let service = Process::spawn(bed.command());
    service.until_ready().await;
    let intake = bed.intake();
    let mut confirms = Vec::with_capacity(POISON);
    for n in 0..POISON {
        let body = format!("{{poison {n}");
        let sent = bed
            .client
            .publish_soon(&intake, body.as_bytes(), BasicProperties::default());
        confirms.push(sent.await);
    }
    for confirm in confirms {
        assert!(confirm.await.expect("a confirm").is_ack());
    }
    let ids = bed.client.ids(&bed.review(), POISON).await;
    assert_eq!(ids.iter().collect::<HashSet<_>>().len(), POISON);
    bed.until_count(FAILED, POISON as i64).await;
    let bodies = "SELECT count(DISTINCT original_payload) FROM retry_queue";
    assert_eq!(bed.count(bodies).await, POISON as i64);
    for queue in [bed.intake(), bed.review()] {
        assert_eq!(bed.client.depth(&queue).await, Some(0), "{queue}");
    }
    service.until_ready().await;
    service.signal("TERM").await;
    assert!(service.ended().await.0.success());
}

/// Publishes the cases exactly as they are, and waits for each confirm, so that a case
/// which the broker itself refuses is named.
async fn send(bed: &Bed, cases: &[Case]) {
    let channel = bed.client.channel().await;
    let confirms = ConfirmSelectOptions::default();
    channel.confirm_select(confirms).await.expect("confirms");
    let options = BasicPublishOptions::default;
    for case in cases {
        let (name, body) = (&case.name, &case.body);
        let (door, properties) = (case.door.as_str().into(), case.properties.clone());
        let sent = channel.basic_publish("".into(), door, options(), body, properties);
        let confirm = sent.await.expect(name);
        assert!(confirm.await.expect(name).is_ack(), "{name}");
    }
}

/// Waits until `left` returns no names; panics with the names when that takes longer than
/// [`PATIENCE`].
async fn until_none<S: AsRef<str>>(what: &str, mut left: impl AsyncFnMut() -> Vec<S>) {
    let start = Instant::now();
    loop {
        let left = left().await;
        if left.is_empty() {
            return;
        }
        let names: Vec<&str> = left.iter().map(AsRef::as_ref).collect();
        assert!(start.elapsed() < PATIENCE, "{what}: {names:#?}");
        tokio::time::sleep(std::time::Duration::from_millis(50)).await;
    }
}

/// The names of the cases whose payload is in no row.
async fn not_stored(bed: &Bed, cases: &[Case]) -> Vec<String> {
    let stored: Vec<Vec<u8>> =
        sqlx::query_scalar("SELECT sha256(original_payload) FROM retry_queue")
            .fetch_all(&bed.db)
            .await
            .expect("the rows");
    let stored: HashSet<Vec<u8>> = stored.into_iter().collect();
    let missing = cases
        .iter()
        .filter(|c| !stored.contains(&Sha256::digest(&c.arrives)[..]));
    missing.map(|c| c.name.clone()).collect()
}

/// A message from a queue where cases end. In the review queue it has an envelope, and
/// `body` is the payload in that.
struct Arrival {
    queue: String,
    body: Vec<u8>,
    message: Received,
    envelope: Option<ReviewMessage>,
}

impl Arrival {
    /// Whether this is the message of `case`, and it is in the queue where it should end.
    fn is(&self, case: &Case) -> bool {
        let at_end = match (&case.end, &self.envelope) {
            (End::Back(queue), None) => self.queue == *queue,
            (End::Review { .. }, Some(_)) => true,
            _ => false,
        };
        at_end && self.body == case.arrives
    }

    /// Checks what else the case demands of the message.
    fn check(&self, case: &Case) {
        let name = &case.name;
        if let (End::Review { reason, says, from }, Some(envelope)) = (&case.end, &self.envelope) {
            assert_eq!(envelope.reason, *reason, "{name}: {}", envelope.error);
            assert!(envelope.error.contains(says), "{name}: {}", envelope.error);
            assert_eq!(envelope.original_queue, *from, "{name}");
        }
        if let Some(check) = case.check {
            check(&self.message);
        }
    }
}

impl std::fmt::Display for Arrival {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let start = &self.body[..self.body.len().min(60)];
        write!(f, "{}: {}", self.queue, start.escape_ascii())
    }
}

/// Takes all messages that are in the queues where cases end.
async fn collect(bed: &Bed, at: &At, arrived: &mut Vec<Arrival>) {
    let channel = bed.client.channel().await;
    for queue in at.ends() {
        let next = || channel.basic_get(queue.as_str().into(), BasicGetOptions::default());
        while let Some(got) = next().await.expect("a queue") {
            let delivery = got.delivery;
            let acked = delivery.ack(BasicAckOptions::default()).await;
            assert!(acked.expect("acked"));
            let message = Received {
                body: delivery.data,
                properties: delivery.properties,
                at: Instant::now(),
            };
            let envelope = (*queue == at.review).then(|| envelope(&message));
            let body = match &envelope {
                Some(envelope) => envelope.original_payload.clone(),
                None => message.body.clone(),
            };
            arrived.push(Arrival {
                queue: queue.clone(),
                body,
                message,
                envelope,
            });
        }
    }
}

/// Reads a review envelope. A large one is in protobuf, and its content type says so.
fn envelope(message: &Received) -> ReviewMessage {
    let content_type = message.properties.content_type().as_ref();
    if content_type.is_some_and(|t| t.as_str().contains("protobuf")) {
        ReviewMessage::decode(message.body.as_slice()).expect("an envelope in protobuf")
    } else {
        message.review()
    }
}
