//! Sorts a batch by its idempotency keys: what is to be stored, what was applied
//! before, and what only shares a key with another message.

use std::{collections::HashMap, time::Duration};

use sha2::{Digest, Sha256};

use crate::{
    domain::{
        arrival::{Applied, KeyMatch},
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
    /// Other messages under a key that was applied: people have to look at them.
    pub others: Vec<&'t NewTask>,
}

/// Takes the keys of the batch for `life`, and sorts the batch by what they say.
pub(super) async fn sort<'t>(
    tx: &mut IntakeTx,
    tasks: &'t [NewTask],
    life: Duration,
) -> Result<Sorted<'t>, StoreError> {
    let mut sorted = Sorted::default();
    let mut known: HashMap<Key, Applied> = HashMap::new();
    for task in tasks {
        if let Some(key) = key_of(task) {
            known.entry(key).or_insert_with(|| applied_to(task));
        }
    }
    if known.is_empty() {
        sorted.fresh = tasks.iter().collect();
        return Ok(sorted);
    }
    let mut taken = tx.take_keys(&known, life).await?;
    let theirs: Vec<&Key> = known.keys().filter(|key| !taken.contains(key)).collect();
    let theirs = tx.look_up_keys(&theirs).await?;
    known.extend(theirs);
    for task in tasks {
        let Some(key) = key_of(task) else {
            sorted.fresh.push(task);
            continue;
        };
        // The first mention of a key that was free takes it; a later one meets it.
        let before = known.get(&key).filter(|_| !taken.remove(&key));
        match before.map(|before| before.meets(&applied_to(task))) {
            None | Some(KeyMatch::Next) => sorted.fresh.push(task),
            Some(KeyMatch::Same) => sorted.hits.push((task, key)),
            Some(KeyMatch::Other) => sorted.others.push(task),
        }
    }
    Ok(sorted)
}

/// The key of a failure, if it has one, where it is unique.
pub(super) fn key_of(task: &NewTask) -> Option<Key> {
    task.idempotency_key.clone().map(|key| Key {
        scope: task.scope(),
        key,
    })
}

fn applied_to(task: &NewTask) -> Applied {
    Applied {
        retry_count: task.budget.retry_count,
        digest: Sha256::digest(&task.payload).to_vec(),
    }
}
