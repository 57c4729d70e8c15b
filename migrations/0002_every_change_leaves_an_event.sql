-- The history of every message: append-only, written in the transaction of the
-- change it tells.
CREATE TABLE retry_events (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,

    -- retry_queue.id. No foreign key: history may outlive its row.
    task_id BIGINT NOT NULL,
    at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),

    -- What happened: scheduled, duplicate, retry_attempt (sent back), returned (no
    -- such queue), deferred (the broker would not take it), retry_exhausted (given
    -- to review, whatever the reason), idempotency. detail says which kind.
    event_type VARCHAR(30) NOT NULL,
    detail TEXT,

    -- From where to where; NULL: the row is new.
    from_status VARCHAR(50),
    status VARCHAR(50) NOT NULL,

    -- The row as the event left it.
    retry_count INT NOT NULL,
    max_retries INT NOT NULL,
    next_retry_at TIMESTAMPTZ NOT NULL,
    reason VARCHAR(20),

    -- The wait that was decided, where one was, and why.
    delay_ms BIGINT,
    error_class VARCHAR(20),
    error TEXT,
    policy TEXT,

    -- The producer's words, so that history can be searched without the row.
    category TEXT,
    tenant_id TEXT,
    correlation_id TEXT,
    trace_id TEXT,

    -- Who: `service`, or the operator; and which instance did it.
    actor TEXT NOT NULL DEFAULT 'service',
    instance TEXT NOT NULL
);

CREATE INDEX idx_retry_events_task ON retry_events (task_id, id);
