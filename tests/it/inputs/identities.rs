//! RetryMessages in protobuf: message ids, idempotency keys and texts.

use uuid::Uuid;

use super::table::{At, Case};

pub fn table(at: &At) -> Vec<Case> {
    let mut cases = ids(at);
    cases.extend(keys(at));
    cases.extend(words(at));
    cases
}

fn ids(at: &At) -> Vec<Case> {
    let with = |name: &str, id: &str| at.sent(name, |m| m.message_id = id.to_owned());
    let taken = Uuid::now_v7().to_string();
    vec![
        with("no id", ""),
        with("an id that is no UUID", "order 7"),
        with("an id of 10 kB", &"i".repeat(10_000)),
        with("an id with NUL", "order\0seven"),
        with("an id of a space", " "),
        with("an id in another script", "налог-7"),
        with("the nil UUID", &Uuid::nil().to_string())
            .checked(|back| assert_eq!(back.id(), Uuid::nil().to_string())),
        with("the greatest UUID", &Uuid::max().to_string()),
        with("a UUID in braces", &Uuid::now_v7().braced().to_string()),
        with("a UUID as a URN", &Uuid::now_v7().urn().to_string()),
        with("the first message of an id", &taken),
        with("the same id in capitals", &taken.to_uppercase()).reviewed(
            "conflict",
            &at.target,
            "the test said so",
        ),
    ]
}

fn keys(at: &At) -> Vec<Case> {
    let with = |name: &str, key: &str| at.sent(name, |m| m.idempotency_key = key.to_owned());
    vec![
        with("a key of 255 bytes", &"k".repeat(255)),
        with("a key of 256 bytes", &"k".repeat(256)).invalid("idempotency_key has 256 bytes"),
        with("a key of 100 kB", &"k".repeat(100_000)).invalid("idempotency_key has 100000 bytes"),
        with("a key with NUL", "ke\0y"),
        with("a key of 255 NULs", &"\0".repeat(255)),
        with("the first message of a key", "taken"),
        with("another message with that key", "taken").reviewed(
            "conflict",
            &at.target,
            "the test said so",
        ),
    ]
}

fn words(at: &At) -> Vec<Case> {
    vec![
        at.sent("NUL in every text", |m| {
            m.message_id = "id\0".into();
            m.error_reason = "broke\0here".into();
            m.category = "cat\0egory".into();
            m.tenant_id = "ten\0ant".into();
            m.correlation_id = "cor\0relation".into();
            m.trace_id = "tra\0ce".into();
            m.idempotency_key = "k\0".into();
            m.original_payload = b"NUL\0in every text".to_vec();
        })
        .checked(|back| {
            let error = back.text("x-original-error");
            assert_eq!(error.as_deref(), Some("broke\u{2400}here"));
        }),
        // The header holds 1,024 bytes of the error. After the `x` that is the middle of an
        // `é`, which has two bytes, so the cut is made before it.
        at.sent("an error of 300 kB", |m| {
            m.error_reason = format!("x{}", "é".repeat(150_000));
        })
        .checked(|back| {
            let error = back.text("x-original-error").expect("an error");
            assert_eq!(error, format!("x{}", "é".repeat(511)));
        }),
        at.sent("an error of 300 kB of NULs", |m| {
            m.error_reason = "\0".repeat(300_000);
        }),
        at.sent("an error of control characters", |m| {
            m.error_reason = "one\r\ntwo\u{1b}[31m\u{7}\u{202e}".into();
        }),
        at.sent("no error", |m| m.error_reason.clear()),
        at.sent("an error with SQL in it", |m| {
            m.error_reason = "[terminal] '; DROP TABLE retry_queue; --".into();
        })
        .reviewed("terminal", &at.target, "DROP TABLE"),
        at.sent("words of 100 kB each", |m| {
            for word in [
                &mut m.category,
                &mut m.tenant_id,
                &mut m.correlation_id,
                &mut m.trace_id,
            ] {
                *word = "ü".repeat(50_000);
            }
        }),
        at.sent("a category that no policy is for", |m| {
            m.category = "NO_SUCH_POLICY".into();
        }),
    ]
}
