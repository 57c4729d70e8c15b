//! Bytes and properties ⇄ domain. Pure: no IO, no clock.
//!
//! Everything a stranger can send is parsed here, once. What cannot be used
//! becomes a task for review, whole, so nothing past this line can refuse it.

mod dead_letter;
pub mod headers;
mod intake;
mod json;
mod republish;
mod review;

pub use intake::{Arrived, Rules, Source, decode};
pub use republish::{Outgoing, republish};
pub use review::review;

/// Generated from `proto/retry.proto`.
#[allow(missing_docs)]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/retry.v1.rs"));
    include!(concat!(env!("OUT_DIR"), "/retry.v1.serde.rs"));
}

/// Text as Postgres takes it: NUL, which it refuses, made visible.
pub fn storable(text: String) -> String {
    if text.contains('\0') {
        text.replace('\0', "\u{2400}")
    } else {
        text
    }
}

/// The first `limit` bytes of `text`, never cutting a character.
fn cut(text: &str, limit: usize) -> &str {
    if text.len() <= limit {
        return text;
    }
    let mut end = limit;
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    &text[..end]
}
