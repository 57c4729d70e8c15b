//! Bugs on purpose, one at a time, to show that the torture campaign catches them.
//!
//! Compiled in only with the feature `plant`; then `RETRY_PLANT` names the bug.

/// A bug that loses, repeats or never ends.
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
}

impl Bug {
    /// Whether this one is planted.
    pub fn planted(self) -> bool {
        cfg!(feature = "plant")
            && std::env::var("RETRY_PLANT").is_ok_and(|name| name == format!("{self:?}"))
    }
}
