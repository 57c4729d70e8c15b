-- The history of every message: append-only, written in the transaction of the
-- change it tells.
CREATE TABLE retry_events (
    id BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY,

    -- retry_queue.id. No foreign key: history may outlive its row.
    task_id BIGINT NOT NULL,
    at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),

    -- What happened: scheduled, duplicate, retry_attempt, returned, deferred,
    -- exhausted (given to review, whatever the reason).
    event_type VARCHAR(30) NOT NULL,

    -- The row as the event left it.
    status VARCHAR(50) NOT NULL,
    retry_count INT NOT NULL,
    next_retry_at TIMESTAMPTZ NOT NULL,
    reason VARCHAR(20),

    -- The wait that was decided, where one was.
    delay_ms BIGINT,
    error_class VARCHAR(20),
    error TEXT,

    -- Which instance did it.
    instance TEXT NOT NULL
);

CREATE INDEX idx_retry_events_task ON retry_events (task_id, id);
