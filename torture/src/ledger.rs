//! What the producers sent and the consumers received, and the verdict on it.

use std::{
    collections::{HashMap, HashSet},
    sync::{
        Mutex,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use testkit::lock;
use tokio::time::Instant;

use crate::{
    excuse::Record,
    instance::{BASE_DELAY, MAX_DELAY},
    message::{Conduct, Kind, Message},
};

/// One delivery of a message to the consumer of its queue, or of the review queue.
#[derive(Clone, Copy, Debug)]
pub struct Arrival {
    /// `x-retry-count`; `None` in review.
    count: Option<i32>,
    /// The instance that published it, by the header `x-retry-scheduler`.
    pub from: Option<usize>,
    /// Whether RabbitMQ says that it may have delivered this before.
    redelivered: bool,
    pub at: Instant,
}

/// What is known of one message.
struct Entry {
    kind: Kind,
    attempted: bool,
    /// When each failure was reported, whether the report arrived or not.
    reports: Vec<Instant>,
    /// When the last report that RabbitMQ confirmed was sent.
    confirmed: Option<Instant>,
    arrivals: Vec<Arrival>,
}

/// Written by producers and consumers, read at the end.
pub struct Ledger {
    /// By the number of the message.
    entries: Mutex<Vec<Entry>>,
    faults: Mutex<Vec<Record>>,
    unexpected: Mutex<Vec<String>>,
    arrivals: AtomicUsize,
}

/// The result of a campaign.
#[derive(Debug, Default)]
pub struct Verdict {
    pub attempted: usize,
    pub confirmed: usize,
    pub lost: Vec<String>,
    pub duplicated: usize,
    /// Duplicates of messages that RabbitMQ confirmed too late, without a fault.
    pub slow: usize,
    /// Duplicates that no fault explains. They are also among `unexpected`.
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
            entries: Mutex::new((0..messages).map(|_| Entry::new(Kind::Usual)).collect()),
            faults: Mutex::default(),
            unexpected: Mutex::default(),
            arrivals: AtomicUsize::new(0),
        }
    }

    /// Adds a message that a fault needs, and is about to send.
    pub fn add(&self, kind: Kind) -> Message {
        let mut entries = lock(&self.entries);
        let number = entries.len();
        entries.push(Entry {
            attempted: true,
            ..Entry::new(kind)
        });
        Message { kind, number }
    }

    pub fn attempted(&self, message: Message) {
        lock(&self.entries)[message.number].attempted = true;
    }

    /// Records that a failure of this message is about to be reported.
    pub fn reported(&self, message: Message) {
        lock(&self.entries)[message.number]
            .reports
            .push(Instant::now());
    }

    /// Records that RabbitMQ has confirmed the report that was sent at `sent`.
    pub fn confirmed(&self, message: Message, sent: Instant) {
        let confirmed = &mut lock(&self.entries)[message.number].confirmed;
        *confirmed = Some(confirmed.map_or(sent, |before| before.max(sent)));
    }

    /// Records that a message came back to its queue as retry `count`, or to the review queue if that is
    /// `None`.
    pub fn arrived(
        &self,
        message: Message,
        count: Option<i32>,
        from: Option<usize>,
        redelivered: bool,
    ) {
        self.arrivals.fetch_add(1, Ordering::Relaxed);
        let mut entries = lock(&self.entries);
        match entries.get_mut(message.number) {
            Some(entry) if entry.attempted && entry.kind == message.kind => {
                entry.arrivals.push(Arrival {
                    count,
                    from,
                    redelivered,
                    at: Instant::now(),
                })
            }
            _ => self.unexpected(format!("{message:?} was never sent")),
        }
    }

    pub fn unexpected(&self, what: String) {
        lock(&self.unexpected).push(what);
    }

    /// Records a fault that is over.
    pub fn fault(&self, record: Record) {
        lock(&self.faults).push(record);
    }

    /// How many instances have died since then.
    pub fn deaths_since(&self, then: Instant) -> usize {
        let faults = lock(&self.faults);
        let died = |f: &&Record| f.fault.is_death() && f.ended >= then;
        faults.iter().filter(died).count()
    }

    /// How many deliveries there were so far.
    pub fn arrivals(&self) -> usize {
        self.arrivals.load(Ordering::Relaxed)
    }

    /// The messages that have not come back since their last confirmed report.
    pub fn under_way(&self) -> Vec<Message> {
        let entries = lock(&self.entries);
        let open = entries.iter().enumerate().filter(|(_, e)| e.is_open());
        open.map(|(number, entry)| entry.message(number)).collect()
    }

    /// How many messages were attempted and how many confirmed, so far.
    pub fn counts(&self) -> (usize, usize) {
        let entries = lock(&self.entries);
        (
            entries.iter().filter(|e| e.attempted).count(),
            entries.iter().filter(|e| e.confirmed.is_some()).count(),
        )
    }

    /// Comes to a verdict. `live` are the messages that wait in a row; `unconfirmed` are messages and retries
    /// that RabbitMQ did not confirm in time.
    pub fn judge(&self, live: &HashSet<usize>, unconfirmed: &HashSet<(usize, i32)>) -> Verdict {
        let (attempted, confirmed) = self.counts();
        let mut verdict = Verdict {
            attempted,
            confirmed,
            unexpected: lock(&self.unexpected).clone(),
            ..Verdict::default()
        };
        let faults = lock(&self.faults).clone();
        for (number, entry) in lock(&self.entries).iter().enumerate() {
            let message = entry.message(number);
            if entry.is_open() && !live.contains(&number) {
                verdict.lost.push(format!(
                    "{number} ({:?}, {:?}, {}) came back {} times, and not after its last failure",
                    message.kind,
                    message.conduct(),
                    message.id(),
                    entry.arrivals.len()
                ));
            }
            entry.judge(message, &faults, unconfirmed, &mut verdict);
        }
        verdict
    }
}

