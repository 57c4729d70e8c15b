//! Connecting to RabbitMQ, and the few calls to it that need no options.

use std::time::Duration;

use anyhow::Context;
use lapin::{
    Channel, Connection, ConnectionProperties, Consumer, Queue,
    options::{BasicConsumeOptions, ConfirmSelectOptions, QueueDeclareOptions},
    types::FieldTable,
};

/// RabbitMQ answers within this, even while a loaded machine starts it.
const CONNECTING: Duration = Duration::from_secs(30);

/// Connects; RabbitMQ lists the connection under `name`.
pub async fn connect(url: &str, name: &str) -> anyhow::Result<Connection> {
    let properties = ConnectionProperties::default().with_connection_name(name.into());
    tokio::time::timeout(CONNECTING, Connection::connect(url, properties))
        .await
        .context("RabbitMQ does not answer")?
        .context("connecting to RabbitMQ")
}

/// Opens a channel on which RabbitMQ confirms what is published.
pub async fn confirming_channel(connection: &Connection) -> lapin::Result<Channel> {
    let channel = connection.create_channel().await?;
    channel
        .confirm_select(ConfirmSelectOptions::default())
        .await?;
    Ok(channel)
}

/// Declares a durable queue.
pub async fn declare(
    channel: &Channel,
    queue: &str,
    arguments: FieldTable,
) -> lapin::Result<Queue> {
    channel
        .queue_declare(queue.into(), QueueDeclareOptions::durable(), arguments)
        .await
}

/// Asks how many messages and consumers a queue has. If there is no such queue, that is an error, and RabbitMQ closes
/// the channel.
pub async fn inspect(channel: &Channel, queue: &str) -> lapin::Result<Queue> {
    let passive = QueueDeclareOptions {
        passive: true,
        ..QueueDeclareOptions::default()
    };
    channel
        .queue_declare(queue.into(), passive, FieldTable::default())
        .await
}

/// Subscribes to a queue; deliveries have to be acknowledged.
pub async fn subscribe(channel: &Channel, queue: &str) -> lapin::Result<Consumer> {
    channel
        .basic_consume(
            queue.into(),
            "".into(),
            BasicConsumeOptions::default(),
            FieldTable::default(),
        )
        .await
}
