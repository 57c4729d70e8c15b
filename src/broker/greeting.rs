//! What the broker says of itself when a client connects. The AMQP client does not pass it on.

use lapin::types::{AMQPValue, FieldTable, parsing::parse_field_table};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    time::timeout,
};

use super::{Broker, BrokerError, dial::dial};

/// The broker's name and version.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Greeting {
    /// The name of the software, `RabbitMQ` as a rule.
    pub product: String,
    /// Its version.
    pub version: String,
    /// The name of the cluster, which its management API tells, too.
    pub cluster: String,
}

/// The header by which a client asks for AMQP 0-9-1.
const HELLO: &[u8] = b"AMQP\0\0\x09\x01";

/// The most bytes of the answer: RabbitMQ's has about 500.
const LONGEST: usize = 64 * 1024;

impl Broker {
    /// Connects, reads the greeting and hangs up before any login.
    pub async fn greeting(&self) -> Result<Greeting, BrokerError> {
        let unusable = |e: std::io::Error| BrokerError::Unusable(format!("RabbitMQ: {e}"));
        match timeout(self.timeout, self.greet()).await {
            Ok(answer) => parse(&answer.map_err(unusable)?)
                .ok_or_else(|| BrokerError::Unusable("this is no AMQP broker".into())),
            Err(_) => Err(BrokerError::Silent("a connection request", self.timeout)),
        }
    }

    /// The payload of the broker's first frame.
    async fn greet(&self) -> std::io::Result<Vec<u8>> {
        let authority = &self.uri.authority;
        let encrypted = self.is_encrypted();
        let mut stream = dial(&authority.host, authority.port, encrypted).await?;
        stream.write_all(HELLO).await?;
        stream.flush().await?;
        // A frame: its type, two bytes of channel, four of size, the payload.
        let mut head = [0; 7];
        stream.read_exact(&mut head).await?;
        let [_, _, _, size @ ..] = head;
        let size = usize::try_from(u32::from_be_bytes(size)).unwrap_or(usize::MAX);
        let mut payload = vec![0; size.min(LONGEST)];
        stream.read_exact(&mut payload).await?;
        Ok(payload)
    }
}

/// Reads `connection.start`: class and method, two bytes of version, the properties.
fn parse(payload: &[u8]) -> Option<Greeting> {
    const START: [u8; 4] = [0, 10, 0, 10];
    let fields = payload.strip_prefix(&START)?.get(2..)?;
    let (_, properties) = parse_field_table(fields).ok()?;
    Some(Greeting {
        product: text(&properties, "product"),
        version: text(&properties, "version"),
        cluster: text(&properties, "cluster_name"),
    })
}

fn text(properties: &FieldTable, name: &str) -> String {
    match properties.inner().get(name) {
        Some(AMQPValue::LongString(text)) => text.to_string(),
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_greeting_is_read_and_anything_else_is_not() {
        let mut payload = vec![0, 10, 0, 10, 0, 9, 0, 0, 0, 18];
        payload.extend_from_slice(b"\x07versionS\0\0\0\x053.9.1");
        assert_eq!(parse(&payload).unwrap().version, "3.9.1");
        assert_eq!(parse(b"HTTP/1.1 400 Bad Request"), None);
        assert_eq!(parse(&[0, 10, 0, 10, 0]), None);
    }
}
