//! Raw dead letters with hostile headers.

use lapin::{
    BasicProperties,
    types::{AMQPValue, DecimalValue, FieldTable, LongString},
};

use super::table::{At, Case};

pub fn table(at: &At) -> Vec<Case> {
    let mut cases = deaths(at);
    cases.extend(identities(at));
    cases.extend(others(at));
    cases
}

fn text(text: impl Into<Vec<u8>>) -> AMQPValue {
    AMQPValue::LongString(LongString::from(text.into()))
}

fn list(values: Vec<AMQPValue>) -> AMQPValue {
    AMQPValue::FieldArray(values.into())
}

fn table_of<'n>(fields: impl IntoIterator<Item = (&'n str, AMQPValue)>) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in fields {
        table.insert(name.into(), value);
    }
    table
}

/// An entry of `x-death` that names this queue.
fn death(queue: AMQPValue) -> AMQPValue {
    AMQPValue::FieldTable(table_of([
        ("queue", queue),
        ("reason", text("rejected")),
        ("count", AMQPValue::LongLongInt(1)),
        ("exchange", text("")),
    ]))
}

/// A case that sends its name as a dead letter, with these headers and no others.
fn with_headers(at: &At, name: &str, headers: FieldTable) -> Case {
    let case = at.raw(name, name);
    Case {
        door: at.dead_letters.clone(),
        ..case.with(BasicProperties::default().with_headers(headers))
    }
}

fn deaths(at: &At) -> Vec<Case> {
    let died =
        |name: &str, deaths: AMQPValue| with_headers(at, name, table_of([("x-death", deaths)]));
    let died_in = |name: &str, queue: &str| died(name, list(vec![death(text(queue))]));
    let in_target = || death(text(at.target.as_str()));
    let saying = |name: &str, field: (&'static str, AMQPValue)| {
        let mut entry = table_of([("queue", text(at.target.as_str()))]);
        entry.insert(field.0.into(), field.1);
        died(name, list(vec![AMQPValue::FieldTable(entry)]))
    };
    let (none, nameless) = ("it has no x-death header", "x-death does not name a queue");
    let own = "it is one of the scheduler's own queues";
    let no_utf_8 = [at.missing.as_bytes(), b"\xff"].concat();
    let lossy = String::from_utf8_lossy(&no_utf_8).into_owned();
    vec![
        with_headers(at, "no x-death", FieldTable::default()).invalid(none),
        died("x-death: true", AMQPValue::Boolean(true)).invalid(none),
        died("x-death: a text", text(at.target.as_str())).invalid(none),
        died("x-death: a death without a list", in_target()).invalid(none),
        died("x-death: nothing", AMQPValue::Void).invalid(none),
        died("x-death: no deaths", list(vec![])).invalid(none),
        died(
            "x-death: a list of texts",
            list(vec![text("x"), in_target()]),
        )
        .invalid(none),
        died(
            "x-death: a list of lists",
            list(vec![list(vec![in_target()])]),
        )
        .invalid(none),
        died(
            "x-death: an empty death",
            list(vec![AMQPValue::FieldTable(table_of([]))]),
        )
        .invalid(nameless),
        died(
            "x-death: a queue that is a number",
            list(vec![death(AMQPValue::LongInt(7))]),
        )
        .invalid(nameless),
        died("x-death: a queue that is bytes", {
            list(vec![death(AMQPValue::ByteArray(
                at.target.as_bytes().into(),
            ))])
        })
        .invalid(nameless),
        died_in("x-death: a queue without a name", "").invalid("original_queue is empty"),
        died_in("x-death: a queue of 256 bytes", &"q".repeat(256)).invalid("more than 255"),
        died_in("x-death: a queue with CRLF", "a\r\nb").invalid("control characters"),
        died(
            "x-death: a queue that is no UTF-8",
            list(vec![death(text(no_utf_8))]),
        )
        .reviewed("unroutable", &lossy, "does not exist"),
        died_in("x-death: the intake queue", &at.intake).invalid(own),
        died_in("x-death: the dead-letter queue", &at.dead_letters).invalid(own),
        died_in("x-death: the review queue", &at.review).invalid(own),
        died_in("x-death: a queue of the broker", "amq.gen-7").invalid("belong to the broker"),
        died_in("x-death: a queue of somebody else", &at.forbidden).invalid("ALLOWED_QUEUES"),
        died("x-death: 500 deaths", list(vec![in_target(); 500])),
        saying(
            "x-death: a count of i64::MIN",
            ("count", AMQPValue::LongLongInt(i64::MIN)),
        ),
        saying(
            "x-death: a count of i64::MAX",
            ("count", AMQPValue::LongLongInt(i64::MAX)),
        ),
        saying("x-death: a count that is a text", ("count", text("many"))),
        saying(
            "x-death: a reason that is a number",
            ("reason", AMQPValue::LongInt(7)),
        )
        .checked(|back| {
            let error = back.text("x-original-error").expect("an error");
            assert!(error.ends_with("an unknown reason"), "{error}");
        }),
        saying(
            "x-death: a reason of 50 kB",
            ("reason", text("r".repeat(50_000))),
        ),
        saying(
            "x-death: a reason with NUL and no UTF-8",
            ("reason", text(b"\0\xff".as_slice())),
        ),
        saying(
            "x-death: a reason that is terminal",
            ("reason", text("[terminal]")),
        )
        .reviewed("terminal", &at.target, "[terminal]"),
    ]
}

