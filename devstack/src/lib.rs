//! Private Postgres and RabbitMQ processes: for running the service, for its tests, its benchmarks and its demo.
//!
//! Nothing here touches an instance that it did not start, uses a default port, or leaves a process behind: what was
//! started is stopped when its value is dropped, and by a watchdog when the process that owns it ends in any other way.
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
mod ports;
mod postgres;
mod process;
mod programs;
mod rabbitmq;
mod service;
mod watchdog;

use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::thread;

use anyhow::{Result, anyhow};

pub use amqp::speaks_amqp;
pub use foreground::Foreground;
pub use lock::Lock;
pub use ports::free_or_other;
pub use postgres::{Postgres, Standby};
pub use process::exit_code;
pub use programs::{ensure_found, ensure_installed, faketime};
pub use rabbitmq::RabbitMq;

/// How often a service is tried with other ports when someone else was faster.
const ATTEMPTS: u64 = 4;

/// Where and how to run.
#[derive(Clone, Debug)]
pub struct Options {
    /// The directory for data, configuration and logs. It is created if need be and kept.
    pub dir: PathBuf,
    /// Whether data must survive a crash of the machine. Without it everything is faster, and what is committed still
    /// survives the death of the services.
    pub durable: bool,
    /// No progress on stderr.
    pub quiet: bool,
}

/// A Postgres and a RabbitMQ.
#[derive(Debug)]
pub struct Stack {
    /// The database.
    pub postgres: Postgres,
    /// The broker.
    pub rabbitmq: RabbitMq,
}

impl Stack {
    /// Starts both at the same time, after installing them if need be.
    pub fn start(options: &Options) -> Result<Self> {
        Self::start_in(options, false)
    }

    /// Starts both empty, in a directory that is deleted in the end.
    pub fn start_temporary(name: &str) -> Result<Self> {
        Self::start_temporary_in(temporary_directory(name))
    }

    /// Starts both empty, in this directory, which is deleted in the end.
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

/// The one temporary stack of this process, started by whoever asks first.
///
/// Values that live as long as the process are never dropped; the watchdogs stop the stack and delete its directory.
///
/// # Panics
///
/// When it cannot be started: a test cannot do anything else.
pub fn shared() -> &'static Stack {
    static SHARED: OnceLock<Stack> = OnceLock::new();
    SHARED.get_or_init(|| match Stack::start_temporary("shared") {
        Ok(stack) => stack,
        Err(error) => panic!("the shared stack did not start: {error:#}"),
    })
}

/// A name that no other process and no other call has.
fn temporary_directory(name: &str) -> PathBuf {
    static COUNTER: AtomicU32 = AtomicU32::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("devstack-{name}-{}-{count}", std::process::id()))
}

/// What is behind these locks stays meaningful when a holder panicked, and has to be stopped all the more then.
fn unpoisoned<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
