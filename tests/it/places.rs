//! A database belongs to one broker, virtual host and intake queue, and what waits in it is
//! sent nowhere else.

use devstack::RabbitMq;
use futures::future::join_all;
use lapin::options::ExchangeDeleteOptions;
use testkit::{Proxy, Way};

use crate::{
    commands::{run, text},
    support::{Bed, Client, Process, breakable, disturb, eventually, message, shared},
};

const PLACES: &str = "SELECT count(*) FROM retry_place";
const RETRIED: &str = "SELECT count(*) FROM retry_queue WHERE status = 'retried'";

/// Makes a virtual host, and returns its URL.
fn new_vhost(rabbitmq: &RabbitMq, name: &str) -> String {
    disturb(|| {
        rabbitmq.ctl(&["add_vhost", name])?;
        rabbitmq.ctl(&["set_permissions", "-p", name, "guest", ".*", ".*", ".*"])
    });
    rabbitmq.url().replace("/%2f", &format!("/{name}"))
}

/// Checks that a process ended by itself, and that one line of its log says why.
async fn refused(service: Process, parts: &[&str]) {
    let (status, log) = service.ended().await;
    assert_eq!(status.code(), Some(1), "{log}");
    let lines: Vec<&str> = log
        .lines()
        .filter(|line| line.starts_with("retry-scheduler: "))
        .collect();
    assert_eq!(lines.len(), 1, "{log}");
    for part in parts {
        assert!(lines[0].contains(part), "{part}: {log}");
    }
}

