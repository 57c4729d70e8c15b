//! Idempotency keys: where they are unique, and how one is computed.
//!
//! A computed key is the SHA-256 over operation, tenant, correlation id and
//! parameters, in whatever order the parameters come. The text that is hashed is
//! what Python prints for a list of pairs, with the parameters in alphabetical
//! order. A Python program that hashes `str(sorted(fields.items()))` gets the same
//! key when it has put its parameters, and those nested in them, into its
//! dictionaries in alphabetical order; otherwise it gets another one.

use std::fmt::Write;

use serde_json::{Map, Value};
use sha2::{Digest, Sha256};

/// Where a producer's key is unique: one queue and one tenant. The separator is a
/// control character, which no queue's name holds, so no two pairs give one text.
pub fn scope(queue: &str, tenant: Option<&str>) -> String {
    format!("{queue}\u{1f}{}", tenant.unwrap_or_default())
}

/// The key of one operation, in lower-case hexadecimal.
pub fn key(
    operation: &str,
    tenant_id: &str,
    correlation_id: &str,
    parameters: &Map<String, Value>,
) -> String {
    let mut text = String::from("[('additional_params', ");
    write_object(&mut text, parameters);
    for (name, value) in [
        ("correlation_id", correlation_id),
        ("operation", operation),
        ("tenant_id", tenant_id),
    ] {
        text.push_str("), (");
        write_text(&mut text, name);
        text.push_str(", ");
        write_text(&mut text, value);
    }
    text.push_str(")]");
    let digest = Sha256::digest(text.as_bytes());
    digest.iter().fold(String::new(), |mut hex, byte| {
        // Writing to a String cannot fail.
        let _ = write!(hex, "{byte:02x}");
        hex
    })
}

fn write_value(out: &mut String, value: &Value) {
    match value {
        Value::Null => out.push_str("None"),
        Value::Bool(true) => out.push_str("True"),
        Value::Bool(false) => out.push_str("False"),
        Value::Number(n) => out.push_str(&n.to_string()),
        Value::String(text) => write_text(out, text),
        Value::Array(items) => {
            out.push('[');
            for (n, item) in items.iter().enumerate() {
                out.push_str(if n > 0 { ", " } else { "" });
                write_value(out, item);
            }
            out.push(']');
        }
        Value::Object(fields) => write_object(out, fields),
    }
}

fn write_object(out: &mut String, fields: &Map<String, Value>) {
    let mut sorted: Vec<_> = fields.iter().collect();
    sorted.sort_by_key(|(name, _)| *name);
    out.push('{');
    for (n, (name, value)) in sorted.into_iter().enumerate() {
        out.push_str(if n > 0 { ", " } else { "" });
        write_text(out, name);
        out.push_str(": ");
        write_value(out, value);
    }
    out.push('}');
}

/// Writes a string as Python shows it: in single quotes, unless double ones avoid an escape.
fn write_text(out: &mut String, text: &str) {
    let quote = if text.contains('\'') && !text.contains('"') {
        '"'
    } else {
        '\''
    };
    out.push(quote);
    for c in text.chars() {
        match c {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            c if c == quote => out.extend(['\\', c]),
            c if is_printable(c) => out.push(c),
            // Writing to a String cannot fail.
            c => {
                let _ = match u32::from(c) {
                    n @ 0..=0xff => write!(out, "\\x{n:02x}"),
                    n @ 0x100..=0xffff => write!(out, "\\u{n:04x}"),
                    n => write!(out, "\\U{n:08x}"),
                };
            }
        }
    }
    out.push(quote);
}

/// Whether Python's `repr` prints `c` as it is. `str::escape_debug` escapes the same
/// characters, if `c` does not stand first: there it also escapes marks that combine with
/// the character before them.
fn is_printable(c: char) -> bool {
    let text = format!("a{c}");
    matches!(c, '\'' | '"') || text.escape_debug().eq(text.chars())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn key_of(operation: &str, tenant: &str, correlation: &str, parameters: Value) -> String {
        let Value::Object(fields) = parameters else {
            unreachable!("the tests pass objects")
        };
        key(operation, tenant, correlation, &fields)
    }

    // The expected values are printed by
    // `hashlib.sha256(str(sorted(fields.items())).encode()).hexdigest()` in Python.
    #[test]
    fn pythons_keys_are_the_same_for_parameters_in_alphabetical_order() {
        assert_eq!(
            key_of(
                "kill_switch_update",
                "tenant-123",
                "corr-456",
                json!({"switch_name": "all_execution"})
            ),
            "d5923fa44a7b8d95a2a6ce83a85292c5e7a3243498ee9c86a0294ffcef01bb76"
        );
        assert_eq!(
            key_of("op", "", "", json!({})),
            "3b012eef28bc7c3c323573865e85f68d3a9eaec3b4fd24c4ab39033e052ae142"
        );
        assert_eq!(
            key_of(
                "it's",
                "a\"b'c",
                "é\n\t\0\u{200b}\\",
                json!({"a": 1, "b": true, "c": null, "d": [1, "x", {"y": 2.5}], "e": -0.1})
            ),
            "da2490135ed437b1b322fd7bbc9d4759c713f21219b5cc9bb98fad59ef42486e"
        );
    }

    #[test]
    fn marks_that_combine_with_a_letter_are_printed_as_they_are() {
        let mut text = String::new();
        write_text(&mut text, "e\u{301} \u{e01}\u{e47}\u{200b}");
        assert_eq!(text, "'e\u{301} \u{e01}\u{e47}\\u200b'");
    }

    #[test]
    fn the_order_of_parameters_does_not_matter_but_everything_else_does() {
        let of = |json: &str| key_of("op", "t", "c", serde_json::from_str(json).unwrap());
        let one = of(r#"{"a":1,"b":{"x":1,"y":2}}"#);
        assert_eq!(one, of(r#"{"b":{"y":2,"x":1},"a":1}"#));
        assert_ne!(one, of(r#"{"a":2,"b":{"x":1,"y":2}}"#));
        assert_ne!(
            key_of("op", "t", "c", json!({})),
            key_of("op", "c", "t", json!({}))
        );
    }
}
