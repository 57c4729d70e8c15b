//! AMQP properties and headers to the contract's `Properties`, and back, with the
//! exact type of each header.

use lapin::{
    BasicProperties,
    types::{AMQPValue, ByteArray, DecimalValue, FieldArray, FieldTable, LongString, ShortString},
};

use super::proto::{
    Decimal, HeaderList, HeaderTable, HeaderValue, Properties, Void, header_value::Kind,
};

/// Headers that must not travel back. A replayed `x-death` makes the broker drop the
/// message as a cycle; `CC` and `BCC` send copies to other queues.
const NEVER_REPLAYED: [&str; 4] = ["x-death", "x-delivery-count", "cc", "bcc"];

/// Headers nested deeper than this are cut off: they are a stranger's input, and are
/// read by recursion.
const MAX_DEPTH: usize = 16;

fn is_replayed(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    !NEVER_REPLAYED.contains(&name.as_str())
        && !name.starts_with("x-first-death-")
        && !name.starts_with("x-last-death-")
        && !crate::wire::republish::is_ours(&name)
}

/// The properties to restore on a republish. Left out are `expiration` (the message
/// would expire in its queue), `user-id` (the broker checks it against our login) and
/// `delivery-mode` (a republish is always persistent).
pub(super) fn to_amqp(properties: Properties) -> BasicProperties {
    let mut amqp = BasicProperties::default();
    let text = |s: String| {
        (!s.is_empty())
            .then(|| ShortString::try_new(s).ok())
            .flatten()
    };
    if let Some(v) = text(properties.content_type) {
        amqp = amqp.with_content_type(v);
    }
    if let Some(v) = text(properties.content_encoding) {
        amqp = amqp.with_content_encoding(v);
    }
    if let Some(v) = properties.priority.and_then(|p| u8::try_from(p).ok()) {
        amqp = amqp.with_priority(v);
    }
    if let Some(v) = text(properties.correlation_id) {
        amqp = amqp.with_correlation_id(v);
    }
    // The broker closes the channel over a direct reply-to that it did not hand out.
    if let Some(v) = text(properties.reply_to).filter(|v| !v.as_str().starts_with("amq.")) {
        amqp = amqp.with_reply_to(v);
    }
    if let Some(v) = properties.timestamp {
        amqp = amqp.with_timestamp(v);
    }
    if let Some(v) = text(properties.r#type) {
        amqp = amqp.with_type(v);
    }
    if let Some(v) = text(properties.app_id) {
        amqp = amqp.with_app_id(v);
    }
    if let Some(v) = text(properties.message_id) {
        amqp = amqp.with_message_id(v);
    }
    let headers = properties
        .headers
        .into_iter()
        .filter(|(name, _)| is_replayed(name));
    amqp.with_headers(table_to_amqp(headers, 0))
}

/// A delivery's own properties, in the form in which they are stored.
pub fn from_amqp(amqp: &BasicProperties) -> Properties {
    let text = |s: &Option<ShortString>| s.as_ref().map(ToString::to_string).unwrap_or_default();
    Properties {
        content_type: text(amqp.content_type()),
        content_encoding: text(amqp.content_encoding()),
        priority: amqp.priority().map(u32::from),
        correlation_id: text(amqp.correlation_id()),
        reply_to: text(amqp.reply_to()),
        timestamp: *amqp.timestamp(),
        r#type: text(amqp.kind()),
        app_id: text(amqp.app_id()),
        headers: amqp
            .headers()
            .as_ref()
            .map(|t| table_from_amqp(t, 0))
            .unwrap_or_default(),
        message_id: text(amqp.message_id()),
        exchange: String::new(),
        routing_key: None,
    }
}

/// An upper bound of the bytes that the headers take in an AMQP frame.
pub(super) fn size(properties: &Properties) -> usize {
    table_size(&properties.headers)
}

fn table_size(fields: &Fields) -> usize {
    fields
        .iter()
        .map(|(name, value)| 1 + name.len() + value_size(value))
        .sum()
}

