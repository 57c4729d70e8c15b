-- What waits: a narrow row for each pending task, which says when it is due. A claim walks here
-- and locks the task. So no index of retry_queue mentions anything that settling a task changes,
-- and Postgres writes the settled row onto the same page without touching an index (HOT). Half
-- of each page is left free for that.
--
-- History: one row for all that one statement did to its tasks, in a table for each day, which is
-- dropped when it is too old. Writing a batch costs a few arrays and one row instead of hundreds of
-- rows, and so does reading it. The view retry_events shows each event as a row again.
--
-- Nobody may store, settle or remove a task meanwhile.
LOCK TABLE retry_queue, retry_events IN SHARE ROW EXCLUSIVE MODE;

CREATE TABLE retry_due (
    -- As in the task's row of retry_queue. Whoever has locked that row may change this one.
    task_id BIGINT NOT NULL,
    next_retry_at TIMESTAMPTZ NOT NULL,
    lane INT NOT NULL,
    priority SMALLINT NOT NULL
);

INSERT INTO retry_due (task_id, next_retry_at, lane, priority)
    SELECT id, next_retry_at, lane, priority FROM retry_queue WHERE status = 'pending';

-- What is due, oldest first, live before backfill; and where a task's row is.
CREATE INDEX idx_retry_due_next ON retry_due (priority, next_retry_at, task_id);

-- The lanes, and what is due in each, for when more is due than one claim takes.
CREATE INDEX idx_retry_due_lane ON retry_due (lane, next_retry_at);

DROP INDEX idx_retry_next_retry, idx_retry_lane;
ALTER TABLE retry_queue SET (fillfactor = 50);

-- The service keeps retry_due in step with the statements that change tasks, and says so by a
-- setting of its transaction. For everybody else, such as a person with psql, this does it.
-- The rows are never found by reading the table whole, however small it was when the function's
-- statements were planned.
CREATE FUNCTION retry_keep_due() RETURNS trigger LANGUAGE plpgsql SET enable_seqscan = off AS $$
BEGIN
    IF TG_OP = 'TRUNCATE' THEN
        TRUNCATE retry_due;
        RETURN NULL;
    END IF;
    IF TG_OP <> 'INSERT' AND OLD.status = 'pending' THEN
        DELETE FROM retry_due
        WHERE priority = OLD.priority AND next_retry_at = OLD.next_retry_at AND task_id = OLD.id;
    END IF;
    IF TG_OP <> 'DELETE' AND NEW.status = 'pending' THEN
        INSERT INTO retry_due (task_id, next_retry_at, lane, priority)
            VALUES (NEW.id, NEW.next_retry_at, NEW.lane, NEW.priority);
    END IF;
    RETURN NULL;
END
$$;

CREATE TRIGGER keep_due_on_insert AFTER INSERT ON retry_queue FOR EACH ROW
    WHEN (current_setting('retry_scheduler.keeps_due', TRUE) IS DISTINCT FROM 'on')
    EXECUTE FUNCTION retry_keep_due();
CREATE TRIGGER keep_due_on_update AFTER UPDATE ON retry_queue FOR EACH ROW
    WHEN (current_setting('retry_scheduler.keeps_due', TRUE) IS DISTINCT FROM 'on'
          AND (OLD.id, OLD.status, OLD.next_retry_at, OLD.lane, OLD.priority)
              IS DISTINCT FROM (NEW.id, NEW.status, NEW.next_retry_at, NEW.lane, NEW.priority))
    EXECUTE FUNCTION retry_keep_due();
CREATE TRIGGER keep_due_on_delete AFTER DELETE ON retry_queue FOR EACH ROW
    WHEN (OLD.status = 'pending'
          AND current_setting('retry_scheduler.keeps_due', TRUE) IS DISTINCT FROM 'on')
    EXECUTE FUNCTION retry_keep_due();
