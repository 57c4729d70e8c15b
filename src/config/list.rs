//! The one list of what can be set.

/// One setting as a user meets it.
pub struct Setting {
    /// The environment variable; lower-cased, the key in the TOML file.
    pub name: &'static str,
    /// The value when nothing is set.
    pub default: &'static str,
    /// One sentence for people.
    pub help: &'static str,
}

const fn setting(name: &'static str, default: &'static str, help: &'static str) -> Setting {
    Setting {
        name,
        default,
        help,
    }
}

/// Every setting there is, in the order they are documented.
#[rustfmt::skip]
pub const SETTINGS: &[Setting] = &[
    setting("SERVICE_NAME", "retry-scheduler", "Names this service in JSON log lines, broker connections and the `x-retry-scheduler` header."),
    setting("HTTP_HOST", "0.0.0.0", "Address the HTTP server listens on."),
    setting("HTTP_PORT", "8086", "Port of the HTTP server; 0 takes any free one."),
    setting("RABBITMQ_URL", "amqp://localhost:5672", "Broker, as `amqp://` or `amqps://`."),
    setting("RABBITMQ_MANAGEMENT_URL", "", "Management API, asked by `doctor` and at start with RABBITMQ_URL's user; empty: its host, port 15672, or 15671 by https for `amqps://`."),
    setting("RETRY_QUEUE", "retry.scheduled", "Intake queue of RetryMessages; declared durable when absent, so that what the broker gives up on goes to review."),
    setting("MANUAL_REVIEW_QUEUE", "manual-review.pending", "Where messages go that people must look at; declared durable when absent."),
    setting("DEAD_LETTER_QUEUE", "", "Comma-separated queues that DLXs are bound to, whose raw dead letters are retried too; empty: none. Declared durable when absent."),
    setting("REVIEW_FORMAT", "json", "Body of review messages: `json` or `protobuf`; over 8 MiB of payload always protobuf."),
    setting("ALLOWED_QUEUES", "", "Comma-separated globs of queues a message may go back to; empty allows all but our own and `amq.*`."),
    setting("DEFAULT_MAX_RETRIES", "3", "Retries of a message when neither it nor its policy says a number."),
    setting("MAX_RETRIES_LIMIT", "100", "No message gets more retries than this, whatever it asks for."),
    setting("POLICIES_FILE", "", "TOML file of named policies; empty: the presets of `policies.toml`."),
    setting("BASE_DELAY_MS", "2000", "Wait before the first retry; it doubles with each further one."),
    setting("MAX_DELAY_MS", "60000", "Longest wait between retries, before jitter."),
    setting("JITTER_MS", "1000", "A random 0 to this is added to each wait."),
    setting("MAX_AGE_MS", "604800000", "A message older than this goes to review whatever its count, unless its policy says otherwise."),
    setting("RETRY_POLL_INTERVAL_MS", "1000", "Longest sleep of the dispatcher; it wakes earlier for what falls due."),
    setting("DATABASE_URL", "postgresql://localhost:5432/retry_scheduler", "Postgres, as `postgresql://`."),
    setting("DATABASE_SCHEMA", "", "Schema of our tables, as it is written; made when absent. Empty: the first of the connection's search path."),
    setting("DATABASE_POOL_SIZE", "10", "Connections to Postgres, opened when needed: at least one for each dispatch worker and each intake queue, and one more."),
    setting("DATABASE_TIMEOUT_MS", "15000", "Deadline of one database operation."),
    setting("MIGRATE_ON_START", "true", "Apply migrations when serving starts."),
    // DATABASE_POOL_SIZE above, and all sizes and waits from here to
    // DISPATCH_BATCH_BYTES, were chosen by measurement: see BENCHMARKS.md.
    setting("INTAKE_PREFETCH", "1000", "Unacknowledged messages the broker may hand us; each connection begins with one, and gets more as it stores them."),
    setting("INTAKE_MEMORY_BYTES", "16777216", "Most bytes of messages read and not yet stored, shared by the intake queues; a single message may be larger."),
    setting("INTAKE_BATCH", "500", "Most messages stored in one transaction."),
    setting("INTAKE_LINGER_MS", "20", "How long a batch waits for more once it has its first message."),
    setting("DISPATCH_WORKERS", "2", "Batches in flight at once, each on its own connection."),
    setting("DISPATCH_BATCH", "500", "Most messages republished in one transaction."),
    setting("DISPATCH_BATCH_BYTES", "8388608", "Most payload bytes in one such batch; one message always fits."),
    setting("CONFIRM_TIMEOUT_MS", "10000", "How long a published batch waits for the broker's confirms; what is not confirmed by then waits and is sent again."),
    setting("BROKER_TIMEOUT_MS", "5000", "Deadline of connecting, declaring, acknowledging and closing."),
    setting("BROKER_HEARTBEAT_SECONDS", "10", "AMQP heartbeat; a frozen broker is noticed after two. `?heartbeat=` in RABBITMQ_URL wins."),
    setting("MAX_PAYLOAD_BYTES", "16777216", "A larger original payload is not retried but goes to review."),
    setting("IDEMPOTENCY_KEY_HOURS", "168", "How long an idempotency key is remembered, in hours or a fraction, as are the next three."),
    setting("RETAIN_RETRIED_HOURS", "168", "How long a message that was sent back and not heard of again is remembered."),
    setting("RETAIN_REVIEWED_HOURS", "2160", "How long a message that went to review, or was cancelled, is remembered from its `settled_at` on."),
    setting("RETAIN_EVENTS_HOURS", "2160", "How long history is kept."),
    setting("METRICS_MAX_QUEUES", "100", "Queues with a metric label of their own; the rest share `other`."),
    setting("SHUTDOWN_TIMEOUT_MS", "20000", "Deadline for a clean stop."),
    setting("LOG_LEVEL", "info", "tracing filter, such as `info` or `retry_scheduler=debug`."),
    setting("LOG_FORMAT", "auto", "`json`, `pretty`, or `auto`: pretty on a terminal."),
];
