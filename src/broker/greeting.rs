//! Learns which broker it is.
//!
//! A broker introduces itself in its first frame, `connection.start`, with its version and the
//! name of its cluster. lapin reads that frame and keeps nothing of it. So the first frame is
//! copied as lapin reads it. Asking on a connection of its own would be simpler,
//! but behind one address that connection may reach another broker than the next.

use std::sync::{Arc, OnceLock};

use lapin::protocol::{AMQPClass, connection::AMQPMethod, parse_class};

/// A frame is a type, a channel and a size in this many bytes, then its payload and one byte
/// more.
const FRAME_HEADER: usize = 7;

/// Should the first frame be longer than this, it is no broker's.
const LONGEST_GREETING: usize = 128 * 1024;

/// What a broker says of itself; what it does not say is empty.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Greeting {
    /// The name of the software, `RabbitMQ` as a rule.
    pub product: String,
    /// Its version.
    pub version: String,
    /// The name of the cluster.
    pub cluster: String,
}

/// The greeting, once it was heard.
pub(super) type Heard = Arc<OnceLock<Greeting>>;

/// Hears the first frame that is read from a stream.
pub(super) struct Ear {
    /// What was read of it, until it is complete.
    greeting: Option<Vec<u8>>,
    heard: Heard,
}

impl Ear {
    pub(super) fn new(heard: Heard) -> Self {
        Self {
            greeting: Some(Vec::new()),
            heard,
        }
    }

    pub(super) fn hear(&mut self, bytes: &[u8]) {
        let Some(greeting) = &mut self.greeting else {
            return;
        };
        greeting.extend_from_slice(bytes);
        match first_frame(greeting) {
            Some(payload) => {
                let _ = self.heard.set(greeting_in(payload).unwrap_or_default());
                self.greeting = None;
            }
            None if greeting.len() > LONGEST_GREETING => self.greeting = None,
            None => {}
        }
    }
}

/// The payload of the first frame, once all of it is there.
fn first_frame(bytes: &[u8]) -> Option<&[u8]> {
    let size = bytes.get(3..FRAME_HEADER)?.try_into().ok()?;
    let size = usize::try_from(u32::from_be_bytes(size)).ok()?;
    bytes.get(FRAME_HEADER..FRAME_HEADER.checked_add(size)?)
}

/// The greeting, if this is a `connection.start`.
fn greeting_in(payload: &[u8]) -> Option<Greeting> {
    let Ok((_, AMQPClass::Connection(AMQPMethod::Start(start)))) = parse_class(payload) else {
        return None;
    };
    let properties = start.server_properties;
    let text = |name| {
        let value = properties.inner().get(name);
        value
            .and_then(|value| value.as_long_string())
            .map_or_else(String::new, ToString::to_string)
    };
    Some(Greeting {
        product: text("product"),
        version: text("version"),
        cluster: text("cluster_name"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frame_is_complete_when_all_of_its_payload_is_there() {
        let frame = [1, 0, 0, 0, 0, 0, 2, 10, 11, 0xCE];
        for cut in 0..FRAME_HEADER + 2 {
            assert_eq!(first_frame(&frame[..cut]), None, "{cut}");
        }
        assert_eq!(first_frame(&frame), Some(&[10, 11][..]));
        // A size that no machine has memory for.
        assert_eq!(first_frame(&[0xFF; 64]), None);
    }

    #[test]
    fn what_is_no_greeting_says_nothing() {
        for payload in [&b""[..], b"\0\x0a\0\x0a", b"\0\x0a\0\x32junk", &[0xFF; 40]] {
            assert_eq!(greeting_in(payload), None);
        }
    }
}
