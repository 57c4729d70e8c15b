//! Idempotency keys: taken, looked up, attached to tasks, shown and cleared.

use std::{
    collections::{HashMap, HashSet},
    time::Duration,
};

use chrono::{DateTime, Utc};
use sqlx::{FromRow, Row, postgres::PgRow};
use uuid::Uuid;

use super::{
    Store, StoreError,
    arrivals::IntakeTx,
    events::{Event, changed, literal},
    millis,
    statement::{Statement, found_by_key},
};
use crate::domain::{
    arrival::{Applied, Since},
    event::{EventKind, KeyAction},
    task::Status,
};

/// A producer's key with the scope in which it is unique.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Key {
    /// The queue and the tenant, as [`crate::domain::idempotency::scope`] writes them.
    pub scope: String,
    /// The key as the producer sent it.
    pub key: String,
}

/// What is remembered under a key.
#[derive(Clone, Debug)]
pub struct Remembered {
    /// What the key was applied to.
    pub applied: Applied,
    /// When the key is forgotten.
    pub expires_at: DateTime<Utc>,
    /// The task that the key was applied to, and its status, unless it is gone.
    pub task: Option<(Uuid, String)>,
}

/// The event of what happened to a key; an operator is named by `actor`.
fn key_event(from: &str, action: KeyAction, actor: Option<&str>, instance: &str) -> String {
    let (kind, detail) = (literal(EventKind::Idempotency), format!("'{action}'::text"));
    let event = Event::of(from, &kind, instance);
    Event {
        detail: &detail,
        was: "c.status",
        actor: actor.unwrap_or(event.actor),
        ..event
    }
    .insert()
}

/// Takes the keys that are free. Another instance that is just taking the same key is
/// waited for. An expired key is free, and so is one whose message comes with a higher
/// count: that is its next failure.
pub(super) static TAKE: Statement = Statement::new("take keys", || {
    "INSERT INTO idempotency_keys AS k (scope, key, retry_count, digest, expires_at)
     SELECT scope, key, retry_count, digest, now() + $5 * interval '1 millisecond'
     FROM unnest($1::text[], $2::text[], $3::int[], $4::bytea[])
         AS i (scope, key, retry_count, digest)
     ORDER BY scope, key
     ON CONFLICT (scope, key) DO UPDATE
         SET expires_at = EXCLUDED.expires_at, task_id = NULL,
             retry_count = EXCLUDED.retry_count, digest = EXCLUDED.digest
         WHERE k.expires_at <= now()
            OR (k.digest = EXCLUDED.digest AND k.retry_count < EXCLUDED.retry_count)
     RETURNING scope, key"
        .to_owned()
});

/// What the keys were applied to, and the tasks as they are. It locks the tasks, and so
/// waits for whoever holds one: the dispatcher may be about to commit that the message was
/// sent, and then the failure that has just arrived may be the next one.
pub(super) static LOOK_UP: Statement = Statement::new("look up keys", || {
    "SELECT k.scope, k.key, k.retry_count, k.digest, q.status, q.retry_count AS task_retry_count
     FROM (
         SELECT k.* FROM unnest($1::text[], $2::text[]) AS i (scope, key)
         CROSS JOIN LATERAL (
             SELECT scope, key, retry_count, digest, task_id FROM idempotency_keys
             WHERE scope = i.scope AND key = i.key OFFSET 0
         ) k
         ORDER BY task_id
     ) k
     LEFT JOIN LATERAL (
         SELECT status, retry_count FROM retry_queue WHERE id = k.task_id FOR UPDATE
     ) q ON TRUE"
        .to_owned()
});

