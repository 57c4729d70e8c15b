//! The queues that the service declares when they are absent.

use devstack::RabbitMq;
use lapin::{
    options::{BasicGetOptions, BasicNackOptions},
    types::FieldTable,
};
use uuid::Uuid;

use crate::support::{Bed, Client, disturb, eventually, quorum, shared};

/// Takes a message from the head of a queue and puts it back, `times` times or until the queue is
/// empty.
async fn give_back(client: &Client, queue: &str, times: usize, requeue: bool) {
    let channel = client.channel().await;
    for _ in 0..times {
        let got = eventually("the message is back, or gone", || async {
            let options = BasicGetOptions::default();
            let got = channel.basic_get(queue.into(), options).await.expect("got");
            match got {
                Some(got) => Some(Some(got)),
                None => (client.depth(queue).await == Some(0)).then_some(None),
            }
        })
        .await;
        let Some(got) = got else { return };
        let options = BasicNackOptions {
            requeue,
            ..Default::default()
        };
        got.nack(options).await.expect("given back");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_broker_gives_up_on_goes_from_the_queues_that_we_declare_to_review() {
    let mut bed = Bed::new().await;
    bed.set("DEAD_LETTER_QUEUE", &bed.queue("dead"));
    bed.start().await.stop().await;
    for queue in [bed.intake(), bed.queue("dead")] {
        bed.client
            .publish(&queue, queue.as_bytes(), Default::default())
            .await;
        give_back(&bed.client, &queue, 1, false).await;
        let mut review = bed.client.consume(&bed.review()).await;
        assert_eq!(review.next().await.body, queue.as_bytes());
    }
}

/// A virtual host whose queues are quorum queues unless they say otherwise; none where RabbitMQ
/// does not have that, before 3.11.
fn quorum_host(rabbitmq: &RabbitMq) -> Option<String> {
    let name = format!("t{}", Uuid::new_v4().simple());
    tokio::task::block_in_place(|| {
        let made = rabbitmq.ctl(&["add_vhost", &name, "--default-queue-type", "quorum"]);
        made.ok()?;
        let all = ["set_permissions", "-p", &name, "guest", ".*", ".*", ".*"];
        rabbitmq.ctl(&all).expect("permissions");
        Some(name)
    })
}

#[tokio::test(flavor = "multi_thread")]
async fn where_queues_are_quorum_queues_what_was_delivered_too_often_goes_to_review_and_stays() {
    let stack = shared().await;
    let Some(host) = quorum_host(&stack.rabbitmq) else {
        return;
    };
    let name = format!("t{}", Uuid::new_v4().simple());
    let database = tokio::task::block_in_place(|| stack.postgres.create_database(&name));
    let broker = stack.rabbitmq.url().replace("%2f", &host);
    let bed = Bed::at(&database.expect("a database"), &broker, name).await;
    bed.start().await.stop().await;

    let (intake, review) = (bed.intake(), bed.review());
    let listed = ["list_queues", "-p", &host, "name", "arguments"];
    let listed = disturb(|| stack.rabbitmq.ctl(&listed));
    assert!(listed.contains("at-least-once"), "{listed}");
    // Before 4.0 there is no limit unless somebody sets one.
    let limit = [
        "set_policy",
        "-p",
        &host,
        "limit",
        &format!("^{intake}$"),
        r#"{"delivery-limit":5}"#,
    ];
    disturb(|| stack.rabbitmq.ctl(&limit));
    bed.client
        .publish(&intake, b"too often", Default::default())
        .await;
    give_back(&bed.client, &intake, 100, true).await;
    eventually("it is with people", || async {
        (bed.client.depth(&review).await == Some(1)).then_some(())
    })
    .await;
    give_back(&bed.client, &review, 100, true).await;
    let mut inbox = bed.client.consume(&review).await;
    assert_eq!(inbox.next().await.body, b"too often");
    assert_eq!(bed.client.depth(&intake).await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn queues_that_are_there_are_used_as_they_are() {
    let bed = Bed::new().await;
    bed.client
        .declare_with(&bed.intake(), quorum(Some(20)))
        .await;
    bed.client
        .declare_with(&bed.review(), FieldTable::default())
        .await;
    bed.start().await.stop().await;
    // Declaring them with other arguments than they have would be refused.
    bed.client
        .declare_with(&bed.intake(), quorum(Some(20)))
        .await;
    bed.client
        .declare_with(&bed.review(), FieldTable::default())
        .await;
}
