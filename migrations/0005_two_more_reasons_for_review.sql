-- `undelivered`: a dead letter that expired in its queue, or was pushed out of it, before
-- anyone had it. `looping`: the same message comes back under new ids. NOT VALID because
-- the rows that are there satisfy it already, and need not be read under the lock.
ALTER TABLE retry_queue
    DROP CONSTRAINT retry_queue_reason_check,
    ADD CONSTRAINT retry_queue_reason_check
        CHECK (reason IN ('exhausted', 'expired', 'final', 'terminal', 'unroutable', 'invalid',
                          'conflict', 'late', 'undelivered', 'looping')) NOT VALID;
