//! Replays a task's events to the state that its row must have, and refuses histories
//! that are impossible.

use chrono::{DateTime, Utc};

use retry_scheduler::domain::{event::EventKind, review::Reason, task::Status};

/// One entry of `retry_events`.
#[derive(Clone, Debug, PartialEq)]
pub struct Event {
    pub kind: EventKind,
    /// The row's status before the event; none if the row did not exist.
    pub from: Option<Status>,
    /// The row's status after the event.
    pub to: Status,
    pub retry_count: i32,
    pub max_retries: i32,
    pub next_retry_at: DateTime<Utc>,
    pub reason: Option<Reason>,
}

/// The state of a row, as its events tell it.
#[derive(Clone, Debug, PartialEq)]
pub struct State {
    pub status: Status,
    pub retry_count: i32,
    pub max_retries: i32,
    pub next_retry_at: DateTime<Utc>,
    pub reason: Option<Reason>,
    /// How often the message was sent back to its queue.
    pub republished: u32,
}

/// Replays events in their order. An impossible history is an error that says
/// what is impossible about it.
pub fn replay(events: &[Event]) -> Result<State, String> {
    let mut state: Option<State> = None;
    for event in events {
        let before = state.as_ref();
        check(before, event).map_err(|why| format!("{}: {why}", event.kind))?;
        state = Some(State {
            status: event.to,
            retry_count: event.retry_count,
            max_retries: event.max_retries,
            next_retry_at: event.next_retry_at,
            reason: event.reason,
            republished: before.map_or(0, |s| s.republished)
                + u32::from(event.kind == EventKind::SentBack),
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
    let (from, to) = (event.from, event.to);
    let legal = match event.kind {
        EventKind::Scheduled => {
            // While it waits, a message is scheduled anew only for review.
            let from = match from {
                Some(Status::Pending) => event.reason.is_some(),
                from => matches!(from, None | Some(Status::Retried)),
            };
            from && to == Status::Pending
        }
        EventKind::SentBack => from == Some(Status::Pending) && to == Status::Retried,
        EventKind::Reviewed => from == Some(Status::Pending) && to == Status::Failed,
        EventKind::Returned | EventKind::Deferred => {
            from == Some(Status::Pending) && to == Status::Pending
        }
        // Of an attempt before the last, a failure may come late.
        EventKind::Duplicate => {
            matches!(from, Some(Status::Pending | Status::Retried)) && from == Some(to)
        }
        EventKind::Idempotency => from == Some(to),
    };
    if !legal {
        return Err(format!("it cannot lead from {:?} to {}", from, to));
    }
    if let Some(before) = before {
        let step = event.retry_count - before.retry_count;
        let most = match event.kind {
            EventKind::SentBack | EventKind::Returned => 1,
            EventKind::Scheduled | EventKind::Duplicate => i32::MAX,
            EventKind::Reviewed | EventKind::Deferred | EventKind::Idempotency => 0,
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

    fn event(kind: EventKind, from: Option<Status>, to: Status, retry_count: i32) -> Event {
        Event {
            kind,
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
        use EventKind::{Deferred, Reviewed, Scheduled, SentBack};
        use Status::{Failed, Pending, Retried};
        let state = replay(&[
            event(Scheduled, None, Pending, 0),
            event(Deferred, Some(Pending), Pending, 0),
            event(SentBack, Some(Pending), Retried, 1),
            event(Scheduled, Some(Retried), Pending, 3),
            event(Reviewed, Some(Pending), Failed, 3),
        ])
        .unwrap();
        assert_eq!(state.status, Failed);
        assert_eq!(state.retry_count, 3);
        assert_eq!(state.republished, 1);
    }

    #[test]
    fn an_impossible_history_is_refused() {
        use EventKind::{Deferred, Returned, Scheduled, SentBack};
        use Status::{Failed, Pending, Retried};
        let first = event(Scheduled, None, Pending, 2);
        for (why, second) in [
            ("count went", event(SentBack, Some(Pending), Retried, 1)),
            ("count went", event(Deferred, Some(Pending), Pending, 3)),
            (
                "but the row was",
                event(Scheduled, Some(Retried), Pending, 2),
            ),
            ("cannot lead", event(Returned, Some(Pending), Failed, 2)),
        ] {
            let error = replay(&[first.clone(), second]).unwrap_err();
            assert!(error.contains(why), "{error}");
        }
        assert!(replay(&[]).is_err());
    }
}
