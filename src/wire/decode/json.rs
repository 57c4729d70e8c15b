//! A RetryMessage in JSON: proto3 names or snake_case. Beyond proto3's mapping, the payload may be
//! Node's `{"type":"Buffer","data":[…]}`, a text or a JSON value, and headers may be plain values.

use std::{collections::BTreeMap, mem};

use base64::{
    Engine, alphabet,
    engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig},
};
use serde::Deserialize;
use serde_json::{Map, Value, value::RawValue};

use crate::wire::proto::{
    HeaderList, HeaderTable, HeaderValue, RetryMessage, Void, header_value::Kind,
};

/// A body whose payload has not been understood yet. A field that is null is `None`.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", expecting = "an object")]
struct Body<'a> {
    #[serde(alias = "original_payload")]
    original_payload: Option<Value>,
    #[serde(alias = "original_payload_text")]
    original_payload_text: Option<Value>,
    /// The JSON stays as it was written, because `Value` would round a long number, reorder the
    /// keys of an object and refuse what is nested deeply.
    #[serde(borrow, alias = "original_payload_json")]
    original_payload_json: Option<&'a RawValue>,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

pub(super) fn parse(body: &[u8]) -> Result<RetryMessage, String> {
    let explain = |e: serde_json::Error| format!("not a RetryMessage in JSON: {e}");
    let mut body: Body = serde_json::from_slice(body).map_err(explain)?;
    drop_nulls(&mut body.rest);
    let mut plain = None;
    if let Some(properties) = body
        .rest
        .get_mut("properties")
        .and_then(Value::as_object_mut)
    {
        drop_nulls(properties);
        plain = properties.remove("headers");
    }
    let original_payload = payload(&mut body)?;
    let mut message: RetryMessage =
        serde_json::from_value(Value::Object(body.rest)).map_err(explain)?;
    message.original_payload = original_payload;
    if let (Some(plain), Some(properties)) = (plain, &mut message.properties) {
        properties.headers = headers(plain)?;
    }
    Ok(message)
}

/// Removes fields that are null: by the JSON mapping of proto3 they are left out.
fn drop_nulls(fields: &mut Map<String, Value>) {
    fields.retain(|_, value| !value.is_null());
}

/// The payload, from whichever of its forms the body has.
fn payload(body: &mut Body) -> Result<Vec<u8>, String> {
    let forms = (
        body.original_payload.take(),
        body.original_payload_text.take(),
        body.original_payload_json.take(),
    );
    match forms {
        (None, None, None) => Ok(Vec::new()),
        (Some(bytes), None, None) => binary(bytes).map_err(|problem| {
            format!(
                "original_payload: {problem}; to send text as it is, use original_payload_text, \
                 for JSON original_payload_json"
            )
        }),
        (None, Some(Value::String(text)), None) => Ok(text.into_bytes()),
        (None, Some(_), None) => Err(
            "original_payload_text: not a text; to send JSON as it is, use original_payload_json"
                .to_owned(),
        ),
        (None, None, Some(json)) => Ok(compact(json.get())),
        _ => Err(
            "the payload is given more than once: send one of original_payload, \
             original_payload_text and original_payload_json"
                .to_owned(),
        ),
    }
}

