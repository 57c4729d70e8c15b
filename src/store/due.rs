//! `retry_due`, the narrow rows that say what waits: how statements keep them in step with the
//! tasks they change.

use sqlx::{
    Encode, Postgres, Type,
    encode::IsNull,
    error::BoxDynError,
    postgres::{PgArgumentBuffer, PgTypeInfo, types::Oid},
};

/// The setting of a transaction whose statements keep `retry_due` in step themselves. In any other
/// transaction triggers do it, row by row, which costs more.
pub(super) const KEEPS_DUE: &str = "set_config('retry_scheduler.keeps_due', 'on', true)";

/// Writes what waits now: the rows of `changed`, a relation with the columns `id`, `next_retry_at`,
/// `lane` and `priority`, for which `which` holds.
pub(super) fn waits(changed: &str, which: &str) -> String {
    format!(
        "INSERT INTO retry_due (task_id, next_retry_at, lane, priority)
         SELECT id, next_retry_at, lane, priority FROM {changed} WHERE {which}"
    )
}

/// Removes what waited before: the rows of `changed` for which `which` holds, by the values that
/// they had, in the columns `due_before` and `priority_before`.
pub(super) fn waits_no_longer(changed: &str, which: &str) -> String {
    format!(
        "DELETE FROM retry_due d
         USING (SELECT place.ctid FROM {changed} c CROSS JOIN LATERAL (
                    SELECT ctid FROM retry_due
                    WHERE priority = c.priority_before AND next_retry_at = c.due_before
                      AND task_id = c.id OFFSET 0) AS place
                WHERE {which}) AS place
         WHERE d.ctid = place.ctid"
    )
}

/// Where a row's version stands: its `ctid`, as `tidsend` writes it.
pub(super) type Tid = [u8; 6];

/// An array of `ctid`s, which the client library does not know.
pub(super) struct Tids(pub(super) Vec<Tid>);

/// The types `tid` and `tid[]`, whose numbers are the same in every Postgres.
const TID: u32 = 27;
const TID_ARRAY: u32 = 1010;

impl Type<Postgres> for Tids {
    fn type_info() -> PgTypeInfo {
        PgTypeInfo::with_oid(Oid(TID_ARRAY))
    }
}

impl Encode<'_, Postgres> for Tids {
    /// An array in Postgres's binary form: the number of dimensions, whether it holds NULLs, the
    /// type of its elements; its length and first index; each element after its length in bytes.
    fn encode_by_ref(&self, to: &mut PgArgumentBuffer) -> Result<IsNull, BoxDynError> {
        let length = u32::try_from(self.0.len())?;
        for head in [1, 0, TID, length, 1] {
            to.extend_from_slice(&head.to_be_bytes());
        }
        for tid in &self.0 {
            to.extend_from_slice(&6_u32.to_be_bytes());
            to.extend_from_slice(tid);
        }
        Ok(IsNull::No)
    }
}
