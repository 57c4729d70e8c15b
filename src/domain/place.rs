//! The place that a database belongs to.

use std::fmt;

/// Where messages come from and go back to: an intake queue in a virtual host of a broker.
///
/// Rows name the queue that they go back to, and nothing else. A queue of that name may
/// stand in every virtual host of every broker, so all rows of a database belong to one
/// place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Place {
    /// The name of the broker's cluster. Nodes of one cluster may go by several names.
    pub broker: String,
    /// The virtual host.
    pub vhost: String,
    /// The intake queue of RetryMessages.
    pub queue: String,
}

impl Place {
    /// Whether this is the same queue in a virtual host of the same name; the brokers may
    /// differ.
    pub fn is_alike(&self, other: &Self) -> bool {
        (&self.vhost, &self.queue) == (&other.vhost, &other.queue)
    }

    /// Why an instance at this place cannot work on a database that belongs to `other`: one
    /// line for people, with what to do about it.
    pub fn refusal(&self, other: &Self) -> String {
        format!(
            "this database belongs to {other}, but this instance is at {self}; give it a database \
             (DATABASE_URL) or a schema (DATABASE_SCHEMA) of its own, or stop the instances there \
             and move this one on purpose with `retry-scheduler move`"
        )
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            broker,
            vhost,
            queue,
        } = self;
        write!(
            f,
            "the intake queue {queue:?} in the virtual host {vhost:?} of the broker {broker:?}"
        )
    }
}
