//! Which failures were applied already.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

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

/// What a key is, or is to be, applied to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Applied {
    /// Retries made by then.
    pub retry_count: i32,
    /// SHA-256 of the payload.
    pub digest: Vec<u8>,
}

/// Takes the keys that are free. Another instance that is just taking the same
/// key is waited for. An expired key is free, and so is one whose message comes
/// with a higher count: that is its next failure.
const TAKE: &str = "
    INSERT INTO idempotency_keys AS k (scope, key, retry_count, digest, expires_at)
    SELECT scope, key, retry_count, digest, now() + $5 * interval '1 millisecond'
    FROM unnest($1::text[], $2::text[], $3::int[], $4::bytea[])
        AS i (scope, key, retry_count, digest)
    ORDER BY scope, key
    ON CONFLICT (scope, key) DO UPDATE
        SET expires_at = EXCLUDED.expires_at, task_id = NULL,
            retry_count = EXCLUDED.retry_count, digest = EXCLUDED.digest
        WHERE k.expires_at <= now()
           OR (k.digest = EXCLUDED.digest AND k.retry_count < EXCLUDED.retry_count)
    RETURNING scope, key";

/// Public for those who want to see its plan, as are the next ones.
pub const LOOK_UP: &str = "
    SELECT k.* FROM unnest($1::text[], $2::text[]) AS i (scope, key)
    CROSS JOIN LATERAL (
        SELECT scope, key, retry_count, digest FROM idempotency_keys
        WHERE scope = i.scope AND key = i.key OFFSET 0
    ) k";

/// `TAKE` has locked all keys of the batch.
pub const ATTACH: &str = concat!(
    "WITH attached AS (
        UPDATE idempotency_keys k SET task_id = q.id
        FROM unnest($1::text[], $2::text[], $3::uuid[]) AS i (scope, key, message_id)
        CROSS JOIN LATERAL (
            SELECT * FROM retry_queue WHERE message_id = i.message_id OFFSET 0
        ) q",
    place!("idempotency_keys", "scope = i.scope AND key = i.key"),
    "WHERE k.ctid = place.ctid
        RETURNING ",
    changed!(),
    ") ",
    record_events!(from: "attached", event: "'idempotency'", detail: "'record'", was: "c.status",
        delay_ms: "NULL", error: "NULL", instance: "$4"),
);

/// A hit changes nothing, but is told with the task its key was applied to.
pub const HITS: &str = concat!(
    "WITH hit AS (
        SELECT ",
    changed!(),
    " FROM unnest($1::text[], $2::text[]) AS i (scope, key)
        CROSS JOIN LATERAL (
            SELECT task_id FROM idempotency_keys
            WHERE scope = i.scope AND key = i.key OFFSET 0
        ) k
        CROSS JOIN LATERAL (SELECT * FROM retry_queue WHERE id = k.task_id OFFSET 0) q
    ) ",
    record_events!(from: "hit", event: "'idempotency'", detail: "'hit'", was: "c.status",
        delay_ms: "NULL", error: "NULL", instance: "$3"),
);

impl IntakeTx {
    /// Takes the keys that nobody has, and returns those.
    pub async fn take_keys(
        &mut self,
        wanted: &HashMap<Key, Applied>,
        life: Duration,
    ) -> Result<HashSet<Key>, StoreError> {
        let (scopes, names) = columns(wanted.keys());
        let counts: Vec<i32> = wanted.values().map(|a| a.retry_count).collect();
        let digests: Vec<&[u8]> = wanted.values().map(|a| a.digest.as_slice()).collect();
        let query = sqlx::query_as(TAKE)
            .bind(&scopes)
            .bind(&names)
            .bind(&counts)
            .bind(&digests)
            .bind(millis(life));
        let taken: Vec<(String, String)> = self.tx.run(|c| query.fetch_all(c)).await?;
        Ok(taken
            .into_iter()
            .map(|(scope, key)| Key { scope, key })
            .collect())
    }

    /// What taken keys were applied to.
    pub async fn look_up_keys(
        &mut self,
        keys: &[&Key],
    ) -> Result<HashMap<Key, Applied>, StoreError> {
        let (scopes, names) = columns(keys.iter().copied());
        let query = sqlx::query_as(LOOK_UP).bind(&scopes).bind(&names);
        let rows: Vec<(String, String, i32, Vec<u8>)> = self.tx.run(|c| query.fetch_all(c)).await?;
        Ok(rows
            .into_iter()
            .map(|(scope, key, retry_count, digest)| {
                let applied = Applied {
                    retry_count,
                    digest,
                };
                (Key { scope, key }, applied)
            })
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

fn columns<'k>(keys: impl IntoIterator<Item = &'k Key>) -> (Vec<&'k str>, Vec<&'k str>) {
    keys.into_iter()
        .map(|k| (k.scope.as_str(), k.key.as_str()))
        .unzip()
}
