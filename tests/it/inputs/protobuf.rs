//! RetryMessages in protobuf: broken bytes, queue names and numbers.

use retry_scheduler::wire::proto::{ErrorClass, RetryMessage};

use super::table::{At, Case};

/// The end of the year 9999 in Unix milliseconds, which is the latest moment allowed.
const LATEST_MS: i64 = 253_402_300_799_999;
const YEAR_0_MS: i64 = -62_167_219_200_000;

pub fn table(at: &At) -> Vec<Case> {
    let mut cases = bytes(at);
    cases.extend(queues(at));
    cases.extend(numbers(at));
    cases
}

fn bytes(at: &At) -> Vec<Case> {
    let no_protobuf = "not a RetryMessage in protobuf";
    let good = |name| at.sent(name, |_| ()).body;
    let mut truncated = good("truncated protobuf");
    truncated.truncate(truncated.len() - 5);
    let unknown = |name, field: &[u8]| at.raw(name, [&good(name), field].concat());
    let mut cases = vec![
        at.raw("an empty body", [])
            .invalid("original_queue is empty"),
        at.raw("one NUL", [0]).invalid(no_protobuf),
        at.raw("truncated protobuf", truncated).invalid(no_protobuf),
        at.raw("random bytes", noise(1000)).invalid(no_protobuf),
        at.raw("text", "hello").invalid(no_protobuf),
        at.raw("XML", "<RetryMessage/>").invalid(no_protobuf),
        at.raw("gzip", b"\x1f\x8b\x08\0\0\0\0\0\0\x03".as_slice())
            .invalid(no_protobuf),
        at.raw("a queue that is a number", [0x18, 1])
            .invalid("invalid wire type"),
        at.raw("a count that is text", [0x2a, 1, b'1'])
            .invalid("invalid wire type"),
        at.raw("a field number of zero", [0x02, 0])
            .invalid(no_protobuf),
        at.raw("a wire type of seven", [0x0f])
            .invalid("invalid wire type"),
        at.raw(
            "a length past the end",
            [0x12, 0xff, 0xff, 0xff, 0xff, 0x0f],
        )
        .invalid(no_protobuf),
        at.raw("a varint without an end", [0xff; 11])
            .invalid(no_protobuf),
        at.raw("a group without an end", [0xa3, 0x06])
            .invalid(no_protobuf),
        at.raw("groups 10,000 deep", [0xa3, 0x06].repeat(10_000))
            .invalid("recursion limit"),
        unknown("a field of a newer contract", &[0xa0, 0x06, 7]),
        unknown("a text of a newer contract", &[0xa2, 0x06, 2, 0xff, 0]),
        at.sent("enums of a newer contract", |m| {
            m.error_class = 99;
            m.priority = -7;
        }),
        at.sent("no payload", |m| m.original_payload.clear()),
        at.sent("a payload over 16 MiB", |m| {
            m.original_payload = vec![b'x'; (16 << 20) + 1];
        })
        .invalid("16777217 bytes, more than MAX_PAYLOAD_BYTES"),
    ];
    for (field, name) in [
        (1, "message_id"),
        (3, "original_queue"),
        (4, "error_reason"),
        (10, "category"),
        (11, "idempotency_key"),
        (12, "tenant_id"),
        (13, "correlation_id"),
        (14, "trace_id"),
    ] {
        let body = [field << 3 | 2, 2, 0xc3, 0x28];
        cases.push(at.raw(format!("no UTF-8 in {name}"), body).invalid(name));
    }
    cases
}

