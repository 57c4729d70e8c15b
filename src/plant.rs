//! Bugs and deaths on purpose, for the torture campaign: it must notice every bug, and
//! lose nothing over any death.
//!
//! They are compiled in only with the feature `plant`. Then `RETRY_PLANT` names the bug,
//! and `RETRY_DIE_AT` a file that may say, at any time, where to die.

/// A bug that loses messages, repeats them, sends them too early or never ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bug {
    /// Deliveries are acknowledged before they are stored.
    AckBeforeCommit,
    /// A COMMIT without an answer is taken for done.
    TrustLostCommit,
    /// A message without a confirm is taken for sent.
    SettleUnconfirmed,
    /// A message that the broker returned is taken for sent.
    IgnoreReturns,
    /// Rows are published without being locked.
    ClaimWithoutLock,
    /// A republish is not counted.
    CountNotRaised,
    /// A message whose budget is spent is sent back all the same.
    BudgetIgnored,
    /// A message bound for review is settled without being sent.
    ReviewNotSent,
    /// A connection goes back to the pool with its transaction open.
    TxNotDetached,
    /// The instance's clock decides what is due.
    DueByOwnClock,
    /// Each subscription holds as many deliveries as it may from the beginning, so that every
    /// crash counts against all of them.
    FullWindowAtOnce,
}

impl Bug {
    /// Whether this bug is planted.
    pub fn planted(self) -> bool {
        cfg!(feature = "plant")
            && std::env::var("RETRY_PLANT").is_ok_and(|name| name == format!("{self:?}"))
    }
}

/// A place where an instance can be told to die.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Point {
    /// A batch of failures is written, but not committed.
    BeforeIntakeCommit,
    /// The batch is committed, but its deliveries are not acknowledged.
    AfterIntakeCommit,
    /// The batch is committed, and its acknowledgement is about to be handed to the client.
    BeforeAck,
    /// The acknowledgement has been handed to the client.
    AfterAck,
    /// A claimed message is about to be published; others of its batch may have been.
    BeforePublish,
    /// The client has written this message's frames, or has failed to; all of its batch is
    /// handed over.
    AfterPublish,
    /// A batch is published, and no confirm was waited for.
    BeforeConfirm,
    /// All confirms have come, or were given up.
    AfterConfirm,
    /// The settlement of a batch is written, but not committed.
    BeforeSettleCommit,
    /// The settlement is committed.
    AfterSettleCommit,
}

impl Point {
    /// Dies here if the file that `RETRY_DIE_AT` names says so: `AfterAck 3` means at
    /// the third passing from then on. It dies by SIGKILL, so that nothing is unwound,
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

    /// Goes on: without the feature `plant` nothing dies here.
    #[cfg(not(feature = "plant"))]
    #[inline]
    pub fn pass(self) {}
}
