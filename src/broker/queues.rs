//! Queues that we need: they are used as they are, and declared when they are absent.

use lapin::{
    Connection,
    options::QueueDeclareOptions,
    types::{AMQPValue, FieldTable, ShortString},
};
use tracing::info;

use super::{Broker, BrokerError, amqp_code, close, short};

const NOT_FOUND: u16 = 404;
const ACCESS_REFUSED: u16 = 403;
const PRECONDITION_FAILED: u16 = 406;

/// What a queue that we declare is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role<'r> {
    /// We take messages from it.
    Intake {
        /// Where messages go that the broker gives up on.
        review: &'r str,
    },
    /// People take messages from it.
    Review,
    /// It is somebody else's.
    Other,
}

impl Role<'_> {
    /// The arguments to declare such a queue with, the best first. A broker refuses arguments
    /// that it does not know, or that the queue's type does not have, which the virtual host
    /// decides, and dead-lettering by an exchange that the user may not publish to; so what is
    /// refused is tried with fewer.
    fn arguments(self) -> Vec<FieldTable> {
        let text = |text: &str| AMQPValue::LongString(text.into());
        let plain = FieldTable::default();
        match self {
            // What the broker gives up on goes to people: a quorum queue gives a message up
            // when it was delivered too often. `at-least-once` makes it keep the message until
            // the review queue has it, and is to be had only with `reject-publish`, which has
            // no effect on a queue without a maximal length.
            Self::Intake { review } => {
                let mut classic = plain.clone();
                classic.insert("x-dead-letter-exchange".into(), text(""));
                classic.insert("x-dead-letter-routing-key".into(), text(review));
                let mut quorum = classic.clone();
                quorum.insert("x-dead-letter-strategy".into(), text("at-least-once"));
                quorum.insert("x-overflow".into(), text("reject-publish"));
                vec![quorum, classic, plain]
            }
            // However often people put a message back, it stays. RabbitMQ 4 knows -1 for no limit,
            // but 3.10 takes that for a limit that the first return exceeds.
            Self::Review => {
                let mut quorum = plain.clone();
                quorum.insert("x-delivery-limit".into(), AMQPValue::LongInt(i32::MAX));
                vec![quorum, plain]
            }
            Self::Other => vec![plain],
        }
    }
}

impl Broker {
    /// Makes sure that an intake queue exists, and before it the review queue, which gets what
    /// the broker gives up on.
    pub(super) async fn ensure_intake(
        &self,
        connection: &Connection,
        queue: &str,
        review: &str,
    ) -> Result<(), BrokerError> {
        self.ensure_queue(connection, review, Role::Review).await?;
        self.ensure_queue(connection, queue, Role::Intake { review })
            .await
    }

    /// Makes sure that the queue exists. It looks first, because declaring a queue that
    /// exists with other arguments fails; such a queue is used as it is.
    pub(super) async fn ensure_queue(
        &self,
        connection: &Connection,
        queue: &str,
        role: Role<'_>,
    ) -> Result<(), BrokerError> {
        let queue = &short(queue)?;
        if self.exists(connection, queue).await? {
            return Ok(());
        }
        let mut refused = None;
        for arguments in role.arguments() {
            // The broker closes a channel over what it refuses.
            let channel = self
                .answer("channel.open", connection.create_channel())
                .await?;
            let shown = format!("{:?}", arguments.inner());
            let declared = self
                .answer(
                    "queue.declare",
                    channel.queue_declare(queue.clone(), QueueDeclareOptions::durable(), arguments),
                )
                .await;
            match declared {
                Ok(_) => {
                    info!(
                        queue = queue.as_str(),
                        arguments = shown,
                        "declared the queue, it was absent"
                    );
                    return Ok(());
                }
                Err(BrokerError::Failed(e))
                    if matches!(amqp_code(&e), Some(ACCESS_REFUSED | PRECONDITION_FAILED)) =>
                {
                    // Somebody else may have declared it meanwhile, in another way.
                    if self.exists(connection, queue).await? {
                        return Ok(());
                    }
                    refused = Some(e);
                }
                Err(e) => return Err(e),
            }
        }
        refused.map_or(Ok(()), |e| Err(e.into()))
    }

    async fn exists(
        &self,
        connection: &Connection,
        queue: &ShortString,
    ) -> Result<bool, BrokerError> {
        let passive = QueueDeclareOptions {
            passive: true,
            ..QueueDeclareOptions::default()
        };
        let probe = self
            .answer("channel.open", connection.create_channel())
            .await?;
        let found = self
            .answer(
                "queue.declare",
                probe.queue_declare(queue.clone(), passive, FieldTable::default()),
            )
            .await;
        match found {
            Ok(_) => Ok(true),
            Err(BrokerError::Failed(e)) if amqp_code(&e) == Some(NOT_FOUND) => Ok(false),
            Err(e) => Err(e),
        }
    }

    /// Declares an intake queue if it is absent, on a connection of its own.
    pub async fn declare_intake(&self, queue: &str, review: &str) -> Result<(), BrokerError> {
        let connection = self.connect("command").await?;
        self.ensure_intake(&connection, queue, review).await?;
        close(&connection, self.timeout).await;
        Ok(())
    }

    /// Declares a durable queue if it is absent, on a connection of its own.
    pub async fn declare(&self, queue: &str) -> Result<(), BrokerError> {
        let connection = self.connect("command").await?;
        self.ensure_queue(&connection, queue, Role::Other).await?;
        close(&connection, self.timeout).await;
        Ok(())
    }
}
