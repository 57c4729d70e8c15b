//! RetryMessages in protobuf: the properties to restore, and the properties of the
//! delivery itself.

use std::collections::BTreeMap;

use lapin::{
    BasicProperties,
    types::{AMQPValue, FieldTable},
};
use retry_scheduler::wire::proto::{
    Decimal, HeaderList, HeaderTable, HeaderValue, Properties, Void, header_value::Kind,
};

use super::table::{At, Case};

type Headers = BTreeMap<String, HeaderValue>;

pub fn table(at: &At) -> Vec<Case> {
    let mut cases = restored(at);
    cases.extend(headers(at));
    cases.extend(own(at));
    cases
}

fn header(name: impl Into<String>, kind: Kind) -> Headers {
    Headers::from([(name.into(), HeaderValue { kind: Some(kind) })])
}

fn text(text: impl Into<String>) -> Kind {
    Kind::Text(text.into())
}

/// A value inside `depth` lists, each within the next.
fn nested(depth: usize) -> Kind {
    (0..depth).fold(Kind::Boolean(true), |inner, _| {
        let values = vec![HeaderValue { kind: Some(inner) }];
        Kind::List(HeaderList { values })
    })
}

fn restored(at: &At) -> Vec<Case> {
    let with = |name: &str, p: Properties| at.sent(name, |m| m.properties = Some(p));
    vec![
        with(
            "properties that close channels",
            Properties {
                reply_to: "amq.rabbitmq.reply-to".into(),
                // AMQP holds at most 255 bytes here.
                content_type: "t".repeat(300),
                priority: Some(4711),
                timestamp: Some(u64::MAX),
                ..Properties::default()
            },
        )
        .checked(|back| {
            assert_eq!(*back.properties.reply_to(), None);
            assert_eq!(*back.properties.content_type(), None);
            assert_eq!(*back.properties.priority(), None);
        }),
        with(
            "a reply-to that is the intake queue",
            Properties {
                reply_to: at.intake.clone(),
                ..Properties::default()
            },
        ),
        with(
            "gzip, priority 255 and NULs in properties",
            Properties {
                content_encoding: "gzip".into(),
                priority: Some(255),
                app_id: "a\0pp".into(),
                r#type: "\0".into(),
                ..Properties::default()
            },
        )
        .checked(|back| {
            assert_eq!(*back.properties.priority(), Some(255));
            assert_eq!(*back.properties.content_encoding(), Some("gzip".into()));
        }),
        with(
            "a property of 70 kB",
            Properties {
                app_id: "a".repeat(70_000),
                ..Properties::default()
            },
        )
        .invalid("properties have 7"),
    ]
}

fn headers(at: &At) -> Vec<Case> {
    let with = |name: &str, headers: Headers| {
        at.sent(name, |m| {
            m.properties = Some(Properties {
                headers,
                ..Properties::default()
            });
        })
    };
    let many = (0..300).flat_map(|n| header(format!("label-{n}"), Kind::Int32(n)));
    let harmful = ["x-death", "CC", "BCC", "x-delivery-count", "X-Retry-Id"];
    let harmful = harmful
        .into_iter()
        .flat_map(|h| header(h, text("elsewhere")));
    let zero = HeaderValue {
        kind: Some(Kind::Int64(0)),
    };
    let zeros = Kind::List(HeaderList {
        values: vec![zero; 15_000],
    });
    let odd_numbers = [
        Kind::Float64(f64::NAN),
        Kind::Float64(f64::NEG_INFINITY),
        Kind::Float32(f32::NAN),
        Kind::Float32(f32::INFINITY),
    ];
    let odd_numbers = odd_numbers.into_iter().enumerate();
    vec![
        with("300 headers", many.collect())
            .checked(|back| assert_eq!(back.number("label-299"), Some(299))),
        with(
            "headers that must not travel",
            harmful.chain(header("kept", Kind::Int32(7))).collect(),
        )
        .checked(|back| {
            assert_eq!(back.number("kept"), Some(7));
            let headers = back.properties.headers().as_ref().expect("headers");
            assert!(!headers.contains_key("x-death") && !headers.contains_key("CC"));
        }),
        with(
            "a header name of 255 bytes",
            header("n".repeat(255), text("x")),
        )
        .checked(|back| assert!(back.text(&"n".repeat(255)).is_some())),
        with(
            "a header name of 300 bytes",
            header("n".repeat(300), text("x")),
        )
        .checked(|back| assert!(back.text(&"n".repeat(300)).is_none())),
        with("a header name of nothing", header("", text("x"))),
        with("a header name with NUL", header("n\0n", text("x"))),
        with("a header name with an emoji", header("🐇", text("a\0b")))
            .checked(|back| assert_eq!(back.text("🐇").as_deref(), Some("a\0b"))),
        with(
            "a header that is no text",
            header("raw", Kind::RawText(vec![0xff, 0])),
        ),
        with(
            "a header of 70 kB",
            header("huge", text("h".repeat(70_000))),
        )
        .invalid("properties have"),
        // In protobuf these zeros take about 60 kB, which is within the limit of 64 KiB. In
        // AMQP they take 135 kB.
        with("a header of 15,000 zeros", header("wide", zeros)).invalid("properties have"),
        with("a header 40 lists deep", header("deep", nested(40))),
        with("a header 1,000 lists deep", header("deep", nested(1000))).invalid("recursion limit"),
        with(
            "headers that are no numbers",
            odd_numbers
                .flat_map(|(n, kind)| header(format!("n{n}"), kind))
                .collect(),
        )
        .checked(|back| assert_eq!(back.text("n0").as_deref(), Some("NaN"))),
        with("every odd header type", every_odd_type()),
    ]
}

