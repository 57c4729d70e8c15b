//! `doctor` on set-ups that are sound, and on set-ups that are really broken.

use std::{process::Output, time::Duration};

use lapin::{
    ExchangeKind,
    options::{ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions},
    types::{AMQPValue, FieldTable},
};
use serde_json::{Value, json};

use crate::{
    commands::{run, text},
    support::{Bed, Process, disturb, eventually, examined, max_length, shared},
};

/// A bed on servers that tell everything, with a dead letter queue.
async fn patient() -> Bed {
    let stack = examined().await;
    let mut bed = Bed::on(stack).await;
    let management = stack.rabbitmq.management_url().expect("the plugin");
    let (dead_letters, name) = (bed.queue("dead-letters"), bed.queue("service"));
    bed.set("RABBITMQ_MANAGEMENT_URL", &management)
        .set("DEAD_LETTER_QUEUE", &dead_letters)
        .set("SERVICE_NAME", &name)
        .set("RETRY_POLL_INTERVAL_MS", "100");
    bed.migrate().await;
    bed
}

fn table(fields: &[(&str, Value)]) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in fields {
        let value = match value {
            Value::String(text) => AMQPValue::LongString(text.as_str().into()),
            number => AMQPValue::LongInt(number.as_i64().expect("a number") as i32),
        };
        table.insert((*name).into(), value);
    }
    table
}

/// Arguments of a quorum queue whose dead letters go to `target`, at least once.
fn sound(target: &str) -> FieldTable {
    table(&[
        ("x-queue-type", json!("quorum")),
        ("x-dead-letter-exchange", json!("")),
        ("x-dead-letter-routing-key", json!(target)),
        ("x-dead-letter-strategy", json!("at-least-once")),
        ("x-overflow", json!("reject-publish")),
    ])
}

impl Bed {
    /// Declares all queues so that nothing can be lost, but for those that are there already.
    async fn declare_soundly(&self) -> String {
        let orders = self.queue("orders");
        let dead_letters = self.setting("DEAD_LETTER_QUEUE").to_owned();
        let wanted = [
            (self.review(), FieldTable::default()),
            (self.intake(), sound(&self.review())),
            (dead_letters.clone(), sound(&self.review())),
            (orders.clone(), sound(&dead_letters)),
        ];
        for (queue, arguments) in wanted {
            if self.client.depth(&queue).await.is_none() {
                self.client.declare_with(&queue, arguments).await;
            }
        }
        orders
    }

    /// Runs `doctor --json`, and returns its status and findings.
    async fn doctor(&self, arguments: &[&str]) -> (Option<i32>, Vec<Value>) {
        let mut all = vec!["doctor", "--json"];
        all.extend(arguments);
        let output = run(self, &all).await;
        let report: Value =
            serde_json::from_slice(&output.stdout).unwrap_or_else(|e| panic!("{e}: {output:?}"));
        let findings = report["findings"].as_array().expect("findings").clone();
        (output.status.code(), findings)
    }
}

/// The finding that has this grade and is about this subject; its fact and its cure must contain
/// these words.
fn expect(findings: &[Value], grade: &str, subject: &str, fact: &str, cure: &str) {
    let has =
        |f: &Value, field: &str, words: &str| f[field].as_str().unwrap_or_default().contains(words);
    let found = findings.iter().any(|f| {
        f["grade"] == grade
            && has(f, "subject", subject)
            && has(f, "fact", fact)
            && has(f, "cure", cure)
    });
    assert!(
        found,
        "no {grade} of {subject}: {fact}, {cure}\n{findings:#?}"
    );
}

/// The findings of one grade.
fn of(findings: &[Value], grade: &str) -> Vec<Value> {
    let all = findings.iter();
    all.filter(|f| f["grade"] == grade).cloned().collect()
}