/// A number that does not fit its type is written as the widest type, so each number
/// counts as many bytes as that one has.
fn value_size(value: &HeaderValue) -> usize {
    1 + match &value.kind {
        None | Some(Kind::Void(_)) => 0,
        Some(Kind::Boolean(_)) => 1,
        Some(Kind::Text(s)) => 4 + s.len(),
        Some(Kind::RawText(b) | Kind::Bytes(b)) => 4 + b.len(),
        Some(Kind::List(list)) => 4 + list.values.iter().map(value_size).sum::<usize>(),
        Some(Kind::Table(table)) => 4 + table_size(&table.values),
        Some(
            Kind::Int8(_)
            | Kind::Uint8(_)
            | Kind::Int16(_)
            | Kind::Uint16(_)
            | Kind::Int32(_)
            | Kind::Uint32(_)
            | Kind::Int64(_)
            | Kind::Float32(_)
            | Kind::Float64(_)
            | Kind::Decimal(_)
            | Kind::Timestamp(_),
        ) => 8,
    }
}

/// The bytes of the frame that carries these properties: all of them go in one.
pub fn header_frame_size(properties: &BasicProperties) -> usize {
    // The frame's own 8, class, weight and body size, and the flags.
    const FRAME: usize = 8 + 2 + 2 + 8 + 2;
    let texts = [
        properties.content_type(),
        properties.content_encoding(),
        properties.correlation_id(),
        properties.reply_to(),
        properties.expiration(),
        properties.message_id(),
        properties.kind(),
        properties.user_id(),
        properties.app_id(),
        properties.cluster_id(),
    ];
    let texts = texts
        .into_iter()
        .flatten()
        .map(|text| 1 + text.as_str().len());
    let delivery_mode = properties.delivery_mode().map_or(0, |_| 1);
    let priority = properties.priority().map_or(0, |_| 1);
    let timestamp = properties.timestamp().map_or(0, |_| 8);
    let headers = properties.headers().as_ref();
    FRAME
        + texts.sum::<usize>()
        + delivery_mode
        + priority
        + timestamp
        + headers.map_or(0, |table| 4 + amqp_table_size(table))
}

fn amqp_table_size(table: &FieldTable) -> usize {
    let fields = table.inner().iter();
    fields
        .map(|(name, value)| 1 + name.as_str().len() + amqp_value_size(value))
        .sum()
}

fn amqp_value_size(value: &AMQPValue) -> usize {
    1 + match value {
        AMQPValue::Void => 0,
        AMQPValue::Boolean(_) | AMQPValue::ShortShortInt(_) | AMQPValue::ShortShortUInt(_) => 1,
        AMQPValue::ShortInt(_) | AMQPValue::ShortUInt(_) => 2,
        AMQPValue::LongInt(_) | AMQPValue::LongUInt(_) | AMQPValue::Float(_) => 4,
        AMQPValue::DecimalValue(_) => 5,
        AMQPValue::LongLongInt(_) | AMQPValue::Double(_) | AMQPValue::Timestamp(_) => 8,
        AMQPValue::ShortString(text) => 1 + text.as_str().len(),
        AMQPValue::LongString(text) => 4 + text.as_bytes().len(),
        AMQPValue::ByteArray(bytes) => 4 + bytes.len(),
        AMQPValue::FieldArray(list) => {
            4 + list.as_slice().iter().map(amqp_value_size).sum::<usize>()
        }
        AMQPValue::FieldTable(table) => 4 + amqp_table_size(table),
    }
}

type Fields = std::collections::BTreeMap<String, HeaderValue>;

fn table_to_amqp(
    fields: impl IntoIterator<Item = (String, HeaderValue)>,
    depth: usize,
) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in fields {
        if let Ok(name) = ShortString::try_new(name) {
            table.insert(name, value_to_amqp(value, depth));
        }
    }
    table
}

fn table_from_amqp(table: &FieldTable, depth: usize) -> Fields {
    table
        .inner()
        .iter()
        .map(|(name, value)| (name.to_string(), value_from_amqp(value, depth)))
        .collect()
}

