//! Durable retries for RabbitMQ.
//!
//! In reading order, along the way of a message:
//!
//! - [`domain`]: what a failed message is and the rules that decide over it; pure
//! - [`wire`]: bytes and AMQP properties to domain types, and back; pure
//! - [`config`]: the settings
//! - [`store`]: all SQL, as verbs
//! - [`broker`]: all AMQP
//! - [`intake`]: the loop that stores arriving failures
//! - [`dispatcher`]: the loop that sends due tasks back, or to review
//! - [`janitor`]: the loop that removes what is too old
//! - [`place`]: which broker, virtual host and intake queue the database belongs to
//! - [`doctor`]: whether a set-up can lose messages
//! - [`observe`]: metrics, health, the log
//! - [`http`] and [`cli`]: the surfaces
//! - [`app`]: builds the parts, runs them and stops them
//!
//! Beside them stand [`backoff`], the growing wait between two attempts to reach Postgres
//! or RabbitMQ, and [`plant`], which holds bugs and deaths on purpose for the torture
//! campaign.
//!
//! Data flows one way, and so do imports: app and cli use everything; the loops, doctor and
//! http use store, broker and observe; these use config, which uses wire, which uses domain.
//! One loop knows of another: intake tells the dispatcher's `Wake` what it has stored.
//! `ARCHITECTURE.md` walks one message from end to end, lists what always holds, and
//! has the glossary.

pub mod app;
pub mod backoff;
pub mod broker;
pub mod cli;
pub mod config;
pub mod dispatcher;
pub mod doctor;
pub mod domain;
pub mod http;
pub mod intake;
pub mod janitor;
pub mod observe;
pub mod place;
pub mod plant;
pub mod store;
pub mod wire;
