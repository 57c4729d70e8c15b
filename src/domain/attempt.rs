//! The id of one attempt: computed, never stored before the attempt is made.

use chrono::{DateTime, Utc};
use uuid::Uuid;

/// Namespace of attempt ids.
const ATTEMPTS: Uuid = Uuid::from_u128(0x5b0f_8c1e_2d74_4a96_b3c8_61fe_9d07_42ab);

/// The id of the attempt that raises the count to `count`, or leaves it there when it
/// is free, after the failure reported at `last_failed_at`.
///
/// A republish that has to be made again, because its confirm was lost, finds count and
/// moment unchanged, and so bears the same id. The moment tells apart attempts that
/// spend nothing, whose count stays.
pub fn id(message_id: Uuid, count: i32, last_failed_at: DateTime<Utc>) -> Uuid {
    let mut name = [0; 28];
    name[..16].copy_from_slice(message_id.as_bytes());
    name[16..20].copy_from_slice(&count.to_be_bytes());
    name[20..].copy_from_slice(&last_failed_at.timestamp_micros().to_be_bytes());
    Uuid::new_v5(&ATTEMPTS, &name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_attempt_has_the_same_id_each_time_and_its_own() {
        let message = Uuid::from_u128(7);
        let failed = DateTime::from_timestamp_micros(1_000_000).unwrap();
        let later = DateTime::from_timestamp_micros(1_000_001).unwrap();
        let first = id(message, 1, failed);
        assert_eq!(first, id(message, 1, failed));
        assert_ne!(first, id(message, 2, failed), "the next count");
        assert_ne!(first, id(message, 1, later), "the next failure");
        assert_ne!(first, id(Uuid::from_u128(8), 1, failed), "another message");
    }
}