/// A number that does not fit its AMQP type is a producer's mistake. It is kept as the
/// widest type rather than refused.
fn value_to_amqp(value: HeaderValue, depth: usize) -> AMQPValue {
    let long = |n: i64| AMQPValue::LongLongInt(n);
    if depth > MAX_DEPTH {
        return AMQPValue::Void;
    }
    match value.kind {
        None | Some(Kind::Void(_)) => AMQPValue::Void,
        Some(Kind::Text(s)) => AMQPValue::LongString(LongString::from(s)),
        Some(Kind::RawText(b)) => AMQPValue::LongString(LongString::from(b)),
        Some(Kind::Boolean(b)) => AMQPValue::Boolean(b),
        Some(Kind::Int8(n)) => n
            .try_into()
            .map_or(long(n.into()), AMQPValue::ShortShortInt),
        Some(Kind::Uint8(n)) => n
            .try_into()
            .map_or(long(n.into()), AMQPValue::ShortShortUInt),
        Some(Kind::Int16(n)) => n.try_into().map_or(long(n.into()), AMQPValue::ShortInt),
        Some(Kind::Uint16(n)) => n.try_into().map_or(long(n.into()), AMQPValue::ShortUInt),
        Some(Kind::Int32(n)) => AMQPValue::LongInt(n),
        Some(Kind::Uint32(n)) => AMQPValue::LongUInt(n),
        Some(Kind::Int64(n)) => long(n),
        // Erlang has no such number, and the broker ends the connection over it.
        Some(Kind::Float32(x)) if !x.is_finite() => AMQPValue::LongString(x.to_string().into()),
        Some(Kind::Float64(x)) if !x.is_finite() => AMQPValue::LongString(x.to_string().into()),
        Some(Kind::Float32(x)) => AMQPValue::Float(x),
        Some(Kind::Float64(x)) => AMQPValue::Double(x),
        Some(Kind::Decimal(Decimal { scale, value })) => AMQPValue::DecimalValue(DecimalValue {
            scale: u8::try_from(scale).unwrap_or(u8::MAX),
            value,
        }),
        Some(Kind::Timestamp(t)) => AMQPValue::Timestamp(t),
        Some(Kind::List(list)) => AMQPValue::FieldArray(FieldArray::from(
            list.values
                .into_iter()
                .map(|v| value_to_amqp(v, depth + 1))
                .collect::<Vec<_>>(),
        )),
        Some(Kind::Table(t)) => AMQPValue::FieldTable(table_to_amqp(t.values, depth + 1)),
        Some(Kind::Bytes(b)) => AMQPValue::ByteArray(ByteArray::from(b)),
    }
}

