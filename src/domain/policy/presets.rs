//! Tests of the shipped policies, number by number.

use std::time::Duration;

use super::{Jitter, Policy, PolicyBook};

/// The random number at which a jitter that goes both ways changes nothing.
const MIDDLE: f64 = 0.5;

fn preset(category: &str) -> Policy {
    let book = PolicyBook::presets(Policy::default()).unwrap();
    book.choose(category, "any.queue").as_ref().clone()
}

fn schedule(policy: &Policy, random: f64) -> Vec<f64> {
    let attempts = 0..policy.max_retries.cast_unsigned();
    attempts
        .map(|attempt| policy.delay(attempt, random).as_secs_f64())
        .collect()
}

fn close(left: Duration, right: f64) -> bool {
    (left.as_secs_f64() - right).abs() < 1e-6
}

#[test]
fn the_presets_are_these_and_leave_unnamed_messages_alone() {
    let book = PolicyBook::presets(Policy::default()).unwrap();
    let described = book.describe();
    let names = described.lines().filter_map(|line| {
        let (name, _) = line.strip_prefix("policy ")?.split_once(':')?;
        Some(name)
    });
    assert!(
        names.eq(["default", "partition", "run"]
            .into_iter()
            .chain(OPERATIONS.map(|row| row.0)))
    );
    for queue in [
        "",
        "billing.invoices",
        "retry.scheduled",
        "partition",
        "run",
    ] {
        assert_eq!(**book.choose("", queue), Policy::default());
    }
}

#[test]
fn partition_backoff_is_5_minutes_doubling_to_6_hours() {
    const MINUTE: u64 = 60;
    let policy = preset("PARTITION");
    assert_eq!(policy.name, "partition");
    // delay = base * 2^(attempt_count-1), capped
    for (attempt_count, minutes) in [
        (1, 5),
        (2, 10),
        (3, 20),
        (4, 40),
        (5, 80),
        (6, 160),
        (7, 320),
        (8, 360),
        (9, 360),
    ] {
        let delay = policy.delay(attempt_count - 1, MIDDLE);
        assert_eq!(
            delay,
            Duration::from_secs(minutes * MINUTE),
            "attempt_count {attempt_count}"
        );
    }
    assert_eq!(
        policy.delay(u32::MAX, MIDDLE),
        Duration::from_secs(6 * 60 * MINUTE)
    );
}

#[test]
fn partition_jitter_is_30_seconds_either_way() {
    let policy = preset("PARTITION");
    assert_eq!(policy.delay(0, 0.0), Duration::from_secs(300 - 30));
    assert_eq!(policy.delay(0, 1.0), Duration::from_secs(300 + 30));
    assert_eq!(policy.delay(99, 0.0), Duration::from_secs(21_600 - 30));
    assert_eq!(policy.delay(99, 1.0), Duration::from_secs(21_600 + 30));
}

#[test]
fn partition_is_retried_for_about_six_days() {
    let policy = preset("PARTITION");
    assert_eq!(policy.max_retries, 30);
    let days = schedule(&policy, MIDDLE).iter().sum::<f64>() / 86_400.0;
    assert!((6.0..6.5).contains(&days), "{days}");
}

#[test]
fn run_is_8_retries_from_60_to_3600_seconds() {
    let policy = preset("RUN");
    assert_eq!(
        (policy.name.as_str(), policy.max_retries, policy.multiplier),
        ("run", 8, 2.0)
    );
    for random in [0.0, MIDDLE, 1.0] {
        assert_eq!(
            schedule(&policy, random),
            [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 3600.0, 3600.0]
        );
    }
}

#[test]
fn the_default_schedule_is_2_4_8_seconds() {
    let policy = preset("");
    assert_eq!(policy.max_retries, 3);
    assert_eq!(schedule(&policy, 0.0), [2.0, 4.0, 8.0]);
}

#[test]
fn the_default_goes_on_with_16_seconds_and_stops_at_60() {
    let delays =
        [3, 4, 5, 6, u32::MAX].map(|attempt| Policy::default().delay(attempt, 0.0).as_secs());
    assert_eq!(delays, [16, 32, 60, 60, 60]);
}

#[test]
fn the_defaults_jitter_adds_up_to_a_second_even_at_the_cap() {
    let policy = Policy::default();
    assert_eq!(policy.delay(0, 0.25), Duration::from_millis(2_250));
    assert_eq!(policy.delay(0, 1.0), Duration::from_secs(3));
    assert_eq!(policy.delay(10, 1.0), Duration::from_secs(61));
}

/// Name, category code, max attempts, base, max, multiplier, jitter factor.
type Row = (&'static str, &'static str, i32, f64, f64, f64, f64);

