//! Which parcels of a steady load have come back, in two bytes for each.

use std::sync::{
    Mutex,
    atomic::{AtomicUsize, Ordering},
};

use testkit::lock;

use super::parcel::{Parcel, REVIEWED};
use crate::ledger::Verdict;

/// How many unexpected things are kept, which is more than anybody reads.
const TOLD: usize = 1000;

/// Knows how each parcel must come back. Because nothing is disturbed in a steady load, there is exactly one
/// course for each, and everything else is unexpected.
#[derive(Default)]
pub struct Oracle {
    /// By number of the parcel, the bits of [`Parcel::course`] that have come back.
    came: Mutex<Vec<u16>>,
    /// How many parcels have not completed their course.
    open: AtomicUsize,
    duplicated: AtomicUsize,
    unexpected: Mutex<Vec<String>>,
}

impl Oracle {
    /// Records that the next parcel is sent. Parcels are sent in the order of their numbers.
    pub fn sent(&self) {
        lock(&self.came).push(0);
        self.open.fetch_add(1, Ordering::Relaxed);
    }

    pub fn count(&self) -> usize {
        lock(&self.came).len()
    }

    pub fn open(&self) -> usize {
        self.open.load(Ordering::Relaxed)
    }

    /// Records that a parcel came back to its queue with this retry count, or to review if that is `None`.
    pub fn arrived(&self, parcel: Parcel, count: Option<i32>) {
        let bit = count.map_or(REVIEWED, |count| 1 << count.clamp(0, 14));
        let which = count.map_or("in review".into(), |count| format!("as retry {count}"));
        let course = parcel.course();
        let mut came = lock(&self.came);
        let Some(came) = came.get_mut(parcel.number) else {
            return self.unexpected(format!("{parcel:?} was never sent"));
        };
        if *came & bit != 0 {
            self.duplicated.fetch_add(1, Ordering::Relaxed);
            self.unexpected(format!("{parcel:?} came twice {which}"));
        } else if course & bit == 0 {
            self.unexpected(format!("{parcel:?} ({:?}) came {which}", parcel.fate()));
        } else {
            *came |= bit;
            if *came == course {
                self.open.fetch_sub(1, Ordering::Relaxed);
            }
        }
    }

    pub fn unexpected(&self, what: String) {
        let mut told = lock(&self.unexpected);
        if told.len() < TOLD {
            told.push(what);
        }
    }

    /// Comes to a verdict. All parcels count as confirmed, because the run ends when one is not.
    pub fn judge(&self) -> Verdict {
        let came = lock(&self.came);
        let mut verdict = Verdict {
            attempted: came.len(),
            confirmed: came.len(),
            duplicated: self.duplicated.load(Ordering::Relaxed),
            unexplained: self.duplicated.load(Ordering::Relaxed),
            unexpected: lock(&self.unexpected).clone(),
            ..Verdict::default()
        };
        for (number, came) in came.iter().enumerate() {
            let parcel = Parcel {
                number,
                not_before: 0,
            };
            if *came != parcel.course() {
                verdict.lost.push(format!(
                    "{number} ({:?}) came back as {came:#b}, of {:#b}",
                    parcel.fate(),
                    parcel.course()
                ));
            }
        }
        verdict
    }
}
