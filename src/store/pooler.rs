//! Finds out whether a pooler between us and Postgres mixes up prepared statements.
//!
//! A pooler in transaction mode hands a client another server, a backend of Postgres, for
//! each transaction. The statements that a client has prepared stay with the server, under
//! names that all sqlx clients count up alike. Unless the pooler renames them (PgBouncer does
//! from 1.21 on, with `max_prepared_statements` above 0), a client finds those of another one
//! under its own names: it fails after it has published, or runs a statement it never meant.
//!
//! Two facts together prove such a pooler, and neither can be seen without one:
//!
//! - A statement of ours bears our own name in `pg_prepared_statements`: nobody renames it.
//! - A server is not ours alone: a connection is given another one than before, or one that
//!   an open connection of ours had. A server is known by its process id and the moment of its
//!   start. On a direct connection, and in session mode, a connection has one server for life.
//!
//! The servers are compared over several short transactions of two connections, in an order
//! that shows the sharing whichever free server the pooler prefers: the one used last goes to
//! the other connection, and the one used least recently replaces a connection's own. Other
//! clients can only add to the changes. A statement of ours that is met by another's, or is
//! not there any more, proves the same.
//!
//! This is looked into before the first transaction, and again after connections were made
//! anew: the address may lead somewhere else by then.

use std::sync::{
    Mutex, PoisonError,
    atomic::{AtomicU64, Ordering},
};

use super::{Store, StoreError, Tx};

/// How the names begin that sqlx gives to statements.
const OUR_NAMES: &str = "sqlx_s_";

/// The names that Postgres has for this very statement, which finds itself by its text.
const NAMES: &str = "SELECT name FROM pg_prepared_statements \
    WHERE statement LIKE '%retry-scheduler asks for the name of its own statement%'";

/// The server that answers.
const SERVER: &str = "SELECT pid::text || ', started at ' || backend_start::text \
    FROM pg_stat_activity WHERE pid = pg_backend_pid()";

/// Which of the two connections asks for its server, in turn.
const ORDER: [usize; 12] = [0, 1, 0, 0, 1, 1, 0, 1, 0, 0, 1, 1];

/// What is known of the pooler.
pub(super) struct Pooler {
    /// How many connections were made, and one more, so that there is something to check at first.
    connects: AtomicU64,
    /// The value of `connects` at which there was last found to be no harm.
    checked: AtomicU64,
    /// Held by whoever looks, while the others wait.
    looking: tokio::sync::Mutex<()>,
    found: Mutex<Option<String>>,
}

impl Pooler {
    pub(super) fn new() -> Self {
        Self {
            connects: AtomicU64::new(1),
            checked: AtomicU64::new(0),
            looking: tokio::sync::Mutex::default(),
            found: Mutex::default(),
        }
    }

    /// Says that the next transaction must look again.
    pub(super) fn suspect(&self) {
        self.connects.fetch_add(1, Ordering::Relaxed);
    }

    /// Whether no connection was made since the last look.
    pub(super) fn is_checked(&self) -> bool {
        self.checked.load(Ordering::Relaxed) == self.connects.load(Ordering::Relaxed)
    }

    /// Fails if the last look has found statements mixed up.
    pub(super) fn harmless(&self) -> Result<(), StoreError> {
        match self.found().clone() {
            Some(found) => Err(StoreError::SharedServers(found)),
            None => Ok(()),
        }
    }

    fn found(&self) -> std::sync::MutexGuard<'_, Option<String>> {
        self.found.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether an error tells that prepared statements are mixed up: there is one of this name
/// already, or there is none.
pub(super) fn tells_of_strangers(error: &StoreError) -> bool {
    let StoreError::Unavailable(error) = error else {
        return false;
    };
    let code = error.as_database_error().and_then(|e| e.code());
    code.is_some_and(|code| ["42P05", "26000"].contains(&&*code))
}

impl Store {
    /// Fails if there is a pooler that mixes up prepared statements. This costs nothing
    /// unless connections were made since the last look.
    pub(super) async fn check_pooler(&self) -> Result<(), StoreError> {
        if self.pooler.is_checked() {
            return Ok(());
        }
        let _looking = self.pooler.looking.lock().await;
        if self.pooler.is_checked() {
            return Ok(());
        }
        let mut first = self.client().await?;
        let mut connects = self.pooler.connects.load(Ordering::Relaxed);
        let mut found = None;
        match is_renamed(&mut first).await {
            Ok(true) => first.release(),
            Err(e) if tells_of_strangers(&e) => found = Some(e.cause()),
            Err(e) => return Err(e),
            Ok(false) => {
                let mut second = self.client().await?;
                connects = self.pooler.connects.load(Ordering::Relaxed);
                match is_renamed(&mut second).await {
                    Ok(_) => found = shared_server([&mut first, &mut second]).await?,
                    Err(e) if tells_of_strangers(&e) => found = Some(e.cause()),
                    Err(e) => return Err(e),
                }
                if found.is_none() {
                    first.release();
                    second.release();
                }
            }
        }
        if found.is_none() {
            self.pooler.checked.store(connects, Ordering::Relaxed);
        }
        *self.pooler.found() = found;
        self.pooler.harmless()
    }

    /// A connection without a transaction. It is closed when it is dropped before it was
    /// released.
    async fn client(&self) -> Result<Tx, StoreError> {
        let connection = self.within(self.pool.acquire()).await?;
        Ok(Tx::on(connection, self.deadline, self))
    }
}

/// Whether a statement that this client prepares gets another name on its way to Postgres.
async fn is_renamed(client: &mut Tx) -> Result<bool, StoreError> {
    // In a transaction, so that the same server prepares the statement and runs it.
    client.run(|c| sqlx::raw_sql("BEGIN").execute(c)).await?;
    let names: Vec<String> = client
        .run(|c| sqlx::query_scalar(NAMES).fetch_all(c))
        .await?;
    client.run(|c| sqlx::raw_sql("COMMIT").execute(c)).await?;
    Ok(names.iter().any(|name| !name.starts_with(OUR_NAMES)))
}

/// Tells of a server that is not one connection's own, if one was seen.
async fn shared_server(clients: [&mut Tx; 2]) -> Result<Option<String>, StoreError> {
    let mut servers: [Option<String>; 2] = [None, None];
    for turn in ORDER {
        let row = clients[turn].run(|c| sqlx::raw_sql(SERVER).fetch_one(c));
        let server: String = sqlx::Row::try_get(&row.await?, 0)?;
        let (own, other) = (&servers[turn], &servers[1 - turn]);
        if other.as_ref() == Some(&server) {
            return Ok(Some(format!(
                "two connections were given one server (process {server})"
            )));
        }
        if own.as_ref().is_some_and(|own| *own != server) {
            return Ok(Some(format!(
                "a connection was given another server (process {server}) than before"
            )));
        }
        servers[turn] = Some(server);
    }
    Ok(None)
}