/// The first number of RabbitMQ's version.
fn major(findings: &[Value]) -> u32 {
    let version = findings.iter().find_map(|f| {
        let fact = f["fact"].as_str()?;
        fact.strip_prefix("RabbitMQ ")?
            .split('.')
            .next()?
            .parse()
            .ok()
    });
    version.expect("the broker's version")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sound_set_up_has_only_good_findings_and_exits_with_0() {
    let bed = patient().await;
    let orders = bed.declare_soundly().await;
    let (status, findings) = bed.doctor(&["--queue", &orders]).await;
    let bad: Vec<&Value> = findings.iter().filter(|f| f["grade"] != "ok").collect();
    assert!(bad.is_empty(), "{bad:#?}");
    assert_eq!(status, Some(0));
    for subject in [
        "RabbitMQ at",
        "rights",
        "intake",
        "review",
        "dead letter queue",
        "Postgres",
    ] {
        expect(&findings, "ok", subject, "", "");
    }
    // The same, for people: a line each, and one with the counts.
    let output = run(&bed, &["doctor", "--queue", &orders]).await;
    let report = text(&output.stdout);
    assert_eq!(report.lines().count(), findings.len() + 1, "{report}");
    assert!(
        report.ends_with("0 problems, 0 warnings, 0 unknown\n"),
        "{report}"
    );
    assert!(output.stderr.is_empty(), "{output:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_quorum_intake_that_drops_after_some_deliveries_is_a_problem() {
    let bed = patient().await;
    let quorum = ("x-queue-type", json!("quorum"));
    let limited = table(&[quorum.clone(), ("x-delivery-limit", json!(5))]);
    bed.client.declare_with(&bed.intake(), limited).await;
    let dead_letters = bed.setting("DEAD_LETTER_QUEUE").to_owned();
    bed.client
        .declare_with(&dead_letters, table(&[quorum]))
        .await;
    bed.declare_soundly().await;
    let (status, findings) = bed.doctor(&[]).await;
    assert_eq!(status, Some(1));
    let cure = format!("\"dead-letter-routing-key\":\"{}\"", bed.review());
    let fact = "after 5 deliveries, and then drops it: it has no dead-letter exchange";
    expect(&findings, "problem", "intake queue", fact, &cure);
    // Without an argument it is the version that decides.
    if major(&findings) >= 4 {
        let fact = "after 20 deliveries, RabbitMQ 4's default";
        expect(&findings, "problem", "dead letter queue", fact, &cure);
    } else {
        expect(&findings, "ok", "dead letter queue", "quorum", "");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_dead_letter_exchange_that_does_not_exist_is_a_problem() {
    let bed = patient().await;
    let orders = bed.queue("orders");
    let nowhere = bed.queue("dlx");
    let arguments = table(&[("x-dead-letter-exchange", json!(nowhere))]);
    bed.client.declare_with(&orders, arguments).await;
    bed.declare_soundly().await;
    let (status, findings) = bed.doctor(&["--queue", &orders]).await;
    assert_eq!(status, Some(1));
    let fact = format!("its dead-letter exchange {nowhere:?} does not exist");
    let cure = format!("declare the exchange {nowhere:?}");
    expect(&findings, "problem", &orders, &fact, &cure);
}

/// Declares a work queue whose dead letters go to a topic exchange, and binds that to the dead
/// letter queue by `pattern` only.
async fn narrow(bed: &Bed, pattern: &str) -> String {
    let orders = bed.queue("orders");
    let (events, dlx) = (bed.queue("events"), bed.queue("dlx"));
    let channel = bed.client.channel().await;
    for exchange in [&events, &dlx] {
        let options = ExchangeDeclareOptions {
            durable: true,
            ..ExchangeDeclareOptions::default()
        };
        let name = exchange.as_str().into();
        channel
            .exchange_declare(name, ExchangeKind::Topic, options, FieldTable::default())
            .await
            .expect("an exchange");
    }
    let arguments = table(&[("x-dead-letter-exchange", json!(dlx))]);
    bed.client.declare_with(&orders, arguments).await;
    bed.declare_soundly().await;
    let dead_letters = bed.setting("DEAD_LETTER_QUEUE");
    for (queue, exchange, key) in [
        (orders.as_str(), &events, "order.*"),
        (dead_letters, &dlx, pattern),
    ] {
        let options = QueueBindOptions::default();
        let (queue, exchange) = (queue.into(), exchange.as_str().into());
        channel
            .queue_bind(queue, exchange, key.into(), options, FieldTable::default())
            .await
            .expect("a binding");
    }
    orders
}

#[tokio::test(flavor = "multi_thread")]
async fn bindings_that_miss_the_producers_keys_are_a_problem_and_those_that_miss_the_name_a_warning()
 {
    let bed = patient().await;
    let orders = narrow(&bed, "invoice.*").await;
    let (status, findings) = bed.doctor(&["--queue", &orders]).await;
    assert_eq!(status, Some(1));
    let cure = format!("to {:?} by \"#\"", bed.queue("dlx"));
    expect(
        &findings,
        "problem",
        &orders,
        "\"order.doctor-probe\"",
        &cure,
    );

    let bed = patient().await;
    let orders = narrow(&bed, "order.*").await;
    let (status, findings) = bed.doctor(&["--queue", &orders]).await;
    assert_eq!(status, Some(0), "{findings:#?}");
    expect(
        &findings,
        "warning",
        &orders,
        "a republish keeps them",
        "by \"#\"",
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_review_queue_that_drops_its_oldest_by_policy_is_a_problem() {
    let bed = patient().await;
    bed.declare_soundly().await;
    let policy = bed.queue("short");
    let pattern = format!("^{}$", bed.review());
    let rabbitmq = &examined().await.rabbitmq;
    let set = ["set_policy", &policy, &pattern, r#"{"max-length":1000}"#];
    disturb(|| rabbitmq.ctl(&set));
    let findings = eventually("the policy is told", || async {
        let (_, findings) = bed.doctor(&[]).await;
        (!of(&findings, "problem").is_empty()).then_some(findings)
    })
    .await;
    let cure = format!("add {{\"overflow\":\"reject-publish\"}} to the policy {policy:?}");
    expect(
        &findings,
        "problem",
        "review queue",
        "drops its oldest messages beyond 1000",
        &cure,
    );
    disturb(|| rabbitmq.ctl(&["clear_policy", &policy]));
}

#[tokio::test(flavor = "multi_thread")]
async fn queues_that_expire_or_vanish_are_problems() {
    let bed = patient().await;
    let dead_letters = bed.setting("DEAD_LETTER_QUEUE").to_owned();
    let ttl = table(&[("x-message-ttl", json!(60_000))]);
    bed.client.declare_with(&dead_letters, ttl).await;
    let channel = bed.client.channel().await;
    let fleeting = QueueDeclareOptions {
        auto_delete: true,
        ..QueueDeclareOptions::default()
    };
    let expiring = table(&[("x-expires", json!(1_800_000))]);
    channel
        .queue_declare(bed.intake().as_str().into(), fleeting, expiring)
        .await
        .expect("a queue");
    bed.declare_soundly().await;
    let (status, findings) = bed.doctor(&[]).await;
    assert_eq!(status, Some(1));
    let without = "without x-message-ttl";
    expect(
        &findings,
        "problem",
        "dead letter queue",
        "after 1m (to nowhere)",
        without,
    );
    expect(
        &findings,
        "problem",
        "intake",
        "is not durable",
        "declare it again, durable",
    );
    expect(
        &findings,
        "problem",
        "intake",
        "auto-delete",
        "declare it again",
    );
    expect(
        &findings,
        "problem",
        "intake",
        "expires after 30m",
        "without x-expires",
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_forgets_and_tables_that_are_not_there_are_told() {
    // The Postgres of all other tests runs without fsync.
    let mut bed = Bed::new().await;
    let (status, findings) = bed.doctor(&[]).await;
    assert_eq!(status, Some(1));
    expect(
        &findings,
        "problem",
        "Postgres",
        "fsync is off",
        "fsync = on",
    );
    expect(
        &findings,
        "warning",
        "Postgres",
        "none of our tables",
        "`serve` applies",
    );
    bed.set("MIGRATE_ON_START", "false");
    let (_, findings) = bed.doctor(&[]).await;
    expect(
        &findings,
        "problem",
        "Postgres",
        "none of our tables",
        "migrate",
    );
    // Nobody answers there.
    bed.set("DATABASE_URL", "postgresql://127.0.0.1:1/x")
        .set("DATABASE_TIMEOUT_MS", "1000");
    let (status, findings) = bed.doctor(&[]).await;
    assert_eq!(status, Some(1));
    // It was not available, or did not answer in time: both limits are the same.
    expect(&findings, "problem", "Postgres", "Postgres", "DATABASE_URL");
}

#[tokio::test(flavor = "multi_thread")]
async fn few_connections_and_tables_without_autovacuum_are_told() {
    let mut bed = patient().await;
    bed.declare_soundly().await;
    bed.set("DATABASE_POOL_SIZE", "500");
    let (status, findings) = bed.doctor(&[]).await;
    assert_eq!(status, Some(0), "{findings:#?}");
    expect(
        &findings,
        "warning",
        "Postgres",
        "uses up to 500",
        "max_connections",
    );
    let database = url::Url::parse(bed.setting("DATABASE_URL")).expect("a URL");
    let database = database.path().trim_start_matches('/').to_owned();
    bed.arrange(&format!(
        "ALTER TABLE retry_queue SET (autovacuum_enabled = off);
         ALTER DATABASE \"{database}\" SET synchronous_commit = off"
    ))
    .await;
    let (_, findings) = bed.doctor(&[]).await;
    expect(
        &findings,
        "warning",
        "Postgres",
        "off for retry_queue",
        "RESET",
    );
    expect(
        &findings,
        "ok",
        "Postgres",
        "the service switches it on",
        "",
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn without_the_management_api_it_says_so_and_goes_on() {
    let mut bed = patient().await;
    let orders = bed.declare_soundly().await;
    bed.set("RABBITMQ_MANAGEMENT_URL", "http://127.0.0.1:1");
    let (status, findings) = bed.doctor(&["--queue", &orders]).await;
    assert_eq!(status, Some(0), "{findings:#?}");
    let enable = "rabbitmq-plugins enable rabbitmq_management";
    expect(&findings, "unknown", "management API", "refused", enable);
    expect(&findings, "ok", &orders, "0 messages, 0 consumers", "");
    expect(&findings, "ok", "Postgres", "", "");
    assert_eq!(of(&findings, "unknown").len(), 1);

    // One that takes the connection and never answers.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0")
        .await
        .expect("a port");
    let address = format!("http://{}", silent.local_addr().expect("an address"));
    bed.set("RABBITMQ_MANAGEMENT_URL", &address);
    let (status, findings) = bed.doctor(&[]).await;
    assert_eq!(status, Some(0), "{findings:#?}");
    expect(
        &findings,
        "unknown",
        "management API",
        "no answer within",
        enable,
    );

    // One that belongs to another broker.
    let other = shared().await.rabbitmq.url();
    let management = examined()
        .await
        .rabbitmq
        .management_url()
        .expect("the plugin");
    bed.set("RABBITMQ_MANAGEMENT_URL", &management)
        .set("RABBITMQ_URL", &other);
    let (_, findings) = bed.doctor(&[]).await;
    let set = "set RABBITMQ_MANAGEMENT_URL";
    expect(
        &findings,
        "unknown",
        "management API",
        "belongs to the cluster",
        set,
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_user_with_few_rights_is_told_what_is_missing() {
    let mut bed = patient().await;
    let orders = narrow(&bed, "order.*").await;
    let rabbitmq = &examined().await.rabbitmq;
    let user = bed.queue("shy");
    disturb(|| rabbitmq.ctl(&["add_user", &user, "secret"]));
    // It may use the queues, but not the exchange, whose name begins with "x".
    let ours = format!("^(amq\\.default|{}.*)$", bed.queue(""));
    disturb(|| rabbitmq.ctl(&["set_permissions", &user, &ours, &ours, ".*"]));
    let mut url = url::Url::parse(bed.setting("RABBITMQ_URL")).expect("a URL");
    url.set_username(&user).expect("a user");
    url.set_password(Some("secret")).expect("a password");
    bed.set("RABBITMQ_URL", url.as_str())
        .set("SERVICE_NAME", &format!("x-{user}"));
    let (_, findings) = bed.doctor(&["--queue", &orders]).await;
    expect(
        &findings,
        "warning",
        "rights",
        "cannot be used",
        "set_permissions",
    );
    expect(
        &findings,
        "unknown",
        "management API",
        "refuses this user",
        "set_user_tags",
    );
    // With the tag, it is told that the second death would bear the queue's name, and be lost.
    disturb(|| rabbitmq.ctl(&["set_user_tags", &user, "monitoring"]));
    let (status, findings) = bed.doctor(&["--queue", &orders]).await;
    assert_eq!(status, Some(1));
    expect(&findings, "problem", &orders, "is lost to us", "by \"#\"");
    // A wrong password.
    url.set_password(Some("wrong")).expect("a password");
    bed.set("RABBITMQ_URL", url.as_str());
    let (status, findings) = bed.doctor(&[]).await;
    assert_eq!(status, Some(1));
    expect(&findings, "problem", "RabbitMQ at", "", "see RABBITMQ_URL");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_used_exits_with_2_and_help_explains() {
    let mut bed = Bed::new().await;
    let one_line = |output: Output, words: &str| {
        let stderr = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{stderr}");
        assert!(stderr.contains(words), "{stderr}");
    };
    one_line(run(&bed, &["doctor", "--frobnicate"]).await, "--frobnicate");
    one_line(
        run(&bed, &["doctor", "--queue", ""]).await,
        "queue name is empty",
    );
    one_line(
        run(&bed, &["doctor", "--routing-key", "k"]).await,
        "--probe",
    );
    bed.set("RABBITMQ_MANAGEMENT_URL", "nowhere");
    let output = run(&bed, &["doctor"]).await;
    assert_eq!(text(&output.stderr).lines().count(), 1);
    one_line(output, "RABBITMQ_MANAGEMENT_URL: ");
    let help = text(&run(&bed, &["doctor", "--help"]).await.stdout);
    for words in [
        "--probe",
        "--queue",
        "--json",
        "Exit status",
        "problem  messages can be lost",
    ] {
        assert!(help.contains(words), "{words}: {help}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_goes_round_a_good_loop_twice_and_leaves_nothing_behind() {
    let mut bed = patient().await;
    // A delay that a probe would never wait for.
    bed.set("BASE_DELAY_MS", "3600000")
        .set("MAX_DELAY_MS", "3600000");
    let orders = bed.declare_soundly().await;
    let subject = format!("dead-letter loop of {orders:?}");
    // Nobody consumes: doctor itself takes the probe from the dead letter queue.
    let (status, findings) = bed.doctor(&["--probe", &orders]).await;
    assert_eq!(status, Some(0), "{findings:#?}");
    expect(
        &findings,
        "ok",
        &subject,
        "both deaths arrived (taken from",
        "",
    );
    // The service consumes: what it stores is the proof, and it sends the probe back itself.
    let service = bed.start().await;
    let (status, findings) = bed.doctor(&["--probe", &orders]).await;
    assert_eq!(status, Some(0), "{findings:#?}");
    expect(
        &findings,
        "ok",
        &subject,
        "both deaths arrived (stored by",
        "",
    );
    for sql in [
        "SELECT count(*) FROM retry_queue",
        "SELECT count(*) FROM retry_events",
    ] {
        assert_eq!(bed.count(sql).await, 0, "{sql}");
    }
    for queue in [&orders, bed.setting("DEAD_LETTER_QUEUE"), &bed.review()] {
        assert_eq!(bed.client.depth(queue).await, Some(0), "{queue}");
    }
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_behind_narrow_bindings_is_lost_by_name_and_comes_round_by_its_key() {
    let bed = patient().await;
    let orders = narrow(&bed, "order.*").await;
    let subject = format!("dead-letter loop of {orders:?}");
    let (status, findings) = bed.doctor(&["--probe", &orders]).await;
    assert_eq!(status, Some(1));
    let fact = format!("the routing key {orders:?} was rejected, and this death did not arrive");
    expect(&findings, "problem", &subject, &fact, "--routing-key");
    let by_key = ["--probe", &orders, "--routing-key", "order.created"];
    let (status, findings) = bed.doctor(&by_key).await;
    assert_eq!(status, Some(0), "{findings:#?}");
    expect(
        &findings,
        "ok",
        &subject,
        "\"order.created\" was rejected, sent back",
        "",
    );
    assert_eq!(bed.client.depth(&orders).await, Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_finds_a_loop_that_loses_the_second_death_alone() {
    let mut bed = patient().await;
    let orders = narrow(&bed, "order.*").await;
    // A service that cannot use its exchange sends back under the queue's name.
    let unable = bed.queue("unable");
    let channel = bed.client.channel().await;
    let (name, options) = (
        format!("{unable}.republish"),
        ExchangeDeclareOptions::default(),
    );
    channel
        .exchange_declare(
            name.as_str().into(),
            ExchangeKind::Fanout,
            options,
            FieldTable::default(),
        )
        .await
        .expect("an exchange");
    let able = bed.setting("SERVICE_NAME").to_owned();
    bed.set("SERVICE_NAME", &unable);
    let service = bed.start().await;
    bed.set("SERVICE_NAME", &able);
    let by_key = ["--probe", &orders, "--routing-key", "order.created"];
    let (status, findings) = bed.doctor(&by_key).await;
    assert_eq!(status, Some(1));
    let subject = format!("dead-letter loop of {orders:?}");
    let fact = format!("{orders:?} was rejected, and this second death");
    expect(
        &findings,
        "problem",
        &subject,
        &fact,
        &format!("by {orders:?}"),
    );
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_probe_is_not_sent_where_it_would_disturb() {
    let bed = patient().await;
    let orders = bed.declare_soundly().await;
    let subject = format!("dead-letter loop of {orders:?}");
    bed.client
        .publish(&orders, b"real", Default::default())
        .await;
    let (status, findings) = bed.doctor(&["--probe", &orders]).await;
    assert_eq!(status, Some(0), "{findings:#?}");
    expect(
        &findings,
        "unknown",
        &subject,
        "1 messages wait",
        "work them off",
    );
    let mut inbox = bed.client.consume(&orders).await;
    assert_eq!(inbox.next().await.body, b"real");
    let (_, findings) = bed.doctor(&["--probe", &orders]).await;
    expect(
        &findings,
        "unknown",
        &subject,
        "has 1 consumers",
        "stop them",
    );
    drop(inbox);
    let other = bed.declare("other").await;
    let dead_letters = bed.setting("DEAD_LETTER_QUEUE").to_owned();
    bed.client
        .publish(&dead_letters, b"real", Default::default())
        .await;
    let (_, findings) = bed.doctor(&["--probe", &other]).await;
    expect(
        &findings,
        "unknown",
        "",
        "nobody consumes it",
        "start the service",
    );
    assert_eq!(bed.client.depth(&dead_letters).await, Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn serve_warns_of_problems_at_start_and_starts_all_the_same() {
    let bed = patient().await;
    bed.client.declare_with(&bed.intake(), max_length(10)).await;
    bed.declare_soundly().await;
    let service = Process::spawn(bed.command());
    service.until_ready().await;
    let line = service.until_logged("the set-up can lose messages").await;
    let line: Value = serde_json::from_str(&line).expect("JSON");
    assert_eq!(line["level"], "WARN");
    let fact = line["fact"].as_str().expect("a fact");
    assert!(fact.contains("drop-head"), "{line}");
    assert!(
        line["cure"].as_str().is_some_and(|cure| !cure.is_empty()),
        "{line}"
    );
    service.signal("TERM").await;
    let (status, log) = service.ended().await;
    assert!(status.success(), "{log}");
    assert_eq!(
        log.matches("the set-up can lose messages").count(),
        1,
        "{log}"
    );
    let closed = || async { (bed.client.consumers(&bed.intake()).await == Some(0)).then_some(()) };
    tokio::time::timeout(Duration::from_secs(10), eventually("it has gone", closed))
        .await
        .expect("nothing is left behind");
}
