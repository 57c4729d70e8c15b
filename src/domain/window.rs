//! How many deliveries a subscription may hold: few at first, more as it proves itself.
//!
//! A quorum queue counts, against each message that was held when a connection ended, one
//! delivery, and gives a message up when the count passes a limit. So a subscription holds
//! no more than it has stored: whoever crashes again and again, or loses the connection
//! again and again, moves each message that it held at least half the way to the head of
//! the queue with every life. A message is then held by at most log2(prefetch) + 2 lives that
//! stored anything before it is at the head and is stored first. A life that stored
//! nothing held only the message at the head.

/// By how much a window grows at a time: five steps lead from 1 to 1000.
const STEP: u16 = 4;

/// The window of one subscription.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Window {
    size: u16,
    full: u16,
    acked: u64,
}

impl Window {
    /// A window of one delivery, that may grow to `full`.
    pub fn opening(full: u16) -> Self {
        Self {
            size: 1,
            full: full.max(1),
            acked: 0,
        }
    }

    /// A window that is full from the beginning.
    pub fn full(full: u16) -> Self {
        Self {
            size: full.max(1),
            ..Self::opening(full)
        }
    }

    /// How many unacknowledged deliveries the broker may hand us.
    pub fn size(self) -> u16 {
        self.size
    }

    /// Notes that `deliveries` more were stored and acknowledged.
    pub fn acked(&mut self, deliveries: usize) {
        self.acked = self.acked.saturating_add(deliveries as u64);
    }

    /// The next size, once enough was acknowledged for it. While the window grows, what
    /// the old size let in may still be held beside what the new one lets in, so as many
    /// as both have to be acknowledged before.
    pub fn next(self) -> Option<u16> {
        let next = self.size.saturating_mul(STEP).min(self.full);
        let both = u64::from(self.size) + u64::from(next);
        (next > self.size && self.acked >= both).then_some(next)
    }

    /// The window has this size from now on.
    pub fn grown_to(&mut self, size: u16) {
        self.size = size;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_window_opens_with_one_and_grows_with_what_was_acknowledged() {
        let mut window = Window::opening(1000);
        let mut sizes = vec![window.size()];
        let mut batches = 0;
        while window.size() < 1000 {
            window.acked(window.size().into());
            batches += 1;
            if let Some(next) = window.next() {
                window.grown_to(next);
                sizes.push(next);
            }
        }
        assert_eq!(sizes, [1, 4, 16, 64, 256, 1000]);
        assert!(batches <= 21, "{batches} batches until the window is full");
        assert_eq!(window.next(), None);
    }

    #[test]
    fn a_window_of_one_stays_one() {
        let mut window = Window::opening(1);
        window.acked(1_000_000);
        assert_eq!(window.next(), None);
        assert_eq!(Window::opening(0).size(), 1);
    }

    /// One life of a subscription: after how many batches it crashes, and whether the broker
    /// had by then filled the new window beside the old one.
    #[derive(Clone, Copy, Debug)]
    struct Life {
        batches: u16,
        both: bool,
    }

    proptest! {
        #[test]
        fn lives_that_store_anything_hold_a_message_few_times(
            full in 1..5000_u16,
            lives in prop::collection::vec(
                (0..60_u16, any::<bool>()).prop_map(|(batches, both)| Life { batches, both }),
                1..80,
            ),
        ) {
            // Messages are numbers in their order; those below `head` are stored.
            let mut head = 0_u64;
            // Where a range of messages that were held begins and ends.
            let mut changes: BTreeMap<u64, i32> = BTreeMap::new();
            for life in lives {
                let start = head;
                let mut window = Window::opening(full);
                let mut beside = 0;
                for _ in 0..life.batches {
                    head += u64::from(window.size());
                    window.acked(window.size().into());
                    beside = 0;
                    if let Some(next) = window.next() {
                        beside = window.size();
                        window.grown_to(next);
                    }
                }
                let held = u64::from(window.size()) + if life.both { u64::from(beside) } else { 0 };
                let stored = head - start;
                prop_assert!(held <= stored.max(1), "held {held}, stored {stored}");
                if stored > 0 {
                    *changes.entry(head).or_default() += 1;
                    *changes.entry(head + held).or_default() -= 1;
                }
            }
            let bound = full.ilog2() + 2;
            let mut charges = 0;
            for change in changes.values() {
                charges += change;
                prop_assert!(charges <= bound.cast_signed(), "{charges} charges, bound {bound}");
            }
        }
    }
}
