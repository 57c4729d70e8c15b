//! What the producers and consumers saw, and the verdict on it.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::time::Instant;

use crate::message::{Conduct, Message};

/// A fault is felt a little before (what was read but not acked) and after.
const SLACK: Duration = Duration::from_secs(5);

/// One coming back, to its queue or to review.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    /// `x-retry-count`; `None` in review.
    count: Option<i32>,
    /// RabbitMQ says that it handed it out before.
    redelivered: bool,
    at: Instant,
}

/// What is known of one message.
#[derive(Default)]
struct Entry {
    attempted: bool,
    /// When the last failure that RabbitMQ confirmed was sent.
    reported: Option<Instant>,
    arrivals: Vec<Arrival>,
}

/// Written by producers and consumers, read at the end.
pub struct Ledger {
    entries: Mutex<Vec<Entry>>,
    faults: Mutex<Vec<(Instant, Option<Instant>)>>,
    unexpected: Mutex<Vec<String>>,
    arrivals: AtomicUsize,
}

/// How it ended.
#[derive(Debug, Default)]
pub struct Verdict {
    pub attempted: usize,
    pub confirmed: usize,
    pub lost: Vec<String>,
    pub duplicated: usize,
    /// Duplicates without a fault that explains them; unexpected as well.
    pub unexplained: usize,
    pub unexpected: Vec<String>,
    pub over_bound: Vec<String>,
}

impl Verdict {
    pub fn is_good(&self) -> bool {
        self.lost.is_empty() && self.unexpected.is_empty() && self.over_bound.is_empty()
    }
}

impl Ledger {
    pub fn new(messages: usize) -> Self {
        Self {
            entries: Mutex::new((0..messages).map(|_| Entry::default()).collect()),
            faults: Mutex::default(),
            unexpected: Mutex::default(),
            arrivals: AtomicUsize::new(0),
        }
    }

    pub fn attempted(&self, message: Message) {
        lock(&self.entries)[message.number].attempted = true;
    }

    /// RabbitMQ has confirmed a failure that was sent at `sent`.
    pub fn confirmed(&self, message: Message, sent: Instant) {
        let reported = &mut lock(&self.entries)[message.number].reported;
        *reported = Some(reported.map_or(sent, |before| before.max(sent)));
    }

    /// It came back to its queue (`count`), or to review (`None`).
    pub fn arrived(&self, message: Message, count: Option<i32>, redelivered: bool) {
        self.arrivals.fetch_add(1, Ordering::Relaxed);
        let mut entries = lock(&self.entries);
        match entries.get_mut(message.number) {
            Some(entry) if entry.attempted => entry.arrivals.push(Arrival {
                count,
                redelivered,
                at: Instant::now(),
            }),
            _ => self.unexpected(format!("{message:?} was never sent")),
        }
    }

    pub fn unexpected(&self, what: String) {
        lock(&self.unexpected).push(what);
    }

    /// A fault begins; the answer names it for [`Ledger::fault_ended`].
    pub fn fault_begun(&self) -> usize {
        let mut faults = lock(&self.faults);
        faults.push((Instant::now(), None));
        faults.len() - 1
    }

    pub fn fault_ended(&self, fault: usize) {
        lock(&self.faults)[fault].1 = Some(Instant::now());
    }

    /// How much came back so far.
    pub fn arrivals(&self) -> usize {
        self.arrivals.load(Ordering::Relaxed)
    }

    /// Confirmed, and not back since.
    pub fn under_way(&self) -> Vec<Message> {
        let entries = lock(&self.entries);
        let open = entries.iter().enumerate().filter(|(_, e)| e.is_open());
        open.map(|(number, _)| Message { number }).collect()
    }

    /// Attempted and confirmed so far.
    pub fn counts(&self) -> (usize, usize) {
        let entries = lock(&self.entries);
        (
            entries.iter().filter(|e| e.attempted).count(),
            entries.iter().filter(|e| e.reported.is_some()).count(),
        )
    }

    /// Judges. `live` are the messages that wait in a row.
    pub fn judge(&self, live: &HashSet<usize>) -> Verdict {
        let (attempted, confirmed) = self.counts();
        let mut verdict = Verdict {
            attempted,
            confirmed,
            unexpected: lock(&self.unexpected).clone(),
            ..Verdict::default()
        };
        let faults = lock(&self.faults).clone();
        for (number, entry) in lock(&self.entries).iter().enumerate() {
            let message = Message { number };
            if entry.is_open() && !live.contains(&number) {
                verdict.lost.push(format!(
                    "{number} ({:?}, {}) came back {} times, and not after its last failure",
                    message.conduct(),
                    message.id(),
                    entry.arrivals.len()
                ));
            }
            entry.judge(message, &faults, &mut verdict);
        }
        verdict
    }
}

impl Entry {
    fn is_open(&self) -> bool {
        let back_since = |sent| self.arrivals.iter().any(|a| a.at >= sent);
        self.reported.is_some_and(|sent| !back_since(sent))
    }

    fn judge(
        &self,
        message: Message,
        faults: &[(Instant, Option<Instant>)],
        verdict: &mut Verdict,
    ) {
        let mut last: HashMap<Option<i32>, Instant> = HashMap::new();
        for arrival in &self.arrivals {
            let number = message.number;
            match arrival.count {
                Some(count) if !(1..=message.max_retries()).contains(&count) => {
                    let most = message.max_retries();
                    let what = format!("{number} came back as retry {count} of {most}");
                    verdict.over_bound.push(what);
                }
                Some(_) if message.conduct() == Conduct::Garbage => {
                    let what = format!("garbage {number} came back to a queue");
                    verdict.unexpected.push(what);
                }
                _ => {}
            }
            if arrival.redelivered {
                continue;
            }
            let Some(before) = last.insert(arrival.count, arrival.at) else {
                continue;
            };
            verdict.duplicated += 1;
            // The same retry twice: a fault must lie between the two, or around.
            let explained = faults.iter().any(|(begun, ended)| {
                *begun <= arrival.at && ended.is_none_or(|ended| ended + SLACK >= before)
            });
            if !explained {
                verdict.unexplained += 1;
                let which = arrival
                    .count
                    .map_or("in review".into(), |c| format!("as retry {c}"));
                let what = format!("{number} came twice {which} without a fault");
                verdict.unexpected.push(what);
            }
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
