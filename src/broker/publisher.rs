//! Publishes a batch and tells what became of each message.

use std::{collections::HashMap, task::Poll};

use futures::FutureExt;
use lapin::{
    BasicProperties, Channel, Confirmation, Connection, options::BasicPublishOptions,
    types::ShortString,
};
use tokio::time::{Instant, error::Elapsed, timeout_at};

use super::{
    Broker, BrokerError,
    bindings::{Bindings, Way},
    close, marks,
    outcome::{Fault, Outcome, blame},
    queues::Role,
};
use crate::{
    plant::{Bug, Point},
    wire::{Outgoing, header_frame_size, retry_id, with_bcc},
};

/// Publishes batches, one at a time.
pub struct Publisher {
    pub(super) broker: Broker,
    pub(super) bindings: Bindings,
    pub(super) connection: Connection,
    pub(super) channel: Channel,
    /// The size of the largest body that the broker has taken on this connection.
    pub(super) taken: usize,
    /// Where we ask for the marks of other services' queues.
    pub(super) channel_for_marks: Option<Channel>,
}

/// A message of a batch, ready to be handed to the client.
struct Post<'b> {
    /// Its place in the batch.
    at: usize,
    message: &'b Outgoing,
    /// Whether it goes by our own exchange.
    by_key: bool,
    exchange: ShortString,
    key: ShortString,
    properties: BasicProperties,
}

impl<'b> Post<'b> {
    fn new(at: usize, message: &'b Outgoing, way: &Way, bindings: &Bindings) -> Self {
        let properties = message.properties.clone();
        match way {
            Way::ByKey(binding_key) => Self {
                at,
                message,
                by_key: true,
                exchange: bindings.exchange.clone(),
                key: message.routing_key.clone().unwrap_or_default(),
                properties: with_bcc(properties, binding_key),
            },
            _ => Self {
                at,
                message,
                by_key: false,
                exchange: ShortString::default(),
                key: message.queue.clone(),
                properties,
            },
        }
    }
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

    /// Publishes the messages of a batch and waits for their confirms; gives an outcome for
    /// each.
    ///
    /// Over a message that is too large the broker closes the channel, and then nobody can
    /// tell which others on that channel have arrived. So messages share the channel only if
    /// the broker is known to take their size. If the largest of a batch is larger than all
    /// that the broker has taken on this connection, its body is first published to nowhere:
    /// the broker looks at the size before it looks for a queue, and no queue can hold up
    /// the answer.
    pub async fn publish(&mut self, batch: &[Outgoing]) -> (Vec<Outcome>, Option<Fault>) {
        let mut outcomes = vec![Outcome::Unsent; batch.len()];
        let marked = match self.marked(batch).await {
            Ok(marked) => marked,
            Err(e) => return (outcomes, Some(Fault::Connection(e.to_string()))),
        };
        let bound_by = Instant::now() + self.broker.timeout;
        let mut posts = Vec::with_capacity(batch.len());
        for (at, message) in batch.iter().enumerate() {
            if marked.contains(&message.queue) {
                outcomes[at] = Outcome::Forbidden(marks::refusal(message.queue.as_str()));
                continue;
            }
            let way = self
                .bindings
                .way(&self.broker, &self.connection, message, bound_by)
                .await;
            match way {
                Ok(Way::Nowhere(why)) => outcomes[at] = Outcome::Returned(why),
                Ok(Way::Later) => {}
                Ok(way) => {
                    let post = Post::new(at, message, &way, &self.bindings);
                    match self.frame_problem(&post.properties) {
                        Some(why) => outcomes[at] = Outcome::Unacceptable(why),
                        None => posts.push(post),
                    }
                }
                Err(e) => return (outcomes, Some(Fault::Connection(e.to_string()))),
            }
        }
        let deadline = Instant::now() + self.broker.confirm_timeout;
        // A message that is alone can harm no other.
        while posts.len() > 1
            && let Some(largest) = self.largest_unproven(&posts)
        {
            let body = &posts[largest].message.body;
            match self.prove_size(body, deadline).await {
                Ok(()) => {}
                Err(Fault::Channel(why)) => {
                    outcomes[posts.remove(largest).at] = self.unacceptable(body.len(), why);
                    if let Err(e) = self.reopen().await {
                        return (outcomes, Some(Fault::Connection(e.to_string())));
                    }
                }
                Err(fault) => {
                    if let Fault::Timeout(_) = fault {
                        // It may need too long for its size, and must not hold up the others
                        // again at once.
                        outcomes[posts[largest].at] = Outcome::Unconfirmed;
                    }
                    return (outcomes, Some(fault));
                }
            }
        }
        let fault = self
            .publish_together(posts, &mut outcomes, bound_by, deadline)
            .await;
        (outcomes, fault)
    }