CREATE TRIGGER keep_due_on_truncate AFTER TRUNCATE ON retry_queue
    FOR EACH STATEMENT EXECUTE FUNCTION retry_keep_due();

ALTER TABLE retry_events RENAME TO retry_events_before;

-- What happened to some tasks at one moment: event N is of the Nth task, and its other values are
-- the Nth of their arrays. An array that would hold nothing but NULLs is NULL.
CREATE TABLE retry_history (
    id BIGINT GENERATED ALWAYS AS IDENTITY,
    at TIMESTAMPTZ NOT NULL DEFAULT clock_timestamp(),

    -- What happened: scheduled, duplicate, retry_attempt (sent back), returned (no such queue),
    -- deferred (the broker would not take it), retry_exhausted (given to review, whatever the
    -- reason), idempotency.
    event_type TEXT NOT NULL,

    -- From where to where; NULL: the tasks are new.
    from_status TEXT,
    status TEXT NOT NULL,

    -- Who: `service`, or the operator; and which instance did it.
    actor TEXT NOT NULL DEFAULT 'service',
    instance TEXT NOT NULL,

    -- The tasks, by retry_queue.id. No foreign key: history may outlive its task.
    task_ids BIGINT[] NOT NULL CHECK (cardinality(task_ids) BETWEEN 1 AND 1048575),

    -- The task as the event left it.
    retry_count INT[] NOT NULL,
    max_retries INT[] NOT NULL,
    next_retry_at TIMESTAMPTZ[] NOT NULL,
    reason TEXT[],

    -- More on what happened; the wait that was decided, where one was, and why; the attempt, by the
    -- value of the republish's x-retry-attempt-id.
    detail TEXT[],
    delay_ms BIGINT[],
    error_class TEXT[],
    error TEXT[],
    policy TEXT[],
    attempt_id UUID[],

    -- The producer's words, so that history can be searched without the task.
    category TEXT[],
    operation TEXT[],
    error_type TEXT[],
    tenant_id TEXT[],
    correlation_id TEXT[],
    trace_id TEXT[]
) PARTITION BY RANGE (at);

-- Where history goes for whose day there is no table.
CREATE TABLE retry_history_other PARTITION OF retry_history DEFAULT;
CREATE INDEX idx_retry_history_other_at ON retry_history_other (at);

-- A row for each event of a row of history.
CREATE FUNCTION retry_events_in(h retry_history) RETURNS TABLE (
    id BIGINT, task_id BIGINT, at TIMESTAMPTZ, event_type TEXT, detail TEXT, from_status TEXT,
    status TEXT, retry_count INT, max_retries INT, next_retry_at TIMESTAMPTZ, reason TEXT,
    delay_ms BIGINT, error_class TEXT, error TEXT, policy TEXT, category TEXT, tenant_id TEXT,
    correlation_id TEXT, trace_id TEXT, actor TEXT, instance TEXT, operation TEXT, error_type TEXT,
    attempt_id UUID
) LANGUAGE sql IMMUTABLE AS $$
    SELECT (h.id << 20) + e.n, e.task_id, h.at, h.event_type, e.detail, h.from_status, h.status,
           e.retry_count, e.max_retries, e.next_retry_at, e.reason, e.delay_ms, e.error_class, e.error,
           e.policy, e.category, e.tenant_id, e.correlation_id, e.trace_id, h.actor, h.instance,
           e.operation, e.error_type, e.attempt_id
    FROM unnest(
        h.task_ids, h.detail, h.retry_count, h.max_retries, h.next_retry_at, h.reason, h.delay_ms,
        h.error_class, h.error, h.policy, h.category, h.tenant_id, h.correlation_id, h.trace_id,
        h.operation, h.error_type, h.attempt_id
    ) WITH ORDINALITY AS e(
        task_id, detail, retry_count, max_retries, next_retry_at, reason, delay_ms, error_class, error,
        policy, category, tenant_id, correlation_id, trace_id, operation, error_type, attempt_id, n)
