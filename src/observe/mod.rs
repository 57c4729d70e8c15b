//! What the service says of itself: [`metrics`], [`health`], the log ([`telemetry`]) and
//! the events of history as log lines ([`audit`]).

pub mod audit;
pub mod health;
pub mod metrics;
pub mod telemetry;
