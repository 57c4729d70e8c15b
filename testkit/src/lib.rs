//! What the tests, the torture campaign, the demo and the benchmark share: asking an instance over HTTP, talking to
//! RabbitMQ, and disturbing TCP connections.
//!
//! This crate uses no code of retry-scheduler. It only knows that a built binary exists and has a `/ready` page.

pub mod amqp;
mod http;
mod process;
mod proxy;

use std::sync::{Mutex, MutexGuard, PoisonError};

pub use http::{get, is_ready};
pub use process::{free_address, interrupted, memory_mb, service_binary};
pub use proxy::{Fault, Proxy, Sprung, Trap, Way};

/// Locks a mutex whose content stays meaningful when another holder has panicked.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