impl Entry {
    fn new(kind: Kind) -> Self {
        Self {
            kind,
            attempted: false,
            reports: Vec::new(),
            confirmed: None,
            arrivals: Vec::new(),
        }
    }

    fn message(&self, number: usize) -> Message {
        let kind = self.kind;
        Message { kind, number }
    }

    fn is_open(&self) -> bool {
        let back_since = |sent| self.arrivals.iter().any(|a| a.at >= sent);
        self.confirmed.is_some_and(|sent| !back_since(sent))
    }

    fn judge(
        &self,
        message: Message,
        faults: &[Record],
        unconfirmed: &HashSet<(usize, i32)>,
        verdict: &mut Verdict,
    ) {
        let number = message.number;
        for arrival in &self.arrivals {
            let Some(count) = arrival.count else { continue };
            if !(1..=message.max_retries()).contains(&count) {
                let most = message.max_retries();
                let what = format!("{number} came back as retry {count} of {most}");
                verdict.over_bound.push(what);
            }
            if message.conduct() == Conduct::Garbage {
                let what = format!("garbage {number} came back to a queue");
                verdict.unexpected.push(what);
            }
            let due = self.reports.first().map(|sent| *sent + least_wait(count));
            if let Some(early) = due.and_then(|due| due.checked_duration_since(arrival.at))
                && !early.is_zero()
            {
                let what = format!("{number} came back as retry {count}, {early:?} too early");
                verdict.unexpected.push(what);
            }
        }
        self.judge_doubles(message, faults, unconfirmed, verdict);
    }

    /// Looks for a retry that came twice, and for more retries than there were failures. Both are expected only
    /// if a fault explains them. Any of the failures may have been taken in twice, not only the last one: what is
    /// too much then shows itself at the end.
    fn judge_doubles(
        &self,
        message: Message,
        faults: &[Record],
        unconfirmed: &HashSet<(usize, i32)>,
        verdict: &mut Verdict,
    ) {
        let number = message.number;
        let mut doubles = Vec::new();
        let different: HashSet<i32> = self.arrivals.iter().filter_map(|a| a.count).collect();
        let reviews = self.arrivals.iter().filter(|a| a.count.is_none()).count();
        let failed_as_often = self.reports.len() >= different.len() + reviews;
        let mut last: HashMap<Option<i32>, Arrival> = HashMap::new();
        for arrival in self.arrivals.iter().filter(|a| !a.redelivered) {
            let Some(before) = last.insert(arrival.count, *arrival) else {
                continue;
            };
            let mut sent_twice = faults.iter().any(|f| f.sent_twice(&before, arrival));
            if let Some(count) = arrival.count
                && !sent_twice
                && unconfirmed.contains(&(number, count))
            {
                // No fault caused this: the machine was too busy to confirm in time.
                verdict.slow += 1;
                sent_twice = true;
            }
            let (which, explained) = match (arrival.count, self.reports.first()) {
                (Some(count), _) => {
                    let died = self.reports.first().filter(|_| message.is_letter());
                    let died_twice = died.is_some_and(|died| {
                        let twice = |f: &Record| f.dead_lettered_twice(*died, arrival.at);
                        faults.iter().any(twice)
                    });
                    (format!("as retry {count}"), sent_twice || died_twice)
                }
                // Its consumer failed one retry twice, and the second report is in review as `late`.
                (None, _) if failed_as_often => continue,
                (None, sent) => {
                    let sent = sent.copied().unwrap_or(before.at);
                    let taken_twice = faults.iter().any(|f| f.taken_twice(sent, arrival.at));
                    ("in review".into(), sent_twice || taken_twice)
                }
            };
            doubles.push((format!("{number} came twice {which}"), explained));
        }
        if different.len() > self.reports.len()
            && let (Some(sent), Some(end)) = (self.reports.first(), self.arrivals.last())
        {
            let (times, failures) = (different.len(), self.reports.len());
            let explained = faults.iter().any(|f| f.taken_twice(*sent, end.at));
            doubles.push((
                format!("{number} was sent back {times} times for {failures} failures"),
                explained,
            ));
        }
        for (what, explained) in doubles {
            verdict.duplicated += 1;
            if !explained {
                verdict.unexplained += 1;
                let what = format!("{what} without a fault that explains it");
                verdict.unexpected.push(what);
            }
        }
    }
}

/// The shortest time after which a message can come back as retry `count`. Jitter only adds to it, and so does
/// a retry that finds no queue.
fn least_wait(count: i32) -> Duration {
    (0..count.clamp(0, 16))
        .map(|attempt| (BASE_DELAY * (1 << attempt)).min(MAX_DELAY))
        .sum()
}
