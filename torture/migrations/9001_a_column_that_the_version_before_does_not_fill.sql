-- A mistake on purpose, which `cargo dev upgrade` must notice: rows need a value that the version
-- before does not give them, so it can store nothing any more.
ALTER TABLE retry_queue ADD COLUMN region TEXT NOT NULL DEFAULT 'unknown';
ALTER TABLE retry_queue ALTER COLUMN region DROP DEFAULT;

-- Stands for the code of the next version, which would fill the column. The instances' names tell
-- the version.
CREATE FUNCTION fill_region() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF current_setting('application_name') LIKE 'torture-%-new' THEN
        NEW.region := 'unknown';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER fill_region BEFORE INSERT ON retry_queue FOR EACH ROW EXECUTE FUNCTION fill_region();
