//! RetryMessages in JSON, valid and broken.

use base64::{Engine, engine::general_purpose::STANDARD};
use lapin::types::AMQPValue;
use serde_json::json;
use uuid::Uuid;

use super::table::{At, Case};

const NO_JSON: &str = "not a RetryMessage in JSON";

pub fn table(at: &At) -> Vec<Case> {
    let mut cases = syntax(at);
    cases.extend(payloads(at));
    cases.extend(payloads_as_they_are(at));
    cases.extend(fields(at));
    cases.extend(headers(at));
    cases
}

/// A valid message without its closing brace, so that more fields can be added.
fn open(at: &At, name: &str) -> String {
    let id = Uuid::now_v7();
    let payload = STANDARD.encode(name);
    let queue = &at.target;
    format!(r#"{{"messageId":"{id}","originalQueue":"{queue}","originalPayload":"{payload}""#)
}

/// A valid message.
fn good(at: &At, name: &str) -> String {
    open(at, name) + "}"
}

fn syntax(at: &At) -> Vec<Case> {
    let bytes = |name: &str, body: Vec<u8>| at.raw(name, body).typed("application/json");
    let raw = |name: &str, body: &str| bytes(name, body.into());
    let around = |name: &str, before: &str, after: &str| {
        raw(name, &format!("{before}{}{after}", good(at, name)))
    };
    let utf_16 = good(at, "JSON in UTF-16");
    let utf_16: Vec<u8> = utf_16.encode_utf16().flat_map(u16::to_le_bytes).collect();
    let no_utf_8 = [open(at, "JSON").as_bytes(), b",\"x\":\"\xff\"}"].concat();
    let mut unknown = open(at, "JSON with 10,000 unknown keys");
    for n in 0..10_000 {
        unknown += &format!(r#","unknown{n}":{n}"#);
    }
    vec![
        raw("JSON of nothing", "\n").invalid("EOF while parsing"),
        at.raw("JSON without fields", "{}")
            .invalid("original_queue is empty"),
        at.raw("JSON that ends too soon", open(at, "JSON"))
            .invalid("EOF while parsing"),
        around("JSON with a BOM", "\u{feff}", "").invalid(NO_JSON),
        around("JSON with something after it", "", "{}").invalid("trailing characters"),
        around("JSON with space around it", "\r\n\t ", "\r\n"),
        at.raw(
            "JSON that nobody calls JSON",
            good(at, "JSON that nobody calls JSON"),
        ),
        around("JSON in capitals", "", "").typed("APPLICATION/JSON"),
        around("JSON of a vendor", "", "").typed("application/vnd.acme+json; charset=utf-16"),
        around("JSON said to be protobuf", "", "")
            .typed("application/x-protobuf")
            .invalid("not a RetryMessage in protobuf"),
        raw("JSON: null", "null").invalid(NO_JSON),
        raw("JSON: a number", "7").invalid(NO_JSON),
        raw("JSON: a text", "\"RetryMessage\"").invalid(NO_JSON),
        around("JSON: a list", "[", "]").invalid(NO_JSON),
        bytes("JSON in UTF-16", utf_16).invalid(NO_JSON),
        bytes("JSON that is no UTF-8", no_utf_8).invalid(NO_JSON),
        raw("JSON in single quotes", "{'originalQueue':'q'}").invalid("key must be a string"),
        raw("JSON with a comment", "{/* */}").invalid("key must be a string"),
        raw("JSON 10,000 objects deep", &r#"{"a":"#.repeat(10_000)).invalid("recursion limit"),
        raw("JSON that is 10,000 lists", &"[".repeat(10_000)).invalid("expected an object"),
        raw(
            "JSON 10,000 lists deep",
            &format!(r#"{{"a":{}"#, "[".repeat(10_000)),
        )
        .invalid("recursion limit"),
        at.raw("JSON with 10,000 unknown keys", unknown + "}"),
        at.raw("JSON with a key of 100 kB", {
            let key = "k".repeat(100_000);
            format!(r#"{},"{key}":1}}"#, open(at, "JSON with a key of 100 kB"))
        }),
    ]
}

fn payloads(at: &At) -> Vec<Case> {
    let with = |name: &str, payload: serde_json::Value| {
        let body = json!({
            "message_id": Uuid::now_v7(),
            "original_queue": at.target,
            "original_payload": payload,
        });
        at.raw(name, body.to_string())
    };
    let buffer = |data| json!({"type": "Buffer", "data": data});
    vec![
        with("a Buffer", buffer(json!(b"a Buffer".to_vec()))),
        with("a Buffer of 256", buffer(json!([256]))).invalid("a Buffer's data must be bytes"),
        with("a Buffer of -1", buffer(json!([-1]))).invalid("must be bytes"),
        with("a Buffer of halves", buffer(json!([0.5]))).invalid("must be bytes"),
        with("a Buffer of texts", buffer(json!(["1"]))).invalid("must be bytes"),
        with("a Buffer of text", buffer(json!("aGk="))).invalid("not a Node Buffer"),
        with("a Buffer without data", json!({"type": "Buffer"})).invalid("not a Node Buffer"),
        with(
            "a Buffer of another type",
            json!({"type": "buffer", "data": []}),
        )
        .invalid("not a Node Buffer"),
        with("a payload that is a list", json!([104, 105])).invalid("neither base64 nor"),
        with("a payload that is a number", json!(7)).invalid("neither base64 nor"),
        with("a payload that is no base64", json!("not base64!"))
            .invalid(r#"original_payload: not base64 ("eyJhIjoxfQ==" is {"a":1})"#),
        with("a payload that is JSON in a text", json!(r#"{"a":1}"#)).invalid(
            "to send text as it is, use original_payload_text, for JSON original_payload_json",
        ),
        with("a payload that is JSON", json!({"a": 1})).invalid("use original_payload_text"),
        with("a payload with half a letter", json!("YQ=a")).invalid("original_payload: not base64"),
        with("a payload without padding", json!("YWI")).arriving("ab"),
        with("a payload for URLs", json!("_-8=")).arriving([0xff, 0xef]),
    ]
}

/// Payloads that are given as text or as JSON, without base64.
fn payloads_as_they_are(at: &At) -> Vec<Case> {
    let with = |name: &str, payload: &str| {
        let (id, queue) = (Uuid::now_v7(), &at.target);
        at.raw(
            name,
            format!(r#"{{"messageId":"{id}","originalQueue":"{queue}",{payload}}}"#),
        )
    };
    vec![
        with(
            "a payload as text",
            r#""originalPayloadText":"a payload as text""#,
        ),
        // The text is also valid base64, and must not be decoded.
        with("text like base64", r#""original_payload_text":"hello123""#).arriving("hello123"),
        with(
            "text that is not ASCII",
            r#""originalPayloadText":"🐇\u0000\n""#,
        )
        .arriving("🐇\0\n"),
        with("text that is an object", r#""originalPayloadText":{"a":1}"#)
            .invalid("original_payload_text: not a text"),
        with(
            "a payload as JSON",
            r#""originalPayloadJson": { "z" : "a b" , "a" : [ 1.10, null ] }"#,
        )
        .arriving(r#"{"z":"a b","a":[1.10,null]}"#),
        with(
            "JSON with long numbers",
            r#""original_payload_json":[123456789012345678901, 0.1000000000000000055511, 1e400]"#,
        )
        .arriving("[123456789012345678901,0.1000000000000000055511,1e400]"),
        with(
            "JSON that is a text",
            r#""originalPayloadJson":"JSON that is a text""#,
        )
        .arriving(r#""JSON that is a text""#),
        with(
            "JSON that is null",
            r#""originalPayloadJson":null,"originalPayloadText":"and text""#,
        )
        .arriving("and text"),
        with("JSON that is broken", r#""originalPayloadJson":{"a":}"#).invalid(NO_JSON),
        with(
            "a payload in two forms",
            r#""originalPayload":"aGk=","originalPayloadText":"hi""#,
        )
        .invalid("the payload is given more than once"),
        with(
            "a payload in one form, in two spellings",
            r#""originalPayloadText":"hi","original_payload_text":"hi""#,
        )
        .invalid("duplicate field"),
    ]
}

fn headers(at: &At) -> Vec<Case> {
    let with = |name: &str, headers: &str| {
        let properties = format!(r#""properties":{{"headers":{headers}}}"#);
        at.raw(name, format!("{},{properties}}}", open(at, name)))
    };
    vec![
        with("a plain header", r#"{"a":"b"}"#)
            .checked(|back| assert_eq!(back.text("a").as_deref(), Some("b"))),
        with(
            "plain headers of each type",
            r#"{"a":"b","c":true,"d":-9007199254740993,"e":null,"f":{"int16":7}}"#,
        )
        .checked(|back| {
            let headers = back.properties.headers().as_ref().expect("headers").inner();
            assert_eq!(headers["a"], AMQPValue::LongString("b".into()));
            assert_eq!(headers["c"], AMQPValue::Boolean(true));
            assert_eq!(headers["d"], AMQPValue::LongLongInt(-9_007_199_254_740_993));
            assert_eq!(headers["e"], AMQPValue::Void);
            assert_eq!(headers["f"], AMQPValue::ShortInt(7));
        }),
        with("a plain fraction", r#"{"h":1.5}"#).invalid(r#"header "h": 1.5 is no int64"#),
        with("a plain list", r#"{"h":["a"]}"#).invalid(r#"header "h": a list is written as"#),
        with("a header of no known type", r#"{"h":{"b":"c"}}"#)
            .invalid(r#"header "h": "b" is no type of a header"#),
        with("a header of two types", r#"{"h":{"text":"a","int8":1}}"#)
            .invalid(r#"header "h": more than one type"#),
        with("a header that is no number", r#"{"h":{"float64":"NaN"}}"#),
        with("headers that are a list", "[]").invalid("properties.headers: not an object"),
    ]
}

fn fields(at: &At) -> Vec<Case> {
    let more = |name: &str, more: &str| at.raw(name, format!("{},{more}}}", open(at, name)));
    let queue = &at.target;
    vec![
        more("NaN", r#""retryCount":NaN"#).invalid(NO_JSON),
        more("Infinity", r#""retryCount":Infinity"#).invalid(NO_JSON),
        more("a NaN in quotes", r#""retryCount":"NaN""#).invalid(NO_JSON),
        more("a number of 400 digits", r#""retryCount":1e400"#).invalid("number out of range"),
        more("half a retry", r#""retryCount":0.5"#).invalid(NO_JSON),
        more("retryCount over INT_MAX", r#""retryCount":2147483648"#).invalid(NO_JSON),
        more(
            "nextRetryAtMs over i64",
            r#""nextRetryAtMs":9223372036854775808"#,
        )
        .invalid(NO_JSON),
        more("a count in quotes", r#""retryCount":"2","maxRetries":"7""#)
            .checked(|back| assert_eq!(back.number("x-retry-count"), Some(3))),
        more("a count that is a word", r#""retryCount":"two""#).invalid(NO_JSON),
        more("a count that is true", r#""retryCount":true"#).invalid(NO_JSON),
        more("a negative count", r#""retryCount":-1"#).invalid("retry_count is negative"),
        more(
            "an error that is an object",
            r#""errorReason":{"code":500}"#,
        )
        .invalid(NO_JSON),
        more("an error that is null", r#""errorReason":null"#),
        more("NUL in JSON", r#""errorReason":"a\u0000b""#),
        more("half a surrogate", r#""errorReason":"\ud800""#).invalid(NO_JSON),
        more("a class that does not exist", r#""errorClass":"WHATEVER""#).invalid(NO_JSON),
        more("a class by its number", r#""errorClass":2"#),
        more("the same key twice", r#""retryCount":9,"retryCount":1"#)
            .checked(|back| assert_eq!(back.number("x-retry-count"), Some(2))),
        more(
            "one field in two spellings",
            &format!(r#""original_queue":"{queue}""#),
        )
        .invalid("duplicate field"),
        at.raw(
            "a key in the wrong case",
            format!(r#"{{"ORIGINALQUEUE":"{queue}"}}"#),
        )
        .invalid("original_queue is empty"),
        more("properties that are a text", r#""properties":"none""#).invalid(NO_JSON),
        // `proto/retry.proto` has no such properties, so they are ignored and do not reach the
        // broker.
        more(
            "an expiration and a user",
            r#""properties":{"expiration":"abc","userId":"nobody","deliveryMode":9}"#,
        )
        .checked(|back| {
            assert_eq!(*back.properties.expiration(), None);
            assert_eq!(*back.properties.user_id(), None);
        }),
    ]
}
