//! What a failed message is, what may become of it, and the rules that decide.
//!
//! Everything here is pure: no IO, no clock, no randomness of its own. In reading
//! order: [`task`] (the row as types), [`budget`], [`classify`] (what kind of failure it was),
//! [`policy`] (how long to wait and how often), [`review`] (why a task goes to
//! people), [`arrival`] (what a failure means for a row that has its id), [`loops`] (what comes
//! back under a new id each time),
//! [`settlement`] (how a claimed row ends), [`event`] (the words of history),
//! [`attempt`] and [`idempotency`] (ids and keys that can be computed again),
//! [`queues`] and [`limits`] (what is allowed), [`place`] (where a database's messages
//! come from and go to), [`window`] (how much intake may hold).

#[macro_use]
mod text;
pub mod arrival;
pub mod attempt;
pub mod budget;
pub mod classify;
pub mod event;
pub mod idempotency;
pub mod limits;
pub mod loops;
pub mod place;
pub mod policy;
pub mod queues;
pub mod review;
pub mod settlement;
pub mod task;
pub mod window;

pub use text::UnknownText;
