//! Finds out what a COMMIT that has no answer yet is waiting for.
//!
//! With a synchronous standby away, Postgres has written a COMMIT to its own disk and does
//! not answer: the transaction is neither done nor undone until the standby is back. Its
//! backend goes on waiting when we close the connection, keeps its row locks, and commits
//! in the end. Whoever gave such a COMMIT up and did the work again would store and send
//! everything twice, and leave a backend behind each time. So it is waited for. It is
//! never cancelled either: Postgres would answer a cancelled wait as if the standby had
//! the transaction.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use sqlx::{
    AssertSqlSafe, FromRow, PgPool, Row,
    postgres::{PgConnectOptions, PgPoolOptions},
};
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tracing::{info, warn};

use super::StoreError;

/// How long a COMMIT may take before we ask what it waits for, and how long we wait before
/// we ask again. Few take this long, and readiness is to be red within a few seconds.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// The columns of a [`Backend`].
pub(super) const BACKEND: &str = "pg_backend_pid() AS pid, now()::text AS began";

/// The server process that runs a transaction, and the moment at which the transaction
/// began. The moment tells the transaction from later ones of the same process, which may
/// be those of other clients behind a pooler. The process id is asked of the server itself,
/// because a pooler gives its clients ids of its own making.
#[derive(Clone, Debug, FromRow)]
pub(super) struct Backend {
    pid: i32,
    began: String,
}

/// A COMMIT that waits for a synchronous standby.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Wait {
    /// The part of the service whose COMMIT it is.
    pub part: Arc<str>,
    /// The setting `synchronous_standby_names` of the server.
    pub standbys: String,
}

impl fmt::Display for Wait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let standbys = &self.standbys;
        write!(
            f,
            "COMMIT waits for a synchronous standby (synchronous_standby_names = '{standbys}')"
        )
    }
}

/// Watches over the COMMITs of one instance.
pub(super) struct Watch {
    /// One connection, apart from those that the work is done on: all of these may be waiting.
    eyes: PgPool,
    deadline: Duration,
    waiting: Mutex<Waiting>,
}

#[derive(Default)]
struct Waiting {
    next_id: u64,
    /// When the first of those that wait now was seen to wait.
    since: Option<Instant>,
    waits: Vec<(u64, Wait)>,
}

impl Watch {
    pub(super) fn new(options: PgConnectOptions, deadline: Duration) -> Self {
        let eyes = PgPoolOptions::new()
            .max_connections(1)
            .acquire_timeout(deadline)
            // It is closed again soon after nothing waits any longer.
            .idle_timeout(5 * LOOK_EVERY)
            .connect_lazy_with(options);
        Self {
            eyes,
            deadline,
            waiting: Mutex::default(),
        }
    }

    /// Waits for the answer to a COMMIT: as long as its backend waits for a synchronous
    /// standby, and else until the deadline. The deadline begins anew whenever the backend
    /// is seen to wait, so that the answer has time to arrive once the standby is back.
    pub(super) async fn answer<T>(
        &self,
        mut commit: Pin<&mut impl Future<Output = Result<T, sqlx::Error>>>,
        backend: &Backend,
        part: &Arc<str>,
    ) -> Result<T, StoreError> {
        let mut give_up = Instant::now() + self.deadline;
        let pause = LOOK_EVERY.min(self.deadline / 2);
        if let Ok(answer) = timeout(pause, &mut commit).await {
            return Ok(answer?);
        }
        let mut wait: Option<Seen<'_>> = None;
        loop {
            let look = timeout_at(give_up, self.look(backend));
            let looked = tokio::select! {
                answer = &mut commit => return Ok(answer?),
                looked = look => looked,
            };
            match looked {
                Ok(Ok(Some(standbys))) => {
                    give_up = Instant::now() + self.deadline;
                    let part = part.clone();
                    wait.get_or_insert_with(|| self.begins(Wait { part, standbys }));
                }
                // The backend is gone or does something else; or we cannot know.
                Ok(Ok(None) | Err(_)) | Err(_) => wait = None,
            }
            let next = (Instant::now() + pause).min(give_up);
            tokio::select! {
                answer = &mut commit => return Ok(answer?),
                () = sleep_until(next) => {}
            }
            if Instant::now() >= give_up {
                return Err(StoreError::Silent(self.deadline));
            }
        }
    }

    /// The standbys that a backend waits for, if it does. Postgres shows what a process of
    /// the same role waits for without further rights.
    async fn look(&self, backend: &Backend) -> Result<Option<String>, sqlx::Error> {
        let Backend { pid, began } = backend;
        let sql = format!(
            "SELECT current_setting('synchronous_standby_names') FROM pg_stat_activity \
             WHERE pid = {pid} AND xact_start = '{began}'::timestamptz \
             AND wait_event_type = 'IPC' AND wait_event = 'SyncRep'"
        );
        let row = sqlx::raw_sql(AssertSqlSafe(sql)).fetch_optional(&self.eyes);
        row.await?.map(|row| row.try_get(0)).transpose()
    }

    fn begins(&self, wait: Wait) -> Seen<'_> {
        let mut waiting = self.lock();
        if waiting.waits.is_empty() {
            waiting.since = Some(Instant::now());
            warn!("{wait}; it is waited for, because what it has written may be durable already");
        }
        let id = waiting.next_id;
        waiting.next_id += 1;
        waiting.waits.push((id, wait));
        Seen { watch: self, id }
    }

    /// The COMMITs that wait now.
    pub(super) fn waits(&self) -> Vec<Wait> {
        let waiting = self.lock();
        waiting.waits.iter().map(|(_, wait)| wait.clone()).collect()
    }

    pub(super) async fn close(&self) {
        self.eyes.close().await;
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Keeps a [`Wait`] in the list until it is dropped.
struct Seen<'w> {
    watch: &'w Watch,
    id: u64,
}

impl Drop for Seen<'_> {
    fn drop(&mut self) {
        let mut waiting = self.watch.lock();
        waiting.waits.retain(|(id, _)| *id != self.id);
        if waiting.waits.is_empty()
            && let Some(since) = waiting.since.take()
        {
            let waited = since.elapsed();
            info!(
                ?waited,
                "no COMMIT waits for a synchronous standby any longer"
            );
        }
    }
}