/// Writes down which task each key was applied to. [`TAKE`] has locked all keys of the
/// batch.
pub(super) static ATTACH: Statement = Statement::new("attach keys", || {
    format!(
        "WITH attached AS (
            UPDATE idempotency_keys k SET task_id = q.id
            FROM unnest($1::text[], $2::text[], $3::uuid[]) AS i (scope, key, message_id)
            CROSS JOIN LATERAL (
                SELECT * FROM retry_queue WHERE message_id = i.message_id OFFSET 0
            ) q {}
            WHERE k.ctid = found.ctid
            RETURNING {}
        ) {}",
        found_by_key(
            "idempotency_keys",
            "scope = i.scope AND key = i.key",
            "ctid"
        ),
        changed(),
        key_event("attached", KeyAction::Record, None, "$4"),
    )
});

/// Writes an event for each hit, with the task that its key was applied to, and
/// returns that task. A hit changes nothing else.
pub(super) static HITS: Statement = Statement::new("record hits", || {
    format!(
        "WITH hit AS (
            SELECT i.scope, i.key, q.message_id, {}
            FROM unnest($1::text[], $2::text[]) AS i (scope, key)
            CROSS JOIN LATERAL (
                SELECT task_id FROM idempotency_keys
                WHERE scope = i.scope AND key = i.key OFFSET 0
            ) k
            CROSS JOIN LATERAL (SELECT * FROM retry_queue WHERE id = k.task_id OFFSET 0) q
        ), events AS ({})
        SELECT DISTINCT scope, key, message_id FROM hit",
        changed(),
        key_event("hit", KeyAction::Hit, None, "$3"),
    )
});

/// What is remembered under one key, and of which task.
pub(super) static SHOW: Statement = Statement::new("show a key", || {
    "SELECT k.retry_count, k.digest, k.expires_at, q.message_id, q.status
     FROM idempotency_keys k LEFT JOIN retry_queue q ON q.id = k.task_id
     WHERE k.scope = $1 AND k.key = $2 AND k.expires_at > now()"
        .to_owned()
});

/// Forgets one key, and writes the event to the task that it was applied to.
pub(super) static CLEAR: Statement = Statement::new("clear a key", || {
    format!(
        "WITH cleared AS (
            DELETE FROM idempotency_keys WHERE scope = $1 AND key = $2 AND expires_at > now()
            RETURNING task_id, retry_count, digest, expires_at
        ), changed AS (
            SELECT q.message_id, {} FROM cleared k
            CROSS JOIN LATERAL (SELECT * FROM retry_queue WHERE id = k.task_id OFFSET 0) q
        ), events AS ({})
        SELECT k.retry_count, k.digest, k.expires_at, c.message_id, c.status
        FROM cleared k LEFT JOIN changed c ON TRUE",
        changed(),
        key_event("changed", KeyAction::Clear, Some("$3"), "$4"),
    )
});

impl Store {
    /// Returns what is remembered under a key, if anything is.
    pub async fn show_key(&self, key: &Key) -> Result<Option<Remembered>, StoreError> {
        let query = sqlx::query_as(self.sql.of(&SHOW))
            .bind(&key.scope)
            .bind(&key.key);
        let mut tx = self.begin().await?;
        let remembered = tx.run(|c| query.fetch_optional(c)).await?;
        tx.rollback().await?;
        Ok(remembered)
    }

    /// Forgets a key in `actor`'s name, and returns what was remembered.
    pub async fn clear_key(
        &self,
        key: &Key,
        actor: &str,
    ) -> Result<Option<Remembered>, StoreError> {
        let mut tx = self.begin().await?;
        let instance = tx.instance.clone();
        let query = sqlx::query_as(self.sql.of(&CLEAR))
            .bind(&key.scope)
            .bind(&key.key)
            .bind(actor)
            .bind(&*instance);
        let cleared = tx.run(|c| query.fetch_optional(c)).await?;
        tx.commit().await?;
        Ok(cleared)
    }
}

