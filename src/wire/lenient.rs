//! Reads AMQP content headers that the AMQP client refuses.
//!
//! AMQP asks of a short text, such as `content_type` or the name of a header, that it be
//! UTF-8, but RabbitMQ takes and delivers any bytes. The client ends the connection over such a
//! message. Here it is read for people: what is no UTF-8 is replaced, and told in hex.

use std::fmt::Write;

use lapin::{
    BasicProperties,
    protocol::basic::parse_properties,
    types::{AMQPValue, DecimalValue, FieldArray, FieldTable, ShortString},
};

/// Tables and lists that are nested deeper than this are kept as bytes: they are a stranger's
/// input, and are read by recursion.
const MAX_DEPTH: usize = 32;

/// How many bytes of an unreadable text are shown.
const SHOWN_BYTES: usize = 255;

/// The most bytes of a short text.
const SHORT: usize = 255;

/// A message's properties, and what is wrong with them.
#[derive(Debug, Default)]
pub struct Lenient {
    /// All that could be read; what is no UTF-8 is replaced.
    pub properties: BasicProperties,
    /// What the AMQP client cannot read, each with its bytes in hex. Empty when it can
    /// read all.
    pub problems: Vec<String>,
}

/// What `basic.get-ok` says of a message.
#[derive(Debug, PartialEq, Eq)]
pub struct GetOk {
    /// By which the message is acknowledged.
    pub delivery_tag: u64,
    /// Whether the broker may have delivered it before.
    pub redelivered: bool,
    /// What the AMQP client could not read.
    pub problems: Vec<String>,
}

/// Reads the arguments of `basic.get-ok`; none when they are cut off.
pub fn get_ok(arguments: &[u8]) -> Option<GetOk> {
    let mut input = Input {
        bytes: arguments,
        problems: Vec::new(),
    };
    let delivery_tag = u64::from_be_bytes(input.take()?);
    let redelivered = input.octet()? & 1 == 1;
    input.short("exchange")?;
    input.short("routing_key")?;
    Some(GetOk {
        delivery_tag,
        redelivered,
        problems: input.problems,
    })
}

/// Reads the payload of a content header: the size of the body, and the properties. None
/// when not even the size of the body is there.
pub fn content_header(payload: &[u8]) -> Option<(u64, Lenient)> {
    let size = u64::from_be_bytes(payload.get(4..12)?.try_into().ok()?);
    let raw = payload.get(12..)?;
    if let Ok(([], properties)) = parse_properties(raw) {
        let lenient = Lenient {
            properties,
            problems: Vec::new(),
        };
        return Some((size, lenient));
    }
    let mut input = Input {
        bytes: raw,
        problems: Vec::new(),
    };
    let mut properties = BasicProperties::default();
    let complete = read_properties(&mut input, &mut properties).is_some();
    let mut problems = input.problems;
    if !complete || problems.is_empty() {
        problems.push(format!(
            "the properties are malformed: {}",
            hex(raw, SHOWN_BYTES)
        ));
    }
    let lenient = Lenient {
        properties,
        problems,
    };
    Some((size, lenient))
}

/// Reads all properties, in the order in which AMQP writes them. None when they are cut off; what
/// came before is read.
fn read_properties(input: &mut Input<'_>, properties: &mut BasicProperties) -> Option<()> {
    let flags = u16::from_be_bytes(input.take()?);
    let has = |n: u16| flags & (1 << (15 - n)) != 0;
    let mut read = std::mem::take(properties);
    // Each step takes what was read so far, so that it is kept when the next one fails.
    macro_rules! property {
        ($n:literal, $with:ident, $value:expr) => {
            if has($n) {
                let Some(value) = $value else {
                    *properties = read;
                    return None;
                };
                read = read.$with(value);
            }
        };
    }
    property!(0, with_content_type, input.short("content_type"));
    property!(1, with_content_encoding, input.short("content_encoding"));
    property!(2, with_headers, input.headers());
    property!(3, with_delivery_mode, input.octet());
    property!(4, with_priority, input.octet());
    property!(5, with_correlation_id, input.short("correlation_id"));
    property!(6, with_reply_to, input.short("reply_to"));
    property!(7, with_expiration, input.short("expiration"));
    property!(8, with_message_id, input.short("message_id"));
    property!(9, with_timestamp, input.take().map(u64::from_be_bytes));
    property!(10, with_type, input.short("type"));
    property!(11, with_user_id, input.short("user_id"));
    property!(12, with_app_id, input.short("app_id"));
    property!(13, with_cluster_id, input.short("cluster_id"));
    *properties = read;
    Some(())
}

