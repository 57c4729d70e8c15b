//! Bytes and AMQP properties to domain types, and back. Pure: no IO, no clock.
//!
//! Everything that a stranger can send is parsed here, once. A delivery that cannot
//! be used becomes a task for review that holds it whole, so no later step has to refuse
//! a message for what it says.

mod decode;
pub mod headers;
pub mod lenient;
mod meter;
mod probe;
mod republish;
mod request;
mod review;

pub use decode::{Arrived, Rules, Source, decode, decode_message, unreadable};
pub use headers::header_frame_size;
pub use meter::Meter;
pub use probe::{is_probe, probe, probe_again};
pub use republish::{Outgoing, republish, retry_id, with_bcc};
pub use request::request;
pub use review::{Envelope, LeftOut, ReviewFormat, review};

/// Generated from `proto/retry.proto`.
#[allow(missing_docs)]
pub mod proto {
    include!(concat!(env!("OUT_DIR"), "/retry.v1.rs"));
    include!(concat!(env!("OUT_DIR"), "/retry.v1.serde.rs"));
}

/// Text as Postgres takes it: NUL, which Postgres refuses, becomes a visible symbol.
pub fn storable(text: String) -> String {
    if text.contains('\0') {
        text.replace('\0', "\u{2400}")
    } else {
        text
    }
}

/// The first `limit` bytes of `text`, or a little less: no character is cut.
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
