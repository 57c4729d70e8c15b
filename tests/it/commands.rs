//! The compiled binary: its commands, its exit codes and its HTTP pages.

use std::process::Output;

use prost::Message;
use retry_scheduler::{
    config::SETTINGS,
    wire::proto::{ErrorClass, Priority, RetryMessage},
};

use tokio::io::AsyncWriteExt;

use crate::support::{Bed, Process, Scrape, eventually};

/// Runs the binary with these arguments until it ends.
pub(crate) async fn run(bed: &Bed, arguments: &[&str]) -> Output {
    let output = bed.command().args(arguments).output();
    tokio::time::timeout(crate::support::PATIENCE, output)
        .await
        .expect("it ends")
        .expect("it runs")
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("UTF-8")
}

/// Checks that the binary failed, with one line on stderr that contains all of `parts`.
pub(crate) fn one_line_naming(output: &Output, parts: &[&str]) {
    let stderr = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    for part in parts {
        assert!(stderr.contains(part), "{part}: {stderr}");
    }
}

/// A TOML file that is deleted when this is dropped.
struct Toml(std::path::PathBuf);

impl Toml {
    fn new(bed: &Bed, content: &str) -> Self {
        let path = std::env::temp_dir().join(format!("{}.toml", bed.queue("config")));
        std::fs::write(&path, content).expect("a file");
        Self(path)
    }

    fn path(&self) -> &str {
        self.0.to_str().expect("UTF-8")
    }
}

