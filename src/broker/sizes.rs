//! What the broker has shown of the sizes that it takes. It does not tell its limit.

use std::sync::atomic::{AtomicUsize, Ordering};

use tracing::warn;

/// The smallest body that the broker has refused for its size, shared by all connections of
/// this process. It is learnt again after a restart, at the price of one refusal.
pub(super) struct Sizes(AtomicUsize);

impl Default for Sizes {
    fn default() -> Self {
        Self(AtomicUsize::new(usize::MAX))
    }
}

impl Sizes {
    pub(super) fn refused(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    pub(super) fn note_refused(&self, size: usize, why: &str) {
        if self.0.fetch_min(size, Ordering::Relaxed) > size {
            warn!(
                bytes = size,
                error = why,
                "the broker takes no message of this size: review envelopes that are as large \
                 go without the body, which stays in Postgres"
            );
        }
    }

    /// Forgets the limit once the broker takes what it had refused: somebody has raised it.
    pub(super) fn note_taken(&self, size: usize) {
        if size >= self.refused() {
            self.0.store(usize::MAX, Ordering::Relaxed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_refused_size_counts_until_the_broker_takes_as_much() {
        let sizes = Sizes::default();
        assert_eq!(sizes.refused(), usize::MAX);
        sizes.note_refused(900, "too large");
        sizes.note_refused(1000, "too large");
        assert_eq!(sizes.refused(), 900);
        sizes.note_taken(899);
        assert_eq!(sizes.refused(), 900);
        sizes.note_taken(900);
        assert_eq!(sizes.refused(), usize::MAX);
    }
}
