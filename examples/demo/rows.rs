//! Reads from Postgres how many tasks wait, and which events have happened.

use std::collections::HashSet;

use anyhow::{Context, ensure};
use sqlx::{Connection, PgConnection};
use uuid::Uuid;

use crate::{
    ledger::{Ledger, Mark},
    services::SERVICES,
};

/// The schema of the demo's tables: the database may hold a user's own data, too.
pub const SCHEMA: &str = "retry_demo";

/// The advisory lock that keeps two demos from one database. Any number will do.
const LOCK: i64 = 0x7265_7472_795f_646d;

/// How many event ids to go back and read again. An id is taken before its transaction
/// commits, so a lower id may appear after a higher one.
const OVERLAP: i64 = 2000;

/// The tasks of one service, in numbers.
#[derive(Clone, Copy, Default)]
pub struct Row {
    pub waiting: usize,
    /// Seconds until the next waiting task is due.
    pub next: Option<f64>,
    pub failed: usize,
    pub republished: usize,
}

/// The demo's connection to Postgres, and the events that it has seen.
pub struct Rows {
    connection: PgConnection,
    seen: HashSet<i64>,
    newest: i64,
}

impl Rows {
    /// Connects, and removes the tables that the last demo left.
    pub async fn open(database_url: &str) -> anyhow::Result<Self> {
        let mut connection = PgConnection::connect(database_url)
            .await
            .context("connecting to Postgres (DATABASE_URL)")?;
        let alone: bool = sqlx::query_scalar("SELECT pg_try_advisory_lock($1)")
            .bind(LOCK)
            .fetch_one(&mut connection)
            .await?;
        ensure!(alone, "another demo is running on this database");
        sqlx::raw_sql("DROP SCHEMA IF EXISTS retry_demo CASCADE; CREATE SCHEMA retry_demo")
            .execute(&mut connection)
            .await
            .context("making the schema retry_demo")?;
        Ok(Self {
            connection,
            seen: HashSet::new(),
            newest: 0,
        })
    }

    /// Counts the tasks of each service as they are now.
    pub async fn count(&mut self) -> sqlx::Result<[Row; SERVICES.len()]> {
        type Counted = (String, i64, Option<f64>, i64, i64);
        let counted: Vec<Counted> = sqlx::query_as(
            "SELECT original_queue,
                    count(*) FILTER (WHERE status = 'pending'),
                    EXTRACT(EPOCH FROM min(next_retry_at) FILTER (WHERE status = 'pending')
                                       - clock_timestamp())::float8,
                    count(*) FILTER (WHERE status = 'failed'),
                    COALESCE(sum(sent.times), 0)::bigint
             FROM retry_queue q
             LEFT JOIN (SELECT task_id, count(*) AS times FROM retry_events
                        WHERE event_type = 'retry_attempt' GROUP BY task_id) AS sent
                    ON sent.task_id = q.id
             GROUP BY original_queue",
        )
        .fetch_all(&mut self.connection)
        .await?;
        let mut rows = [Row::default(); SERVICES.len()];
        let number = |n: i64| usize::try_from(n).unwrap_or(0);
        for (queue, waiting, next, failed, republished) in counted {
            if let Some(index) = SERVICES.iter().position(|s| s.queue == queue) {
                rows[index] = Row {
                    waiting: number(waiting),
                    next: next.map(|s| s.max(0.0)),
                    failed: number(failed),
                    republished: number(republished),
                };
            }
        }
        Ok(rows)
    }

    /// Tells the ledger of the events with a wait that are new since the last call.
    pub async fn tell(&mut self, ledger: &Ledger) -> sqlx::Result<()> {
        type Event = (i64, Uuid, String, String, i64, bool);
        let events: Vec<Event> = sqlx::query_as(
            "SELECT e.id, q.message_id, e.event_type, COALESCE(e.error, ''), e.delay_ms,
                    e.reason IS NOT NULL
             FROM retry_events e JOIN retry_queue q ON q.id = e.task_id
             WHERE e.id > $1 AND e.delay_ms IS NOT NULL AND e.event_type <> 'retry_attempt'
               AND q.original_queue <> $2
               AND (e.reason IS NULL OR e.event_type = 'returned')
             ORDER BY e.id",
        )
        .bind(self.newest - OVERLAP)
        .bind(crate::services::INTAKE)
        .fetch_all(&mut self.connection)
        .await?;
        for (event, message, kind, error, delay_ms, spent) in events {
            if !self.seen.insert(event) {
                continue;
            }
            self.newest = self.newest.max(event);
            let seconds = delay_ms as f64 / 1000.0;
            let mut what = if kind == "returned" {
                ledger.failed(message);
                "could not go back: no such queue".to_owned()
            } else {
                format!("failed: {error}")
            };
            if !spent {
                what += &format!(" → waits {seconds:.1} s");
            }
            ledger.tell(Mark::Failed, message, &what);
        }
        Ok(())
    }

    /// The id and the history, a line an event, of the first message that spent all its
    /// retries.
    pub async fn one_history(&mut self) -> sqlx::Result<Option<(Uuid, Vec<String>)>> {
        type Event = (Uuid, f64, String, i32, Option<i64>, Option<String>);
        let events: Vec<Event> = sqlx::query_as(
            "SELECT q.message_id, EXTRACT(EPOCH FROM e.at - q.first_failed_at)::float8,
                    e.event_type, e.retry_count, e.delay_ms, e.reason
             FROM retry_events e JOIN retry_queue q ON q.id = e.task_id
             WHERE q.id = (SELECT min(id) FROM retry_queue
                           WHERE status = 'failed' AND reason = 'exhausted')
             ORDER BY e.id",
        )
        .fetch_all(&mut self.connection)
        .await?;
        let Some(id) = events.first().map(|e| e.0) else {
            return Ok(None);
        };
        let lines = events
            .into_iter()
            .map(|(_, at, kind, count, delay_ms, reason)| {
                let waits = delay_ms.unwrap_or_default() as f64 / 1000.0;
                let what = match (kind.as_str(), reason) {
                    ("retry_exhausted", Some(reason)) => format!("given to review: {reason}"),
                    ("retry_attempt", _) => format!("sent back, retry {count}"),
                    (_, Some(_)) => "failed, and its retries are spent".to_owned(),
                    (_, None) => format!("failed, waits {waits:.1} s"),
                };
                format!("{at:6.1} s  {kind:<14} {what}")
            })
            .collect();
        Ok(Some((id, lines)))
    }
}
