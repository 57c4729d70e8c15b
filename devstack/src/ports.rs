//! Chooses free ports of the loopback interface.

use std::net::{Ipv4Addr, TcpListener};

use anyhow::{Result, bail};

/// The ports to choose from lie below the range from which systems take ports for outgoing
/// connections.
///
/// With a port of that range, a service that restarts could find its port given to an outgoing
/// connection; and a client that tries to reach the stopped service could be connected to itself.
const FIRST: u16 = 20_000;
const COUNT: u16 = 10_000;

/// Returns `N` different free ports. The same `seed` gives the same ports as long as they are free,
/// so a checkout has the same addresses in each run.
///
/// Another process may take a port before the service listens on it. The caller must be prepared to
/// try again with another seed.
pub(crate) fn free<const N: usize>(seed: u64) -> Result<[u16; N]> {
    let mut found = [0; N];
    let mut next = 0;
    let offset = u16::try_from(seed % u64::from(COUNT))?;
    for step in 0..COUNT {
        if next == N {
            return Ok(found);
        }
        let port = FIRST + (offset + step) % COUNT;
        if is_free(port) {
            found[next] = port;
            next += 1;
        }
    }
    bail!("no {N} free ports between {FIRST} and {}", FIRST + COUNT)
}

/// Whether a service could listen on the port at this moment.
pub(crate) fn is_free(port: u16) -> bool {
    // Both are tried, because some systems allow a listener on a single address beside one on all
    // addresses.
    [Ipv4Addr::LOCALHOST, Ipv4Addr::UNSPECIFIED]
        .iter()
        .all(|&address| TcpListener::bind((address, port)).is_ok())
}

/// Returns `wanted`, or a free port if `wanted` is taken.
pub fn free_or_other(wanted: u16) -> Result<u16> {
    if is_free(wanted) {
        Ok(wanted)
    } else {
        free(u64::from(wanted)).map(|[port]| port)
    }
}

/// The FNV-1a hash of a text. Unlike Rust's own hashes it is the same on every machine and with
/// every version of Rust.
pub(crate) fn hash(text: &str) -> u64 {
    text.bytes().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_taken_port_is_passed_over() {
        let [first] = free(hash("a_taken_port_is_passed_over")).unwrap();
        let _taken = TcpListener::bind((Ipv4Addr::LOCALHOST, first)).unwrap();
        let [second, third] = free(hash("a_taken_port_is_passed_over")).unwrap();
        assert!(
            first != second && second != third,
            "{first} {second} {third}"
        );
    }
}