    /// The place of the largest message, unless the broker is known to take its size.
    fn largest_unproven(&self, posts: &[Post<'_>]) -> Option<usize> {
        let sizes = posts.iter().map(|post| post.message.body.len());
        let (at, largest) = sizes.enumerate().max_by_key(|(_, size)| *size)?;
        (largest > self.taken).then_some(at)
    }

    /// Publishes a body to a queue that does not exist, to see whether its size is taken.
    async fn prove_size(&mut self, body: &[u8], deadline: Instant) -> Result<(), Fault> {
        let mut fault = None;
        let nowhere = self.broker.nowhere();
        let nowhere = nowhere.map_err(|e| Fault::Connection(e.to_string()))?;
        let publish = self.channel.basic_publish(
            ShortString::default(),
            nowhere,
            BasicPublishOptions::default(),
            body,
            BasicProperties::default(),
        );
        let written = timeout_at(deadline, publish).await;
        if let Some(confirm) = self.answered(written, &mut fault) {
            let answer = timeout_at(deadline, confirm).await;
            if self.answered(answer, &mut fault).is_some() {
                self.note_taken(body.len());
            }
        }
        fault.map_or(Ok(()), Err)
    }

    fn note_taken(&mut self, size: usize) {
        self.taken = self.taken.max(size);
        self.broker.sizes.note_taken(size);
    }

    /// What is wrong with properties that do not fit one frame: the broker would close the
    /// connection over them.
    fn frame_problem(&self, properties: &BasicProperties) -> Option<String> {
        let most = self.connection.configuration().frame_max();
        let size = header_frame_size(properties);
        let fits = u32::try_from(size).is_ok_and(|size| size <= most);
        (!fits).then(|| {
            format!("its properties need a frame of {size} bytes, and the broker takes {most}")
        })
    }

    /// Publishes all posts, then waits for all confirms; notes the outcome of each.
    ///
    /// The AMQP client hands a return to whichever confirm comes next, not to the one
    /// it belongs to, so returns are matched by our id over the whole batch. The
    /// broker sends a message's return before its ack, and the client hands that return
    /// to a confirm which completes no later than the message's own. So a message that
    /// is acked, and is not among the returns of all confirms completed by then, is in
    /// its queue, even if the batch broke off.
    async fn publish_together(
        &mut self,
        posts: Vec<Post<'_>>,
        outcomes: &mut [Outcome],
        bound_by: Instant,
        deadline: Instant,
    ) -> Option<Fault> {
        let mut fault = None;
        let uses_exchange = posts.iter().any(|post| post.by_key);
        // The client's own thread writes the frames, and its future completes only
        // then: two switches of threads. So all messages are handed over, in order,
        // before one of them is waited for.
        let mut handed_over = Vec::with_capacity(posts.len());
        let mut sent = Vec::with_capacity(posts.len());
        for post in posts {
            Point::BeforePublish.pass();
            let mut publish = Box::pin(self.channel.basic_publish(
                post.exchange,
                post.key,
                // Without `mandatory` the broker drops a message to a missing queue, and
                // acknowledges it.
                BasicPublishOptions {
                    mandatory: true,
                    ..BasicPublishOptions::default()
                },
                &post.message.body,
                post.properties,
            ));
            let polled = futures::poll!(publish.as_mut());
            handed_over.push((publish, polled));
            sent.push((post.at, post.message, post.by_key));
        }
        // When one publish fails the others may still be answered, so what is known of
        // each message is kept.
        let mut confirms = Vec::with_capacity(sent.len());
        // If we stop waiting before the client has written a message's frames, its confirm
        // may carry another message's return; so after a write timeout no ack is trusted.
        let mut trusted = true;
        for (publish, polled) in handed_over {
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
        let mut returned: HashMap<String, String> = HashMap::new();
        let mut given_up = Vec::new();
        for ((at, message, _), confirm) in sent.iter().zip(confirms) {
            let outcome = &mut outcomes[*at];
            *outcome = Outcome::Unknown;
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
            // Returned or refused, its size was looked at first.
            self.note_taken(message.body.len());
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
        for (at, message, by_key) in &sent {
            if returned.is_empty() || Bug::IgnoreReturns.planted() {
                break;
            }
            let Some(why) = returned.remove(&message.message_id.to_string()) else {
                continue;
            };
            outcomes[*at] = if *by_key && self.is_bound_anew(message, bound_by).await {
                Outcome::Refused
            } else {
                Outcome::Returned(why)
            };
        }
        match (fault, sent.as_slice()) {
            (Some(Fault::Channel(why)), [(at, message, _)]) => {
                outcomes[*at] = self.unacceptable(message.body.len(), why);
                let reopened = self.reopen().await;
                reopened.err().map(|e| Fault::Connection(e.to_string()))
            }
            (Some(fault @ Fault::Timeout(_)), _) | (Some(fault @ Fault::Internal(_)), [_]) => {
                for (at, ..) in sent {
                    if outcomes[at] == Outcome::Unknown {
                        outcomes[at] = Outcome::Unconfirmed;
                    }
                }
                Some(fault)
            }
            (fault, _) => fault,
        }
    }

    /// Notes why the broker closed the channel over the only message on it.
    fn unacceptable(&mut self, size: usize, why: String) -> Outcome {
        // RabbitMQ says so in these words, from 3.8 to 4.3, under a code that has many uses.
        if !why.contains("message size") {
            return Outcome::Unacceptable(why);
        }
        self.taken = self.taken.min(size.saturating_sub(1));
        self.broker.sizes.note_refused(size, &why);
        Outcome::TooLarge(why)
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
