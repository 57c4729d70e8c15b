//! Publishes what no AMQP client would: properties, names and keys that are no UTF-8.

use std::{
    io::{Read, Write},
    net::TcpStream,
    time::Duration,
};

use super::PATIENCE;

/// A message as bytes.
pub struct RawMessage<'m> {
    /// The property flags and the properties, as they are on the wire.
    pub properties: &'m [u8],
    pub body: &'m [u8],
}

/// Publishes messages to an exchange of the virtual host `/`, and waits until RabbitMQ has them all.
pub fn publish_raw(rabbitmq_url: &str, exchange: &str, key: &[u8], messages: &[RawMessage<'_>]) {
    tokio::task::block_in_place(|| {
        let url = url::Url::parse(rabbitmq_url).expect("a URL");
        let address = (url.host_str().expect("a host"), url.port().expect("a port"));
        let mut socket = TcpStream::connect(address).expect("connected");
        socket.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        socket
            .set_write_timeout(Some(Duration::from_secs(10)))
            .expect("a timeout");
        socket.write_all(b"AMQP\x00\x00\x09\x01").expect("written");
        until(&mut socket, [10, 10]);
        let start_ok = [
            &[0; 4][..],
            &short(b"PLAIN"),
            &long(b"\0guest\0guest"),
            &short(b"en_US"),
        ];
        method(&mut socket, 0, [10, 11], &start_ok.concat());
        let tune = until(&mut socket, [10, 30]);
        method(&mut socket, 0, [10, 31], &tune);
        method(
            &mut socket,
            0,
            [10, 40],
            &[&short(b"/")[..], &[0, 0]].concat(),
        );
        until(&mut socket, [10, 41]);
        method(&mut socket, 1, [20, 10], &[0]);
        until(&mut socket, [20, 11]);
        method(&mut socket, 1, [85, 10], &[0]);
        until(&mut socket, [85, 11]);
        for message in messages {
            let to = [short(exchange.as_bytes()), short(key)].concat();
            method(&mut socket, 1, [60, 40], &[&[0, 0][..], &to, &[0]].concat());
            let mut header = vec![0, 60, 0, 0];
            header.extend((message.body.len() as u64).to_be_bytes());
            header.extend(message.properties);
            frame(&mut socket, 2, 1, &header);
            for piece in message.body.chunks(100_000) {
                frame(&mut socket, 3, 1, piece);
            }
            until(&mut socket, [60, 80]);
        }
    });
}

/// A property or a key as AMQP writes it.
pub fn short(text: &[u8]) -> Vec<u8> {
    [&[text.len() as u8][..], text].concat()
}

/// A table, or a header's text, as AMQP writes it.
pub fn long(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u32).to_be_bytes()[..], text].concat()
}

fn method(socket: &mut TcpStream, channel: u8, id: [u8; 2], arguments: &[u8]) {
    let payload = [&[0, id[0], 0, id[1]][..], arguments].concat();
    frame(socket, 1, channel, &payload);
}

fn frame(socket: &mut TcpStream, kind: u8, channel: u8, payload: &[u8]) {
    let frame = [&[kind, 0, channel][..], &long(payload), &[206]].concat();
    socket.write_all(&frame).expect("written");
}

/// Reads frames until this method comes, and returns its arguments.
fn until(socket: &mut TcpStream, id: [u8; 2]) -> Vec<u8> {
    loop {
        let mut head = [0; 7];
        socket.read_exact(&mut head).expect("a frame");
        let size = u32::from_be_bytes(head[3..].try_into().expect("four bytes"));
        let mut payload = vec![0; size as usize + 1];
        socket.read_exact(&mut payload).expect("a payload");
        payload.pop();
        if head[0] == 1 {
            let said = [payload[1], payload[3]];
            assert_eq!(said, id, "{}", String::from_utf8_lossy(&payload));
            return payload.split_off(4);
        }
    }
}
