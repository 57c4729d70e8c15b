//! Things that the campaign itself does wrong on purpose, and must notice.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use clap::ValueEnum;
use tokio::time::sleep;

use crate::{consumer::Tricks, rows::Rows};

/// Something wrong, done a few times behind the service's back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Plant {
    /// Rows that wait are deleted
    LoseRows,
    /// Rows that wait are marked as sent back
    SettleUnsent,
    /// Messages vanish from their queue
    Steal,
    /// Messages are published once more
    Copy,
    /// Failures that were none are reported
    Repeat,
    /// Counts are set back
    ForgetCounts,
    /// Rows are made due at once
    Hurry,
    /// Rows that wait are forgotten by the table that says what waits
    ForgetDue,
}

impl Plant {
    /// Does it as soon as there are rows or messages to do it to.
    pub async fn grow(self, rows: Arc<Rows>, tricks: Arc<Tricks>) {
        let sql = match self {
            Self::LoseRows => {
                "DELETE FROM retry_queue WHERE id IN (
                     SELECT id FROM retry_queue WHERE status = 'pending' LIMIT 3
                     FOR UPDATE SKIP LOCKED)"
            }
            Self::SettleUnsent => {
                "UPDATE retry_queue SET status = 'retried', reason = NULL WHERE id IN (
                     SELECT id FROM retry_queue WHERE status = 'pending' LIMIT 3
                     FOR UPDATE SKIP LOCKED)"
            }
            Self::ForgetCounts => {
                "UPDATE retry_queue SET retry_count = 0 WHERE id IN (
                     SELECT id FROM retry_queue
                     WHERE status = 'pending' AND retry_count BETWEEN 1 AND max_retries - 1
                     LIMIT 3 FOR UPDATE SKIP LOCKED)"
            }
            Self::Hurry => {
                "UPDATE retry_queue SET next_retry_at = now() WHERE id IN (
                     SELECT id FROM retry_queue
                     WHERE status = 'pending' AND next_retry_at > now() + interval '200 ms'
                     LIMIT 3 FOR UPDATE SKIP LOCKED)"
            }
            Self::ForgetDue => {
                "DELETE FROM retry_due WHERE task_id IN (
                     SELECT id FROM retry_queue
                     WHERE status = 'pending' AND next_retry_at > now() + interval '200 ms'
                     LIMIT 3 FOR UPDATE SKIP LOCKED)"
            }
            Self::Steal => return tricks.steal.store(3, Ordering::Relaxed),
            Self::Copy => return tricks.copy.store(3, Ordering::Relaxed),
            Self::Repeat => return tricks.repeat.store(3, Ordering::Relaxed),
        };
        while !matches!(rows.spoil(sql).await, Ok(1..)) {
            sleep(Duration::from_millis(20)).await;
        }
    }
}
