-- What a migration of the next version may do while the version before goes on working: none of this
-- keeps it from writing a row as it always has. `cargo dev upgrade --migration` adds it to a version
-- that is built for the purpose; no release has it.
ALTER TABLE retry_queue ADD COLUMN region TEXT;
ALTER TABLE retry_history ADD COLUMN region TEXT;

-- NOT VALID: rows that are there are not read under the lock.
ALTER TABLE retry_queue ADD CONSTRAINT a_region_has_a_name CHECK (region <> '') NOT VALID;

-- No row has a region yet, so the index is empty. Writers wait only while the table is read once.
CREATE INDEX idx_retry_region ON retry_queue (region, next_retry_at) WHERE region IS NOT NULL;

CREATE TABLE retry_regions (
    name TEXT PRIMARY KEY,
    paused BOOLEAN NOT NULL DEFAULT FALSE
);
