//! A connection that is read only as far as there is room for what comes.
//!
//! RabbitMQ bounds what it hands to a consumer by count, not by bytes, and the AMQP client
//! reads whatever the socket has. So the bound is made below the client: while as many bytes of
//! deliveries are held as the budget allows, the socket is not read, TCP's own flow
//! control fills up, and the broker waits. Writing goes on meanwhile, acknowledgements
//! and heartbeats among it.

use std::{
    pin::Pin,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use tokio::{runtime::Handle, time::Sleep};

use crate::wire::Meter;

/// How much is read at once when a single delivery is larger than the budget.
const PIECE: usize = 64 << 10;

/// How long the socket is left unread at most. The client takes a connection for dead when it has
/// read nothing for two heartbeats, of which the shortest is a second.
const DRIP_EVERY: Duration = Duration::from_millis(500);

/// How much is read then.
const DRIP: usize = 64;

/// Stands between a socket and the AMQP client.
pub(super) struct Gate {
    budget: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    meter: Meter,
    /// Wakes the client's reader.
    reader: Option<Waker>,
}

impl Gate {
    /// Keeps the bytes of deliveries that are read and not released within `budget`, but for
    /// one delivery that is larger itself.
    pub(super) fn new(budget: usize) -> Arc<Self> {
        Arc::new(Self {
            budget,
            state: Mutex::default(),
        })
    }

    /// Makes room: the oldest deliveries are not held any more.
    pub(super) fn release(&self, deliveries: usize) {
        let mut state = self.lock();
        state.meter.release(deliveries);
        if let Some(reader) = state.reader.take() {
            reader.wake();
        }
    }

    /// Whether nothing is read until something is released.
    pub(super) fn is_shut(&self) -> bool {
        self.room(&self.lock().meter) == 0
    }

    /// How many bytes may be read now. A delivery is read to its end if no other is held,
    /// because it can be released only when it is whole.
    fn room(&self, meter: &Meter) -> usize {
        match self.budget.saturating_sub(meter.held()) {
            0 if meter.whole() == 0 => PIECE,
            room => room,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A gate, as the reader of one stream stands before it.
pub(super) struct Throttle {
    gate: Arc<Gate>,
    /// Runs while the gate is shut.
    drip: Option<Pin<Box<Sleep>>>,
    handle: Handle,
}

impl Throttle {
    pub(super) fn new(gate: Arc<Gate>) -> Self {
        Self {
            gate,
            drip: None,
            handle: Handle::current(),
        }
    }

    /// How many bytes may be read, once any may.
    pub(super) fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<usize> {
        let room = {
            let mut state = self.gate.lock();
            let room = self.gate.room(&state.meter);
            if room == 0 {
                state.reader = Some(cx.waker().clone());
            }
            room
        };
        if room > 0 {
            return Poll::Ready(room);
        }
        let drip = self.drip.get_or_insert_with(|| {
            // The client polls from a thread of its own.
            let _entered = self.handle.enter();
            Box::pin(tokio::time::sleep(DRIP_EVERY))
        });
        ready!(drip.as_mut().poll(cx));
        Poll::Ready(DRIP)
    }

    /// These bytes were read.
    pub(super) fn has_read(&mut self, bytes: &[u8]) {
        self.drip = None;
        self.gate.lock().meter.read(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A delivery that takes 45 bytes and more by its body.
    fn delivery(body: usize) -> Vec<u8> {
        let mut bytes = vec![1, 0, 1, 0, 0, 0, 4, 0, 60, 0, 60, 206];
        bytes.extend([2, 0, 1, 0, 0, 0, 14, 0, 60, 0, 0]);
        bytes.extend((body as u64).to_be_bytes());
        bytes.extend([0, 0, 206, 3, 0, 1]);
        bytes.extend(u32::try_from(body).unwrap().to_be_bytes());
        bytes.resize(bytes.len() + body, 0);
        bytes.push(206);
        bytes
    }

    #[test]
    fn a_gate_is_shut_while_whole_deliveries_fill_the_budget() {
        let gate = Gate::new(1000);
        let read = |bytes: &[u8]| gate.lock().meter.read(bytes);
        read(&delivery(400));
        assert!(!gate.is_shut());
        let large = delivery(700);
        read(&large[..700]);
        assert!(gate.is_shut(), "the first is whole");
        gate.release(1);
        assert!(!gate.is_shut());
        read(&large[700..]);
        assert!(!gate.is_shut());
        read(&delivery(400));
        assert!(gate.is_shut());
    }

    #[test]
    fn a_delivery_larger_than_the_budget_is_read_to_its_end() {
        let gate = Gate::new(1000);
        let large = delivery(5000);
        gate.lock().meter.read(&large[..5000]);
        assert!(!gate.is_shut());
        gate.lock().meter.read(&large[5000..]);
        assert!(gate.is_shut());
        gate.release(1);
        assert!(!gate.is_shut());
    }
}