fn value_from_amqp(value: &AMQPValue, depth: usize) -> HeaderValue {
    let kind = match value {
        _ if depth > MAX_DEPTH => Kind::Void(Void {}),
        AMQPValue::Boolean(b) => Kind::Boolean(*b),
        AMQPValue::ShortShortInt(n) => Kind::Int8((*n).into()),
        AMQPValue::ShortShortUInt(n) => Kind::Uint8((*n).into()),
        AMQPValue::ShortInt(n) => Kind::Int16((*n).into()),
        AMQPValue::ShortUInt(n) => Kind::Uint16((*n).into()),
        AMQPValue::LongInt(n) => Kind::Int32(*n),
        AMQPValue::LongUInt(n) => Kind::Uint32(*n),
        AMQPValue::LongLongInt(n) => Kind::Int64(*n),
        AMQPValue::Float(x) => Kind::Float32(*x),
        AMQPValue::Double(x) => Kind::Float64(*x),
        AMQPValue::DecimalValue(d) => Kind::Decimal(Decimal {
            scale: d.scale.into(),
            value: d.value,
        }),
        AMQPValue::ShortString(s) => Kind::Text(s.to_string()),
        AMQPValue::LongString(s) => match std::str::from_utf8(s.as_bytes()) {
            Ok(text) => Kind::Text(text.to_owned()),
            Err(_) => Kind::RawText(s.as_bytes().to_vec()),
        },
        AMQPValue::FieldArray(list) => Kind::List(HeaderList {
            values: list
                .as_slice()
                .iter()
                .map(|v| value_from_amqp(v, depth + 1))
                .collect(),
        }),
        AMQPValue::Timestamp(t) => Kind::Timestamp(*t),
        AMQPValue::FieldTable(t) => Kind::Table(HeaderTable {
            values: table_from_amqp(t, depth + 1),
        }),
        AMQPValue::ByteArray(b) => Kind::Bytes(b.as_slice().to_vec()),
        AMQPValue::Void => Kind::Void(Void {}),
    };
    HeaderValue { kind: Some(kind) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_type() -> FieldTable {
        let mut inner = FieldTable::default();
        inner.insert("deep".into(), AMQPValue::ShortInt(-7));
        let values = [
            AMQPValue::Boolean(true),
            AMQPValue::ShortShortInt(-8),
            AMQPValue::ShortShortUInt(200),
            AMQPValue::ShortInt(-300),
            AMQPValue::ShortUInt(60_000),
            AMQPValue::LongInt(i32::MIN),
            AMQPValue::LongUInt(u32::MAX),
            AMQPValue::LongLongInt(i64::MIN),
            AMQPValue::Float(1.5),
            AMQPValue::Double(-2.25),
            AMQPValue::DecimalValue(DecimalValue { scale: 2, value: 5 }),
            AMQPValue::LongString("text".into()),
            AMQPValue::LongString(LongString::from(vec![0xff, 0xfe])),
            AMQPValue::Timestamp(9),
            AMQPValue::FieldTable(inner),
            AMQPValue::FieldArray(vec![AMQPValue::Void, AMQPValue::Boolean(false)].into()),
            AMQPValue::ByteArray(vec![1, 2].into()),
            AMQPValue::Void,
        ];
        let mut table = FieldTable::default();
        for (n, value) in values.into_iter().enumerate() {
            table.insert(format!("h{n}").into(), value);
        }
        table
    }

    #[test]
    fn every_header_type_survives_the_round_trip_exactly() {
        let amqp = BasicProperties::default()
            .with_content_type("a/b".into())
            .with_content_encoding("gzip".into())
            .with_priority(4)
            .with_correlation_id("c".into())
            .with_reply_to("r".into())
            .with_timestamp(5)
            .with_type("t".into())
            .with_app_id("a".into())
            .with_message_id("m".into())
            .with_headers(every_type());
        assert_eq!(to_amqp(from_amqp(&amqp)), amqp);
    }

    #[test]
    fn what_would_hurt_is_not_replayed() {
        let mut headers = FieldTable::default();
        for name in [
            "x-death",
            "x-first-death-queue",
            "x-last-death-reason",
            "x-delivery-count",
            "CC",
            "BCC",
            "x-retry-count",
            "x-retry-id",
        ] {
            headers.insert(name.into(), AMQPValue::Boolean(true));
        }
        headers.insert("mine".into(), AMQPValue::Boolean(true));
        let amqp = BasicProperties::default()
            .with_expiration("0".into())
            .with_user_id("someone".into())
            .with_reply_to("amq.rabbitmq.reply-to".into())
            .with_headers(headers);
        let back = to_amqp(from_amqp(&amqp));
        let kept = back.headers().as_ref().unwrap();
        assert_eq!(kept.inner().len(), 1);
        assert!(kept.contains_key("mine"));
        assert_eq!(back.expiration(), &None);
        assert_eq!(back.user_id(), &None);
        assert_eq!(back.reply_to(), &None);
    }

    #[test]
    fn what_is_no_number_goes_back_as_text() {
        let kinds = [
            (Kind::Float32(f32::NAN), "NaN"),
            (Kind::Float32(f32::INFINITY), "inf"),
            (Kind::Float64(f64::NAN), "NaN"),
            (Kind::Float64(f64::NEG_INFINITY), "-inf"),
        ];
        for (kind, text) in kinds {
            let header = HeaderValue { kind: Some(kind) };
            let size = value_size(&header);
            let back = value_to_amqp(header, 0);
            assert_eq!(back, AMQPValue::LongString(text.into()));
            assert!(size > 4 + text.len(), "no larger than it was measured");
        }
    }

    #[test]
    fn deep_nesting_is_cut_and_long_names_are_dropped() {
        let mut value = AMQPValue::Void;
        for _ in 0..100 {
            let mut table = FieldTable::default();
            table.insert("n".into(), value);
            value = AMQPValue::FieldTable(table);
        }
        let mut headers = FieldTable::default();
        headers.insert("deep".into(), value);
        let mut kept = from_amqp(&BasicProperties::default().with_headers(headers));
        kept.headers.insert("n".repeat(300), HeaderValue::default());
        let back = to_amqp(kept);
        assert_eq!(back.headers().as_ref().unwrap().inner().len(), 1);
    }
}