async fn id_of_the_mark(bed: &Bed) -> String {
    sqlx::query_scalar("SELECT mark::text FROM retry_place")
        .fetch_one(&bed.db)
        .await
        .expect("a place")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_virtual_host_on_one_database_is_refused_and_nothing_is_misdelivered() {
    let mut bed = Bed::new().await;
    let vhost = bed.queue("lib");
    let other = new_vhost(&shared().await.rabbitmq, &vhost);
    let queue = bed.declare("target").await;
    let client = Client::connect(&other).await;
    client.declare(&queue).await;
    let first = bed.start().await;

    bed.set("RABBITMQ_URL", &other);
    let messages: Vec<_> = (0..40).map(|_| message(&queue, "x")).collect();
    bed.client.send_all(&bed.intake(), &messages).await;
    let second = Process::spawn(bed.command());
    let parts = [
        "belongs to",
        &bed.intake(),
        "the virtual host \"/\"",
        &vhost,
        "DATABASE_SCHEMA",
        "retry-scheduler move",
    ];
    refused(second, &parts).await;
    bed.until_count(RETRIED, 40).await;
    assert_eq!(bed.client.depth(&queue).await, Some(40));
    assert_eq!(client.depth(&queue).await, Some(0));
    assert_eq!(client.depth(&bed.intake()).await, None, "nothing is made");
    first.stop().await;

    // Another intake queue is another place, too.
    let elsewhere = bed.queue("another-intake");
    bed.set("RABBITMQ_URL", &shared().await.rabbitmq.url())
        .set("RETRY_QUEUE", &elsewhere);
    refused(Process::spawn(bed.command()), &["belongs to", &elsewhere]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn move_gives_the_database_to_another_place_on_purpose() {
    let mut bed = Bed::new().await;
    let vhost = bed.queue("new");
    let old = bed.setting("RABBITMQ_URL").to_owned();
    let new = new_vhost(&shared().await.rabbitmq, &vhost);
    let queue = bed.declare("target").await;
    let client = Client::connect(&new).await;
    client.declare(&queue).await;
    bed.start().await.stop().await;
    bed.insert_due(&queue, 3).await;

    let help = text(&run(&bed, &["move", "--help"]).await.stdout);
    assert!(help.contains("stop all instances"), "{help}");
    let again = run(&bed, &["move"]).await;
    assert_eq!(again.status.code(), Some(0), "{}", text(&again.stderr));
    assert!(text(&again.stdout).contains("already"));

    bed.set("RABBITMQ_URL", &new);
    let asked = run(&bed, &["move"]).await;
    let (said, why) = (text(&asked.stdout), text(&asked.stderr));
    assert_eq!(asked.status.code(), Some(1), "{why}");
    assert!(said.contains("from ") && said.contains("to "), "{said}");
    assert!(said.contains(&vhost), "{said}");
    assert!(
        why.contains("3 messages wait") && why.contains("--yes"),
        "{why}"
    );
    refused(Process::spawn(bed.command()), &["belongs to"]).await;

    let moved = run(&bed, &["move", "--yes"]).await;
    assert_eq!(moved.status.code(), Some(0), "{}", text(&moved.stderr));
    assert!(text(&moved.stdout).contains("Moved, with 3 messages"));
    bed.set("RABBITMQ_URL", &old);
    refused(Process::spawn(bed.command()), &["belongs to", &vhost]).await;
    bed.set("RABBITMQ_URL", &new);
    let service = bed.start().await;
    bed.until_count(RETRIED, 3).await;
    assert_eq!(client.depth(&queue).await, Some(3));
    assert_eq!(bed.client.depth(&queue).await, Some(0));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_instance_ends_when_the_database_is_moved_away_from_it() {
    let mut bed = Bed::new().await;
    let service = Process::spawn(bed.command());
    service.until_ready().await;
    let elsewhere = bed.queue("another-intake");
    bed.set("RETRY_QUEUE", &elsewhere);
    let moved = run(&bed, &["move"]).await;
    assert_eq!(moved.status.code(), Some(0), "{}", text(&moved.stderr));
    refused(service, &["belongs to", &elsewhere]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_broker_behind_the_same_address_gets_nothing() {
    let broken = breakable().await;
    let mut bed = Bed::new().await;
    let queue = bed.declare("target").await;
    let home = bed.setting("RABBITMQ_URL").to_owned();
    let home_port = url::Url::parse(&home).unwrap().port().unwrap();
    let proxy = Proxy::to(home_port).await.expect("a proxy");
    bed.set("RABBITMQ_URL", &proxy.by_way(&home).unwrap());
    let stranger = Client::connect(&broken.rabbitmq.url()).await;
    stranger.declare(&queue).await;
    let service = bed.start().await;

    proxy.lead_to(broken.rabbitmq.port());
    proxy.set(Way::Down);
    service.until_down("publisher").await;
    bed.insert_due(&queue, 5).await;
    proxy.set(Way::Open);
    for part in ["consumer", "publisher-1", "publisher-2"] {
        eventually(&format!("{part} says why"), || async {
            let (_, body) = service.ready().await;
            let why = body["parts"][part]["detail"].as_str().unwrap_or_default();
            (why.contains("leads to the broker") && why.contains("belongs to")).then_some(())
        })
        .await;
    }
    assert_eq!(stranger.depth(&queue).await, Some(0));
    assert_eq!(stranger.depth(&bed.intake()).await, None);
    assert_eq!(bed.count(RETRIED).await, 0);

    proxy.lead_to(home_port);
    service.until_ready().await;
    bed.until_count(RETRIED, 5).await;
    assert_eq!(bed.client.depth(&queue).await, Some(5));
    assert_eq!(stranger.depth(&queue).await, Some(0));
    service.stop().await;

    // An instance that starts there does not wait for another broker, but ends.
    proxy.lead_to(broken.rabbitmq.port());
    refused(Process::spawn(bed.command()), &["belongs to", "move"]).await;
    stranger.delete(&queue).await;
}

/// Each node of a cluster without a name says a name of its own. Here one node says another
/// name, as if the next node had answered.
#[tokio::test(flavor = "multi_thread")]
async fn a_broker_is_recognised_by_its_mark_or_by_its_name() {
    let broken = breakable().await;
    let bed = Bed::on(&broken).await;
    let queue = bed.declare("target").await;
    let service = bed.start().await;
    let name: String = sqlx::query_scalar("SELECT broker FROM retry_place")
        .fetch_one(&bed.db)
        .await
        .expect("a place");
    disturb(|| {
        broken
            .rabbitmq
            .ctl(&["set_cluster_name", "the-next-node"])?;
        broken.rabbitmq.close_all_connections("a test")
    });
    service.until_down("publisher").await;
    service.until_ready().await;
    bed.insert_due(&queue, 2).await;
    bed.until_count(RETRIED, 2).await;
    service.stop().await;

    // A broker that has neither the name nor the mark is another one.
    let client = Client::connect(&broken.rabbitmq.url()).await;
    let mark = format!("retry-scheduler.place.{}", id_of_the_mark(&bed).await);
    client
        .channel()
        .await
        .exchange_delete(mark.into(), ExchangeDeleteOptions::default())
        .await
        .expect("the mark was there");
    let parts = ["belongs to", &name, "the-next-node"];
    refused(Process::spawn(bed.command()), &parts).await;

    // One that has lost its mark is known by its name, and marked again.
    disturb(|| broken.rabbitmq.ctl(&["set_cluster_name", &name]));
    bed.start().await.stop().await;
    disturb(|| broken.rabbitmq.ctl(&["set_cluster_name", "the-next-node"]));
    bed.start().await.stop().await;
    disturb(|| {
        broken
            .rabbitmq
            .ctl(&["clear_global_parameter", "cluster_name"])
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn while_the_broker_is_away_at_the_start_nothing_is_taken_and_http_says_so() {
    let mut bed = Bed::new().await;
    let direct = bed.setting("RABBITMQ_URL").to_owned();
    let port = url::Url::parse(&direct).unwrap().port().unwrap();
    let proxy = Proxy::to(port).await.expect("a proxy");
    proxy.set(Way::Down);
    bed.set("RABBITMQ_URL", &proxy.by_way(&direct).unwrap());
    bed.migrate().await;
    let service = bed.start_unready().await;
    eventually("it says what it waits for", || async {
        let (ready, body) = service.ready().await;
        let why = body["parts"]["consumer"]["detail"].as_str();
        (!ready && why.is_some_and(|why| why.contains("RabbitMQ"))).then_some(())
    })
    .await;
    assert_eq!(service.get("/health").await.0, 200);
    assert_eq!(bed.count(PLACES).await, 0);
    proxy.set(Way::Open);
    service.until_ready().await;
    assert_eq!(bed.count(PLACES).await, 1);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn instances_of_one_place_that_start_at_once_agree_on_it() {
    let bed = Bed::new().await;
    let services = join_all((0..6).map(|_| bed.start())).await;
    assert_eq!(bed.count(PLACES).await, 1);
    let queue = bed.declare("target").await;
    bed.insert_due(&queue, 10).await;
    bed.until_count(RETRIED, 10).await;
    for service in services {
        service.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dry_run_takes_no_place() {
    let bed = Bed::new().await;
    bed.migrate().await;
    let mut command = bed.command();
    command.args(["serve", "--dry-run"]);
    let service = Process::spawn(command);
    service.until_ready().await;
    service.signal("TERM").await;
    assert_eq!(service.ended().await.0.code(), Some(0));
    assert_eq!(bed.count(PLACES).await, 0);
}
