//! Publishes a batch and tells what became of each message.

use std::{collections::HashMap, task::Poll, time::Duration};

use futures::FutureExt;
use lapin::{Channel, Confirmation, Connection, options::BasicPublishOptions, types::ShortString};
use tokio::time::{Instant, error::Elapsed, timeout_at};

use super::{Broker, BrokerError, amqp_code, close};
use crate::{
    plant::{Bug, Point},
    wire::Outgoing,
};

/// What became of one published message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// In its queue.
    Confirmed,
    /// There is no such queue.
    Returned(String),
    /// The broker would not take it (a full queue, for example).
    Refused,
    /// Not known: it may or may not be in its queue.
    Unknown,
}

/// What kept a batch from being answered in full. The publisher is spent.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The broker closed the channel, or all of the connection, over one
    /// message's content.
    #[error("RabbitMQ closed the channel: {0}")]
    Channel(String),
    /// The broker failed inside. It does so over some content, too, so a message
    /// that was alone is suspect.
    #[error("RabbitMQ failed over what it was sent: {0}")]
    Internal(String),
    /// The connection failed.
    #[error("RabbitMQ: {0}")]
    Connection(String),
    /// Confirms did not come in time.
    #[error("RabbitMQ did not confirm within {0:?}")]
    Timeout(Duration),
}

/// Publishes batches, one at a time.
pub struct Publisher {
    pub(super) broker: Broker,
    pub(super) connection: Connection,
    pub(super) channel: Channel,
}

impl Publisher {
    /// Whether a batch can be tried: connected, and no alarm raised.
    pub fn usable(&self) -> Result<(), &'static str> {
        let status = self.connection.status();
        if !status.connected() || !self.channel.status().connected() {
            Err("the connection is closed")
        } else if status.blocked() {
            Err("RabbitMQ has blocked publishers (memory or disk alarm)")
        } else {
            Ok(())
        }
    }

    /// Whether the broker has raised an alarm. A connection that has since died
    /// still says so of itself, but will never be told that the alarm is over.
    pub fn blocked(&self) -> bool {
        let status = self.connection.status();
        status.connected() && self.channel.status().connected() && status.blocked()
    }

    /// Publishes all, then waits for all confirms: an outcome each.
    ///
    /// lapin hands a return to whichever confirm comes next, not to its own, so
    /// returns are matched by `message_id` over the whole batch. A message's
    /// return is on the wire before its ack, and is handed to a confirm that is
    /// done no later than its own; so one that is acked and not among the returns
    /// of all confirms done by then is in its queue, even if the batch broke off.
    pub async fn publish(&mut self, batch: &[Outgoing]) -> (Vec<Outcome>, Option<Fault>) {
        let deadline = Instant::now() + self.broker.confirm_timeout;
        let mut fault = None;
        // lapin's future is done when its own thread has written the frames, a
        // switch to and fro. So all are handed over, in order, before one is waited for.
        let mut handed_over = Vec::with_capacity(batch.len());
        for message in batch {
            Point::BeforePublish.pass();
            let mut publish = Box::pin(self.channel.basic_publish(
                ShortString::default(),
                message.queue.clone(),
                // Without `mandatory` a message to a missing queue is dropped and acked.
                BasicPublishOptions {
                    mandatory: true,
                    ..BasicPublishOptions::default()
                },
                &message.body,
                message.properties.clone(),
            ));
            let polled = futures::poll!(publish.as_mut());
            handed_over.push((publish, polled));
        }
        // Whatever breaks off, the others may still be answered: what is known of
        // each is kept.
        let mut confirms = Vec::with_capacity(batch.len());
        for (publish, polled) in handed_over {
            let written = match polled {
                Poll::Ready(written) => Ok(written),
                Poll::Pending => timeout_at(deadline, publish).await,
            };
            confirms.push(self.answered(written, &mut fault));
            Point::AfterPublish.pass();
        }
        Point::BeforeConfirm.pass();
        let mut outcomes = vec![Outcome::Unknown; batch.len()];
        let mut returned: HashMap<String, String> = HashMap::new();
        let mut given_up = Vec::new();
        // One that is given up before its frames are written may get another's return.
        let trusted = !matches!(fault, Some(Fault::Timeout(_)));
        for (outcome, confirm) in outcomes.iter_mut().zip(confirms) {
            let Some(mut confirm) = confirm else { continue };
            let answer = timeout_at(deadline, &mut confirm).await;
            if answer.is_err() {
                given_up.push(confirm);
            }
            let Some(answer) = self.answered(answer, &mut fault) else {
                continue;
            };
            *outcome = match answer {
                Confirmation::Ack(_) if trusted => Outcome::Confirmed,
                Confirmation::Nack(_) => Outcome::Refused,
                Confirmation::Ack(_) | Confirmation::NotRequested => Outcome::Unknown,
            };
            note_return(answer, &mut returned);
        }
        // Confirmed since, such a one may have the return of a message that was read
        // as confirmed after it.
        for confirm in given_up {
            if let Some(Ok(answer)) = confirm.now_or_never() {
                note_return(answer, &mut returned);
            }
        }
        Point::AfterConfirm.pass();
        if !returned.is_empty() && !Bug::IgnoreReturns.planted() {
            for (outcome, message) in outcomes.iter_mut().zip(batch) {
                if let Some(text) = returned.remove(&message.message_id.to_string()) {
                    *outcome = Outcome::Returned(text);
                }
            }
        }
        (outcomes, fault)
    }

    fn answered<T>(
        &self,
        answer: Result<lapin::Result<T>, Elapsed>,
        fault: &mut Option<Fault>,
    ) -> Option<T> {
        match answer {
            Ok(Ok(answer)) => return Some(answer),
            Ok(Err(e)) => blame(fault, &e),
            Err(_) => {
                fault.get_or_insert(Fault::Timeout(self.broker.confirm_timeout));
            }
        }
        None
    }

    /// A new channel on the same connection, after the broker closed the old one.
    pub async fn reopen(&mut self) -> Result<(), BrokerError> {
        self.channel = self.broker.confirming(&self.connection).await?;
        Ok(())
    }

    /// Makes `queue` again if somebody deleted it.
    pub async fn ensure_queue(&self, queue: &ShortString) -> Result<(), BrokerError> {
        self.broker.ensure_queue(&self.connection, queue).await
    }

    /// Says goodbye, within the deadline.
    pub async fn close(self) {
        close(&self.connection, self.broker.timeout).await;
    }
}

