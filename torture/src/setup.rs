//! The broker as a team might have set it up before it heard of the service: quorum queues with a delivery limit,
//! and a dead-letter exchange that is bound by a pattern of routing keys.
//!
//! Such a set-up is unforgiving. A message that is delivered more often than the limit allows is dropped, and so is a
//! dead letter whose routing key matches no binding, and nobody is told.

use std::path::Path;

use devstack::Stack;
use lapin::{
    Channel, ExchangeKind,
    options::{ExchangeDeclareOptions, QueueBindOptions},
    types::{AMQPValue, FieldTable, LongString},
};
use testkit::amqp;

use crate::{
    message::{DEAD_LETTERS, INTAKE, KEYS, LARGEST, REVIEW, TARGETS},
    post::connect,
};

/// The topic exchange that letters are published to.
pub const WORK: &str = "torture.work";

/// The topic exchange that the targets' dead letters go to.
const DEAD: &str = "torture.dead";

/// The only binding of the dead-letter queue. The names of the targets do not match it.
const DEAD_PATTERN: &str = "order.*";

/// How often a message may be delivered again to the service. This is what RabbitMQ 4 has as its default; RabbitMQ 3
/// has none.
const DELIVERY_LIMIT: i32 = 20;

/// The same for the campaign's own consumers, which hold many deliveries whenever their connections end.
const NO_DELIVERY_LIMIT: i32 = 1_000_000;

/// Sets what RabbitMQ can only be told before it starts. It reads all files in this directory.
pub fn configure(rabbitmq: &Path) -> anyhow::Result<()> {
    let directory = rabbitmq.join("conf.d");
    std::fs::create_dir_all(&directory)?;
    let limit = format!("max_message_size = {LARGEST}\n");
    Ok(std::fs::write(directory.join("90-torture.conf"), limit)?)
}

/// Declares all that the campaign needs.
pub async fn declare_all(url: &str) -> anyhow::Result<()> {
    let connection = connect(url).await?;
    let channel = connection.create_channel().await?;
    for exchange in [WORK, DEAD] {
        let options = ExchangeDeclareOptions {
            durable: true,
            ..ExchangeDeclareOptions::default()
        };
        let none = FieldTable::default();
        channel
            .exchange_declare(exchange.into(), ExchangeKind::Topic, options, none)
            .await?;
    }
    for queue in TARGETS.into_iter().chain([INTAKE, REVIEW, DEAD_LETTERS]) {
        declare(&channel, queue).await?;
    }
    connection.close(200, "done".into()).await?;
    Ok(())
}

/// Declares a queue, with its bindings.
pub async fn declare(channel: &Channel, queue: &str) -> lapin::Result<()> {
    let text = |text: &str| AMQPValue::LongString(LongString::from(text));
    let mut arguments = FieldTable::default();
    arguments.insert("x-queue-type".into(), text("quorum"));
    let limit = if [INTAKE, DEAD_LETTERS].contains(&queue) {
        DELIVERY_LIMIT
    } else {
        NO_DELIVERY_LIMIT
    };
    arguments.insert("x-delivery-limit".into(), limit.into());
    if TARGETS.contains(&queue) {
        arguments.insert("x-dead-letter-exchange".into(), text(DEAD));
        // Otherwise RabbitMQ itself might lose a dead letter when it is killed.
        arguments.insert("x-dead-letter-strategy".into(), text("at-least-once"));
        arguments.insert("x-overflow".into(), text("reject-publish"));
    }
    amqp::declare(channel, queue, arguments).await?;
    let bound = match TARGETS.iter().position(|target| *target == queue) {
        Some(which) => Some((WORK, KEYS[which])),
        None if queue == DEAD_LETTERS => Some((DEAD, DEAD_PATTERN)),
        None => None,
    };
    if let Some((exchange, key)) = bound {
        let options = QueueBindOptions::default();
        let none = FieldTable::default();
        channel
            .queue_bind(queue.into(), exchange.into(), key.into(), options, none)
            .await?;
    }
    Ok(())
}

/// Whether a quorum queue holds no message at all: none that is delivered and not acknowledged, and none that is dead
/// and has not reached another queue yet. AMQP tells of neither, and RabbitMQ's lists are up to five seconds old, so
/// this asks the queue's own process.
pub fn is_empty(stack: &Stack, queue: &str) -> anyhow::Result<bool> {
    let ask = format!(
        "{{ok, Q}} = rabbit_amqqueue:lookup(rabbit_misc:r(<<\"/\">>, queue, <<\"{queue}\">>)), \
         {{ok, {{_, Of}}, _}} = ra:leader_query(amqqueue:get_pid(Q), fun rabbit_fifo:overview/1), \
         lists:sum([maps:get(Count, Of) || Count <- \
             [num_messages, num_checked_out, num_discarded, num_discard_checked_out]])."
    );
    Ok(stack.rabbitmq.ctl(&["eval", &ask])?.trim() == "0")
}