impl FromRow<'_, PgRow> for Remembered {
    fn from_row(row: &PgRow) -> Result<Self, sqlx::Error> {
        let message_id: Option<Uuid> = row.try_get("message_id")?;
        let status: Option<String> = row.try_get("status")?;
        Ok(Self {
            applied: Applied {
                retry_count: row.try_get("retry_count")?,
                digest: row.try_get("digest")?,
            },
            expires_at: row.try_get("expires_at")?,
            task: message_id.zip(status),
        })
    }
}

impl IntakeTx {
    /// Takes those of the keys that nobody has, and returns them.
    pub async fn take_keys(
        &mut self,
        wanted: &HashMap<Key, Applied>,
        life: Duration,
    ) -> Result<HashSet<Key>, StoreError> {
        let (scopes, names) = columns(wanted.keys());
        let counts: Vec<i32> = wanted.values().map(|a| a.retry_count).collect();
        let digests: Vec<&[u8]> = wanted.values().map(|a| a.digest.as_slice()).collect();
        let query = sqlx::query_as(self.tx.sql.of(&TAKE))
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

    /// Returns what these keys, which others took, were applied to, and what became of it.
    pub async fn look_up_keys(
        &mut self,
        keys: &[&Key],
    ) -> Result<HashMap<Key, (Applied, Since)>, StoreError> {
        let (scopes, names) = columns(keys.iter().copied());
        let query = sqlx::query(self.tx.sql.of(&LOOK_UP))
            .bind(&scopes)
            .bind(&names);
        let rows = self.tx.run(|c| query.fetch_all(c)).await?;
        let known = rows.iter().map(|row| {
            let key = Key {
                scope: row.try_get("scope")?,
                key: row.try_get("key")?,
            };
            let applied = Applied {
                retry_count: row.try_get("retry_count")?,
                digest: row.try_get("digest")?,
            };
            Ok((key, (applied, since(row)?)))
        });
        Ok(known.collect::<Result<_, sqlx::Error>>()?)
    }

    /// Writes down which stored message each taken key was applied to.
    pub async fn attach_keys(&mut self, applied: &[(Key, Uuid)]) -> Result<(), StoreError> {
        let (keys, ids): (Vec<Key>, Vec<Uuid>) = applied.iter().cloned().unzip();
        let (scopes, names) = columns(&keys);
        let instance = self.tx.instance.clone();
        let query = sqlx::query(self.tx.sql.of(&ATTACH))
            .bind(&scopes)
            .bind(&names)
            .bind(&ids)
            .bind(&*instance);
        self.tx.run(|c| query.execute(c)).await?;
        Ok(())
    }

    /// Records that these keys came again, once for each time, and returns the id of
    /// the message that each key was applied to, unless its task is gone.
    pub async fn record_hits(&mut self, keys: &[Key]) -> Result<HashMap<Key, Uuid>, StoreError> {
        let (scopes, names) = columns(keys);
        let instance = self.tx.instance.clone();
        let query = sqlx::query_as(self.tx.sql.of(&HITS))
            .bind(&scopes)
            .bind(&names)
            .bind(&*instance);
        let tasks: Vec<(String, String, Uuid)> = self.tx.run(|c| query.fetch_all(c)).await?;
        let tasks = tasks.into_iter();
        Ok(tasks
            .map(|(scope, key, message_id)| (Key { scope, key }, message_id))
            .collect())
    }
}

/// What became of a key's failure, by the status of its task.
fn since(row: &PgRow) -> Result<Since, sqlx::Error> {
    let status: Option<&str> = row.try_get("status")?;
    Ok(match status.and_then(|status| status.parse().ok()) {
        Some(Status::Retried) => Since::SentBack {
            retry_count: row.try_get("task_retry_count")?,
        },
        Some(Status::Pending | Status::Failed | Status::Cancelled) => Since::Held,
        None => Since::Unknown,
    })
}

fn columns<'k>(keys: impl IntoIterator<Item = &'k Key>) -> (Vec<&'k str>, Vec<&'k str>) {
    keys.into_iter()
        .map(|k| (k.scope.as_str(), k.key.as_str()))
        .unzip()
}
