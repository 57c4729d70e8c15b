//! Whatever happens to Postgres or RabbitMQ, the service notices it, shows it on `/ready`,
//! survives it, and resumes its work without help.

use std::collections::HashSet;

use lapin::{options::QueueDeclareOptions, types::FieldTable};
use retry_scheduler::wire::proto::RetryMessage;

use crate::support::{
    Bed, Breakable, Client, Inbox, Process, Running, breakable, disturb, eventually, message,
};

const PENDING: &str = "SELECT count(*) FROM retry_queue WHERE status = 'pending'";
const RETRIED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'retried'";
const FAILED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'failed'";

/// A bed with short time-outs, so that the service notices trouble soon.
async fn impatient(stack: &Breakable) -> Bed {
    let mut bed = Bed::on(stack).await;
    bed.set("BROKER_HEARTBEAT_SECONDS", "1")
        .set("BROKER_TIMEOUT_MS", "2000")
        .set("CONFIRM_TIMEOUT_MS", "2000")
        .set("DATABASE_TIMEOUT_MS", "2000")
        .set("RETRY_POLL_INTERVAL_MS", "200");
    bed
}

/// Reports one failure, and waits until its message is sent back.
async fn round_trip(bed: &Bed, inbox: &mut Inbox, queue: &str) {
    let sent = message(queue, "there and back");
    bed.client.send(&bed.intake(), &sent).await;
    while inbox.next().await.id() != sent.message_id {}
}

/// Takes messages until all of `ids` have been seen; returns how many came.
async fn until_all(inbox: &mut Inbox, ids: impl IntoIterator<Item = String>) -> usize {
    let mut missing: HashSet<String> = ids.into_iter().collect();
    let mut came = 0;
    while !missing.is_empty() {
        missing.remove(&inbox.next().await.id());
        came += 1;
    }
    came
}

/// New failures for `queue`, and their ids.
fn later(queue: &str, count: usize) -> (Vec<RetryMessage>, Vec<String>) {
    let messages: Vec<RetryMessage> = (0..count)
        .map(|n| message(queue, format!("message {n}")))
        .collect();
    let ids = messages.iter().map(|m| m.message_id.clone()).collect();
    (messages, ids)
}

