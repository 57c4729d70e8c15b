//! A claim ends: its tasks are settled with their history.

use uuid::Uuid;

use super::{
    StoreError,
    dispatch::{Claim, limit},
    due::{Tids, waits},
    events::{Event, changed},
    millis,
    statement::Statement,
};
use crate::{
    domain::{review::Reason, settlement::Settlement, task::Task},
    plant::Point,
};

/// Settles a whole batch with its history in one statement. It finds the rows where the claim
/// found them: the tasks are locked, so their versions stay where they are, and the rows of
/// `retry_due` belong to whoever has locked the task. Returns how many there were of each. Moments
/// are of `clock_timestamp()`, because the transaction began before the broker was asked.
pub(super) static SETTLE: Statement = Statement::of_claim("settle", || {
    let events = Event {
        was: "'pending'",
        delay_ms: "c.delay_ms",
        error: "c.error",
        attempt_id: "c.attempt_id",
        ..Event::of("settled", "c.event_type", "$9")
    };
    format!(
        "WITH gone AS (
            DELETE FROM retry_due WHERE ctid = ANY($11) RETURNING 1
        ), outcome AS (
            SELECT *
            FROM unnest($1::bigint[], $2::text[], $3::text[], $4::int[], $5::bigint[], $6::text[],
                        $7::text[], $8::uuid[], $10::tid[])
                AS o (id, event_type, status, retry_count, delay_ms, reason, error, attempt_id, place)
        ), settled AS (
            UPDATE retry_queue q
            SET status = o.status,
                retry_count = COALESCE(o.retry_count, q.retry_count),
                next_retry_at = CASE WHEN o.status <> 'pending' THEN q.next_retry_at
                    -- A task that has expired waits like any other when it cannot be sent.
                    WHEN q.expires_at > clock_timestamp()
                    THEN LEAST(clock_timestamp() + o.delay_ms * interval '1 millisecond',
                               q.expires_at)
                    ELSE clock_timestamp() + o.delay_ms * interval '1 millisecond' END,
                free_attempt = q.free_attempt AND o.status = 'pending',
                reason = COALESCE(o.reason, q.reason),
                error_reason = COALESCE(o.error, q.error_reason),
                settled_at = CASE WHEN o.status = 'pending' THEN q.settled_at
                                  ELSE clock_timestamp() END
            FROM outcome o
            WHERE q.ctid = o.place
            RETURNING o.event_type, o.delay_ms, o.error, o.attempt_id, q.lane, q.priority, {}
        ), waits AS ({}), events AS ({})
        SELECT (SELECT count(*) FROM gone), (SELECT count(*) FROM settled)",
        changed(),
        waits("settled", "status = 'pending'"),
        events.insert(),
    )
});

impl Claim {
    /// Writes how each task ended, with its event. Rows that are not named stay as
    /// they were.
    pub async fn settle(mut self, ends: &[(&Task, &Settlement)]) -> Result<(), StoreError> {
        if ends.is_empty() {
            return self.tx.rollback().await;
        }
        let outcomes = Outcomes::of(ends);
        let places = || {
            ends.iter()
                .filter_map(|(task, _)| self.places.get(&task.id))
        };
        let tasks = Tids(places().map(|place| place.task).collect());
        let due = Tids(places().map(|place| place.due).collect());
        let instance = self.tx.instance.clone();
        let query = sqlx::query_as(self.tx.sql.of(&SETTLE))
            .bind(&outcomes.ids)
            .bind(&outcomes.kinds)
            .bind(&outcomes.statuses)
            .bind(&outcomes.counts)
            .bind(&outcomes.delays)
            .bind(&outcomes.reasons)
            .bind(&outcomes.errors)
            .bind(&outcomes.attempts)
            .bind(&*instance)
            .bind(tasks)
            .bind(due);
        let settled: (i64, i64) = self.tx.run(|c| query.fetch_one(c)).await?;
        // If a row had left its place, its task would wait no longer and yet not be settled.
        let all = limit(ends.len());
        if settled != (all, all) {
            return Err(StoreError::Moved);
        }
        Point::BeforeSettleCommit.pass();
        self.tx.commit().await?;
        Point::AfterSettleCommit.pass();
        Ok(())
    }
}

/// The columns of [`SETTLE`]'s batch, as arrays for `unnest`.
#[derive(Default)]
struct Outcomes<'e> {
    ids: Vec<i64>,
    kinds: Vec<&'static str>,
    statuses: Vec<&'static str>,
    counts: Vec<Option<i32>>,
    /// The wait that the event tells of: the next one, or, of a message that was sent
    /// back, the whole time from its failure to its due moment.
    delays: Vec<Option<i64>>,
    reasons: Vec<Option<&'static str>>,
    errors: Vec<Option<&'e str>>,
    /// The attempt, where the message was to go to its queue and not to review.
    attempts: Vec<Option<Uuid>>,
}

impl<'e> Outcomes<'e> {
    fn of(ends: &[(&Task, &'e Settlement)]) -> Self {
        let mut all = Self::default();
        for (task, end) in ends {
            let (count, delay, reason, error) = match end {
                Settlement::SentBack { retry_count } => {
                    (Some(*retry_count), Some(task.delay()), None, None)
                }
                Settlement::Reviewed(reason) => (None, None, Some(*reason), None),
                Settlement::Returned {
                    retry_count,
                    delay,
                    error,
                    reason,
                } => {
                    let error = Some(error.as_str());
                    (Some(*retry_count), Some(*delay), *reason, error)
                }
                Settlement::Deferred { delay } => (None, Some(*delay), None, None),
            };
            all.ids.push(task.id);
            all.kinds.push(end.event().as_str());
            all.statuses.push(end.status().as_str());
            all.counts.push(count);
            all.delays.push(delay.map(millis));
            all.reasons.push(reason.map(Reason::as_str));
            all.errors.push(error);
            let to_its_queue = task.review_reason().is_none();
            all.attempts.push(to_its_queue.then(|| task.attempt_id()));
        }
        // `unnest` fills up shorter arrays with NULLs.
        leave_out_nulls(&mut all.reasons);
        leave_out_nulls(&mut all.errors);
        all
    }
}

fn leave_out_nulls<T>(column: &mut Vec<Option<T>>) {
    if column.iter().all(Option::is_none) {
        column.clear();
    }
}
