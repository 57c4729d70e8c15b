//! The columns of a batch of failures: the one list that its arrays, its parameters
//! and its SQL are made of.

use sqlx::{Postgres, postgres::PgArguments, query::Query};
use uuid::Uuid;

use super::{arrivals::Planned, millis};
use crate::domain::{review::Reason, task::Next};

/// Declares the columns: name, Rust type, SQL type, and where the value comes from.
macro_rules! columns {
    ($($name:ident: $type:ty, $sql:literal, $value:expr;)+) => {
        /// A batch as arrays for `unnest`.
        #[derive(Default)]
        pub(super) struct Columns<'t> {
            $($name: Vec<$type>,)+
        }

        const COLUMNS: &[(&str, &str)] = &[$((stringify!($name), $sql)),+];

        impl<'t> Columns<'t> {
            fn push(&mut self, planned: &Planned<'t>) {
                $({
                    let value: fn(&Planned<'t>) -> $type = $value;
                    self.$name.push(value(planned));
                })+
            }

            /// Empties the arrays that hold nothing but NULLs. `unnest` fills up shorter
            /// arrays with NULLs, so the batch stays the same, and costs less: most
            /// messages leave most of what they could say unsaid.
            fn leave_out_nulls(&mut self) {
                $(if self.$name.iter().all(Nullable::is_null) {
                    self.$name.clear();
                })+
            }

            /// Binds the arrays as the parameters from `$1` on.
            pub(super) fn bind<'q>(
                &self,
                query: Query<'q, Postgres, PgArguments>,
            ) -> Query<'q, Postgres, PgArguments> {
                query$(.bind(&self.$name))+
            }
        }
    };
}

columns! {
    message_id: Uuid, "uuid", |p| p.task.message_id;
    producer_id: Option<&'t str>, "text", |p| p.task.producer_id.as_deref();
    payload: &'t [u8], "bytea", |p| &p.task.payload;
    queue: &'t str, "text", |p| &p.task.queue;
    properties: Option<&'t [u8]>, "bytea", |p| Some(&*p.task.properties).filter(|b| !b.is_empty());
    error: &'t str, "text", |p| &p.task.error;
    class: &'t str, "text", |p| p.task.class.as_str();
    retry_count: i32, "int", |p| p.retry_count;
    max_retries: i32, "int", |p| p.task.budget.max_retries;
    free: bool, "bool", |p| matches!(p.next, Next::Retry { free: true, .. });
    delay_ms: Option<i64>, "bigint", |p| delay_ms(p.next);
    not_before_ms: Option<i64>, "bigint", |p| p.task.not_before_ms;
    first_failed_at_ms: Option<i64>, "bigint", |p| p.task.first_failed_at_ms;
    max_age_ms: i64, "bigint", |p| millis(p.task.policy.max_age);
    reason: Option<&'t str>, "text", |p| reason(p.next).map(Reason::as_str);
    policy: &'t str, "text", |p| &p.task.policy.name;
    category: Option<&'t str>, "text", |p| p.task.labels.category.as_deref();
    operation: Option<&'t str>, "text", |p| p.task.labels.operation.as_deref();
    error_type: Option<&'t str>, "text", |p| p.task.labels.error_type.as_deref();
    tenant: Option<&'t str>, "text", |p| p.task.labels.tenant.as_deref();
    correlation_id: Option<&'t str>, "text", |p| p.task.labels.correlation_id.as_deref();
    trace_id: Option<&'t str>, "text", |p| p.task.labels.trace_id.as_deref();
    priority: i16, "smallint", |p| p.task.priority as i16;
}

/// A value of a column, which may be NULL.
pub(super) trait Nullable {
    fn is_null(&self) -> bool {
        false
    }
}

impl Nullable for Uuid {}
impl Nullable for &str {}
impl Nullable for &[u8] {}
impl Nullable for bool {}
impl Nullable for i16 {}
impl Nullable for i32 {}
impl Nullable for i64 {}
impl<T> Nullable for Option<T> {
    fn is_null(&self) -> bool {
        self.is_none()
    }
}

fn delay_ms(next: Next) -> Option<i64> {
    match next {
        Next::Retry { delay, .. } => Some(millis(delay)),
        Next::Review(_) => None,
    }
}

fn reason(next: Next) -> Option<Reason> {
    match next {
        Next::Retry { .. } => None,
        Next::Review(reason) => Some(reason),
    }
}

impl<'t> Columns<'t> {
    /// The batch in order of id, so that two instances with the same messages lock them in
    /// the same order.
    pub(super) fn of(batch: &[Planned<'t>]) -> Self {
        let mut columns = Self::default();
        let mut ordered: Vec<&Planned<'t>> = batch.iter().collect();
        ordered.sort_unstable_by_key(|planned| planned.task.message_id);
        for planned in ordered {
            columns.push(planned);
        }
        columns.leave_out_nulls();
        columns
    }
}

/// The first parameter after those of the batch.
pub(super) fn next_parameter() -> String {
    format!("${}", COLUMNS.len() + 1)
}

/// The batch as a relation `timed`. A message is due after its delay, not before the
/// moment its producer names, and at the latest when it expires; a message for review
/// is due now.
///
/// `unnest` stands among the columns, not in FROM: there Postgres would first store
/// the whole batch with its payloads, on disk beyond `work_mem`.
pub(super) fn incoming() -> String {
    let arrays: Vec<String> = COLUMNS
        .iter()
        .zip(1..)
        .map(|((name, sql), n)| format!("unnest(${n}::{sql}[]) AS {name}"))
        .collect();
    format!(
        "WITH arrays AS (
            SELECT {}
        ), incoming AS (
            SELECT *, LEAST(now(), to_timestamp(first_failed_at_ms / 1000.0)) AS first_failed_at
            FROM arrays
        ), timed AS (
            SELECT *,
                   first_failed_at + max_age_ms * interval '1 millisecond' AS expires_at,
                   CASE WHEN delay_ms IS NULL THEN now() ELSE GREATEST(
                       now() + delay_ms * interval '1 millisecond',
                       to_timestamp(not_before_ms / 1000.0)) END AS due_at
            FROM incoming
        )",
        arrays.join(", ")
    )
}
