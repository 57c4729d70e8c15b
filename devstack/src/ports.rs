//! Free ports of the loopback interface.

use std::net::{Ipv4Addr, TcpListener};

use anyhow::{Result, bail};

/// Below the range from which systems take the ports of outgoing connections.
///
/// A service that restarts gets its port back only if no outgoing connection was given it meanwhile; and a client that
/// tries to reach a stopped service on such a port may even be connected to itself.
const FIRST: u16 = 20_000;
const COUNT: u16 = 10_000;

/// `N` different free ports. The same `seed` gives the same ports as long as they are free, so that a checkout keeps
/// its addresses between runs without writing them down.
///
/// Nothing holds them until the service does: who starts one must be ready to try again with another seed.
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

/// Whether the port could be taken at this moment.
pub(crate) fn is_free(port: u16) -> bool {
    // Some systems allow one listener on all addresses beside one on a single address.
    [Ipv4Addr::LOCALHOST, Ipv4Addr::UNSPECIFIED]
        .iter()
        .all(|&address| TcpListener::bind((address, port)).is_ok())
}

/// `wanted`, or a free port if it is taken.
pub fn free_or_other(wanted: u16) -> Result<u16> {
    if is_free(wanted) {
        Ok(wanted)
    } else {
        free(u64::from(wanted)).map(|[port]| port)
    }
}

/// FNV-1a: the same number for the same text on every machine and with every version of Rust.
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
