//! Several services on one broker, each with a database of its own: none sends a message
//! into another's intake or review queue, where it would go round.

use lapin::types::FieldTable;

use crate::support::{Bed, Process, disturb, eventually, message, shared};

const FAILED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'failed'";

/// The exchange by which services mark their queues.
const MARKS: &str = "retry-scheduler.intakes";

/// The queue that the marks lead to.
const MARKED: &str = "retry-scheduler.marked";

#[tokio::test(flavor = "multi_thread")]
async fn a_message_for_another_services_intake_goes_to_review_and_not_there() {
    let (mut ours, mut theirs) = (Bed::new().await, Bed::new().await);
    ours.set("SERVICE_NAME", "ours").set("BASE_DELAY_MS", "20");
    // The longest name that a queue can have.
    let intake = format!("{:x<255}", theirs.intake());
    let dead_letters = theirs.queue("dead-letters");
    theirs
        .set("SERVICE_NAME", "theirs")
        .set("RETRY_QUEUE", &intake)
        .set("DEAD_LETTER_QUEUE", &dead_letters);
    let their_service = theirs.start().await;
    let our_service = ours.start().await;
    let mut review = ours.client.consume(&ours.review()).await;
    for queue in [intake, dead_letters, theirs.review()] {
        let sent = message(&queue, "round");
        ours.client.send(&ours.intake(), &sent).await;
        let envelope = review.next().await.review();
        assert_eq!(envelope.message_id, sent.message_id);
        assert_eq!(envelope.reason, "invalid");
        assert_eq!(envelope.original_queue, queue);
        assert_eq!(envelope.original_payload, b"round");
        assert_eq!(envelope.retry_count, 0);
        for said in [&*queue, "would go round", "remove the binding", MARKS] {
            assert!(envelope.error.contains(said), "{}", envelope.error);
        }
    }
    ours.until_count(FAILED, 3).await;
    assert_eq!(theirs.client.depth(&theirs.review()).await, Some(0));
    assert_eq!(theirs.count("SELECT count(*) FROM retry_queue").await, 0);
    // An ordinary queue of theirs is as good as any.
    let work = theirs.declare("work").await;
    let sent = message(&work, "fine");
    ours.client.send(&ours.intake(), &sent).await;
    let mut inbox = theirs.client.consume(&work).await;
    assert_eq!(inbox.next().await.id(), sent.message_id);
    our_service.stop().await;
    their_service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_queue_that_is_no_intake_any_more_is_a_target_again_once_its_mark_is_removed() {
    let (ours, theirs) = (Bed::new().await, Bed::new().await);
    theirs.start().await.stop().await;
    let former = theirs.intake();
    let service = ours.start().await;
    ours.client
        .send(&ours.intake(), &message(&former, "round"))
        .await;
    ours.until_count(FAILED, 1).await;
    service.stop().await;
    let channel = theirs.client.channel().await;
    channel
        .queue_unbind(
            MARKED.into(),
            MARKS.into(),
            former.as_str().into(),
            FieldTable::default(),
        )
        .await
        .expect("the mark is removed");
    let service = ours.start().await;
    let sent = message(&former, "fine");
    ours.client.send(&ours.intake(), &sent).await;
    let mut inbox = theirs.client.consume(&former).await;
    assert_eq!(inbox.next().await.id(), sent.message_id);
    service.stop().await;
}

/// A user who may configure the queues of this bed, and nothing else.
#[tokio::test(flavor = "multi_thread")]
async fn where_queues_cannot_be_marked_it_is_said_once_and_messages_go_back() {
    let mut bed = Bed::new().await;
    let user = bed.queue("shy");
    let rabbitmq = &shared().await.rabbitmq;
    disturb(|| rabbitmq.ctl(&["add_user", &user, "secret"]));
    let configure = format!("^{}.*$", bed.queue(""));
    disturb(|| rabbitmq.ctl(&["set_permissions", "-p", "/", &user, &configure, ".*", ".*"]));
    let mut url = url::Url::parse(bed.setting("RABBITMQ_URL")).expect("a URL");
    url.set_username(&user).expect("a user");
    url.set_password(Some("secret")).expect("a password");
    bed.set("RABBITMQ_URL", url.as_str());
    let queue = bed.declare("target").await;
    let service = Process::spawn(bed.command());
    service.until_ready().await;
    let mut inbox = bed.client.consume(&queue).await;
    for _ in 0..3 {
        let sent = message(&queue, "by name");
        bed.client.send(&bed.intake(), &sent).await;
        assert_eq!(inbox.next().await.id(), sent.message_id);
    }
    eventually("it is still ready", || async {
        (service.get("/ready").await.0 == 200).then_some(())
    })
    .await;
    service.signal("TERM").await;
    let (_, log) = service.ended().await;
    let told = log.matches("the intake queues of other services cannot be told");
    assert_eq!(told.count(), 1, "{log}");
}