impl Drop for Toml {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn help_names_every_command() {
    let bed = Bed::new().await;
    let help = run(&bed, &["--help"]).await;
    assert_eq!(help.status.code(), Some(0));
    let help = text(&help.stdout);
    for command in [
        "serve",
        "migrate",
        "move",
        "import",
        "check-config",
        "doctor",
        "probe",
        "send",
        "idempotency",
        "--config",
        "Exit status",
    ] {
        assert!(help.contains(command), "{command}: {help}");
    }
    let version = run(&bed, &["--version"]).await;
    assert!(text(&version.stdout).contains(env!("CARGO_PKG_VERSION")));
}

#[tokio::test(flavor = "multi_thread")]
async fn migrate_can_be_run_again_and_again() {
    let bed = Bed::new().await;
    for _ in 0..2 {
        let output = run(&bed, &["migrate"]).await;
        assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    }
    assert_eq!(bed.count("SELECT count(*) FROM retry_queue").await, 0);
    assert_eq!(bed.count("SELECT count(*) FROM retry_events").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_migrations_it_stays_unready_until_somebody_applies_them() {
    let mut bed = Bed::new().await;
    bed.set("MIGRATE_ON_START", "false");
    let queue = bed.declare("migrated-by-hand").await;
    let service = Process::spawn(bed.command());
    // Intake must not take the message before there are tables: it would hand the message
    // back again and again, and a quorum queue drops what was handed back too often.
    let sent = run(&bed, &["send", "--queue", &queue, "--payload", "patience"]).await;
    assert_eq!(sent.status.code(), Some(0), "{}", text(&sent.stderr));
    service.until_logged("not settled yet which place").await;
    for _ in 0..3 {
        let (status, body) = service.get("/ready").await;
        assert_eq!(status, 503, "{body}");
        assert!(body.contains("retry_queue"), "it says why: {body}");
    }
    assert_eq!(bed.client.depth(&bed.intake()).await, Some(1));

    let migrated = run(&bed, &["migrate"]).await;
    assert_eq!(migrated.status.code(), Some(0));
    service.until_ready().await;
    let mut inbox = bed.client.consume(&queue).await;
    assert_eq!(inbox.next().await.body, b"patience");
    service.signal("TERM").await;
    assert_eq!(service.ended().await.0.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn on_the_tables_of_an_older_version_it_takes_nothing_until_they_are_migrated() {
    let mut bed = Bed::new().await;
    bed.set("MIGRATE_ON_START", "false");
    bed.migrate().await;
    bed.arrange("ALTER TABLE retry_history RENAME COLUMN attempt_id TO attempts")
        .await;
    let queue = bed.declare("target").await;
    let sent = run(&bed, &["send", "--queue", &queue, "--payload", "p"]).await;
    assert_eq!(sent.status.code(), Some(0), "{}", text(&sent.stderr));
    let service = Process::spawn(bed.command());
    service.until_logged("intake cannot subscribe yet").await;
    let (status, body) = service.get("/ready").await;
    assert_eq!(status, 503, "{body}");
    assert!(body.contains("attempt_id"), "it says why: {body}");
    // A quorum queue counts deliveries that come back: none may be taken yet.
    assert_eq!(bed.client.depth(&bed.intake()).await, Some(1));
    bed.arrange("ALTER TABLE retry_history RENAME COLUMN attempts TO attempt_id")
        .await;
    service.until_ready().await;
    let mut inbox = bed.client.consume(&queue).await;
    assert_eq!(inbox.next().await.body, b"p");
    service.signal("TERM").await;
    assert_eq!(service.ended().await.0.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn check_config_prints_every_setting_and_no_secret() {
    let mut bed = Bed::new().await;
    bed.set("RABBITMQ_URL", "amqp://me:broker-secret@broker.example/v")
        .set(
            "DATABASE_URL",
            "postgresql://me:store-secret@db.example/d?password=query-secret",
        );
    let output = run(&bed, &["check-config"]).await;
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    for setting in SETTINGS {
        let prefix = format!("{}=", setting.name);
        let lines = shown.lines().filter(|l| l.starts_with(&prefix));
        assert_eq!(lines.count(), 1, "{}: {shown}", setting.name);
    }
    let (settings, policies) = shown.split_once("\n\n").expect("two parts");
    assert_eq!(settings.lines().count(), SETTINGS.len());
    // There are 19 presets, and the default.
    assert_eq!(policies.lines().count(), 20, "{policies}");
    assert!(policies.lines().all(|line| line.starts_with("policy ")));
    assert!(policies.starts_with("policy default: 3 retries, 200ms "));
    assert!(shown.contains("broker.example"), "{shown}");
    assert!(shown.contains("db.example"), "{shown}");
    assert!(!shown.contains("secret"), "{shown}");
    assert!(shown.contains("BASE_DELAY_MS=200\n"), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn check_config_reads_the_policies_file_and_says_what_is_wrong_with_it() {
    let mut bed = Bed::new().await;
    let file = Toml::new(
        &bed,
        "[policy.billing]\nmax_attempts = 5\nqueues = [\"billing.*\"]\n",
    );
    bed.set("POLICIES_FILE", file.path());
    let output = run(&bed, &["check-config"]).await;
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    assert!(shown.contains("policy billing: 4 retries, "), "{shown}");
    assert!(shown.contains("; queues billing.*\n"), "{shown}");

    std::fs::write(file.path(), "[policy.billing]\nmax_attempt = 5\n").expect("a file");
    for command in ["check-config", "serve"] {
        let output = run(&bed, &[command]).await;
        one_line_naming(&output, &["POLICIES_FILE", "billing", "max_attempt"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_wrong_value_ends_it_with_one_line_that_names_it() {
    let bed = Bed::new().await;
    for (name, value) in [
        ("HTTP_PORT", "many"),
        ("HTTP_PORT", "70000"),
        ("HTTP_HOST", "nowhere at all"),
        ("BASE_DELAY_MS", "-1"),
        ("MAX_DELAY_MS", "1"),
        ("RABBITMQ_URL", "http://example/"),
        ("RABBITMQ_URL", "not a url"),
        ("RABBITMQ_URL", "amqp://broker.example/v?heartbeat=often"),
        ("MAX_AGE_MS", "630720000000"),
        ("DATABASE_URL", "mysql://me:store-secret@db.example/d"),
        ("DATABASE_URL", "nonsense"),
        ("DATABASE_POOL_SIZE", "0"),
        ("MIGRATE_ON_START", "perhaps"),
        ("RETRY_QUEUE", ""),
        ("ALLOWED_QUEUES", "a[,b"),
        ("LOG_LEVEL", "=====\n="),
        ("LOG_FORMAT", "purple"),
        ("REVIEW_FORMAT", "xml"),
    ] {
        for command in ["serve", "check-config"] {
            let mut binary = bed.command();
            let output = binary.env(name, value).arg(command).output();
            let output = output.await.expect("it runs");
            one_line_naming(&output, &[name]);
            assert!(!text(&output.stderr).contains("secret"));
            assert!(output.stdout.is_empty());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_gives_settings_and_the_environment_wins() {
    let bed = Bed::new().await;
    let file = Toml::new(
        &bed,
        "service_name = \"from-the-file\"\nbase_delay_ms = 7\ndispatch_batch = 11\n",
    );
    let output = run(&bed, &["--config", file.path(), "check-config"]).await;
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let shown = text(&output.stdout);
    assert!(shown.contains("SERVICE_NAME=from-the-file\n"), "{shown}");
    assert!(shown.contains("DISPATCH_BATCH=11\n"), "{shown}");
    assert!(shown.contains("BASE_DELAY_MS=200\n"), "{shown}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_with_an_unknown_key_or_none_at_all_is_refused_in_one_line() {
    let bed = Bed::new().await;
    let file = Toml::new(&bed, "base_delay_ms = 7\nbase_dely_ms = 8\n");
    let output = run(&bed, &["--config", file.path(), "check-config"]).await;
    one_line_naming(&output, &["base_dely_ms", file.path()]);
    drop(file);
    let file = Toml::new(&bed, "this is not TOML\n");
    let output = run(&bed, &["check-config", "--config", file.path()]).await;
    one_line_naming(&output, &[file.path()]);
    let output = run(&bed, &["check-config", "--config", "/nowhere.toml"]).await;
    one_line_naming(&output, &["/nowhere.toml"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_send_publishes_comes_back() {
    let bed = Bed::new().await;
    let queue = bed.queue("by-hand");
    let service = bed.start().await;
    let arguments = [
        "send",
        "--declare",
        "--queue",
        &queue,
        "--payload",
        "a first message",
        "--error",
        "as an example",
        "--retry-count",
        "1",
        "--max-retries",
        "5",
    ];
    let output = run(&bed, &arguments).await;
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let said = text(&output.stdout);
    let mut inbox = bed.client.consume(&queue).await;
    let back = inbox.next().await;
    assert!(said.contains(&back.id()), "{said}");
    assert_eq!(back.body, b"a first message");
    assert_eq!(back.text("x-original-error").unwrap(), "as an example");
    assert_eq!(back.number("x-retry-count"), Some(2));
    assert_eq!(back.number("x-max-retries"), Some(5));
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn send_can_set_every_field_of_a_retry_message() {
    let bed = Bed::new().await;
    // No service runs, so the message stays in the intake queue and the test can read it.
    bed.client.declare(&bed.intake()).await;
    let arguments = "send --queue q --payload body --error e --error-type T \
         --error-class rate-limited --operation o --message-id m --retry-count 1 \
         --max-retries 2 --next-retry-at-ms 3 --retry-after-ms 4 --first-failed-at-ms 5 \
         --category c --idempotency-key k --tenant-id t --correlation-id co --trace-id tr \
         --priority backfill";
    let properties = r#"{"contentType":"text/plain","headers":{"h":{"int16":-3}}}"#;
    let mut arguments: Vec<&str> = arguments.split_whitespace().collect();
    arguments.extend(["--properties", properties]);
    let output = run(&bed, &arguments).await;
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let sent = bed.client.consume(&bed.intake()).await.next().await;
    let sent = RetryMessage::decode(sent.body.as_slice()).expect("a RetryMessage");
    let expected = RetryMessage {
        message_id: "m".into(),
        original_payload: b"body".to_vec(),
        original_queue: "q".into(),
        error_reason: "e".into(),
        retry_count: 1,
        max_retries: 2,
        next_retry_at_ms: 3,
        error_class: ErrorClass::RateLimited.into(),
        retry_after_ms: Some(4),
        category: "c".into(),
        idempotency_key: "k".into(),
        tenant_id: "t".into(),
        correlation_id: "co".into(),
        trace_id: "tr".into(),
        properties: Some(serde_json::from_str(properties).expect("properties")),
        priority: Priority::Backfill.into(),
        first_failed_at_ms: 5,
        operation: "o".into(),
        error_type: "T".into(),
    };
    assert_eq!(sent, expected);
    for (class, expected) in [
        ("final", ErrorClass::Final),
        ("retryable", ErrorClass::Retryable),
    ] {
        let mut command = bed.command();
        command
            .args(["send", "--queue", "q", "--payload", "-"])
            .args(["--error-class", class])
            .stdin(std::process::Stdio::piped());
        let mut child = command.spawn().expect("it starts");
        let mut stdin = child.stdin.take().expect("its input");
        stdin.write_all(b"from a pipe").await.expect("it reads");
        drop(stdin);
        assert!(child.wait().await.expect("it ends").success());
        let sent = bed.client.consume(&bed.intake()).await.next().await;
        let sent = RetryMessage::decode(sent.body.as_slice()).expect("a RetryMessage");
        assert_eq!(sent.original_payload, b"from a pipe");
        assert_eq!(sent.error_class, i32::from(expected));
    }
    let wrong = [
        "send",
        "--queue",
        "q",
        "--payload",
        "p",
        "--properties",
        "{",
    ];
    one_line_naming(&run(&bed, &wrong).await, &["--properties"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn send_and_migrate_say_in_one_line_what_they_cannot_reach() {
    let mut bed = Bed::new().await;
    // Nothing listens on port 1.
    bed.set("RABBITMQ_URL", "amqp://me:broker-secret@127.0.0.1:1/v")
        .set("DATABASE_URL", "postgresql://me:store-secret@127.0.0.1:1/d")
        .set("DATABASE_TIMEOUT_MS", "1000");
    let output = run(&bed, &["send", "--queue", "q", "--payload", "p"]).await;
    one_line_naming(&output, &["RabbitMQ"]);
    assert!(!text(&output.stderr).contains("secret"));
    let output = run(&bed, &["migrate"]).await;
    one_line_naming(&output, &["Postgres"]);
    assert!(!text(&output.stderr).contains("secret"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_port_in_use_is_named_in_one_line() {
    let mut bed = Bed::new().await;
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    bed.set("HTTP_PORT", &port);
    let output = run(&bed, &["serve"]).await;
    one_line_naming(&output, &["HTTP_PORT", &port]);
}

#[tokio::test(flavor = "multi_thread")]
async fn health_and_ready_say_how_each_part_is() {
    let bed = Bed::new().await;
    let service = bed.start().await;
    let (status, body) = service.get("/health").await;
    let health: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status, 200);
    assert_eq!(health["status"], "ok");
    assert_eq!(health["version"], env!("CARGO_PKG_VERSION"));
    for part in ["postgres", "consumer", "publisher-1", "publisher-2"] {
        let part = &health["parts"][part];
        assert_eq!(part["up"], true, "{health}");
        assert!(part["detail"].is_string(), "{health}");
    }
    let (ready, body) = service.ready().await;
    assert!(ready);
    assert_eq!(body["ready"], true);
    assert_eq!(body["down"], serde_json::json!([]));
    assert_eq!(service.get("/nowhere").await.0, 404);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ready_is_503_with_the_parts_that_are_down_and_health_stays_200() {
    let mut bed = Bed::new().await;
    bed.set("RABBITMQ_URL", "amqp://127.0.0.1:1/v");
    bed.migrate().await;
    let service = bed.start_unready().await;
    service.until_down("publisher").await;
    service.until_down("consumer").await;
    let (status, body) = service.get("/ready").await;
    let ready: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status, 503);
    assert_eq!(ready["ready"], false);
    assert_eq!(
        ready["down"],
        serde_json::json!(["consumer", "publisher-1", "publisher-2"])
    );
    let (status, body) = service.get("/health").await;
    let health: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(status, 200);
    assert_eq!(health["status"], "degraded");
    assert_eq!(health["parts"]["postgres"]["up"], true);
    let up = service.scrape().await;
    assert_eq!(up.get("retry_up{part=\"consumer\"}"), 0.0);
    service.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn metrics_explain_themselves() {
    let bed = Bed::new().await;
    let queue = bed.declare("measured").await;
    let service = bed.start().await;
    for retries in ["0", "3"] {
        let arguments = [
            "send",
            "--queue",
            &queue,
            "--payload",
            "p",
            "--retry-count",
            retries,
        ];
        assert!(run(&bed, &arguments).await.status.success());
    }
    let page = eventually("both are counted", || async {
        let (_, page) = service.get("/metrics").await;
        let metrics = Scrape::parse(&page);
        let done = metrics.sum("retries_executed_total") == 1.0
            && metrics.sum("retries_exhausted_total") == 1.0;
        done.then_some(page)
    })
    .await;
    for (name, kind) in [
        ("retries_scheduled_total", "counter"),
        ("retries_executed_total", "counter"),
        ("retries_exhausted_total", "counter"),
        ("retry_queue_depth", "gauge"),
        ("retry_up", "gauge"),
        ("retry_scheduler_build_info", "gauge"),
        ("retry_drift_seconds", "histogram"),
        ("retry_intake_batch_size", "histogram"),
        ("retry_intake_total", "counter"),
        ("retry_duplicates_total", "counter"),
        ("retry_invalid_total", "counter"),
        ("retry_database_connections", "gauge"),
    ] {
        assert!(page.contains(&format!("# HELP {name} ")), "{name}: {page}");
        assert!(page.contains(&format!("# TYPE {name} {kind}")), "{name}");
    }
    let metrics = Scrape::parse(&page);
    let version = env!("CARGO_PKG_VERSION");
    let build = format!("retry_scheduler_build_info{{version=\"{version}\"}}");
    assert_eq!(metrics.get(&build), 1.0);
    for part in ["consumer", "publisher-1", "publisher-2"] {
        assert_eq!(metrics.get(&format!("retry_up{{part=\"{part}\"}}")), 1.0);
    }
    service.stop().await;
}