#[rustfmt::skip]
const OPERATIONS: [Row; 17] = [
    ("nats_connect", "RETRY_NATS_CONNECT", 5, 1.0, 30.0, 2.0, 0.1),
    ("nats_publish", "RETRY_NATS_PUBLISH", 3, 0.5, 10.0, 2.0, 0.1),
    ("nats_subscribe", "RETRY_NATS_SUBSCRIBE", 3, 0.5, 10.0, 2.0, 0.1),
    ("nats_stream_create", "RETRY_NATS_STREAM_CREATE", 2, 2.0, 60.0, 2.0, 0.1),
    ("kv_create", "RETRY_KV_CREATE", 2, 1.0, 30.0, 2.0, 0.1),
    ("kv_get", "RETRY_KV_GET", 3, 0.5, 10.0, 2.0, 0.1),
    ("kv_put", "RETRY_KV_PUT", 3, 0.5, 10.0, 2.0, 0.1),
    ("kv_delete", "RETRY_KV_DELETE", 2, 1.0, 30.0, 2.0, 0.1),
    ("execution_intent", "RETRY_EXECUTION_INTENT", 2, 2.0, 60.0, 2.0, 0.1),
    ("execution_containment", "RETRY_EXECUTION_CONTAINMENT", 2, 2.0, 60.0, 2.0, 0.1),
    ("execution_expiration", "RETRY_EXECUTION_EXPIRATION", 1, 1.0, 30.0, 2.0, 0.1),
    ("approval_check", "RETRY_APPROVAL_CHECK", 3, 1.0, 30.0, 2.0, 0.1),
    ("approval_grant", "RETRY_APPROVAL_GRANT", 2, 2.0, 60.0, 2.0, 0.1),
    ("replay_processing", "REPLAY_REPLAY_PROCESSING", 1, 1.0, 30.0, 2.0, 0.1),
    ("replay_validation", "REPLAY_REPLAY_VALIDATION", 2, 1.0, 30.0, 2.0, 0.1),
    ("api_request", "RETRY_API_REQUEST", 3, 1.0, 30.0, 2.0, 0.1),
    ("api_validation", "RETRY_API_VALIDATION", 2, 0.5, 10.0, 2.0, 0.1),
];

#[test]
fn the_operation_matrix_has_17_rows() {
    for (name, category, max_attempts, base, max, multiplier, jitter) in OPERATIONS {
        let policy = preset(category);
        assert_eq!(policy.name, name);
        assert_eq!(policy.max_retries + 1, max_attempts, "{name}");
        assert_eq!(policy.base_delay, Duration::from_secs_f64(base), "{name}");
        assert_eq!(policy.max_delay, Duration::from_secs_f64(max), "{name}");
        assert_eq!(policy.multiplier, multiplier, "{name}");
        assert_eq!(policy.jitter, Jitter::Factor { by: jitter }, "{name}");

        for attempt in 1..=10 {
            let delay = (base * multiplier.powi(attempt - 1)).min(max);
            let at = |random| policy.delay(attempt.cast_unsigned() - 1, random);
            assert!(close(at(0.0), delay * (1.0 - jitter)), "{name} {attempt}");
            assert!(close(at(MIDDLE), delay), "{name} {attempt}");
            assert!(close(at(1.0), delay * (1.0 + jitter)), "{name} {attempt}");
        }
    }
}

#[test]
fn nats_connect_waits_as_in_the_examples() {
    let policy = preset("RETRY_NATS_CONNECT");
    for (attempt, low, middle, high) in [
        (1, 0.9, 1.0, 1.1),
        (2, 1.8, 2.0, 2.2),
        (3, 3.6, 4.0, 4.4),
        (4, 7.2, 8.0, 8.8),
    ] {
        assert!(close(policy.delay(attempt - 1, 0.0), low));
        assert!(close(policy.delay(attempt - 1, MIDDLE), middle));
        assert!(close(policy.delay(attempt - 1, 1.0), high));
    }
}

#[test]
fn a_second_publish_attempt_can_wait_1_05_seconds() {
    // 0.5 s doubled once, plus 5 % of jitter.
    let policy = preset("RETRY_NATS_PUBLISH");
    assert_eq!(policy.max_retries, 2);
    assert!(close(policy.delay(1, 0.75), 1.05));
}

#[test]
fn api_request_has_three_attempts_from_a_second_up() {
    // 3 attempts, 1 s doubling to 30 s, ±10 %.
    let policy = preset("RETRY_API_REQUEST");
    assert_eq!(schedule(&policy, MIDDLE), [1.0, 2.0]);
    assert_eq!(policy.delay(99, MIDDLE), Duration::from_secs(30));
}

#[test]
fn a_custom_policy_for_critical_operations() {
    let file = r#"
        [policy.critical]
        max_attempts = 5
        base_delay = "2s"
        max_delay = "60s"
        multiplier = 1.5
        jitter = { factor = 0.2 }
    "#;
    let book = PolicyBook::parse(file, Policy::default()).unwrap();
    let policy = book.named(Some("critical"));
    assert_eq!(schedule(policy, MIDDLE), [2.0, 3.0, 4.5, 6.75]);
    assert!(close(policy.delay(0, 0.0), 1.6));
    assert!(close(policy.delay(0, 1.0), 2.4));
    assert!(close(policy.delay(99, 1.0), 72.0));
}
