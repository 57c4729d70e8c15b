//! Publishes a message that most AMQP clients cannot read: its content type is not UTF-8.
//!
//! AMQP allows that, but no client that has strings for names can send it, so its frames are written here.

use anyhow::{Context, ensure};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
};

use crate::message::INTAKE;

/// The types of frames.
const METHOD: u8 = 1;
const HEADER: u8 = 2;
const BODY: u8 = 3;

/// The last byte of each frame.
const END: u8 = 0xce;

/// Publishes this body to the intake queue and waits for its confirm.
pub async fn publish(port: u16, body: Vec<u8>) -> anyhow::Result<()> {
    let mut to = TcpStream::connect(("127.0.0.1", port)).await?;
    to.write_all(b"AMQP\0\0\x09\x01").await?;
    answer(&mut to, [10, 10]).await?;
    // start-ok: no properties, PLAIN, the user and the password, a locale.
    let mut start = vec![0; 4];
    start.extend(short("PLAIN"));
    start.extend(long(b"\0guest\0guest"));
    start.extend(short("en_US"));
    method(&mut to, 0, [10, 11], &start).await?;
    answer(&mut to, [10, 30]).await?;
    // tune-ok: 100 channels, frames of 128 KiB, no heartbeat.
    method(&mut to, 0, [10, 31], &[0, 100, 0, 2, 0, 0, 0, 0]).await?;
    // open: the virtual host, and two fields that are not used.
    let mut open = short("/");
    open.extend([0, 0]);
    method(&mut to, 0, [10, 40], &open).await?;
    answer(&mut to, [10, 41]).await?;
    method(&mut to, 1, [20, 10], &[0]).await?;
    answer(&mut to, [20, 11]).await?;
    // confirm.select
    method(&mut to, 1, [85, 10], &[0]).await?;
    answer(&mut to, [85, 11]).await?;
    // publish: a field that is not used, the default exchange, the queue; mandatory.
    let mut publish = vec![0, 0];
    publish.extend(short(""));
    publish.extend(short(INTAKE));
    publish.push(1);
    method(&mut to, 1, [60, 40], &publish).await?;
    // The header: class and weight, the size of the body, which properties follow, and those: the content type, and
    // that the message is persistent.
    let mut header = vec![0, 60, 0, 0];
    header.extend((body.len() as u64).to_be_bytes());
    header.extend([0b1001_0000, 0]);
    header.extend([2, 0xff, 0xfe]);
    header.push(2);
    frame(&mut to, HEADER, 1, &header).await?;
    frame(&mut to, BODY, 1, &body).await?;
    answer(&mut to, [60, 80]).await
}

async fn method(
    to: &mut TcpStream,
    channel: u16,
    [class, number]: [u8; 2],
    arguments: &[u8],
) -> anyhow::Result<()> {
    let mut payload = vec![0, class, 0, number];
    payload.extend(arguments);
    frame(to, METHOD, channel, &payload).await
}

async fn frame(to: &mut TcpStream, kind: u8, channel: u16, payload: &[u8]) -> anyhow::Result<()> {
    let mut frame = vec![kind];
    frame.extend(channel.to_be_bytes());
    frame.extend(u32::try_from(payload.len())?.to_be_bytes());
    frame.extend(payload);
    frame.push(END);
    Ok(to.write_all(&frame).await?)
}

/// Reads one frame, which must be this method.
async fn answer(from: &mut TcpStream, [class, number]: [u8; 2]) -> anyhow::Result<()> {
    let mut head = [0; 7];
    from.read_exact(&mut head).await?;
    let [kind, _, _, size @ ..] = head;
    let mut payload = vec![0; usize::try_from(u32::from_be_bytes(size))? + 1];
    from.read_exact(&mut payload).await?;
    let said = payload.get(..4).context("a short frame")?;
    ensure!(
        kind == METHOD && said == [0, class, 0, number],
        "RabbitMQ said {said:?} instead of method {number} of class {class}"
    );
    Ok(())
}

fn short(text: &str) -> Vec<u8> {
    let mut field = vec![u8::try_from(text.len()).unwrap_or_default()];
    field.extend(text.bytes());
    field
}

fn long(bytes: &[u8]) -> Vec<u8> {
    let size = u32::try_from(bytes.len()).unwrap_or_default();
    let mut field = size.to_be_bytes().to_vec();
    field.extend(bytes);
    field
}
