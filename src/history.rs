//! A message's events, folded back into the state of its row.

use chrono::{DateTime, Utc};

use crate::task::{Reason, Status};

/// One entry of `retry_events`.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    /// What happened.
    pub event_type: String,
    /// Where the row stood; `None`: it did not exist.
    pub from: Option<Status>,
    /// Where it stands after.
    pub to: Status,
    /// Its count after.
    pub retry_count: i32,
    /// Its budget after.
    pub max_retries: i32,
    /// When it is, or was, due.
    pub next_retry_at: DateTime<Utc>,
    /// Why it goes to review, if it does.
    pub reason: Option<Reason>,
}

/// What the events say of a row.
#[derive(Clone, Debug, PartialEq)]
#[allow(missing_docs)] // the fields are those of the last event
pub struct State {
    pub status: Status,
    pub retry_count: i32,
    pub max_retries: i32,
    pub next_retry_at: DateTime<Utc>,
    pub reason: Option<Reason>,
    /// How often it was sent back to its queue.
    pub republished: u32,
}

/// Replays events in their order. An impossible history is an error that says
/// what is impossible about it.
pub fn replay(events: &[Event]) -> Result<State, String> {
    let mut state: Option<State> = None;
    for event in events {
        let before = state.as_ref();
        check(before, event).map_err(|why| format!("{}: {why}", event.event_type))?;
        state = Some(State {
            status: event.to,
            retry_count: event.retry_count,
            max_retries: event.max_retries,
            next_retry_at: event.next_retry_at,
            reason: event.reason,
            republished: before.map_or(0, |s| s.republished)
                + u32::from(event.event_type == "retry_attempt"),
        });
    }
    state.ok_or_else(|| "no events".to_owned())
}

fn check(before: Option<&State>, event: &Event) -> Result<(), String> {
    if before.map(|s| s.status) != event.from {
        return Err(format!(
            "it claims to come from {:?}, but the row was {:?}",
            event.from,
            before.map(|s| s.status)
        ));
    }
    let legal = match event.event_type.as_str() {
        "scheduled" => {
            matches!(event.from, None | Some(Status::Retried)) && event.to == Status::Pending
        }
        "retry_attempt" => event.from == Some(Status::Pending) && event.to == Status::Retried,
        "retry_exhausted" => event.from == Some(Status::Pending) && event.to == Status::Failed,
        "returned" | "deferred" | "duplicate" => {
            event.from == Some(Status::Pending) && event.to == Status::Pending
        }
        "idempotency" => event.from == Some(event.to),
        other => return Err(format!("unknown event type {other:?}")),
    };
    if !legal {
        return Err(format!(
            "it cannot lead from {:?} to {}",
            event.from, event.to
        ));
    }
    if let Some(before) = before {
        let step = event.retry_count - before.retry_count;
        let most = match event.event_type.as_str() {
            "retry_attempt" | "returned" => 1,
            "scheduled" | "duplicate" => i32::MAX,
            _ => 0,
        };
        if !(0..=most).contains(&step) {
            return Err(format!(
                "the count went from {} to {}",
                before.retry_count, event.retry_count
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(event_type: &str, from: Option<Status>, to: Status, retry_count: i32) -> Event {
        Event {
            event_type: event_type.to_owned(),
            from,
            to,
            retry_count,
            max_retries: 3,
            next_retry_at: DateTime::UNIX_EPOCH,
            reason: None,
        }
    }

    #[test]
    fn a_history_ends_where_its_last_event_left_it() {
        use Status::{Failed, Pending, Retried};
        let state = replay(&[
            event("scheduled", None, Pending, 0),
            event("deferred", Some(Pending), Pending, 0),
            event("retry_attempt", Some(Pending), Retried, 1),
            event("scheduled", Some(Retried), Pending, 3),
            event("retry_exhausted", Some(Pending), Failed, 3),
        ])
        .unwrap();
        assert_eq!(state.status, Failed);
        assert_eq!(state.retry_count, 3);
        assert_eq!(state.republished, 1);
    }

    #[test]
    fn an_impossible_history_is_refused() {
        use Status::{Failed, Pending, Retried};
        let first = event("scheduled", None, Pending, 2);
        for (why, second) in [
            (
                "count went",
                event("retry_attempt", Some(Pending), Retried, 1),
            ),
            ("count went", event("deferred", Some(Pending), Pending, 3)),
            (
                "but the row was",
                event("scheduled", Some(Retried), Pending, 2),
            ),
            ("cannot lead", event("returned", Some(Pending), Failed, 2)),
            ("unknown", event("vanished", Some(Pending), Failed, 2)),
        ] {
            let error = replay(&[first.clone(), second]).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        assert!(replay(&[]).is_err());
    }
}
