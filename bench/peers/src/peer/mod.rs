//! The peers, one in each file, behind one trait.

pub mod apalis;
pub mod awa;
pub mod pg_boss;
pub mod pgmq;

use std::{future::Future, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD};
use retry_scheduler::wire::proto::RetryMessage;
use serde::{Deserialize, Serialize};

use crate::adapter::Wake;

/// The name of the queue in each peer that has named queues.
const QUEUE: &str = "bench";

/// Connections that a peer's pool may have: one for intake, one for each of the two workers, and one
/// for what a peer does by itself.
const CONNECTIONS: u32 = 4;

/// A queue on Postgres, driven in batches by what its own interface has for batches.
pub trait Peer: Send + Sync + Sized + 'static {
    /// What the peer knows a fetched message by.
    type Handle: Send;

    /// How long a worker sleeps when less was due than it can take.
    const NAP: Duration;

    /// Creates its tables if they are missing. A peer that listens for notifications by default
    /// passes them on with `wake`.
    fn open(database_url: &str, wake: Wake) -> impl Future<Output = anyhow::Result<Self>>;

    /// Stores messages in one transaction. A `next_retry_at_ms` of 0 means that one is due at once.
    fn enqueue(
        &self,
        messages: Vec<RetryMessage>,
    ) -> impl Future<Output = anyhow::Result<()>> + Send;

    /// Claims messages that are due.
    fn fetch(
        &self,
        most: usize,
    ) -> impl Future<Output = anyhow::Result<Vec<(RetryMessage, Self::Handle)>>> + Send;

    /// Tells the peer that claimed messages were published.
    fn done(&self, handles: Vec<Self::Handle>) -> impl Future<Output = anyhow::Result<()>> + Send;
}

/// What dispatch needs of a message, for peers that store JSON. JSON has no bytes, so the payload is
/// in Base64, which is what such a queue costs whoever has bytes.
#[derive(Debug, Serialize, Deserialize)]
struct Stored {
    id: String,
    to: String,
    payload: String,
}

impl From<RetryMessage> for Stored {
    fn from(message: RetryMessage) -> Self {
        Self {
            id: message.message_id,
            to: message.original_queue,
            payload: BASE64_STANDARD.encode(message.original_payload),
        }
    }
}

impl TryFrom<Stored> for RetryMessage {
    type Error = anyhow::Error;

    fn try_from(stored: Stored) -> anyhow::Result<Self> {
        Ok(Self {
            message_id: stored.id,
            original_queue: stored.to,
            original_payload: BASE64_STANDARD.decode(stored.payload)?,
            ..Self::default()
        })
    }
}
