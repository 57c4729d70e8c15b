//! As much of AMQP 0-9-1 as it takes to see that a broker answers, and which one.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// Whether a broker on this port answers a protocol header with `Connection.Start`. RabbitMQ opens
/// its listener last, so one that answers has started completely.
pub fn speaks_amqp(port: u16) -> bool {
    // A method frame has class 10 and method 10 first if it is `Connection.Start`.
    greeting(port).is_ok_and(|frame| frame.starts_with(&[0, 10, 0, 10]))
}

/// The version that the broker on this port gives itself.
pub(crate) fn version(port: u16) -> Option<String> {
    version_in(&greeting(port).ok()?)
}

/// The payload of the method frame with which a broker answers the protocol header.
fn greeting(port: u16) -> io::Result<Vec<u8>> {
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
    stream.set_read_timeout(Some(Duration::from_secs(5)))?;
    stream.write_all(b"AMQP\x00\x00\x09\x01")?;
    // The kind of frame, which is 1 for a method; the channel, which is 0; and the length.
    let mut header = [0; 7];
    stream.read_exact(&mut header)?;
    let [1, 0, 0, 0, length @ ..] = header else {
        return Err(io::ErrorKind::InvalidData.into());
    };
    let [high, middle, low] = length.map(usize::from);
    let mut payload = vec![0; high << 16 | middle << 8 | low];
    stream.read_exact(&mut payload)?;
    Ok(payload)
}

/// Finds the field `version` in the table of the server's properties. Its name comes with its
/// length before it, and is followed by the kind `S`, the length in four bytes, and the text.
fn version_in(greeting: &[u8]) -> Option<String> {
    const FIELD: &[u8] = b"\x07versionS\0\0\0";
    let mut places = greeting.windows(FIELD.len());
    let after = places.position(|place| place == FIELD)? + FIELD.len();
    let (length, rest) = greeting[after..].split_first()?;
    String::from_utf8(rest.get(..usize::from(*length))?.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_version_is_read_from_the_greeting() {
        let found = version_in(b"\0\x0a\0\x0a\0\x09\0\0\0\x1c\x07versionS\0\0\0\x054.0.5PLAIN");
        assert_eq!(found.as_deref(), Some("4.0.5"));
        assert_eq!(version_in(b"\x07versionS\0\0\0\x09short"), None);
    }
}