/// Keeps the return that came with a confirm, under the id it belongs to.
fn note_return(answer: Confirmation, returned: &mut HashMap<String, String>) {
    if let Some(back) = answer.take_message()
        && let Some(id) = back.delivery.properties.message_id()
    {
        let text = format!("{} {}", back.reply_code, back.reply_text);
        returned.insert(id.to_string(), text);
    }
}

/// Notes why a batch broke off. What the broker said of a message's content
/// outweighs what followed from it: publishing on may fail first, because the
/// channel is gone.
fn blame(fault: &mut Option<Fault>, error: &lapin::Error) {
    const CONTENT_TOO_LARGE: u16 = 311;
    const PRECONDITION_FAILED: u16 = 406;
    const FRAME_ERROR: u16 = 501;
    const SYNTAX_ERROR: u16 = 502;
    const INTERNAL_ERROR: u16 = 541;
    match amqp_code(error) {
        Some(CONTENT_TOO_LARGE | PRECONDITION_FAILED | FRAME_ERROR | SYNTAX_ERROR) => {
            *fault = Some(Fault::Channel(error.to_string()));
        }
        Some(INTERNAL_ERROR) => *fault = Some(Fault::Internal(error.to_string())),
        _ => {
            fault.get_or_insert_with(|| Fault::Connection(error.to_string()));
        }
    }
}

#[cfg(test)]
mod tests {
    use lapin::{
        ChannelState, ErrorKind,
        protocol::{AMQPError, AMQPErrorKind, AMQPHardError, AMQPSoftError},
    };

    use super::*;

    fn said(kind: impl Into<AMQPErrorKind>) -> lapin::Error {
        ErrorKind::ProtocolError(AMQPError::new(kind.into(), "said".into())).into()
    }

    #[test]
    fn a_message_is_blamed_for_its_content_whichever_error_is_seen_first() {
        let gone: lapin::Error =
            ErrorKind::InvalidChannelState(ChannelState::Error, "basic.publish").into();
        let by_content = [
            said(AMQPSoftError::PRECONDITIONFAILED),
            said(AMQPHardError::FRAMEERROR),
        ];
        for content in &by_content {
            for order in [[content, &gone], [&gone, content]] {
                let mut fault = None;
                for error in order {
                    blame(&mut fault, error);
                }
                assert!(matches!(fault, Some(Fault::Channel(_))), "{fault:?}");
            }
        }
    }

    #[test]
    fn an_outage_is_nobodys_fault() {
        let mut fault = None;
        for outage in [
            said(AMQPHardError::CONNECTIONFORCED),
            said(AMQPSoftError::ACCESSREFUSED),
        ] {
            blame(&mut fault, &outage);
            assert!(matches!(fault, Some(Fault::Connection(_))), "{fault:?}");
        }
    }
}