struct Input<'b> {
    bytes: &'b [u8],
    problems: Vec<String>,
}

impl<'b> Input<'b> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (now, later) = self.bytes.split_first_chunk()?;
        self.bytes = later;
        Some(*now)
    }

    fn octet(&mut self) -> Option<u8> {
        self.take().map(|[octet]| octet)
    }

    fn slice(&mut self, len: usize) -> Option<&'b [u8]> {
        let (now, later) = self.bytes.split_at_checked(len)?;
        self.bytes = later;
        Some(now)
    }

    fn long_slice(&mut self) -> Option<&'b [u8]> {
        let len = u32::from_be_bytes(self.take()?);
        self.slice(usize::try_from(len).ok()?)
    }

    fn short(&mut self, name: &str) -> Option<ShortString> {
        let len = self.octet()?;
        let raw = self.slice(len.into())?;
        if std::str::from_utf8(raw).is_err() {
            let shown = hex(raw, SHOWN_BYTES);
            self.problems.push(format!("{name} is not UTF-8: {shown}"));
        }
        Some(short(&String::from_utf8_lossy(raw)))
    }

    fn headers(&mut self) -> Option<FieldTable> {
        let raw = self.long_slice()?;
        Some(self.table(raw, 0))
    }

    /// Reads a table. From an entry on that cannot be read, the rest is kept as bytes.
    fn table(&mut self, raw: &'b [u8], depth: usize) -> FieldTable {
        let mut table = FieldTable::default();
        let mut input = Self {
            bytes: raw,
            problems: Vec::new(),
        };
        while !input.bytes.is_empty() {
            let before = input.bytes;
            let name = input.short("the name of a header");
            let value = name.as_ref().and_then(|_| input.value(depth));
            if let (Some(name), Some(value)) = (name, value) {
                // Two names may be the same once their bytes are replaced.
                let name = if table.contains_key(name.as_str()) {
                    short(&hex(before, SHORT))
                } else {
                    name
                };
                table.insert(name, value);
            } else {
                let shown = hex(before, SHOWN_BYTES);
                input
                    .problems
                    .push(format!("headers are malformed: {shown}"));
                table.insert(
                    short("unreadable headers"),
                    AMQPValue::ByteArray(before.into()),
                );
                break;
            }
        }
        self.problems.append(&mut input.problems);
        table
    }

    fn list(&mut self, raw: &'b [u8], depth: usize) -> FieldArray {
        let mut list = FieldArray::default();
        let mut input = Self {
            bytes: raw,
            problems: Vec::new(),
        };
        while !input.bytes.is_empty() {
            let before = input.bytes;
            if let Some(value) = input.value(depth) {
                list.push(value);
            } else {
                let shown = hex(before, SHOWN_BYTES);
                input.problems.push(format!("a list is malformed: {shown}"));
                list.push(AMQPValue::ByteArray(before.into()));
                break;
            }
        }
        self.problems.append(&mut input.problems);
        list
    }

    fn value(&mut self, depth: usize) -> Option<AMQPValue> {
        Some(match self.octet()? {
            b't' => AMQPValue::Boolean(self.octet()? != 0),
            b'b' => AMQPValue::ShortShortInt(i8::from_be_bytes(self.take()?)),
            b'B' => AMQPValue::ShortShortUInt(self.octet()?),
            b's' | b'U' => AMQPValue::ShortInt(i16::from_be_bytes(self.take()?)),
            b'u' => AMQPValue::ShortUInt(u16::from_be_bytes(self.take()?)),
            b'I' => AMQPValue::LongInt(i32::from_be_bytes(self.take()?)),
            b'i' => AMQPValue::LongUInt(u32::from_be_bytes(self.take()?)),
            b'l' | b'L' => AMQPValue::LongLongInt(i64::from_be_bytes(self.take()?)),
            b'f' => AMQPValue::Float(f32::from_be_bytes(self.take()?)),
            b'd' => AMQPValue::Double(f64::from_be_bytes(self.take()?)),
            b'D' => AMQPValue::DecimalValue(DecimalValue {
                scale: self.octet()?,
                value: u32::from_be_bytes(self.take()?),
            }),
            b'S' => AMQPValue::LongString(self.long_slice()?.into()),
            b'T' => AMQPValue::Timestamp(u64::from_be_bytes(self.take()?)),
            b'x' => AMQPValue::ByteArray(self.long_slice()?.into()),
            b'V' => AMQPValue::Void,
            b'A' | b'F' if depth == MAX_DEPTH => AMQPValue::ByteArray(self.long_slice()?.into()),
            b'A' => {
                let raw = self.long_slice()?;
                AMQPValue::FieldArray(self.list(raw, depth + 1))
            }
            b'F' => {
                let raw = self.long_slice()?;
                AMQPValue::FieldTable(self.table(raw, depth + 1))
            }
            _ => return None,
        })
    }
}

