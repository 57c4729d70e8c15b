//! Lets every retry-scheduler on a broker know the intake and review queues of all others,
//! so that none sends a message into them: it would be taken in there, and go round.
//!
//! AMQP does not tell who consumes a queue. So each service marks its own queues with a
//! binding: from an exchange that all of them share, by the queue's name as key, to a queue
//! that keeps nothing. Whoever wants to know whether a name is marked publishes an empty
//! message there under that name, and has it returned if it is not. That closes no channel,
//! leaves no line in the broker's log, and any number of names cost one round trip.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use futures::future::try_join_all;
use lapin::{
    BasicProperties, Channel, Connection, ExchangeKind,
    options::{BasicPublishOptions, ExchangeDeclareOptions, QueueBindOptions, QueueDeclareOptions},
    types::{AMQPValue, FieldTable, ShortString},
};
use tokio::time::Instant;
use tracing::warn;

use super::{Broker, BrokerError, Publisher, amqp_code};
use crate::wire::Outgoing;

/// The exchange of the marks. Not named by SERVICE_NAME, because services of all names share
/// it.
const MARKS: &str = "retry-scheduler.intakes";

/// The queue that the marks lead to. It is a quorum queue: a classic one lives on one node of a
/// cluster, and while that node is down the broker does not answer who declares it.
const MARKED: &str = "retry-scheduler.marked";

/// How long an answer is believed: a queue may become another service's intake at any time.
const BELIEVED: Duration = Duration::from_secs(300);

/// How long no question is asked after one that was not answered.
const REST: Duration = Duration::from_secs(30);

/// The most answers that are kept: queue names are strangers' words.
const MOST_KNOWN: usize = 10_000;

/// What is known of queues and their marks, shared by all connections of this process.
#[derive(Default)]
pub(super) struct Marks {
    known: Mutex<HashMap<ShortString, Known>>,
    /// Whether the broker has refused to let us make marks or look for them.
    refused: AtomicBool,
    /// When the broker last failed to answer. Most of a cluster may be down for the queue of
    /// the marks, and not for the queues that messages go to.
    unanswered: Mutex<Option<Instant>>,
}

struct Known {
    marked: bool,
    since: Instant,
}

impl Marks {
    /// Of the queues of a batch, those that are marked, and those of which that is not known.
    fn look_up(&self, batch: &[Outgoing]) -> (HashSet<ShortString>, HashSet<ShortString>) {
        let (mut marked, mut unknown) = (HashSet::new(), HashSet::new());
        let now = Instant::now();
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        for Outgoing { queue, .. } in batch {
            match known.get(queue) {
                Some(known) if now.duration_since(known.since) < BELIEVED => {
                    if known.marked {
                        marked.insert(queue.clone());
                    }
                }
                _ => {
                    unknown.insert(queue.clone());
                }
            }
        }
        (marked, unknown)
    }

    fn note(&self, queue: ShortString, marked: bool) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= MOST_KNOWN {
            known.clear();
        }
        let since = Instant::now();
        known.insert(queue, Known { marked, since });
    }

    /// Whether there is no point in asking now.
    fn rests(&self) -> bool {
        let unanswered = self.unanswered.lock();
        let unanswered = *unanswered.unwrap_or_else(PoisonError::into_inner);
        self.refused.load(Ordering::Relaxed) || unanswered.is_some_and(|at| at.elapsed() < REST)
    }

    /// Does without marks for a while where the broker does not answer, and for good where it
    /// does not allow them, which is said once; any other error is the caller's.
    fn forgive(&self, error: BrokerError) -> Result<(), BrokerError> {
        const ACCESS_REFUSED: u16 = 403;
        const NOT_FOUND: u16 = 404;
        const PRECONDITION_FAILED: u16 = 406;
        let error = match error {
            BrokerError::Failed(error) => error,
            BrokerError::Silent(what, _) => {
                warn!(
                    exchange = MARKS,
                    error = %error,
                    "the broker did not answer {what} about the intake queues of other services; \
                     messages go on without that"
                );
                let unanswered = self.unanswered.lock();
                *unanswered.unwrap_or_else(PoisonError::into_inner) = Some(Instant::now());
                return Ok(());
            }
            other => return Err(other),
        };
        match amqp_code(&error) {
            // Somebody has just deleted the exchange; it is made again next time.
            Some(NOT_FOUND) => Ok(()),
            Some(ACCESS_REFUSED | PRECONDITION_FAILED) => {
                if !self.refused.swap(true, Ordering::Relaxed) {
                    warn!(
                        exchange = MARKS,
                        %error,
                        "the intake queues of other services cannot be told, so a message that \
                         names one as its original queue is sent there (told once)"
                    );
                }
                Ok(())
            }
            _ => Err(error.into()),
        }
    }
}

/// Why nothing is sent to a queue that is marked.
pub(super) fn refusal(queue: &str) -> String {
    format!(
        "queue {queue:?} is an intake or review queue of a retry-scheduler, so the message would go \
         round; if it is none any more, remove the binding with that key from the exchange {MARKS}"
    )
}

impl Broker {
    /// Marks one of our own queues, if the broker lets us.
    pub(super) async fn mark(
        &self,
        connection: &Connection,
        queue: &ShortString,
    ) -> Result<(), BrokerError> {
        let marked = async {
            let channel = self.channel_for_marks(connection).await?;
            let none = FieldTable::default();
            let options = QueueBindOptions::default();
            let bind =
                channel.queue_bind(MARKED.into(), MARKS.into(), queue.clone(), options, none);
            self.answer("queue.bind", bind).await?;
            self.answer("channel.close", channel.close(200, "done".into()))
                .await
        };
        match marked.await {
            Ok(()) => Ok(()),
            Err(e) => self.marks.forgive(e),
        }
    }

