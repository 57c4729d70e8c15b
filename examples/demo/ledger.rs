//! Records what the simulated services saw of every message, and finds what does not
//! add up.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard},
};

use uuid::Uuid;

use crate::{rows::Row, services::SERVICES};

/// The numbers of one service.
#[derive(Clone, Copy, Default)]
pub struct Counts {
    /// Messages that the broker has confirmed.
    pub sent: usize,
    pub succeeded: usize,
    /// Failures; one message may have several.
    pub failed: usize,
    /// Deliveries of messages that were sent back.
    pub back: usize,
    /// Messages seen on the review queue.
    pub reviewed: usize,
}

/// The kind of a told event, shown as a sign.
#[derive(Clone, Copy)]
pub enum Mark {
    Failed,
    Back,
    Done,
    Review,
}

/// An event in words, for the screen.
pub struct Told {
    pub mark: Mark,
    pub text: String,
}

struct Message {
    service: usize,
    number: usize,
    deliveries: i32,
    end: Option<&'static str>,
}

impl Message {
    fn label(&self) -> String {
        format!("{} {}", SERVICES[self.service].one, self.number)
    }
}

/// The record that all simulated services share.
#[derive(Default)]
pub struct Ledger(Mutex<Inner>);

#[derive(Default)]
struct Inner {
    messages: HashMap<Uuid, Message>,
    announced: [usize; SERVICES.len()],
    counts: [Counts; SERVICES.len()],
    told: Vec<Told>,
    faults: Vec<String>,
}

impl Ledger {
    fn lock(&self) -> MutexGuard<'_, Inner> {
        testkit::lock(&self.0)
    }

    /// Makes a new message; returns its id and its body. The body is its label, such as
    /// "invoice 7".
    pub fn announce(&self, service: usize) -> (Uuid, String) {
        let mut inner = self.lock();
        inner.announced[service] += 1;
        let message = Message {
            service,
            number: inner.announced[service],
            deliveries: 0,
            end: None,
        };
        let (id, label) = (Uuid::now_v7(), message.label());
        inner.messages.insert(id, message);
        (id, label)
    }

    pub fn sent(&self, id: Uuid) {
        self.lock().count(id, |c| c.sent += 1);
    }

    pub fn failed(&self, id: Uuid) {
        self.lock().count(id, |c| c.failed += 1);
    }

    /// Notes that a service got a message, and checks it; returns the message's number.
    pub fn delivered(&self, id: Uuid, service: usize, retries: i32, body: &[u8]) -> usize {
        let mut inner = self.lock();
        if retries > 0 {
            inner.count(id, |c| c.back += 1);
        }
        let Some(message) = inner.messages.get_mut(&id) else {
            inner.fault(format!("{} got {id}, never sent", SERVICES[service].name));
            return 0;
        };
        let (number, label, before) = (message.number, message.label(), message.deliveries);
        let strayed = message.service != service;
        message.deliveries += 1;
        if retries != before {
            inner.fault(format!(
                "{label} says retry {retries} after {before} deliveries"
            ));
        }
        if strayed {
            inner.fault(format!("{label} came to {}", SERVICES[service].name));
        }
        inner.check_body(&label, body);
        number
    }

    pub fn succeeded(&self, id: Uuid) {
        let mut inner = self.lock();
        inner.count(id, |c| c.succeeded += 1);
        inner.end(id, "done");
    }

    /// Notes that a message was found on the review queue.
    pub fn reviewed(&self, id: Uuid, body: &[u8]) {
        let mut inner = self.lock();
        inner.count(id, |c| c.reviewed += 1);
        inner.end(id, "in review");
        if let Some(label) = inner.messages.get(&id).map(Message::label) {
            inner.check_body(&label, body);
        }
    }

    /// Keeps an event for [`Ledger::take_told`].
    pub fn tell(&self, mark: Mark, id: Uuid, what: &str) {
        let mut inner = self.lock();
        if let Some(label) = inner.messages.get(&id).map(Message::label) {
            let text = format!("{label} {what}");
            inner.told.push(Told { mark, text });
        }
    }

    /// The events that were told since the last call.
    pub fn take_told(&self) -> Vec<Told> {
        std::mem::take(&mut self.lock().told)
    }

    pub fn counts(&self) -> [Counts; SERVICES.len()] {
        self.lock().counts
    }

    /// How many messages are neither done nor in review.
    pub fn open(&self) -> usize {
        let inner = self.lock();
        inner.messages.values().filter(|m| m.end.is_none()).count()
    }

    pub fn label(&self, id: Uuid) -> String {
        let inner = self.lock();
        inner
            .messages
            .get(&id)
            .map(Message::label)
            .unwrap_or_default()
    }

    /// Everything that does not add up, in words; empty when all is well.
    pub fn faults(&self, rows: &[Row], in_review_queue: usize) -> Vec<String> {
        let inner = self.lock();
        let mut faults = inner.faults.clone();
        for ((service, c), row) in SERVICES.iter().zip(inner.counts).zip(rows) {
            let name = service.name;
            if c.sent != c.succeeded + c.reviewed || row.waiting != 0 {
                faults.push(format!(
                    "{name}: {} sent, but {} done + {} in review + {} waiting",
                    c.sent, c.succeeded, c.reviewed, row.waiting
                ));
            }
            if c.reviewed != row.failed {
                faults.push(format!(
                    "{name}: {} on the review queue, but {} failed rows in Postgres",
                    c.reviewed, row.failed
                ));
            }
            if c.back != row.republished {
                faults.push(format!(
                    "{name}: {} came back, but {} republished by Postgres's events",
                    c.back, row.republished
                ));
            }
        }
        let reviewed: usize = inner.counts.iter().map(|c| c.reviewed).sum();
        if reviewed != in_review_queue {
            faults.push(format!(
                "{reviewed} were read from the review queue, but it holds {in_review_queue}"
            ));
        }
        faults
    }
}

impl Inner {
    fn count(&mut self, id: Uuid, change: impl FnOnce(&mut Counts)) {
        if let Some(message) = self.messages.get(&id) {
            change(&mut self.counts[message.service]);
        }
    }

    fn end(&mut self, id: Uuid, end: &'static str) {
        let Some(message) = self.messages.get_mut(&id) else {
            return self.fault(format!("{id} is {end}, never sent"));
        };
        if let Some(before) = message.end.replace(end) {
            let label = message.label();
            self.fault(format!("{label} is {end}, and was {before} already"));
        }
    }

    /// A message's body is its label, and must come back byte for byte.
    fn check_body(&mut self, label: &str, body: &[u8]) {
        if body != label.as_bytes() {
            let body = String::from_utf8_lossy(body).into_owned();
            self.fault(format!("{label} came with another body: {body:?}"));
        }
    }

    fn fault(&mut self, fault: String) {
        self.faults.push(fault);
    }
}