/// A short text; it is cut if the replacements made it too long.
fn short(text: &str) -> ShortString {
    ShortString::try_new(super::cut(text, SHORT)).unwrap_or_default()
}

/// The first `most` bytes in hex.
fn hex(bytes: &[u8], most: usize) -> String {
    let mut text = String::new();
    for byte in bytes.iter().take(most) {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
    }
    if bytes.len() > most {
        let _ = write!(text, "… ({} bytes)", bytes.len());
    }
    text
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A content header with these property flags and values, for a body of 5 bytes.
    fn header(flags: u16, values: &[u8]) -> Vec<u8> {
        let mut payload = vec![0, 60, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5];
        payload.extend(flags.to_be_bytes());
        payload.extend(values);
        payload
    }

    fn table(entries: &[u8]) -> Vec<u8> {
        let mut table = u32::try_from(entries.len()).unwrap().to_be_bytes().to_vec();
        table.extend(entries);
        table
    }

    #[test]
    fn what_the_client_can_read_is_read_as_the_client_reads_it() {
        let (size, read) = content_header(&header(0x8020, b"\x04text\x04type")).unwrap();
        assert_eq!(size, 5);
        assert!(read.problems.is_empty(), "{:?}", read.problems);
        let expected = BasicProperties::default()
            .with_content_type("text".into())
            .with_type("type".into());
        assert_eq!(read.properties, expected);
    }

    #[test]
    fn a_property_that_is_no_utf_8_is_named_and_shown_and_the_others_are_read() {
        // content_type, headers, delivery_mode, priority, message_id, timestamp.
        let mut values = b"\x02\xff\xfe".to_vec();
        values.extend(table(b"\x01aI\x00\x00\x00\x07"));
        values.extend(b"\x02\x09\x02id\x00\x00\x00\x00\x00\x00\x00\x08");
        let (_, read) = content_header(&header(0b1011_1000_1100_0000, &values)).unwrap();
        assert_eq!(read.problems, ["content_type is not UTF-8: fffe"]);
        let mut headers = FieldTable::default();
        headers.insert("a".into(), AMQPValue::LongInt(7));
        let expected = BasicProperties::default()
            .with_content_type("\u{fffd}\u{fffd}".into())
            .with_headers(headers)
            .with_delivery_mode(2)
            .with_priority(9)
            .with_message_id("id".into())
            .with_timestamp(8);
        assert_eq!(read.properties, expected);
    }

    #[test]
    fn names_of_headers_that_become_the_same_are_kept_apart() {
        let entries = table(b"\x01\xffI\x00\x00\x00\x01\x01\xfeI\x00\x00\x00\x02");
        let (_, read) = content_header(&header(0x2000, &entries)).unwrap();
        assert_eq!(read.problems.len(), 2, "{:?}", read.problems);
        assert!(read.problems[0].ends_with("is not UTF-8: ff"));
        let headers = read.properties.headers().clone().unwrap();
        assert_eq!(headers.inner().len(), 2, "{headers:?}");
    }

    #[test]
    fn headers_of_an_unknown_type_are_kept_as_bytes() {
        let entries = table(b"\x01aI\x00\x00\x00\x01\x01b?rest");
        let (_, read) = content_header(&header(0x2000, &entries)).unwrap();
        assert_eq!(read.problems.len(), 1, "{:?}", read.problems);
        let headers = read.properties.headers().clone().unwrap();
        assert_eq!(headers.inner()["a"], AMQPValue::LongInt(1));
        let rest = AMQPValue::ByteArray(b"\x01b?rest"[..].into());
        assert_eq!(headers.inner()["unreadable headers"], rest);
    }

    #[test]
    fn every_kind_of_header_is_read_as_the_client_reads_it() {
        let mut entries = Vec::new();
        for value in [
            &b"t\x01"[..],
            b"b\xff",
            b"B\xff",
            b"s\xff\xff",
            b"U\x01\x02",
            b"u\xff\xff",
            b"I\xff\xff\xff\xff",
            b"i\xff\xff\xff\xff",
            b"l\xff\xff\xff\xff\xff\xff\xff\xff",
            b"L\x01\x02\x03\x04\x05\x06\x07\x08",
            b"f\x40\x49\x0f\xdb",
            b"d\x40\x09\x21\xfb\x54\x44\x2d\x18",
            b"D\x02\x00\x00\x00\x07",
            b"S\x00\x00\x00\x02\xff\xfe",
            b"A\x00\x00\x00\x04t\x01t\x00",
            b"T\x00\x00\x00\x00\x00\x00\x00\x09",
            b"F\x00\x00\x00\x05\x02abt\x01",
            b"x\x00\x00\x00\x01\xff",
            b"V",
        ] {
            entries.extend([2, b'h', value[0]]);
            entries.extend(value);
        }
        let good = header(0x2000, &table(&entries));
        // The same headers behind a content type that the client refuses.
        let mut values = b"\x01\xff".to_vec();
        values.extend(table(&entries));
        let bad = header(0xa000, &values);
        let (_, strict) = content_header(&good).unwrap();
        let (_, lenient) = content_header(&bad).unwrap();
        assert!(strict.problems.is_empty());
        assert_eq!(lenient.problems.len(), 1, "{:?}", lenient.problems);
        assert_eq!(strict.properties.headers(), lenient.properties.headers());
        assert_eq!(
            strict.properties.headers().as_ref().unwrap().inner().len(),
            19
        );
    }

    #[test]
    fn what_comes_before_a_cut_is_kept() {
        let (_, read) = content_header(&header(0xc000, b"\x04text\x09gz")).unwrap();
        let expected = BasicProperties::default().with_content_type("text".into());
        assert_eq!(read.properties, expected);
        assert_eq!(
            read.problems,
            ["the properties are malformed: c000047465787409677a"]
        );
        assert!(content_header(b"\x00\x3c").is_none());
    }

    #[test]
    fn the_answer_to_get_is_read_though_a_routing_key_is_no_utf_8() {
        let read = get_ok(b"\0\0\0\0\0\0\0\x07\x01\x00\x02\xffk\0\0\0\x03").unwrap();
        assert_eq!((read.delivery_tag, read.redelivered), (7, true));
        assert_eq!(read.problems, ["routing_key is not UTF-8: ff6b"]);
        assert_eq!(get_ok(b"\0\0"), None);
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic(flags in any::<u16>(), bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let payload = header(flags, &bytes);
            for cut in 0..payload.len() {
                if let Some((_, read)) = content_header(&payload[..cut]) {
                    prop_assert!(cut >= 12);
                    let strict = parse_properties(&payload[12..cut]).is_ok_and(|(rest, _)| rest.is_empty());
                    prop_assert_eq!(strict, read.problems.is_empty());
                }
                let _ = get_ok(&bytes[..cut.min(bytes.len())]);
            }
        }
    }

    #[test]
    fn deep_nesting_does_not_overflow_the_stack() {
        for depth in [0, MAX_DEPTH, MAX_DEPTH + 1, 5000] {
            let mut value = b"V".to_vec();
            for _ in 0..depth {
                value = [&b"A"[..], &table(&value)].concat();
            }
            let mut values = b"\x01\xff".to_vec();
            values.extend(table(&[&b"\x01a"[..], &value].concat()));
            let (_, read) = content_header(&header(0xa000, &values)).unwrap();
            assert_eq!(read.problems, ["content_type is not UTF-8: ff"]);
        }
    }
}
