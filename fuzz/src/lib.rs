//! Checks what must hold for any input of the decoders.
//!
//! Each target turns bytes into a delivery and hands it to `check`: the decoded task can be stored,
//! the message is complete, and what is sent on from it can be read again. `cargo dev fuzz` runs
//! the targets under libFuzzer; a test runs them once on each seed.

#![allow(
    clippy::expect_used,
    reason = "a panic is how libFuzzer learns of a bug"
)]

mod dead_letter;
mod outgoing;
mod retry_message;

use std::sync::LazyLock;

use lapin::BasicProperties;
use prost::Message;
use retry_scheduler::{
    config::Settings,
    domain::{
        limits::{LATEST_MS, MAX_ERROR_BYTES, MAX_LABEL_BYTES, MAX_PROPERTIES_BYTES},
        policy::{Policy, PolicyBook},
        queues::name_problem,
        review::Reason,
        task::{NewTask, Next},
    },
    wire::{
        Arrived, Rules, Source, decode,
        proto::{HeaderValue, Properties, header_value::Kind},
    },
};
use uuid::Uuid;

pub use dead_letter::dead_letter;
pub use retry_message::{json, protobuf};

/// The id for a message that brings none, and for one that is invalid.
const FRESH: Uuid = Uuid::from_u128(42);

/// The rules of a source. They have a policy for each kind of identity, by id and by payload, and a
/// payload limit that small inputs reach.
fn rules(source: Source) -> &'static Rules {
    static BOTH: LazyLock<[Rules; 2]> = LazyLock::new(|| {
        let settings = Settings::load(None, |_| None).expect("the default settings");
        let book = "[policy.lineage]\nidentity = \"payload\"\ncategories = [\"lineage\"]\n";
        let rules = |source, queue: &str| Rules {
            book: PolicyBook::parse(book, Policy::default()).expect("a policy book"),
            allowed: settings.allowed_queues.clone(),
            intake_queue: queue.to_owned(),
            source,
            max_retries_limit: 100,
            max_payload_bytes: 500,
        };
        [
            rules(Source::RetryMessages, &settings.retry_queue),
            rules(Source::DeadLetters, "dead-letters"),
        ]
    });
    &BOTH[usize::from(source == Source::DeadLetters)]
}

fn decoded(body: &[u8], properties: &BasicProperties, source: Source) -> NewTask {
    let arrived = Arrived {
        body: body.to_vec(),
        properties: properties.clone(),
        redelivered: false,
    };
    decode(arrived, rules(source), || FRESH)
}

/// Decodes a delivery, checks what must hold for any task, and returns the task.
fn check(body: &[u8], properties: &BasicProperties, source: Source) -> NewTask {
    let rules = rules(source);
    let task = decoded(body, properties, source);
    let again = decoded(body, properties, source);
    assert_eq!(task, again, "the same delivery is the same task");
    match task.verdict {
        None => {}
        Some(Reason::Invalid) => {
            assert_eq!(task.payload, body, "what is invalid is kept whole");
            assert_eq!(task.queue, rules.intake_queue);
            assert_eq!(task.message_id, FRESH);
            assert!(!task.error.is_empty(), "people are told why");
        }
        Some(other) => panic!("{other} is not for a decoder to say"),
    }
    can_be_stored(&task, rules);
    outgoing::check(&task);
    task
}

/// Checks that Postgres can store the task, and the due moment that follows from it.
fn can_be_stored(task: &NewTask, rules: &Rules) {
    let labels = &task.labels;
    let texts = [
        Some(&task.queue),
        Some(&task.error),
        Some(&task.policy.name),
        task.producer_id.as_ref(),
        task.idempotency_key.as_ref(),
        labels.category.as_ref(),
        labels.operation.as_ref(),
        labels.error_type.as_ref(),
        labels.tenant.as_ref(),
        labels.correlation_id.as_ref(),
        labels.trace_id.as_ref(),
    ];
    for text in texts.into_iter().flatten() {
        assert!(!text.contains('\0'), "Postgres refuses NUL: {text:?}");
        // Three times the limit, because each NUL is replaced by a visible sign of three bytes.
        assert!(text.len() <= 3 * MAX_ERROR_BYTES, "{} bytes", text.len());
    }
    if let Some(key) = &task.idempotency_key {
        assert!(
            !key.is_empty() && key.len() <= 3 * MAX_LABEL_BYTES,
            "it is in an index"
        );
    }
    assert_eq!(name_problem(&task.queue), None);
    assert!(task.budget.retry_count >= 0);
    assert!((0..=rules.max_retries_limit).contains(&task.budget.max_retries));
    for ms in [task.not_before_ms, task.first_failed_at_ms] {
        assert!(ms.is_none_or(|ms| (1..=LATEST_MS).contains(&ms)), "{ms:?}");
    }
    if task.verdict.is_none() {
        assert!(task.payload.len() <= rules.max_payload_bytes);
        assert_eq!(rules.allowed.refusal(&task.queue), None);
        assert!(task.properties.len() <= MAX_PROPERTIES_BYTES);
    }
    Properties::decode(task.properties.as_slice()).expect("the properties can be read again");
    for random in [0.0, 0.5, 0.999] {
        if let Next::Retry { delay, .. } = task.next(task.budget.retry_count, random) {
            assert!(delay.as_millis() <= LATEST_MS.unsigned_abs().into());
        }
    }
}

/// Whether the properties are the same after they were written as JSON and read again. JSON has no
/// NaN, serde_json may change the last digit of a fraction, and it limits the depth of nesting.
fn speaks_json(properties: &Properties) -> bool {
    fn value(header: &HeaderValue, depth: usize) -> bool {
        depth < 16
            && match &header.kind {
                Some(Kind::Float32(x)) => x.fract() == 0.0 && x.abs() < 1e6,
                Some(Kind::Float64(x)) => x.fract() == 0.0 && x.abs() < 1e6,
                Some(Kind::List(list)) => list.values.iter().all(|v| value(v, depth + 1)),
                Some(Kind::Table(table)) => table.values.values().all(|v| value(v, depth + 1)),
                _ => true,
            }
    }
    properties.headers.values().all(|header| value(header, 0))
}

#[cfg(test)]
mod tests {
    use std::{fs, path::Path};

    fn all_hold(target: &str, check: fn(&[u8])) {
        let seeds = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds");
        let mut seen = 0;
        for seed in fs::read_dir(seeds.join(target)).expect("seeds") {
            check(&fs::read(seed.expect("a seed").path()).expect("a seed"));
            seen += 1;
        }
        assert!(seen > 0, "{target} has no seeds");
    }

    /// The seeds are what `cargo dev fuzz` begins with, and inputs that once failed.
    #[test]
    fn all_seeds_hold() {
        all_hold("protobuf", crate::protobuf);
        all_hold("json", crate::json);
        all_hold("dead-letter", crate::dead_letter);
    }
}
