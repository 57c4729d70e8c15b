//! As much of AMQP 0-9-1 as it takes to see that a broker answers.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::Duration;

/// Whether a broker on this port answers a protocol header with `Connection.Start`. RabbitMQ opens
/// its listener last, so one that answers has started completely.
pub fn speaks_amqp(port: u16) -> bool {
    let attempt = || -> std::io::Result<bool> {
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
        let mut stream = TcpStream::connect_timeout(&address, Duration::from_secs(1))?;
        stream.set_read_timeout(Some(Duration::from_secs(5)))?;
        stream.write_all(b"AMQP\x00\x00\x09\x01")?;
        let mut frame = [0; 11];
        stream.read_exact(&mut frame)?;
        // `Connection.Start`: a method frame (1) on channel 0, its length, class 10 and method 10.
        Ok(frame[..3] == [1, 0, 0] && frame[7..] == [0, 10, 0, 10])
    };
    attempt().unwrap_or(false)
}