fn every_odd_type() -> Headers {
    let table = HeaderTable {
        values: header("in", Kind::Int16(i32::MAX)),
    };
    [
        Kind::Decimal(Decimal {
            scale: u32::MAX,
            value: u32::MAX,
        }),
        Kind::Timestamp(u64::MAX),
        Kind::Void(Void {}),
        Kind::Bytes(vec![0; 100]),
        Kind::Int8(i32::MIN),
        Kind::Uint8(u32::MAX),
        Kind::Uint16(u32::MAX),
        Kind::Uint32(u32::MAX),
        Kind::Int64(i64::MIN),
        Kind::Float32(f32::MIN_POSITIVE),
        Kind::Float64(-0.0),
        Kind::Table(table),
        nested(3),
    ]
    .into_iter()
    .enumerate()
    .flat_map(|(n, kind)| header(format!("h{n}"), kind))
    .chain([("none".to_owned(), HeaderValue::default())])
    .collect()
}

/// Properties of the delivery itself. Its content type says how to read the body; the
/// others have no effect on where the message ends.
fn own(at: &At) -> Vec<Case> {
    let sent = |name: &str, properties| at.sent(name, |_| ()).with(properties);
    let plain = BasicProperties::default;
    let mut deep = AMQPValue::Void;
    for _ in 0..300 {
        deep = AMQPValue::FieldArray(vec![deep].into());
    }
    let mut deep_headers = FieldTable::default();
    deep_headers.insert("deep".into(), deep);
    vec![
        sent("protobuf said to be JSON", plain())
            .typed("application/json")
            .invalid("not a RetryMessage in JSON"),
        sent("protobuf said to be text", plain()).typed("text/plain"),
        sent("protobuf of a type of 255 bytes", plain()).typed(&"t".repeat(255)),
        sent(
            "protobuf said to be gzip",
            plain().with_content_encoding("gzip".into()),
        ),
        sent("priority 255", plain().with_priority(255)),
        sent("not persistent", plain().with_delivery_mode(1)),
        sent(
            "a message that expires",
            plain().with_expiration("600000".into()),
        ),
        sent(
            "a reply-to of its own queue",
            plain().with_reply_to(at.intake.as_str().into()),
        ),
        sent(
            "a timestamp past all time",
            plain().with_timestamp(u64::MAX),
        ),
        at.raw("no message, an id with NUL", b"\xff\xff".as_slice())
            .with(plain().with_message_id("a\0b".into()))
            .invalid("not a RetryMessage"),
        at.raw("no message, headers 300 deep", b"\xff".as_slice())
            .with(plain().with_headers(deep_headers))
            .invalid("not a RetryMessage"),
    ]
}
