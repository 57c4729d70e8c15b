//! The limits that more than one module needs, each defined once.

use std::time::Duration;

/// The longest duration that a setting or a policy may name, ten years: far beyond
/// any use, and far inside what Postgres can add to `now()`.
pub const LONGEST_DURATION: Duration = Duration::from_secs(3650 * 24 * 60 * 60);

/// The most retries that a setting or a policy may grant: a larger number is a
/// typing error.
pub const MOST_RETRIES: i32 = 1000;

/// The longest queue name that AMQP can carry, in bytes.
pub const MAX_QUEUE_NAME_BYTES: usize = 255;

/// The latest moment that a producer may name, the end of the year 9999 in Unix
/// milliseconds: later than any moment that makes sense, early enough that no sum overflows.
pub const LATEST_MS: i64 = 253_402_300_799_999;

/// The longest error text that is kept: it is for people, whom more does not help.
pub const MAX_ERROR_BYTES: usize = 64 * 1024;

/// The most bytes of a producer's label (ids, tenant, category, operation, error type),
/// which is cut there, and of an idempotency key, which is refused beyond.
pub const MAX_LABEL_BYTES: usize = 255;

/// The most bytes of AMQP properties that are kept: all headers go back in one
/// frame of 128 KiB, together with our own.
pub const MAX_PROPERTIES_BYTES: usize = 64 * 1024;

/// The shortest wait before a retry that spends no attempt. Such retries have no end but
/// `max_age`, so a shorter wait would send the message round at full speed until then.
pub const SHORTEST_FREE_WAIT: Duration = Duration::from_secs(1);