fn queues(at: &At) -> Vec<Case> {
    let to = |name: &str, queue: &str| at.sent(name, |m| m.original_queue = queue.to_owned());
    let refused = |name: &str, queue: &str, why: &str| {
        to(name, queue).invalid(format!("original_queue {queue:?} is refused: {why}"))
    };
    let own = "it is one of the scheduler's own queues";
    let brokers = "names beginning with amq. belong to the broker";
    let control = "original_queue has control characters";
    vec![
        to("no queue", "").invalid("original_queue is empty"),
        to("a queue of 255 bytes", &at.long).back_to(&at.long),
        to("a queue of 256 bytes", &"q".repeat(256)).invalid("256 bytes, more than 255"),
        to("a queue of 200 letters in 400 bytes", &"é".repeat(200)).invalid("400 bytes"),
        to("a queue with an emoji", &at.rabbit).back_to(&at.rabbit),
        to("a queue with CRLF", &format!("{}\r\n", at.target)).invalid(control),
        to("a queue with NUL", &format!("{}\0", at.target)).invalid(control),
        to("a queue with DEL", &format!("{}\u{7f}", at.target)).invalid(control),
        to("a queue with NEL", &format!("{}\u{85}", at.target)).invalid(control),
        refused("the intake queue", &at.intake, own),
        refused("the dead-letter queue", &at.dead_letters, own),
        refused("the review queue", &at.review, own),
        refused("a queue that the broker named", "amq.gen-stranger", brokers),
        refused("direct reply-to", "amq.rabbitmq.reply-to", brokers),
        refused(
            "a queue of somebody else",
            &at.forbidden,
            "it is not among ALLOWED_QUEUES",
        ),
        refused("a queue of spaces", "   ", "it is not among ALLOWED_QUEUES"),
        at.sent("a missing queue", |m| {
            m.original_queue.clone_from(&at.missing);
            m.max_retries = 1;
        })
        .reviewed(
            "unroutable",
            &at.missing,
            format!("queue {:?} does not exist", at.missing),
        ),
    ]
}

fn numbers(at: &At) -> Vec<Case> {
    let with = |name: &str, change: fn(&mut RetryMessage)| at.sent(name, change);
    let limited = |name: &str, ms: i64| {
        at.sent(name, |m| {
            m.error_class = ErrorClass::RateLimited.into();
            m.retry_after_ms = Some(ms);
        })
    };
    let (late, range) = ("is after the year 9999", "is out of range");
    let said = "the test said so";
    vec![
        with("retry_count -1", |m| m.retry_count = -1).invalid("retry_count is negative: -1"),
        with("retry_count of INT_MIN", |m| m.retry_count = i32::MIN).invalid("retry_count is neg"),
        with("retry_count of INT_MAX", |m| m.retry_count = i32::MAX).reviewed(
            "exhausted",
            &at.target,
            said,
        ),
        with("max_retries -1", |m| m.max_retries = -1).invalid("max_retries is negative: -1"),
        with("max_retries of INT_MIN", |m| m.max_retries = i32::MIN).invalid("max_retries is neg"),
        with("max_retries of INT_MAX", |m| m.max_retries = i32::MAX)
            .checked(|back| assert!(back.number("x-max-retries") < Some(i64::from(i32::MAX)))),
        with("both counts of INT_MAX", |m| {
            (m.retry_count, m.max_retries) = (i32::MAX, i32::MAX);
        })
        .reviewed("exhausted", &at.target, said),
        with("not before i64::MIN", |m| m.next_retry_at_ms = i64::MIN),
        with("not before the year 0", |m| m.next_retry_at_ms = YEAR_0_MS),
        with("not before -1", |m| m.next_retry_at_ms = -1),
        with("not before the end of 9999", |m| {
            m.next_retry_at_ms = LATEST_MS
        }),
        with("not before 10000", |m| m.next_retry_at_ms = LATEST_MS + 1).invalid(late),
        with("not before i64::MAX", |m| m.next_retry_at_ms = i64::MAX).invalid(late),
        with("first failed at i64::MIN", |m| {
            m.first_failed_at_ms = i64::MIN
        }),
        with("first failed in the year 0", |m| {
            m.first_failed_at_ms = YEAR_0_MS
        }),
        with("first failed in 1970", |m| m.first_failed_at_ms = 1)
            .reviewed("expired", &at.target, said),
        with("first failed at the end of 9999", |m| {
            m.first_failed_at_ms = LATEST_MS
        }),
        with("first failed in 10000", |m| {
            m.first_failed_at_ms = LATEST_MS + 1
        })
        .invalid(late),
        with("first failed at i64::MAX", |m| {
            m.first_failed_at_ms = i64::MAX
        })
        .invalid(late),
        limited("a pause of nothing", 0),
        limited("a pause until 9999", LATEST_MS),
        limited("a pause past 9999", LATEST_MS + 1).invalid(range),
        limited("a pause of -1", -1).invalid("retry_after_ms -1 is out of range"),
        limited("a pause of i64::MIN", i64::MIN).invalid(range),
        limited("a pause of i64::MAX", i64::MAX).invalid(range),
        with("a pause of i64::MAX that is not rate-limited", |m| {
            m.retry_after_ms = Some(i64::MAX);
        })
        .invalid(range),
    ]
}

/// Bytes that look random, are the same in every run, and are no RetryMessage.
fn noise(n: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        state.to_be_bytes()[0]
    };
    (0..n).map(|_| next()).collect()
}
