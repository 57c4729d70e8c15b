//! Sorts a batch by its idempotency keys: what is to be stored, what was applied
//! before, and what only shares a key with another message.

use std::{collections::HashMap, time::Duration};

use sha2::{Digest, Sha256};

use crate::{
    domain::{
        arrival::{Applied, KeyMatch, Since},
        review::Reason,
        task::NewTask,
    },
    store::{StoreError, arrivals::IntakeTx, idempotency::Key},
};

/// A batch by what its idempotency keys say.
#[derive(Default)]
pub(super) struct Sorted<'t> {
    /// Failures to be stored.
    pub fresh: Vec<&'t NewTask>,
    /// Failures that were applied before, with their keys.
    pub hits: Vec<(&'t NewTask, Key)>,
    /// Other messages under a key that was applied, and why they go to review.
    pub others: Vec<(&'t NewTask, Reason)>,
}

/// Takes the keys of the batch for `life`, and sorts the batch by what they say.
pub(super) async fn sort<'t>(
    tx: &mut IntakeTx,
    tasks: &'t [NewTask],
    life: Duration,
) -> Result<Sorted<'t>, StoreError> {
    let mut sorted = Sorted::default();
    let mut wanted: HashMap<Key, Applied> = HashMap::new();
    for task in tasks {
        if let Some(key) = key_of(task) {
            wanted.entry(key).or_insert_with(|| applied(task));
        }
    }
    if wanted.is_empty() {
        sorted.fresh = tasks.iter().collect();
        return Ok(sorted);
    }
    let taken = tx.take_keys(&wanted, life).await?;
    let others: Vec<&Key> = wanted.keys().filter(|key| !taken.contains(key)).collect();
    // What each key was applied to, and what became of that: by others before, and by
    // this batch so far.
    let mut known = tx.look_up_keys(&others).await?;
    for task in tasks {
        let Some(key) = key_of(task) else {
            sorted.fresh.push(task);
            continue;
        };
        let arriving = applied(task);
        let met = known.get(&key);
        match met.map(|(before, since)| before.meets(&arriving, *since)) {
            None | Some(KeyMatch::Next) => {
                known.insert(key, (arriving, Since::Held));
                sorted.fresh.push(task);
            }
            Some(KeyMatch::Same) => sorted.hits.push((task, key)),
            Some(KeyMatch::Other(reason)) => sorted.others.push((task, reason)),
        }
    }
    Ok(sorted)
}

/// The key of a failure with the scope in which it is unique, if the failure has one.
pub(super) fn key_of(task: &NewTask) -> Option<Key> {
    task.idempotency_key.clone().map(|key| Key {
        scope: task.scope(),
        key,
    })
}

fn applied(task: &NewTask) -> Applied {
    Applied {
        retry_count: task.budget.retry_count,
        digest: Sha256::digest(&task.payload).to_vec(),
    }
}
