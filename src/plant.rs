//! Bugs and deaths on purpose, for the torture campaign: it must catch the ones
//! and stand the others.
//!
//! Compiled in only with the feature `plant`. Then `RETRY_PLANT` names the bug,
//! and `RETRY_DIE_AT` a file that may say, at any time, where to die.

/// A bug that loses, repeats, hurries or never ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// Deliveries are acknowledged before they are stored.
    AckBeforeCommit,
    /// A COMMIT without an answer is taken for done.
    TrustLostCommit,
    /// A message without a confirm is taken for sent.
    SettleUnconfirmed,
    /// A message that came back for want of a queue is taken for sent.
    IgnoreReturns,
    /// Rows are published without being locked.
    ClaimWithoutLock,
    /// A republish is not counted.
    CountNotRaised,
    /// What is spent is sent back all the same.
    BudgetIgnored,
    /// What is bound for review is settled without being sent.
    ReviewNotSent,
    /// A connection goes back to the pool with its transaction open.
    TxNotDetached,
    /// The instance's clock decides what is due.
    DueByOwnClock,
}

impl Bug {
    /// Whether this one is planted.
    pub fn planted(self) -> bool {
        cfg!(feature = "plant")
            && std::env::var("RETRY_PLANT").is_ok_and(|name| name == format!("{self:?}"))
    }
}

/// A place where an instance can be told to die.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// A batch of failures is written, not committed.
    BeforeIntakeCommit,
    /// It is committed, not acknowledged.
    AfterIntakeCommit,
    /// The acknowledgement is next.
    BeforeAck,
    /// The acknowledgement has been handed to the client.
    AfterAck,
    /// A claimed message is about to be published; others of its batch may be.
    BeforePublish,
    /// It has been handed to the client.
    AfterPublish,
    /// A batch is published, no confirm was waited for.
    BeforeConfirm,
    /// All confirms that come have come.
    AfterConfirm,
    /// The outcome of a batch is written, not committed.
    BeforeSettleCommit,
    /// It is committed.
    AfterSettleCommit,
}

impl Point {
    /// Dies here if the file that `RETRY_DIE_AT` names says so: `AfterAck 3` is
    /// at the third passing from when it says so. By SIGKILL: nothing is unwound,
    /// flushed or said.
    #[cfg(feature = "plant")]
    pub fn pass(self) {
        use std::sync::atomic::{AtomicU32, Ordering};

        use nix::{
            sys::signal::{Signal, kill},
            unistd::getpid,
        };

        static PASSED: AtomicU32 = AtomicU32::new(0);
        let order = std::env::var_os("RETRY_DIE_AT").and_then(|f| std::fs::read_to_string(f).ok());
        let Some((point, passing)) = order.as_ref().and_then(|order| order.split_once(' ')) else {
            return;
        };
        if point == format!("{self:?}") {
            let passed = PASSED.fetch_add(1, Ordering::Relaxed) + 1;
            if passing.parse().is_ok_and(|n: u32| passed >= n) {
                let _ = kill(getpid(), Signal::SIGKILL);
            }
        }
    }

    /// Goes on.
    #[cfg(not(feature = "plant"))]
    #[inline]
    pub fn pass(self) {}
}
