//! Makes dead letters from bytes, with headers of every type and shape, and feeds them to the
//! decoder.

use arbitrary::{Arbitrary, Unstructured};
use lapin::{
    BasicProperties,
    types::{AMQPValue, DecimalValue, FieldTable, LongString, ShortString},
};
use retry_scheduler::wire::Source;

use crate::check;

/// The name of a header or of a field of `x-death`: one that has a meaning, or any other.
#[derive(Arbitrary, Debug)]
enum Name {
    Death,
    Queue,
    Reason,
    Count,
    RetryId,
    RetryCount,
    MaxRetries,
    Error,
    Copy,
    FirstDeathQueue,
    Other(String),
}

impl From<Name> for ShortString {
    fn from(name: Name) -> Self {
        let name = match name {
            Name::Death => "x-death",
            Name::Queue => "queue",
            Name::Reason => "reason",
            Name::Count => "count",
            Name::RetryId => "x-retry-id",
            Name::RetryCount => "x-retry-count",
            Name::MaxRetries => "x-max-retries",
            Name::Error => "x-original-error",
            Name::Copy => "CC",
            Name::FirstDeathQueue => "x-first-death-queue",
            Name::Other(name) => return Self::try_new(name).unwrap_or_else(|_| "long".into()),
        };
        name.into()
    }
}

/// The value of a header, of any type that AMQP has.
#[derive(Arbitrary, Debug)]
enum Value {
    Boolean(bool),
    I8(i8),
    U8(u8),
    I16(i16),
    U16(u16),
    I32(i32),
    U32(u32),
    I64(i64),
    F32(f32),
    F64(f64),
    Decimal(u8, u32),
    Text(String),
    Raw(Vec<u8>),
    Array(Vec<Value>),
    Timestamp(u64),
    Table(Vec<(Name, Value)>),
    Bytes(Vec<u8>),
    Void,
    /// A value inside so many arrays: deeper than the derived `Arbitrary` would nest.
    Deep(u8, Box<Value>),
}

impl From<Value> for AMQPValue {
    fn from(value: Value) -> Self {
        match value {
            Value::Boolean(x) => Self::Boolean(x),
            Value::I8(x) => Self::ShortShortInt(x),
            Value::U8(x) => Self::ShortShortUInt(x),
            Value::I16(x) => Self::ShortInt(x),
            Value::U16(x) => Self::ShortUInt(x),
            Value::I32(x) => Self::LongInt(x),
            Value::U32(x) => Self::LongUInt(x),
            Value::I64(x) => Self::LongLongInt(x),
            Value::F32(x) => Self::Float(x),
            Value::F64(x) => Self::Double(x),
            Value::Decimal(scale, value) => Self::DecimalValue(DecimalValue { scale, value }),
            Value::Text(x) => Self::LongString(LongString::from(x)),
            Value::Raw(x) => Self::LongString(LongString::from(x)),
            Value::Array(x) => array(x.into_iter().map(Self::from).collect()),
            Value::Timestamp(x) => Self::Timestamp(x),
            Value::Table(x) => Self::FieldTable(table(x)),
            Value::Bytes(x) => Self::ByteArray(x.into()),
            Value::Void => Self::Void,
            Value::Deep(depth, x) => (0..depth).fold(Self::from(*x), |x, _| array(vec![x])),
        }
    }
}

fn array(values: Vec<AMQPValue>) -> AMQPValue {
    AMQPValue::FieldArray(values.into())
}

fn table(fields: Vec<(Name, Value)>) -> FieldTable {
    let mut table = FieldTable::default();
    for (name, value) in fields {
        table.insert(name.into(), value.into());
    }
    table
}

/// The queue that a message died in. Often it is one that the message may go back to, since most of
/// the decoder is only reached then.
#[derive(Arbitrary, Debug)]
enum Queue {
    Usual,
    Own,
    Any(Value),
}

impl From<Queue> for AMQPValue {
    fn from(queue: Queue) -> Self {
        match queue {
            Queue::Usual => Self::LongString("orders".into()),
            Queue::Own => Self::LongString("retry.scheduled".into()),
            Queue::Any(value) => value.into(),
        }
    }
}

#[derive(Arbitrary, Debug)]
struct DeadLetter {
    /// The queue in `x-death`. `None` adds no such header.
    queue: Option<Queue>,
    death: Vec<(Name, Value)>,
    headers: Vec<(Name, Value)>,
    message_id: Option<String>,
    content_type: Option<String>,
    reply_to: Option<String>,
    priority: Option<u8>,
    timestamp: Option<u64>,
    body: Vec<u8>,
}

impl DeadLetter {
    fn properties(self) -> (Vec<u8>, BasicProperties) {
        let mut headers = table(self.headers);
        if let Some(queue) = self.queue {
            let mut death = table(self.death);
            death.insert("queue".into(), queue.into());
            headers.insert("x-death".into(), array(vec![AMQPValue::FieldTable(death)]));
        }
        let mut amqp = BasicProperties::default().with_headers(headers);
        let short = |text: Option<String>| text.and_then(|t| ShortString::try_new(t).ok());
        if let Some(id) = short(self.message_id) {
            amqp = amqp.with_message_id(id);
        }
        if let Some(content_type) = short(self.content_type) {
            amqp = amqp.with_content_type(content_type);
        }
        if let Some(reply_to) = short(self.reply_to) {
            amqp = amqp.with_reply_to(reply_to);
        }
        if let Some(priority) = self.priority {
            amqp = amqp.with_priority(priority);
        }
        if let Some(timestamp) = self.timestamp {
            amqp = amqp.with_timestamp(timestamp);
        }
        (self.body, amqp)
    }
}

/// Checks the dead letter that the bytes describe.
pub fn dead_letter(bytes: &[u8]) {
    let Ok(letter) = DeadLetter::arbitrary_take_rest(Unstructured::new(bytes)) else {
        return;
    };
    let (body, properties) = letter.properties();
    let task = check(&body, &properties, Source::DeadLetters);
    assert_eq!(task.payload, body, "byte for byte, understood or not");
}
