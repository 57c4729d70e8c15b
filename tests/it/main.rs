//! Tests of the whole service, with a real Postgres and a real RabbitMQ.
//!
//! All tests are in one binary, so that they share one Postgres and one RabbitMQ. Each
//! test has a database and queue names of its own ([`support::Bed`]). A test that stops
//! or breaks Postgres or RabbitMQ uses [`support::Breakable`], a second pair that one
//! test has at a time.

#![allow(
    clippy::expect_used,
    clippy::unwrap_used,
    reason = "the helpers of a test may fail it"
)]
#![allow(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "the numbers of a test are small, and its own"
)]
#![allow(
    clippy::large_futures,
    reason = "a test may be slow, and has a stack to itself"
)]

mod again;
mod attempts;
mod blowing;
mod classes;
mod commands;
mod containers;
mod crashing;
mod dead_letters;
mod declaring;
mod doctor;
mod documents;
mod histories;
mod inputs;
mod instances;
mod keys;
mod layout;
mod lines;
mod loops;
mod losing;
mod memory;
mod migrating;
mod neighbours;
mod newer;
mod pipeline;
mod places;
mod plans;
mod pooler;
mod schemas;
mod standby;
mod standing;
mod stopping;
mod strangers;
mod support;
mod unreadable;
