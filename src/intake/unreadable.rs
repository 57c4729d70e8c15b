//! Takes the message that the AMQP client cannot read out of the queue, to review.

use std::time::Duration;

use tokio_util::sync::CancellationToken;
use tracing::warn;

use super::{Ended, Intake};
use crate::broker::Got;

/// How many messages beyond the window are looked at, and how often an empty queue is. The broker
/// may put back what the client held only after we have begun to look.
const LAGGARDS: u16 = 20;

/// How long to wait before looking at an empty queue again.
const NAP: Duration = Duration::from_millis(50);

impl Intake {
    /// Takes messages from the head of the queue, one at a time, until one that the client cannot
    /// read is found and stored, whole, for review. The client held at most `held` messages, so
    /// it is among the first of them; those before it are stored like any other. Each is
    /// acknowledged before the next is taken, so none is held, and counted as delivered, in vain.
    pub(super) async fn take_unreadable(
        &self,
        held: u16,
        cancelled: &CancellationToken,
    ) -> Result<(), Ended> {
        self.recorder.store.prove_durable().await?;
        let mut head = self.broker.head(&self.recorder.rules.intake_queue).await?;
        let (mut found, mut empty) = (false, 0);
        for _ in 0..held.saturating_add(LAGGARDS) {
            if cancelled.is_cancelled() {
                break;
            }
            let Some(Got {
                arrived,
                problems,
                tag,
            }) = head.get().await?
            else {
                empty += 1;
                if found || empty > LAGGARDS {
                    break;
                }
                tokio::time::sleep(NAP).await;
                continue;
            };
            if problems.is_empty() {
                let recording = Box::pin(self.recorder.record(vec![arrived]));
                head.beating(recording).await??;
            } else {
                warn!(
                    queue = self.recorder.rules.intake_queue,
                    problem = problems.join("; "),
                    "the AMQP client cannot read a message; it goes to review"
                );
                let recording = Box::pin(self.recorder.record_unreadable(arrived, &problems));
                head.beating(recording).await??;
            }
            head.ack(tag).await?;
            // Where one is, there may be more; the first that can be read ends it.
            if found && problems.is_empty() {
                break;
            }
            found |= !problems.is_empty();
        }
        head.close().await?;
        Ok(())
    }
}