    async fn channel_for_marks(&self, connection: &Connection) -> Result<Channel, BrokerError> {
        let channel = self.confirming(connection).await?;
        let durable = ExchangeDeclareOptions {
            durable: true,
            ..ExchangeDeclareOptions::default()
        };
        let none = FieldTable::default();
        let exchange = channel.exchange_declare(MARKS.into(), ExchangeKind::Direct, durable, none);
        self.answer("exchange.declare", exchange).await?;
        let text = |text: &str| AMQPValue::LongString(text.into());
        let mut keeps_nothing = FieldTable::default();
        keeps_nothing.insert("x-queue-type".into(), text("quorum"));
        keeps_nothing.insert("x-max-length".into(), AMQPValue::LongInt(0));
        // A policy for all queues may name a dead-letter exchange; this outranks it, and
        // leads nowhere.
        keeps_nothing.insert("x-dead-letter-exchange".into(), text(""));
        keeps_nothing.insert("x-dead-letter-routing-key".into(), text("amq.nowhere"));
        let durable = QueueDeclareOptions::durable();
        let queue = channel.queue_declare(MARKED.into(), durable, keeps_nothing);
        self.answer("queue.declare", queue).await?;
        Ok(channel)
    }
}

impl Publisher {
    /// The queues of a batch that are marked, and are not our own: those are refused when a
    /// message arrives, and what goes there now is ours.
    pub(super) async fn marked(
        &mut self,
        batch: &[Outgoing],
    ) -> Result<HashSet<ShortString>, BrokerError> {
        let marks = self.broker.marks.clone();
        if marks.rests() {
            return Ok(HashSet::new());
        }
        let (mut marked, mut unknown) = marks.look_up(batch);
        for own in &self.broker.own_queues {
            if unknown.remove(own) {
                marks.note(own.clone(), false);
            }
        }
        if unknown.is_empty() {
            return Ok(marked);
        }
        match self.ask(&unknown).await {
            Ok(found) => {
                for queue in unknown {
                    let is_marked = found.contains(&queue);
                    marks.note(queue.clone(), is_marked);
                    if is_marked {
                        marked.insert(queue);
                    }
                }
            }
            Err(e) => {
                // The broker has closed the channel over it.
                self.channel_for_marks = None;
                marks.forgive(e)?;
            }
        }
        Ok(marked)
    }

    /// Asks the broker which of these queues are marked.
    async fn ask(
        &mut self,
        queues: &HashSet<ShortString>,
    ) -> Result<HashSet<ShortString>, BrokerError> {
        let channel = match &self.channel_for_marks {
            Some(channel) if channel.status().connected() => channel.clone(),
            _ => {
                let channel = self.broker.channel_for_marks(&self.connection).await?;
                self.channel_for_marks.insert(channel).clone()
            }
        };
        let mandatory = BasicPublishOptions {
            mandatory: true,
            ..BasicPublishOptions::default()
        };
        let ask = |queue: &ShortString| {
            let (queue, channel) = (queue.clone(), channel.clone());
            async move {
                let properties = BasicProperties::default();
                let published =
                    channel.basic_publish(MARKS.into(), queue, mandatory, b"", properties);
                published.await?.await
            }
        };
        let answers = try_join_all(queues.iter().map(ask));
        let answers = self.broker.answer("a question for marks", answers).await?;
        // A return may come with another question's confirm, but it names its own queue.
        let mut marked = queues.clone();
        for answer in answers {
            if let Some(back) = answer.take_message() {
                marked.remove(&back.delivery.routing_key);
            }
        }
        Ok(marked)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to(queue: &str) -> Outgoing {
        Outgoing {
            message_id: uuid::Uuid::nil(),
            queue: queue.into(),
            routing_key: None,
            properties: BasicProperties::default(),
            body: Vec::new(),
        }
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_is_believed_for_a_while() {
        let marks = Marks::default();
        let batch = ["free", "taken", "new", "new"].map(to);
        marks.note("free".into(), false);
        marks.note("taken".into(), true);
        let (marked, unknown) = marks.look_up(&batch);
        assert_eq!(marked, HashSet::from(["taken".into()]));
        assert_eq!(unknown, HashSet::from(["new".into()]));
        tokio::time::advance(BELIEVED).await;
        let (marked, unknown) = marks.look_up(&batch);
        assert!(marked.is_empty());
        assert_eq!(unknown.len(), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn a_broker_that_does_not_answer_is_not_asked_again_for_a_while() {
        let marks = Marks::default();
        assert!(!marks.rests());
        let silent = BrokerError::Silent("queue.declare", Duration::from_secs(2));
        assert!(marks.forgive(silent).is_ok());
        assert!(marks.rests());
        tokio::time::advance(REST).await;
        assert!(!marks.rests());
    }

    #[test]
    fn strangers_names_do_not_fill_the_memory() {
        let marks = Marks::default();
        for n in 0..MOST_KNOWN + 10 {
            marks.note(n.to_string().as_str().into(), false);
        }
        let known = marks.known.lock().unwrap();
        assert!(known.len() <= MOST_KNOWN);
    }
}