/// A case that sends a dead letter from the target queue, with one more header.
fn with(at: &At, name: &str, header: &str, value: AMQPValue) -> Case {
    let died = list(vec![death(text(at.target.as_str()))]);
    with_headers(at, name, table_of([("x-death", died), (header, value)]))
}

/// Dead letters with headers that the service itself writes, such as `x-retry-count`.
fn identities(at: &At) -> Vec<Case> {
    let counted = |name, value| with(at, name, "x-retry-count", value);
    let first = |case: Case| case.checked(|back| assert_eq!(back.number("x-retry-count"), Some(1)));
    let known = |name, id: AMQPValue| with(at, name, "x-retry-id", id);
    vec![
        first(counted(
            "a count of ours: i64::MIN",
            AMQPValue::LongLongInt(i64::MIN),
        )),
        first(counted(
            "a count of ours: i64::MAX",
            AMQPValue::LongLongInt(i64::MAX),
        )),
        first(counted("a count of ours: -1", AMQPValue::ShortShortInt(-1))),
        first(counted("a count of ours: a text", text("2"))),
        first(counted("a count of ours: 1.5", AMQPValue::Double(1.5))),
        first(counted(
            "a count of ours: a table",
            AMQPValue::FieldTable(table_of([])),
        )),
        counted("a count of ours: INT_MAX", AMQPValue::LongInt(i32::MAX)).reviewed(
            "exhausted",
            &at.target,
            "dead-lettered from",
        ),
        known("an id of ours: no UUID", text("the id of a dead letter")),
        known("an id of ours: empty", text("")),
        known("an id of ours: 10 kB", text("d".repeat(10_000))),
        known("an id of ours: NUL", text("\0")),
        known("an id of ours: no UTF-8", text(b"\xff".as_slice())),
        known("an id of ours: a number", AMQPValue::LongInt(7)),
        with(
            at,
            "a budget of ours: INT_MAX",
            "x-max-retries",
            AMQPValue::LongInt(i32::MAX),
        )
        .checked(|back| assert_eq!(back.number("x-max-retries"), Some(3))),
    ]
}

fn others(at: &At) -> Vec<Case> {
    let own = |name: &str, change: fn(BasicProperties) -> BasicProperties| {
        let case = with(at, name, "h", AMQPValue::Void);
        let properties = change(case.properties.clone());
        case.with(properties)
    };
    let mut deep = AMQPValue::Boolean(true);
    for _ in 0..300 {
        deep = AMQPValue::FieldTable(table_of([("n", deep)]));
    }
    let decimal = DecimalValue {
        scale: 255,
        value: u32::MAX,
    };
    let every = list(vec![
        AMQPValue::DecimalValue(decimal),
        AMQPValue::Timestamp(u64::MAX),
        AMQPValue::Void,
        AMQPValue::ByteArray(vec![0, 0xff].into()),
        AMQPValue::Float(f32::MAX),
        AMQPValue::LongUInt(u32::MAX),
        text(b"\xff".as_slice()),
    ]);
    vec![
        with(at, "a header 300 tables deep", "deep", deep),
        with(at, "every odd AMQP type", "odd", every).checked(|back| {
            let headers = back.properties.headers().as_ref().expect("headers");
            let odd = headers.inner()["odd"]
                .as_array()
                .expect("a list")
                .as_slice();
            assert_eq!(odd.len(), 7);
            assert_eq!(odd[1], AMQPValue::Timestamp(u64::MAX));
            assert_eq!(odd[6], text(b"\xff".as_slice()));
        }),
        with(
            at,
            "a header of 70 kB on a dead letter",
            "huge",
            text("h".repeat(70_000)),
        )
        .invalid("properties have"),
        with(
            at,
            "an emoji as a name on a dead letter",
            "🐇",
            AMQPValue::Void,
        ),
        with(
            at,
            "NUL in a name on a dead letter",
            "a\0b",
            AMQPValue::Void,
        ),
        with(
            at,
            "a name of 255 bytes on a dead letter",
            &"n".repeat(255),
            AMQPValue::Void,
        ),
        with(at, "copies to strangers", "CC", list(vec![text("nobody")])).checked(|back| {
            let headers = back.properties.headers().as_ref().expect("headers");
            assert!(!headers.contains_key("CC"));
        }),
        own("a dead letter said to be JSON", |p| {
            p.with_content_type("application/json".into())
        }),
        own("a dead letter of priority 255", |p| p.with_priority(255)),
        own("a dead letter that expires", |p| {
            p.with_expiration("600000".into())
        })
        .checked(|back| assert_eq!(*back.properties.expiration(), None)),
        own("a dead letter with an id of nothing", |p| {
            p.with_message_id("".into())
        }),
        own("a dead letter with an id with NUL", |p| {
            p.with_message_id("\0".into())
        }),
        own("a dead letter with an id of 255 bytes", |p| {
            p.with_message_id("i".repeat(255).into())
        }),
        own("a dead letter that is not persistent", |p| {
            p.with_delivery_mode(1)
        })
        .checked(|back| assert_eq!(*back.properties.delivery_mode(), Some(2))),
    ]
}
