//! Durable retries for RabbitMQ.
//!
//! In reading order, along the way of a message:
//!
//! - pure, without IO or clock: [`task`] (the row as types), [`policy`] (how
//!   long to wait), [`classify`] (what kind of failure), [`wire`] (bytes ⇄ tasks),
//!   [`history`] (events ⇄ the row), [`idempotency`] (deterministic keys)
//! - edges: [`config`], [`store`] (all SQL), [`broker`] (all AMQP), [`metrics`],
//!   [`telemetry`], [`audit`]
//! - loops: [`intake`] (with [`recorder`]), [`dispatcher`], [`janitor`], [`dry_run`]
//! - surfaces: [`http`], [`cli`]
//! - and [`app`], which builds the parts and stops them; [`plant`] holds bugs
//!   and deaths on purpose, for the torture campaign
//!
//! What holds, whatever fails:
//!
//! 1. A delivery is acknowledged only after the transaction that stores it has
//!    committed; a row leaves `pending` only in the transaction that follows a
//!    positive confirm without a return.
//! 2. `retry_count` never goes down, and no message is republished more often
//!    than its `max_retries`.
//! 3. Two instances never publish the same row; every republish of a message
//!    carries the same `message_id`.
//! 4. Postgres's clock decides what is due.
//! 5. Every change of a row leaves an event, in the same transaction.

pub mod app;
pub mod audit;
pub mod backoff;
pub mod broker;
pub mod classify;
pub mod cli;
pub mod config;
pub mod dispatcher;
pub mod dry_run;
pub mod health;
pub mod history;
pub mod http;
pub mod idempotency;
pub mod intake;
pub mod janitor;
pub mod metrics;
pub mod plant;
pub mod policy;
pub mod recorder;
pub mod store;
pub mod task;
pub mod telemetry;
pub mod wake;
pub mod wire;
