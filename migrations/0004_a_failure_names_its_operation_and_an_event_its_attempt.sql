-- What was attempted and the type of its error, in the producer's words: for search
-- and history.
ALTER TABLE retry_queue ADD COLUMN operation TEXT, ADD COLUMN error_type TEXT;
ALTER TABLE retry_events ADD COLUMN operation TEXT, ADD COLUMN error_type TEXT;

-- The attempt that an event tells of, where it tells of one: the value of the
-- republish's x-retry-attempt-id.
ALTER TABLE retry_events ADD COLUMN attempt_id UUID;

COMMENT ON COLUMN retry_queue.next_retry_at IS
    'When the task is due. Means something only while status is pending: afterwards it is the moment the task was last due.';
