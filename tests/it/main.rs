//! The whole service against real Postgres and real RabbitMQ.
//!
//! One binary, so that all tests share one private pair of services; each test
//! has a database and queue names of its own. Tests that break a service use
//! [`support::Breakable`], a second pair that one test has at a time.

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
mod dead_letters;
mod documents;
mod histories;
mod inputs;
mod instances;
mod keys;
mod lines;
mod losing;
mod migrating;
mod newer;
mod pipeline;
mod plans;
mod standing;
mod stopping;
mod strangers;
mod support;