$$;

-- All history, a row for each event; ids are in the order in which things happened.
CREATE VIEW retry_events AS
    SELECT e.* FROM retry_history h CROSS JOIN LATERAL retry_events_in(h) AS e;

-- The history of one task, found by the index.
CREATE FUNCTION retry_events_of(task BIGINT) RETURNS SETOF retry_events LANGUAGE sql STABLE AS $$
    SELECT e.* FROM retry_history h CROSS JOIN LATERAL retry_events_in(h) AS e
    WHERE h.task_ids @> ARRAY[task] AND e.task_id = task
    ORDER BY e.id
$$;

-- Lets people, and the version before, write a single event.
CREATE FUNCTION retry_write_event() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO retry_history (
        at, event_type, from_status, status, actor, instance, task_ids, retry_count, max_retries,
        next_retry_at, reason, detail, delay_ms, error_class, error, policy, attempt_id, category,
        operation, error_type, tenant_id, correlation_id, trace_id)
    VALUES (
        COALESCE(NEW.at, clock_timestamp()), NEW.event_type, NEW.from_status, NEW.status,
        COALESCE(NEW.actor, 'service'), NEW.instance, ARRAY[NEW.task_id], ARRAY[NEW.retry_count],
        ARRAY[NEW.max_retries], ARRAY[NEW.next_retry_at], ARRAY[NEW.reason], ARRAY[NEW.detail],
        ARRAY[NEW.delay_ms], ARRAY[NEW.error_class], ARRAY[NEW.error], ARRAY[NEW.policy],
        ARRAY[NEW.attempt_id], ARRAY[NEW.category], ARRAY[NEW.operation], ARRAY[NEW.error_type],
        ARRAY[NEW.tenant_id], ARRAY[NEW.correlation_id], ARRAY[NEW.trace_id]);
    RETURN NEW;
END
$$;
CREATE TRIGGER write_event INSTEAD OF INSERT ON retry_events
    FOR EACH ROW EXECUTE FUNCTION retry_write_event();

-- The tables of history, each with the moment at which its events end; no moment for the one that
-- takes what fits no other.
CREATE VIEW retry_history_parts AS
    SELECT c.oid::regclass::text AS part, GREATEST(c.reltuples, 0)::bigint AS entries,
           substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''(.*)''\)')::timestamptz AS until
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'retry_history'::regclass;

-- Makes the tables for the history of the next week, and drops those of which all is older than
-- `keep`; of the table that takes what fits no other, it deletes up to `most` such rows. Returns how
-- many rows are gone: of a dropped table, by Postgres's estimate.
--
-- It runs with the rights of whoever applied this migration, so that the service needs none to
-- make tables. It gives up when a lock is not to be had soon, and so holds nobody up: it is
-- called again.
CREATE FUNCTION retry_rotate_history(keep INTERVAL, most BIGINT) RETURNS BIGINT
LANGUAGE plpgsql SECURITY DEFINER SET lock_timeout = '200ms' AS $$
DECLARE
    today TIMESTAMPTZ := date_trunc('day', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC';
    day TIMESTAMPTZ := GREATEST(today, (SELECT max(until) FROM retry_history_parts));
    part TEXT;
    entries BIGINT;
    gone BIGINT;
BEGIN
    -- One instance at a time, and the others need not wait.
    IF NOT pg_try_advisory_xact_lock('retry_history'::regclass::oid::int, 0) THEN
        RETURN 0;
    END IF;
    WHILE day <= today + interval '7 days' LOOP
        part := 'retry_history_' || to_char(day AT TIME ZONE 'UTC', 'YYYY_MM_DD');
        BEGIN
            -- Attached, because a table that is made as a part of another one locks that one.
            EXECUTE format('CREATE TABLE %I (LIKE retry_history INCLUDING DEFAULTS INCLUDING CONSTRAINTS)',
                           part);
            EXECUTE format('ALTER TABLE retry_history ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
                           part, day, day + interval '24 hours');
        EXCEPTION WHEN check_violation THEN
            -- This day's history has begun to go elsewhere, and stays there.
            NULL;
        END;
        day := day + interval '24 hours';
    END LOOP;
    DELETE FROM retry_history_other WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM retry_history_other WHERE at < now() - keep ORDER BY at LIMIT most));
    GET DIAGNOSTICS gone = ROW_COUNT;
    FOR part, entries IN
        SELECT p.part, p.entries FROM retry_history_parts p WHERE p.until <= now() - keep
    LOOP
        EXECUTE format('DROP TABLE %s', part);
        gone := gone + entries;
    END LOOP;
    RETURN gone;
