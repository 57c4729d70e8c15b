//! Which parts work right now: written by the loops, read by `/health` and `/ready`.

use std::sync::{Arc, Mutex, PoisonError};

/// The state of all parts of one instance.
#[derive(Clone, Default)]
pub struct Health {
    parts: Arc<Mutex<Vec<PartState>>>,
}

/// One part and what it says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartState {
    /// The name, as `/ready` shows it.
    pub name: String,
    /// Whether the part can do its work.
    pub up: bool,
    /// Why it cannot, or what it is doing.
    pub detail: String,
}

/// The handle by which a loop reports on itself.
#[derive(Clone)]
pub struct Part {
    health: Health,
    index: usize,
}

impl Health {
    /// Adds a part, which is down until it says otherwise.
    pub fn part(&self, name: impl Into<String>) -> Part {
        let mut parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        parts.push(PartState {
            name: name.into(),
            up: false,
            detail: "starting".into(),
        });
        Part {
            health: self.clone(),
            index: parts.len() - 1,
        }
    }

    /// All parts, in the order they were added.
    pub fn parts(&self) -> Vec<PartState> {
        self.parts
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

impl Part {
    /// Says that the part works.
    pub fn up(&self, detail: impl Into<String>) {
        self.set(true, detail.into());
    }

    /// Says that the part does not work, and why.
    pub fn down(&self, detail: impl Into<String>) {
        self.set(false, detail.into());
    }

    fn set(&self, up: bool, detail: String) {
        let mut parts = self
            .health
            .parts
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(part) = parts.get_mut(self.index) {
            part.up = up;
            part.detail = detail;
        }
    }
}
