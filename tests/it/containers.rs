//! The container image relies on `probe`, and the alert rules rely on metrics: both must
//! fit the service.

use std::{collections::BTreeSet, process::Output};

use crate::support::Bed;

const DOCKERFILE: &str = include_str!("../../Dockerfile");
const ALERTS: &str = include_str!("../../ops/prometheus/alerts.yml");
const ALERT_TESTS: &str = include_str!("../../ops/prometheus/alerts_test.yml");
const METRICS: &str = include_str!("../../src/observe/metrics.rs");

async fn probe(bed: &mut Bed, port: u16) -> Output {
    bed.set("HTTP_PORT", &port.to_string());
    let output = bed.command().arg("probe").output().await;
    output.expect("the binary runs")
}

fn one_line(bytes: &[u8]) -> &str {
    let text = std::str::from_utf8(bytes).expect("UTF-8").trim_end();
    assert_eq!(text.lines().count(), 1, "{text:?}");
    text
}

#[tokio::test(flavor = "multi_thread")]
async fn probe_succeeds_beside_a_ready_service_and_fails_once_it_is_gone() {
    let mut bed = Bed::new().await;
    let service = bed.start().await;
    let port = service.address.port();

    let output = probe(&mut bed, port).await;
    assert!(output.status.success(), "{output:?}");
    assert_eq!(one_line(&output.stdout), "ready");

    service.stop().await;
    let output = probe(&mut bed, port).await;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error = one_line(&output.stderr);
    assert!(error.contains(&format!("127.0.0.1:{port}")), "{error}");
}

#[tokio::test(flavor = "multi_thread")]
async fn probe_names_the_part_that_is_down() {
    let mut bed = Bed::new().await;
    // The port is bound, but nobody answers there, so the service cannot reach a broker.
    let nobody = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let address = nobody.local_addr().expect("an address");
    bed.set("RABBITMQ_URL", &format!("amqp://{address}"));
    bed.migrate().await;
    let service = bed.start_unready().await;

    let output = probe(&mut bed, service.address.port()).await;
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let error = one_line(&output.stderr);
    assert!(error.contains("not ready: "), "{error}");
    assert!(error.contains("consumer"), "{error}");
    assert!(!error.contains("postgres"), "{error}");
    service.abort().await;
}

#[tokio::test]
async fn probe_refuses_a_port_it_cannot_know() {
    let command = env!("CARGO_BIN_EXE_retry-scheduler");
    let output = std::process::Command::new(command)
        .arg("probe")
        .env("HTTP_PORT", "0")
        .output()
        .expect("the binary runs");
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(one_line(&output.stderr).contains("HTTP_PORT"), "{output:?}");
}

#[test]
fn the_images_health_check_is_the_probe() {
    let health_check = DOCKERFILE
        .lines()
        .skip_while(|line| !line.starts_with("HEALTHCHECK"))
        .nth(1)
        .expect("a HEALTHCHECK over two lines");
    assert_eq!(
        health_check.trim(),
        r#"CMD ["/usr/local/bin/retry-scheduler", "probe"]"#
    );
}

#[test]
fn alerts_use_only_metrics_that_exist() {
    let used: BTreeSet<&str> = ALERTS
        .split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'))
        .filter(|word| word.starts_with("retry_") || word.starts_with("retries_"))
        .map(|word| word.trim_end_matches("_bucket"))
        .filter(|word| *word != "retry_queue") // a table, not a metric
        .collect();
    assert!(used.len() > 5, "{used:?}");
    for metric in used {
        assert!(METRICS.contains(&format!("\"{metric}\"")), "no {metric}");
    }
}

#[test]
fn every_alert_is_seen_firing_in_promtools_tests() {
    for alert in ALERTS
        .lines()
        .filter_map(|line| line.trim().strip_prefix("- alert: "))
    {
        let fires = format!("alertname=\"{alert}\"");
        assert!(ALERT_TESTS.contains(&fires), "{alert} is never seen firing");
    }
}