async fn reconnects(service: &Running, part: &str) -> f64 {
    let sample = format!("retry_reconnects_total{{part=\"{part}\"}}");
    service.scrape().await.get(&sample)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_intake_queue_turns_readiness_red_and_is_declared_anew() {
    let bed = Bed::new().await;
    let queue = bed.declare("orders").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    round_trip(&bed, &mut inbox, &queue).await;

    // After the queue is deleted, another connection declares an exclusive queue with its
    // name. So the service cannot declare it anew at once, and the test can see it unready.
    let squatter = Client::connect(bed.setting("RABBITMQ_URL")).await;
    let exclusive = QueueDeclareOptions {
        exclusive: true,
        ..Default::default()
    };
    eventually("the name is taken", || async {
        bed.client.delete(&bed.intake()).await;
        let channel = squatter.channel().await;
        channel
            .queue_declare(bed.intake().into(), exclusive, FieldTable::default())
            .await
            .ok()
    })
    .await;
    service.until_down("consumer").await;
    let (_, body) = service.ready().await;
    assert!(
        !body["parts"]["consumer"]["up"].as_bool().unwrap(),
        "{body}"
    );
    drop(squatter);

    service.until_ready().await;
    round_trip(&bed, &mut inbox, &queue).await;
    assert!(reconnects(&service, "intake").await >= 1.0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_deleted_review_queue_is_made_again_and_gets_its_message() {
    let bed = Bed::new().await;
    let service = bed.start().await;
    bed.client.delete(&bed.review()).await;
    let spent = RetryMessage {
        retry_count: 3,
        ..message("anywhere", "for people")
    };
    bed.client.send(&bed.intake(), &spent).await;
    eventually("the message is in review", || async {
        (bed.client.depth(&bed.review()).await == Some(1)).then_some(())
    })
    .await;
    bed.until_count(FAILED, 1).await;
    let mut review = bed.client.consume(&bed.review()).await;
    assert_eq!(review.next().await.review().message_id, spent.message_id);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_memory_alarm_spends_no_attempt_and_all_arrives_when_it_clears() {
    let stack = breakable().await;
    let mut bed = impatient(&stack).await;
    bed.set("DISPATCH_WORKERS", "1");
    let queue = bed.declare("alarm").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;

    disturb(|| stack.rabbitmq.raise_memory_alarm());
    let mut ids = Vec::new();
    for n in 0..20 {
        let id = bed.insert_one(&queue, format!("{n}").as_bytes()).await;
        ids.push(id.to_string());
    }
    service.until_down("publisher").await;
    // The rows are unlocked: the dispatcher does not hold them until the broker answers.
    bed.until_count(
        "SELECT count(*) FROM (SELECT FROM retry_queue FOR UPDATE SKIP LOCKED) AS free",
        20,
    )
    .await;
    assert_eq!(bed.count(PENDING).await, 20);
    assert_eq!(
        bed.count("SELECT count(*) FROM retry_queue WHERE retry_count > 0")
            .await,
        0
    );
    let other = "SELECT count(*) FROM retry_events WHERE event_type <> 'deferred'";
    assert_eq!(bed.count(other).await, 0);

    disturb(|| stack.rabbitmq.clear_memory_alarm());
    let came = until_all(&mut inbox, ids).await;
    service.until_ready().await;
    bed.until_count(RETRIED, 20).await;
    assert_eq!(
        bed.count("SELECT count(*) FROM retry_queue WHERE retry_count = 1")
            .await,
        20
    );
    let left = bed.client.depth(&queue).await.unwrap() as usize;
    assert!(came + left <= 40, "{came} came, {left} are left");
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_blocked_broker_does_not_keep_the_service_from_stopping() {
    let stack = breakable().await;
    let mut bed = impatient(&stack).await;
    // The broker will not confirm, and the time-out of confirms is far longer than the test
    // waits. Only SHUTDOWN_TIMEOUT_MS can end the wait.
    bed.set("SHUTDOWN_TIMEOUT_MS", "2000")
        .set("BROKER_TIMEOUT_MS", "2000")
        .set("CONFIRM_TIMEOUT_MS", "600000");
    let queue = bed.declare("blocked").await;
    let service = Process::spawn(bed.command());
    service.until_ready().await;

    disturb(|| stack.rabbitmq.raise_memory_alarm());
    bed.insert_one(&queue, b"stays").await;
    // The row is locked, so the dispatcher has claimed it and waits for its confirm.
    bed.until_count(
        "SELECT count(*) FROM (SELECT FROM retry_queue FOR UPDATE SKIP LOCKED) AS free",
        0,
    )
    .await;
    service.signal("TERM").await;
    let (status, log) = service.ended().await;
    assert_eq!(status.code(), Some(0), "{log}");
    bed.until_count(
        "SELECT count(*) FROM (SELECT FROM retry_queue WHERE status = 'pending'
         FOR UPDATE SKIP LOCKED) AS free",
        1,
    )
    .await;
    disturb(|| stack.rabbitmq.clear_memory_alarm());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_broker_is_noticed_by_its_missing_heartbeats() {
    let stack = breakable().await;
    let bed = impatient(&stack).await;
    let queue = bed.declare("frozen").await;
    let service = bed.start().await;

    disturb(|| stack.rabbitmq.pause());
    service.until_down("consumer").await;
    service.until_down("publisher").await;
    let id = bed.insert_one(&queue, b"waits").await;
    disturb(|| stack.rabbitmq.resume());

    service.until_ready().await;
    // The test connects anew, because its own connection may not have survived either.
    let client = Client::connect(bed.setting("RABBITMQ_URL")).await;
    let mut inbox = client.consume(&queue).await;
    until_all(&mut inbox, [id.to_string()]).await;
    assert!(reconnects(&service, "intake").await >= 1.0);
    assert!(reconnects(&service, "dispatch").await >= 1.0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_closed_by_the_broker_are_made_anew() {
    let stack = breakable().await;
    let mut bed = impatient(&stack).await;
    let queue = bed.declare("closed").await;
    let service = bed.start().await;
    disturb(|| stack.rabbitmq.close_all_connections("by the test"));
    bed.client = Client::connect(bed.setting("RABBITMQ_URL")).await;
    eventually("both parts have reconnected", || async {
        let (intake, dispatch) = (
            reconnects(&service, "intake").await,
            reconnects(&service, "dispatch").await,
        );
        (intake >= 1.0 && dispatch >= 1.0).then_some(())
    })
    .await;
    service.until_ready().await;
    let mut inbox = bed.client.consume(&queue).await;
    round_trip(&bed, &mut inbox, &queue).await;
    service.stop().await;
}

/// Ends RabbitMQ in the given way, starts it again, and checks that no message is lost,
/// whether it was in the intake queue, in Postgres or in the target queue.
async fn outlives_the_broker(end: impl FnOnce(&Breakable) -> anyhow::Result<()>) {
    let stack = breakable().await;
    let mut bed = impatient(&stack).await;
    bed.set("BASE_DELAY_MS", "1000");
    let queue = bed.declare("restart").await;
    let service = bed.start().await;
    let (messages, ids) = later(&queue, 50);
    // Some of these may not be stored yet when the broker ends.
    bed.client.send_all(&bed.intake(), &messages).await;
    disturb(|| end(&stack));
    service.until_down("consumer").await;
    service.until_down("publisher").await;
    disturb(|| stack.rabbitmq.start_again());

    bed.client = Client::connect(bed.setting("RABBITMQ_URL")).await;
    service.until_ready().await;
    let mut inbox = bed.client.consume(&queue).await;
    until_all(&mut inbox, ids).await;
    bed.until_count(RETRIED, 50).await;
    round_trip(&bed, &mut inbox, &queue).await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_restart_loses_nothing_and_needs_nobody() {
    outlives_the_broker(|stack| stack.rabbitmq.stop()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_broker_loses_nothing_and_needs_nobody() {
    outlives_the_broker(|stack| stack.rabbitmq.kill()).await;
}

/// Takes Postgres away in the given way and brings it back. Failures that are sent
/// meanwhile wait in RabbitMQ, and none is lost.
async fn outlives_postgres(
    end: impl FnOnce(&Breakable) -> anyhow::Result<()>,
    begin: impl FnOnce(&Breakable) -> anyhow::Result<()>,
) {
    let stack = breakable().await;
    let bed = impatient(&stack).await;
    let queue = bed.declare("store").await;
    let service = bed.start().await;
    let mut inbox = bed.client.consume(&queue).await;
    let (mut messages, ids) = later(&queue, 40);
    let during = messages.split_off(20);
    bed.client.send_all(&bed.intake(), &messages).await;
    disturb(|| end(&stack));
    bed.client.send_all(&bed.intake(), &during).await;
    service.until_down("postgres").await;
    service.until_down("consumer").await;
    disturb(|| begin(&stack));

    service.until_ready().await;
    until_all(&mut inbox, ids).await;
    bed.until_count(RETRIED, 40).await;
    assert_eq!(bed.client.depth(&bed.intake()).await, Some(0));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_crash_of_postgres_loses_nothing_and_needs_nobody() {
    outlives_postgres(
        |stack| stack.postgres.stop_immediate(),
        |stack| stack.postgres.start_again(),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_postgres_is_noticed_and_work_resumes_when_it_thaws() {
    outlives_postgres(
        |stack| stack.postgres.pause(),
        |stack| stack.postgres.resume(),
    )
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_order_of_starting_does_not_matter() {
    let stack = breakable().await;
    let mut bed = impatient(&stack).await;
    let queue = bed.declare("early").await;
    disturb(|| stack.rabbitmq.stop());
    disturb(|| stack.postgres.stop());
    let service = bed.start_unready().await;
    for part in ["postgres", "consumer", "publisher"] {
        service.until_down(part).await;
    }
    let (status, _) = service.get("/health").await;
    assert_eq!(status, 200, "alive, though nothing is there");
    disturb(|| stack.rabbitmq.start_again());
    service.until_down("postgres").await;
    disturb(|| stack.postgres.start_again());

    service.until_ready().await;
    bed.client = Client::connect(bed.setting("RABBITMQ_URL")).await;
    let mut inbox = bed.client.consume(&queue).await;
    round_trip(&bed, &mut inbox, &queue).await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broker_that_dies_under_its_own_alarm_is_found_again() {
    let stack = breakable().await;
    let mut bed = Bed::on(&stack).await;
    bed.set("CONFIRM_TIMEOUT_MS", "1000")
        .set("BROKER_TIMEOUT_MS", "2000");
    let queue = bed.declare("later").await;
    let service = bed.start().await;
    disturb(|| stack.rabbitmq.raise_memory_alarm());
    bed.insert_one(&queue, b"caught in the alarm").await;
    service.until_down("publisher").await;
    disturb(|| stack.rabbitmq.kill());
    disturb(|| stack.rabbitmq.start_again());
    service.until_ready().await;
    bed.until_count(
        "SELECT count(*) FROM retry_queue WHERE status = 'retried'",
        1,
    )
    .await;
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_does_not_confirm_holds_up_no_other_and_is_not_flooded() {
    let stack = breakable().await;
    let mut bed = Bed::on(&stack).await;
    bed.set("CONFIRM_TIMEOUT_MS", "1000")
        .set("MAX_DELAY_MS", "600000")
        .set("DISPATCH_BATCH", "50");
    let (stuck, healthy) = (bed.declare("stuck").await, bed.declare("healthy").await);
    bed.migrate().await;
    let process = format!(
        "{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<\"/\">>, queue, <<\"{stuck}\">>)),
         sys:ACT(amqqueue:get_pid(Q))."
    );
    let eval = |act: &str| {
        let expression = process.replace("ACT", act);
        disturb(|| stack.rabbitmq.ctl(&["eval", &expression]));
    };
    eval("suspend");
    bed.insert_due(&stuck, 120).await;
    bed.insert_due(&healthy, 5).await;
    let mut inbox = bed.client.consume(&healthy).await;
    let service = bed.start().await;
    inbox.take(5).await;
    bed.until_count(
        "SELECT count(*) FROM retry_events WHERE event_type = 'deferred'",
        120,
    )
    .await;
    eval("resume");
    let mut arrived = std::collections::HashMap::<String, u32>::new();
    for back in bed.client.consume(&stuck).await.take(120).await {
        *arrived.entry(back.id()).or_default() += 1;
    }
    assert_eq!(
        arrived.len(),
        120,
        "each once: what was not confirmed is not sent again soon"
    );
    assert_eq!(
        bed.count("SELECT max(retry_count)::bigint FROM retry_queue WHERE status = 'pending'")
            .await,
        0
    );
    service.stop().await;
}
