//! Publishes a batch and tells what became of each message.

use std::{collections::HashMap, task::Poll, time::Duration};

use futures::FutureExt;
use lapin::{Channel, Confirmation, Connection, options::BasicPublishOptions, types::ShortString};
use tokio::time::{Instant, error::Elapsed, timeout_at};

use super::{
    Broker, BrokerError, amqp_code,
    bindings::{Bindings, Way},
    close,
    queues::Role,
};
use crate::{
    plant::{Bug, Point},
    wire::{Outgoing, retry_id, with_bcc},
};

/// What became of one published message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The message is in its queue.
    Confirmed,
    /// The broker returned the message: its queue does not exist.
    Returned(String),
    /// The broker would not take the message, for example because the queue is full.
    Refused,
    /// It is not known whether the message is in its queue.
    Unknown,
}

/// Why not every message of a batch was answered. The channel cannot be used any more:
/// after `Channel`, [`Publisher::reopen`] may open another; after the rest a new connection
/// is needed.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The broker closed the channel, or all of the connection, over one
    /// message's content.
    #[error("RabbitMQ closed the channel: {0}")]
    Channel(String),
    /// The broker had an internal error. Some content causes one, so a message that was
    /// published alone is suspect.
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
    pub(super) bindings: Bindings,
    pub(super) connection: Connection,
    pub(super) channel: Channel,
}

impl Publisher {
    /// Fails, saying why, when nothing can be published: the connection is closed, or the
    /// broker has raised an alarm.
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

    /// Whether the broker has raised an alarm and the connection still lives. A
    /// connection that has died since still calls itself blocked, but will never be
    /// told that the alarm is over.
    pub fn blocked(&self) -> bool {
        let status = self.connection.status();
        status.connected() && self.channel.status().connected() && status.blocked()
    }

