//! Which failures were applied already.

use std::{collections::HashSet, time::Duration};

use uuid::Uuid;

use super::{StoreError, intake::IntakeTx, millis};

/// A producer's key where it is unique.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// Tenant and queue.
    pub scope: String,
    /// The producer's word.
    pub key: String,
}

/// Takes the keys that are free. Another instance that is just taking the same
/// key is waited for. An expired key is free.
const TAKE: &str = "
    INSERT INTO idempotency_keys AS k (scope, key, expires_at)
    SELECT scope, key, now() + $3 * interval '1 millisecond'
    FROM unnest($1::text[], $2::text[]) AS i (scope, key)
    ORDER BY scope, key
    ON CONFLICT (scope, key) DO UPDATE SET expires_at = EXCLUDED.expires_at, task_id = NULL
        WHERE k.expires_at <= now()
    RETURNING scope, key";

const ATTACH: &str = concat!(
    "WITH attached AS (
        UPDATE idempotency_keys k SET task_id = q.id
        FROM unnest($1::text[], $2::text[], $3::uuid[]) AS i (scope, key, message_id)
        JOIN retry_queue q USING (message_id)
        WHERE k.scope = i.scope AND k.key = i.key
        RETURNING ",
    changed!(),
    ") ",
    record_events!(from: "attached", event: "'idempotency'", detail: "'record'", was: "c.status",
        delay_ms: "NULL", error: "NULL", instance: "$4"),
);

/// A hit changes nothing, but is told with the task its key was applied to.
const HITS: &str = concat!(
    "WITH hit AS (
        SELECT ",
    changed!(),
    " FROM unnest($1::text[], $2::text[]) AS i (scope, key)
        JOIN idempotency_keys k USING (scope, key)
        JOIN retry_queue q ON q.id = k.task_id
    ) ",
    record_events!(from: "hit", event: "'idempotency'", detail: "'hit'", was: "c.status",
        delay_ms: "NULL", error: "NULL", instance: "$3"),
);

impl IntakeTx {
    /// Takes the keys that nobody has, and returns those. Keys must be distinct.
    pub async fn take_keys(
        &mut self,
        keys: &[Key],
        life: Duration,
    ) -> Result<HashSet<Key>, StoreError> {
        let (scopes, names) = columns(keys);
        let query = sqlx::query_as(TAKE)
            .bind(&scopes)
            .bind(&names)
            .bind(millis(life));
        let taken: Vec<(String, String)> = self.tx.run(|c| query.fetch_all(c)).await?;
        Ok(taken
            .into_iter()
            .map(|(scope, key)| Key { scope, key })
            .collect())
    }

    /// Says which stored message each taken key was applied to.
    pub async fn attach_keys(&mut self, applied: &[(Key, Uuid)]) -> Result<(), StoreError> {
        let (keys, ids): (Vec<Key>, Vec<Uuid>) = applied.iter().cloned().unzip();
        let (scopes, names) = columns(&keys);
        let instance = self.tx.instance.clone();
        let query = sqlx::query(ATTACH)
            .bind(&scopes)
            .bind(&names)
            .bind(&ids)
            .bind(&*instance);
        self.tx.run(|c| query.execute(c)).await?;
        Ok(())
    }

    /// Records that these keys came again, once for each time.
    pub async fn record_hits(&mut self, keys: &[Key]) -> Result<(), StoreError> {
        let (scopes, names) = columns(keys);
        let instance = self.tx.instance.clone();
        let query = sqlx::query(HITS)
            .bind(&scopes)
            .bind(&names)
            .bind(&*instance);
        self.tx.run(|c| query.execute(c)).await?;
        Ok(())
    }
}

fn columns(keys: &[Key]) -> (Vec<&str>, Vec<&str>) {
    keys.iter()
        .map(|k| (k.scope.as_str(), k.key.as_str()))
        .unzip()
}