/// The bytes that `original_payload` stands for: a text in base64 or a Node Buffer.
fn binary(payload: Value) -> Result<Vec<u8>, String> {
    match payload {
        Value::String(text) => {
            base64(&text).map_err(|e| format!(r#"not base64 ("eyJhIjoxfQ==" is {{"a":1}}): {e}"#))
        }
        Value::Object(object) => node_buffer(&object),
        _ => Err("neither base64 nor a Node Buffer".to_owned()),
    }
}

/// Decodes both alphabets of base64, with and without padding, as proto3's JSON mapping demands.
fn base64(text: &str) -> Result<Vec<u8>, base64::DecodeError> {
    const ANY_PADDING: GeneralPurposeConfig =
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    const STANDARD: GeneralPurpose = GeneralPurpose::new(&alphabet::STANDARD, ANY_PADDING);
    const FOR_URLS: GeneralPurpose = GeneralPurpose::new(&alphabet::URL_SAFE, ANY_PADDING);
    STANDARD
        .decode(text)
        .or_else(|problem| FOR_URLS.decode(text).map_err(|_| problem))
}

fn node_buffer(object: &Map<String, Value>) -> Result<Vec<u8>, String> {
    let data = object
        .get("data")
        .and_then(Value::as_array)
        .filter(|_| object.get("type").and_then(Value::as_str) == Some("Buffer"))
        .ok_or("an object, but not a Node Buffer")?;
    data.iter()
        .map(|n| n.as_u64().and_then(|n| u8::try_from(n).ok()))
        .collect::<Option<_>>()
        .ok_or_else(|| "a Buffer's data must be bytes".to_owned())
}

/// Removes the space between the tokens of well-formed JSON. Numbers, texts and the order of keys
/// stay byte for byte.
fn compact(json: &str) -> Vec<u8> {
    let (mut in_text, mut escaped) = (false, false);
    json.bytes()
        .filter(|&byte| {
            if in_text {
                in_text = escaped || byte != b'"';
                escaped = !escaped && byte == b'\\';
                true
            } else {
                in_text = byte == b'"';
                !byte.is_ascii_whitespace()
            }
        })
        .collect()
}

fn headers(plain: Value) -> Result<BTreeMap<String, HeaderValue>, String> {
    let Value::Object(plain) = plain else {
        return Err("properties.headers: not an object".to_owned());
    };
    table(plain)
}

fn table(values: Map<String, Value>) -> Result<BTreeMap<String, HeaderValue>, String> {
    values
        .into_iter()
        .map(|(name, value)| match header(value) {
            Ok(value) => Ok((name, value)),
            Err(problem) => Err(format!("header {name:?}: {problem}")),
        })
        .collect()
}

/// A header's value: a plain one whose AMQP type is beyond doubt, or an object that names the type.
fn header(value: Value) -> Result<HeaderValue, String> {
    let kind = match value {
        Value::Null => Kind::Void(Void {}),
        Value::Bool(boolean) => Kind::Boolean(boolean),
        Value::String(text) => Kind::Text(text),
        Value::Number(number) => Kind::Int64(number.as_i64().ok_or_else(|| {
            format!(r#"{number} is no int64; name its type, for example {{"float64":1.5}}"#)
        })?),
        Value::Array(_) => {
            return Err(r#"a list is written as {"list":{"values":["a","b"]}}"#.to_owned());
        }
        Value::Object(typed) => return typed_header(typed),
    };
    Ok(HeaderValue { kind: Some(kind) })
}

/// A header's value in the form of the contract, such as `{"int8":1}`. The generated reader would
/// skip a type that it does not know, and the header would lose its value unnoticed.
fn typed_header(mut typed: Map<String, Value>) -> Result<HeaderValue, String> {
    drop_nulls(&mut typed);
    let names = typed.keys().cloned().collect::<Vec<_>>();
    if names.len() > 1 {
        return Err(format!("more than one type: {names:?}"));
    }
    if let Some(Value::Array(values)) = values_of("list", &mut typed) {
        let values = mem::take(values)
            .into_iter()
            .map(header)
            .collect::<Result<_, _>>()?;
        let kind = Some(Kind::List(HeaderList { values }));
        return Ok(HeaderValue { kind });
    }
    if let Some(Value::Object(values)) = values_of("table", &mut typed) {
        let values = table(mem::take(values))?;
        let kind = Some(Kind::Table(HeaderTable { values }));
        return Ok(HeaderValue { kind });
    }
    let read: HeaderValue =
        serde_json::from_value(Value::Object(typed)).map_err(|e| e.to_string())?;
    match names.first() {
        Some(name) if read.kind.is_none() => Err(format!(
            r#"{name:?} is no type of a header; text is written as "x" or {{"text":"x"}}"#
        )),
        _ => Ok(read),
    }
}

fn values_of<'t>(name: &str, typed: &'t mut Map<String, Value>) -> Option<&'t mut Value> {
    typed.get_mut(name)?.get_mut("values")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_spellings_and_both_payload_forms_are_understood() {
        for body in [
            r#"{"messageId":"m","originalPayload":"aGk=","originalQueue":"q","retryCount":2,"nextRetryAtMs":"7"}"#,
            r#"{"message_id":"m","original_payload":{"type":"Buffer","data":[104,105]},"original_queue":"q","retry_count":2,"next_retry_at_ms":7,"unknown":{"x":1}}"#,
        ] {
            let message = parse(body.as_bytes()).unwrap();
            assert_eq!(message.message_id, "m");
            assert_eq!(message.original_payload, b"hi");
            assert_eq!(message.original_queue, "q");
            assert_eq!(message.retry_count, 2);
            assert_eq!(message.next_retry_at_ms, 7);
        }
    }

    #[test]
    fn a_field_that_is_null_is_left_out() {
        let body = r#"{"originalQueue":"q","originalPayload":null,"error_reason":null,
            "retryCount":null,"properties":{"appId":null,"type":"t"}}"#;
        let message = parse(body.as_bytes()).unwrap();
        assert_eq!(message.original_queue, "q");
        assert_eq!(message.error_reason, "");
        assert_eq!(message.properties.unwrap().r#type, "t");
    }

    #[test]
    fn what_is_not_a_message_says_why() {
        for (body, why) in [
            ("{", "not a RetryMessage in JSON"),
            (r#"{"retryCount":"many"}"#, "not a RetryMessage in JSON"),
            (
                r#"{"original_payload":{"type":"Buffer","data":[256]}}"#,
                "must be bytes",
            ),
            (r#"{"original_payload":{"data":[1]}}"#, "not a Node Buffer"),
            (r#"{"original_payload":7}"#, "neither base64 nor"),
            (r#"{"originalPayloadText":7}"#, "not a text"),
            (
                r#"{"originalPayloadJson":{]}"#,
                "not a RetryMessage in JSON",
            ),
            (r#"{"properties":{"headers":[]}}"#, "not an object"),
        ] {
            let error = parse(body.as_bytes()).unwrap_err();
            assert!(error.contains(why), "{body}: {error}");
        }
        let deep = format!("{}{}", r#"{"a":"#.repeat(500), "}".repeat(500));
        assert!(parse(deep.as_bytes()).is_err());
    }

    fn payload_of(fields: &str) -> Result<String, String> {
        let message = parse(format!("{{{fields}}}").as_bytes())?;
        Ok(String::from_utf8(message.original_payload).unwrap())
    }

    #[test]
    fn a_payload_that_is_no_base64_is_told_what_to_do() {
        for text in [r#"{\"a\":1}"#, "hello", "aGk=\\n", "a+b_"] {
            let error = payload_of(&format!(r#""originalPayload":"{text}""#)).unwrap_err();
            let says = r#"original_payload: not base64 ("eyJhIjoxfQ==" is {"a":1}): "#;
            assert!(error.starts_with(says), "{error}");
            let hint = "; to send text as it is, use original_payload_text, \
                        for JSON original_payload_json";
            assert!(error.ends_with(hint), "{error}");
            assert!(!error.contains('\n'), "{error}");
        }
        let example = payload_of(r#""originalPayload":"eyJhIjoxfQ==""#);
        assert_eq!(example.unwrap(), r#"{"a":1}"#);
    }

    #[test]
    fn text_is_a_payload_as_it_is() {
        for name in ["originalPayloadText", "original_payload_text"] {
            for (text, payload) in [
                ("hello123", "hello123"),
                (r#"{\"a\": 1}\n"#, "{\"a\": 1}\n"),
                ("é\\u00e9\\u0000", "éé\0"),
                ("", ""),
            ] {
                let read = payload_of(&format!(r#""{name}":"{text}""#));
                assert_eq!(read.unwrap(), payload);
            }
        }
    }

    #[test]
    fn json_is_a_payload_that_keeps_every_digit_and_the_order_of_keys() {
        let deep = "[".repeat(1000) + &"]".repeat(1000);
        for name in ["originalPayloadJson", "original_payload_json"] {
            for (json, payload) in [
                (
                    "{ \"b\" : [1 , 2],\r\n\t\"a\":{} }",
                    r#"{"b":[1,2],"a":{}}"#,
                ),
                (
                    "[123456789012345678901234567890, 0.10000000000000000000001, 1.0, 1e400, -0]",
                    "[123456789012345678901234567890,0.10000000000000000000001,1.0,1e400,-0]",
                ),
                (
                    r#"{"a b" : "c \" \\" , "d":"é \u00e9"}"#,
                    r#"{"a b":"c \" \\","d":"é \u00e9"}"#,
                ),
                (r#"{"a":1,"a":null}"#, r#"{"a":1,"a":null}"#),
                (r#""text""#, r#""text""#),
                ("false", "false"),
                (&deep, &deep),
            ] {
                let read = payload_of(&format!(r#""{name}": {json} "#));
                assert_eq!(read.unwrap(), payload);
            }
        }
    }

    #[test]
    fn a_payload_has_one_form() {
        for fields in [
            r#""originalPayload":"aGk=","originalPayloadText":"hi""#,
            r#""original_payload":"","original_payload_json":0"#,
            r#""originalPayloadText":"hi","originalPayloadJson":"hi""#,
        ] {
            let error = payload_of(fields).unwrap_err();
            assert!(error.contains("given more than once"), "{error}");
        }
        let two_spellings = r#""originalPayloadText":"a","original_payload_text":"a""#;
        let error = payload_of(two_spellings).unwrap_err();
        assert!(error.contains("duplicate field"), "{error}");
        let others_are_null =
            r#""originalPayload":null,"originalPayloadText":"hi","originalPayloadJson":null"#;
        assert_eq!(payload_of(others_are_null).unwrap(), "hi");
        assert_eq!(payload_of(r#""originalPayloadJson":null"#).unwrap(), "");
    }

    fn headers_of(headers: &str) -> Result<BTreeMap<String, HeaderValue>, String> {
        let body = format!(r#"{{"properties":{{"appId":"a","headers":{headers}}}}}"#);
        let properties = parse(body.as_bytes())?.properties.unwrap();
        assert_eq!(properties.app_id, "a");
        Ok(properties.headers)
    }

    #[test]
    fn a_plain_header_is_the_same_as_its_typed_form() {
        for (plain, typed) in [
            (r#""b""#, r#"{"text":"b"}"#),
            ("true", r#"{"boolean":true}"#),
            ("-7", r#"{"int64":"-7"}"#),
            ("null", r#"{"void":{}}"#),
            (
                r#"{"list":{"values":["b"]}}"#,
                r#"{"list":{"values":[{"text":"b"}]}}"#,
            ),
            (
                r#"{"table":{"values":{"n":1}}}"#,
                r#"{"table":{"values":{"n":{"int64":1}}}}"#,
            ),
        ] {
            let plain = headers_of(&format!(r#"{{"a":{plain}}}"#)).unwrap();
            assert!(plain["a"].kind.is_some());
            assert_eq!(plain, headers_of(&format!(r#"{{"a":{typed}}}"#)).unwrap());
        }
        assert_eq!(headers_of("null").unwrap(), BTreeMap::new());
        for nothing in ["{}", r#"{"text":null}"#] {
            let headers = headers_of(&format!(r#"{{"a":{nothing}}}"#)).unwrap();
            assert_eq!(headers["a"].kind, None);
        }
    }

    #[test]
    fn a_header_that_is_not_understood_is_named() {
        for (header, why) in [
            (
                "1.5",
                r#"1.5 is no int64; name its type, for example {"float64":1.5}"#,
            ),
            ("9223372036854775808", "is no int64"),
            ("[1]", "a list is written as"),
            (r#"{"b":"c"}"#, r#""b" is no type of a header"#),
            (r#"{"text":"b","int8":1}"#, "more than one type"),
            (r#"{"text":"b","c":1}"#, "more than one type"),
            (r#"{"int8":"many"}"#, "invalid digit"),
            (r#"{"list":{"values":[{"b":1}]}}"#, "is no type of a header"),
            (
                r#"{"table":{"values":{"n":{"b":1}}}}"#,
                r#"header "n": "b" is no type"#,
            ),
            (r#"{"list":7}"#, "invalid type"),
        ] {
            let error = headers_of(&format!(r#"{{"x-a":{header}}}"#)).unwrap_err();
            assert!(error.starts_with(r#"header "x-a": "#), "{error}");
            assert!(error.contains(why), "{header}: {error}");
        }
    }
}