EXCEPTION WHEN lock_not_available THEN
    RETURN 0;
END
$$;

DO $$
DECLARE
    day TIMESTAMPTZ;
BEGIN
    -- The functions find our tables whoever calls them.
    EXECUTE format('ALTER FUNCTION retry_keep_due() SET search_path = %I, pg_temp', current_schema());
    EXECUTE format('ALTER FUNCTION retry_write_event() SET search_path = %I, pg_temp', current_schema());
    EXECUTE format('ALTER FUNCTION retry_events_of(BIGINT) SET search_path = %I, pg_temp',
                   current_schema());
    EXECUTE format('ALTER FUNCTION retry_rotate_history(INTERVAL, BIGINT) SET search_path = %I, pg_temp',
                   current_schema());
    -- The days of the history so far, and those to come.
    FOR day IN SELECT DISTINCT date_trunc('day', at AT TIME ZONE 'UTC') AT TIME ZONE 'UTC'
               FROM retry_events_before WHERE at < date_trunc('day', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC'
    LOOP
        EXECUTE format('CREATE TABLE %I PARTITION OF retry_history FOR VALUES FROM (%L) TO (%L)',
                       'retry_history_' || to_char(day AT TIME ZONE 'UTC', 'YYYY_MM_DD'),
                       day, day + interval '24 hours');
    END LOOP;
    PERFORM retry_rotate_history(interval '100 years', 0);
END
$$;

-- The history so far: events that follow on each other, are alike but for their arrays, and happened
-- within a millisecond, are put together. Each keeps its place; `at` is that much too early at most.
INSERT INTO retry_history (
        at, event_type, from_status, status, actor, instance, task_ids, retry_count, max_retries,
        next_retry_at, reason, detail, delay_ms, error_class, error, policy, attempt_id, category,
        operation, error_type, tenant_id, correlation_id, trace_id)
    SELECT min(at), event_type, from_status, status, actor, instance, array_agg(task_id),
           array_agg(retry_count), array_agg(max_retries), array_agg(next_retry_at), array_agg(reason),
           array_agg(detail), array_agg(delay_ms), array_agg(error_class), array_agg(error),
           array_agg(policy), array_agg(attempt_id), array_agg(category), array_agg(operation),
           array_agg(error_type), array_agg(tenant_id), array_agg(correlation_id), array_agg(trace_id)
    FROM (SELECT *, sum(begins) OVER (ORDER BY id) AS batch
          FROM (SELECT *, (ROW(date_trunc('milliseconds', at), event_type, from_status, status, actor, instance)
                    IS DISTINCT FROM lag(ROW(date_trunc('milliseconds', at), event_type, from_status, status,
                                             actor, instance)) OVER (ORDER BY id))::int AS begins
                FROM retry_events_before) e) e
    GROUP BY batch, event_type, from_status, status, actor, instance
    ORDER BY batch;
DROP TABLE retry_events_before;

-- Finds what happened to a task. New entries wait in a list that is merged when it is full; a longer
-- one would be merged more cheaply, but all at once.
CREATE INDEX idx_retry_history_tasks ON retry_history
    USING gin (task_ids) WITH (gin_pending_list_limit = 256);
