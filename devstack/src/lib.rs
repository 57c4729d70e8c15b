//! Starts private Postgres and RabbitMQ processes: to run the service, its tests, its benchmarks
//! and its demo.
//!
//! They use free ports and directories of their own, so they disturb no other Postgres or RabbitMQ
//! on the machine. Each is stopped when its value is dropped. If the process that owns it ends
//! without that, a watchdog process stops it.
//!
//! ```no_run
//! let stack = devstack::shared();
//! let database = stack.postgres.create_database("my_test")?;
//! let broker = stack.rabbitmq.url();
//! # anyhow::Ok(())
//! ```

mod account;
mod amqp;
mod foreground;
mod install;
mod lock;
mod pgbouncer;
mod ports;
mod postgres;
mod process;
mod programs;
mod rabbitmq;
mod service;
mod unpacked;
mod watchdog;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use anyhow::{Result, anyhow};

pub use amqp::speaks_amqp;
pub use foreground::Foreground;
pub use lock::Lock;
pub use pgbouncer::PgBouncer;
pub use ports::free_or_other;
pub use postgres::{Postgres, Standby};
pub use process::exit_code;
pub use programs::{
    PGBOUNCER_ROOT, POSTGRES_ROOT, PgBouncerProgram, PostgresPrograms, RABBITMQ_ROOT,
    RabbitMqPrograms, ensure_found, ensure_installed, faketime,
};
pub use rabbitmq::RabbitMq;
pub use unpacked::{PGBOUNCER_VERSIONS, POSTGRES_VERSIONS, RABBITMQ_VERSIONS};

/// How often the start of a service is tried. It is tried again, with other ports, if another
/// process has taken the ports between our choosing them and the service's listening on them.
const ATTEMPTS: u64 = 4;

/// Where a service keeps its files, and how it is started.
#[derive(Clone, Debug)]
pub struct Options {
    /// The directory for data, configuration and logs. It is created if need be, and not deleted.
    pub dir: PathBuf,
    /// Whether data must survive a crash of the machine. Otherwise Postgres runs without fsync,
    /// which is faster; what is committed then still survives if only Postgres is killed.
    pub durable: bool,
    /// Do not report on stderr when the service is ready.
    pub quiet: bool,
}

/// A Postgres and a RabbitMQ that are started and stopped together.
#[derive(Debug)]
pub struct Stack {
    /// The database server; tests create a database of their own in it.
    pub postgres: Postgres,
    /// The broker, with the user `guest` and the virtual host `/`.
    pub rabbitmq: RabbitMq,
}

impl Stack {
    /// Starts both at the same time, after installing them if need be.
    pub fn start(options: &Options) -> Result<Self> {
        Self::start_in(options, false)
    }

    /// Starts both empty, in a new directory under the system's directory for temporary files. It
    /// is deleted when they have stopped. `name` becomes part of its name.
    pub fn start_temporary(name: &str) -> Result<Self> {
        Self::start_temporary_in(temporary_directory(name))
    }

    /// Starts both empty, in this directory, which is deleted when they have stopped.
    pub fn start_temporary_in(dir: PathBuf) -> Result<Self> {
        Self::start_in(
            &Options {
                dir,
                durable: false,
                quiet: true,
            },
            true,
        )
    }

    fn start_in(options: &Options, temporary: bool) -> Result<Self> {
        ensure_installed()?;
        let of = |name: &str| Options {
            dir: options.dir.join(name),
            ..options.clone()
        };
        thread::scope(|scope| {
            let rabbitmq = scope.spawn(|| RabbitMq::start_in(&of("rabbitmq"), temporary));
            let postgres = Postgres::start_in(&of("postgres"), temporary);
            let rabbitmq = rabbitmq
                .join()
                .map_err(|_| anyhow!("starting RabbitMQ panicked"))?;
            Ok(Self {
                postgres: postgres?,
                rabbitmq: rabbitmq?,
            })
        })
    }
}

/// The temporary stack that all callers in this process share. The first call starts it.
///
/// A static value is never dropped, so the stack is stopped by its watchdogs when the process ends;
/// they also delete its directory.
///
/// # Panics
///
/// If the stack cannot be started. Only tests call this, and they could do nothing else.
pub fn shared() -> &'static Stack {
    static SHARED: OnceLock<Stack> = OnceLock::new();
    SHARED.get_or_init(|| match Stack::start_temporary("shared") {
        Ok(stack) => stack,
        Err(error) => panic!("the shared stack did not start: {error:#}"),
    })
}

/// A directory whose name no other process and no other call uses.
fn temporary_directory(name: &str) -> PathBuf {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("devstack-{name}-{}-{count}", std::process::id()))
}

/// Locks a mutex even if another thread has panicked while it held it. The data of these mutexes is
/// still valid then, and is needed to stop the processes.
fn unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