    /// Publishes all messages, then waits for all confirms; gives an outcome for each.
    ///
    /// The AMQP client hands a return to whichever confirm comes next, not to the one
    /// it belongs to, so returns are matched by our id over the whole batch. The
    /// broker sends a message's return before its ack, and the client hands that return
    /// to a confirm which completes no later than the message's own. So a message that
    /// is acked, and is not among the returns of all confirms completed by then, is in
    /// its queue, even if the batch broke off.
    pub async fn publish(&mut self, batch: &[Outgoing]) -> (Vec<Outcome>, Option<Fault>) {
        let mut fault = None;
        let bound_by = Instant::now() + self.broker.timeout;
        let mut ways = Vec::with_capacity(batch.len());
        for message in batch {
            let way = self
                .bindings
                .way(&self.broker, &self.connection, message, bound_by)
                .await;
            match way {
                Ok(way) => ways.push(way),
                // Nothing is published yet, so nothing is known of any message.
                Err(e) => {
                    let fault = Fault::Connection(e.to_string());
                    return (vec![Outcome::Unknown; batch.len()], Some(fault));
                }
            }
        }
        let uses_exchange = ways.iter().any(|way| matches!(way, Way::ByKey(_)));
        let deadline = Instant::now() + self.broker.confirm_timeout;
        // The client's own thread writes the frames, and its future completes only
        // then: two switches of threads. So all messages are handed over, in order,
        // before one of them is waited for.
        let mut handed_over = Vec::with_capacity(batch.len());
        for (message, way) in batch.iter().zip(&ways) {
            let (exchange, key, properties) = match way {
                Way::ByName => (
                    ShortString::default(),
                    message.queue.clone(),
                    message.properties.clone(),
                ),
                Way::ByKey(binding_key) => (
                    self.bindings.exchange.clone(),
                    message.routing_key.clone().unwrap_or_default(),
                    with_bcc(message.properties.clone(), binding_key),
                ),
                Way::Nowhere(_) | Way::Later => {
                    handed_over.push(None);
                    continue;
                }
            };
            Point::BeforePublish.pass();
            let mut publish = Box::pin(self.channel.basic_publish(
                exchange,
                key,
                // Without `mandatory` the broker drops a message to a missing queue, and
                // acknowledges it.
                BasicPublishOptions {
                    mandatory: true,
                    ..BasicPublishOptions::default()
                },
                &message.body,
                properties,
            ));
            let polled = futures::poll!(publish.as_mut());
            handed_over.push(Some((publish, polled)));
        }
        // When one publish fails the others may still be answered, so what is known of
        // each message is kept.
        let mut confirms = Vec::with_capacity(batch.len());
        // If we stop waiting before the client has written a message's frames, its confirm
        // may carry another message's return; so after a write timeout no ack is trusted.
        let mut trusted = true;
        for handed_over in handed_over {
            let Some((publish, polled)) = handed_over else {
                confirms.push(None);
                continue;
            };
            let written = match polled {
                Poll::Ready(written) => Ok(written),
                Poll::Pending => timeout_at(deadline, publish).await,
            };
            trusted &= written.is_ok();
            if let Ok(Err(e)) = &written
                && uses_exchange
            {
                self.bindings.note(e);
            }
            confirms.push(self.answered(written, &mut fault));
            Point::AfterPublish.pass();
        }
        Point::BeforeConfirm.pass();
        let mut outcomes = vec![Outcome::Unknown; batch.len()];
        let mut returned: HashMap<String, String> = HashMap::new();
        let mut given_up = Vec::new();
        for (outcome, confirm) in outcomes.iter_mut().zip(confirms) {
            let Some(mut confirm) = confirm else { continue };
            let answer = timeout_at(deadline, &mut confirm).await;
            if answer.is_err() {
                given_up.push(confirm);
            }
            if let Ok(Err(e)) = &answer
                && uses_exchange
            {
                self.bindings.note(e);
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
        // A confirm that we stopped waiting for may have completed since, and may carry
        // the return of a message whose own confirm was read after it.
        for confirm in given_up {
            if let Some(Ok(answer)) = confirm.now_or_never() {
                note_return(answer, &mut returned);
            }
        }
        Point::AfterConfirm.pass();
        for ((outcome, message), way) in outcomes.iter_mut().zip(batch).zip(ways) {
            if let Way::Nowhere(why) = way {
                *outcome = Outcome::Returned(why);
            } else if returned.is_empty() || Bug::IgnoreReturns.planted() {
                continue;
            } else if let Some(why) = returned.remove(&message.message_id.to_string()) {
                *outcome = match way {
                    Way::ByKey(_) if self.is_bound_anew(message, bound_by).await => {
                        Outcome::Refused
                    }
                    _ => Outcome::Returned(why),
                };
            }
        }
        (outcomes, fault)
    }

    /// Binds the queue of a message that was returned once more. That works if the queue
    /// was deleted and made again, and then the message can be sent another time.
    async fn is_bound_anew(&mut self, message: &Outgoing, latest: Instant) -> bool {
        self.bindings.forget(message.queue.as_str());
        let way = self
            .bindings
            .way(&self.broker, &self.connection, message, latest)
            .await;
        matches!(way, Ok(Way::ByKey(_)))
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

    /// Opens a new channel on the same connection, after the broker closed the old one.
    pub async fn reopen(&mut self) -> Result<(), BrokerError> {
        self.channel = self.broker.confirming(&self.connection).await?;
        Ok(())
    }

    /// Makes the review queue again if somebody deleted it.
    pub async fn ensure_review(&self, queue: &str) -> Result<(), BrokerError> {
        self.broker
            .ensure_queue(&self.connection, queue, Role::Review)
            .await
    }

    /// Closes the connection, within the deadline.
    pub async fn close(self) {
        close(&self.connection, self.broker.timeout).await;
    }
}

/// Keeps the return that came with a confirm, under the id it belongs to.
fn note_return(answer: Confirmation, returned: &mut HashMap<String, String>) {
    if let Some(back) = answer.take_message()
        && let Some(id) = retry_id(&back.delivery.properties)
    {
        let text = format!("{} {}", back.reply_code, back.reply_text);
        returned.insert(id, text);
    }
}

/// Notes why a batch broke off. After the broker has closed the channel over a message's
/// content, later publishes fail because the channel is gone, and such an error may be
/// seen first; so what the broker said of the content overwrites it.
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
