//! Import: rows that wait in another scheduler's table become tasks, each once.

use std::{collections::HashSet, time::Duration};

use uuid::Uuid;

use crate::{
    domain::task::{NewTask, Next},
    store::{
        Store, StoreError,
        arrivals::Planned,
        import::{Source, Waiting},
    },
    wire::{self, Rules, proto::RetryMessage},
};

/// Takes rows over, in batches. A batch is one transaction: its rows are ours, with their
/// events, and marked in the other table, or nothing has happened.
#[allow(missing_docs)] // fields without a comment are the parts it works with
pub struct Import {
    pub store: Store,
    pub rules: Rules,
    pub source: Source,
    /// The most rows in one transaction.
    pub batch: i64,
}

/// What became of one batch.
#[derive(Debug, Default)]
pub struct Imported {
    /// How many rows were taken over.
    pub taken: u64,
    /// How many of them are bound for review, because they cannot be sent back.
    pub to_review: u64,
    /// The message ids of the rows that were left where they are, and why.
    pub left: Vec<(String, String)>,
    /// The last row that was looked at; none when there was none to look at.
    pub last: Option<i64>,
}

impl Import {
    /// Takes over the next rows after the id `after`.
    pub async fn run_once(&self, after: i64) -> Result<Imported, StoreError> {
        let mut tx = self.store.begin_intake().await?;
        let rows = tx.next_rows(&self.source, after, self.batch).await?;
        let mut imported = Imported {
            last: rows.last().map(|row| row.id),
            ..Imported::default()
        };
        let (ids, tasks): (Vec<(i64, String)>, Vec<NewTask>) = rows
            .into_iter()
            .map(|row| ((row.id, row.message_id.clone()), self.task(row)))
            .unzip();
        let planned: Vec<Planned<'_>> = tasks.iter().map(plan).collect();
        let stored = tx.insert_new(&planned).await?;
        let mut seen = HashSet::new();
        let mut marked = Vec::with_capacity(stored.len());
        for ((id, message_id), planned) in ids.into_iter().zip(&planned) {
            let ours = planned.task.message_id;
            if stored.contains_key(&ours) && seen.insert(ours) {
                marked.push(id);
                imported.to_review += u64::from(matches!(planned.next, Next::Review(_)));
            } else {
                let why = "a message with this id is here already";
                imported.left.push((message_id, why.to_owned()));
            }
        }
        imported.taken = marked.len() as u64;
        tx.mark_imported(&self.source, &marked).await?;
        tx.commit().await?;
        Ok(imported)
    }

    /// The row as if it had just been reported, with the budget and the due moment that it
    /// has. What is not allowed here becomes a case for review.
    fn task(&self, row: Waiting) -> NewTask {
        let max_retries = row.max_retries;
        let message = RetryMessage {
            message_id: row.message_id,
            original_payload: row.original_payload,
            original_queue: row.original_queue,
            error_reason: row.error_reason.unwrap_or_default(),
            retry_count: row.retry_count,
            max_retries: max_retries.unwrap_or_default(),
            next_retry_at_ms: row.next_retry_at_ms,
            first_failed_at_ms: row.created_at_ms,
            ..RetryMessage::default()
        };
        let mut task = wire::decode_message(message, &self.rules, Uuid::now_v7);
        // In a RetryMessage 0 leaves it to the policy; in the table it means none.
        if max_retries == Some(0) {
            task.budget.max_retries = 0;
        }
        task
    }
}

/// The due moment is the one that the row had, so the policy's delay is left out.
fn plan(task: &NewTask) -> Planned<'_> {
    let retry_count = task.budget.retry_count;
    let next = match task.next(retry_count, 0.0) {
        Next::Retry { free, .. } => Next::Retry {
            delay: Duration::ZERO,
            free,
        },
        review @ Next::Review(_) => review,
    };
    Planned {
        task,
        retry_count,
        next,
    }
}
