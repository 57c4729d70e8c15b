-- A producer's explicit key names one failure. While the key lives, the same
-- failure reported again changes nothing.
CREATE TABLE idempotency_keys (
    -- Keys are the producer's: unique for one tenant and queue, not for the world.
    scope TEXT NOT NULL,
    key TEXT NOT NULL,

    -- The row it was applied to; written later in the same transaction.
    task_id BIGINT,
    expires_at TIMESTAMPTZ NOT NULL,

    -- What it was applied to: the retries made by then, and the SHA-256 of the
    -- payload. A higher count is the next failure, another payload another message.
    retry_count INT NOT NULL,
    digest BYTEA NOT NULL,

    PRIMARY KEY (scope, key)
);

CREATE INDEX idx_idempotency_expiry ON idempotency_keys (expires_at);
