-- What waits: a narrow row for each pending task, which says when it is due. A claim walks here
-- and locks the task. So no index of retry_queue mentions anything that settling a task changes,
-- and Postgres writes the settled row onto the same page without touching an index (HOT). Half
-- of each page is left free for that.
--
-- History: a table for each day, which is dropped when it is too old, instead of deleting events
-- one by one.
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

-- The history so far becomes the oldest part of the new table.
ALTER TABLE retry_events RENAME TO retry_events_before;
ALTER TABLE retry_events_before DROP CONSTRAINT retry_events_pkey;
ALTER INDEX idx_retry_events_task RENAME TO retry_events_before_task;

CREATE TABLE retry_events (LIKE retry_events_before INCLUDING DEFAULTS INCLUDING COMMENTS)
    PARTITION BY RANGE (at);
CREATE INDEX idx_retry_events_task ON retry_events (task_id, id);

-- Where events go for whose day there is no table.
CREATE TABLE retry_events_other PARTITION OF retry_events DEFAULT;
CREATE INDEX idx_retry_events_other_at ON retry_events_other (at);

-- The tables of history, each with the moment at which its events end; no moment for the one that
-- takes what fits no other.
CREATE VIEW retry_events_parts AS
    SELECT c.oid::regclass::text AS part, GREATEST(c.reltuples, 0)::bigint AS events,
           substring(pg_get_expr(c.relpartbound, c.oid) FROM 'TO \(''(.*)''\)')::timestamptz AS until
    FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
    WHERE i.inhparent = 'retry_events'::regclass;

-- Makes the tables for the events of the next week, and drops those whose events are all older
-- than `keep`; of the table that takes what fits no other, it deletes up to `most` such events.
-- Returns how many events are gone: of a dropped table, by Postgres's estimate.
--
-- It runs with the rights of whoever applied this migration, so that the service needs none to
-- make tables. It gives up when a lock is not to be had soon, and so holds nobody up: it is
-- called again.
CREATE FUNCTION retry_rotate_events(keep INTERVAL, most BIGINT) RETURNS BIGINT
LANGUAGE plpgsql SECURITY DEFINER SET lock_timeout = '200ms' AS $$
DECLARE
    today TIMESTAMPTZ := date_trunc('day', now() AT TIME ZONE 'UTC') AT TIME ZONE 'UTC';
    day TIMESTAMPTZ := GREATEST(today, (SELECT max(until) FROM retry_events_parts));
    part TEXT;
    events BIGINT;
    gone BIGINT;
BEGIN
    -- One instance at a time, and the others need not wait.
    IF NOT pg_try_advisory_xact_lock('retry_events'::regclass::oid::int, 0) THEN
        RETURN 0;
    END IF;
    WHILE day <= today + interval '7 days' LOOP
        part := 'retry_events_' || to_char(day AT TIME ZONE 'UTC', 'YYYY_MM_DD');
        BEGIN
            -- Attached, because a table that is made as a part of another one locks that one.
            EXECUTE format('CREATE TABLE %I (LIKE retry_events INCLUDING DEFAULTS)', part);
            EXECUTE format('ALTER TABLE retry_events ATTACH PARTITION %I FOR VALUES FROM (%L) TO (%L)',
                           part, day, day + interval '24 hours');
        EXCEPTION WHEN check_violation THEN
            -- This day's events have begun to go elsewhere, and stay there.
            NULL;
        END;
        day := day + interval '24 hours';
    END LOOP;
    DELETE FROM retry_events_other WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM retry_events_other WHERE at < now() - keep ORDER BY at LIMIT most));
    GET DIAGNOSTICS gone = ROW_COUNT;
    FOR part, events IN
        SELECT p.part, p.events FROM retry_events_parts p WHERE p.until <= now() - keep
    LOOP
        EXECUTE format('DROP TABLE %s', part);
        gone := gone + events;
    END LOOP;
    RETURN gone;
EXCEPTION WHEN lock_not_available THEN
    RETURN 0;
END
$$;

DO $$
DECLARE
    -- The first midnight after all events so far.
    tomorrow TIMESTAMPTZ := (SELECT date_trunc('day', GREATEST(now(), max(at)) AT TIME ZONE 'UTC')
                                 AT TIME ZONE 'UTC' + interval '24 hours' FROM retry_events_before);
    newest BIGINT := (SELECT max(id) FROM retry_events_before);
BEGIN
    IF newest IS NULL THEN
        DROP TABLE retry_events_before;
    ELSE
        ALTER TABLE retry_events_before ALTER COLUMN id DROP IDENTITY;
        EXECUTE format('ALTER TABLE retry_events ATTACH PARTITION retry_events_before
                        FOR VALUES FROM (MINVALUE) TO (%L)', tomorrow);
    END IF;
    EXECUTE format('ALTER TABLE retry_events ALTER COLUMN id ADD GENERATED ALWAYS AS IDENTITY
                    (START WITH %s)', COALESCE(newest, 0) + 1);
    -- The functions find our tables whoever calls them.
    EXECUTE format('ALTER FUNCTION retry_keep_due() SET search_path = %I, pg_temp', current_schema());
    EXECUTE format('ALTER FUNCTION retry_rotate_events(INTERVAL, BIGINT) SET search_path = %I, pg_temp',
                   current_schema());
    PERFORM retry_rotate_events(interval '100 years', 0);
END
$$;
