-- Inboxes: made and dropped, worked through, replayed, swept.
--
-- A worker takes rows of tide."inbox_<name>" by SELECT … WHERE status = 'pending' ORDER BY id FOR
-- UPDATE SKIP LOCKED, does its work and marks them, in one transaction.

-- name: inbox_create
-- Makes an inbox. A message that failed `max_retries` times is a dead letter (status failed). A processed
-- one is kept for `retention_hours`, so that its copies are recognised. Raises TD001,
-- TD003, TD011.
CREATE OR REPLACE FUNCTION tide.inbox_create(
    name text, max_retries integer DEFAULT 5, retention_hours integer DEFAULT 168
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE made text;
BEGIN
    PERFORM tide._check_name('inbox', name, false);
    PERFORM tide._check_hours(retention_hours);
    IF max_retries IS NULL OR max_retries NOT BETWEEN 0 AND 1000000 THEN
        RAISE EXCEPTION 'max_retries is %', coalesce(max_retries::text, 'null')
            USING ERRCODE = 'TD011', HINT = 'Give a number from 0 to 1000000; with 0 or 1 the first '
                'failure makes a dead letter.';
    END IF;
    INSERT INTO tide.inboxes AS i (name, max_retries, retention_hours)
    VALUES (inbox_create.name, inbox_create.max_retries, inbox_create.retention_hours)
    ON CONFLICT DO NOTHING RETURNING i.name INTO made;
    IF made IS NULL THEN
        RAISE EXCEPTION 'there is an inbox % already', quote_literal(name)
            USING ERRCODE = 'TD003', HINT = 'Use it, choose another name, or drop it first: '
                'select tide.inbox_drop(' || quote_literal(name) || ')';
    END IF;
    -- `payload` is null where the message's body is no JSON that Postgres can hold; it is in `body`.
    EXECUTE format($make$
CREATE TABLE tide.%1$I (
    id bigint GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME tide.%2$I) CONSTRAINT %3$I PRIMARY KEY,
    message_id text NOT NULL CONSTRAINT %4$I UNIQUE,
    subject text NOT NULL,
    payload jsonb,
    body bytea,
    headers jsonb NOT NULL DEFAULT '{}',
    status text NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'processed', 'failed')),
    attempts integer NOT NULL DEFAULT 0,
    error text,
    received_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    processed_at timestamptz
);
CREATE INDEX %5$I ON tide.%1$I (id) WHERE status = 'pending';
CREATE INDEX %6$I ON tide.%1$I (id) WHERE status = 'failed';
CREATE INDEX %7$I ON tide.%1$I (processed_at) WHERE status = 'processed'
$make$, 'inbox_' || name, 'in_ids_' || name, 'in_key_' || name, 'in_msg_' || name,
        'in_new_' || name, 'in_bad_' || name, 'in_old_' || name);
    -- Relays fill it: the roles that may write checkpoints are theirs.
    EXECUTE coalesce((
        SELECT string_agg(format('GRANT INSERT ON tide.%I TO %I', 'inbox_' || name, g.rolname), '; ')
        FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) AS a
        JOIN pg_roles g ON g.oid = a.grantee
        WHERE c.oid = 'tide.checkpoints'::regclass AND a.privilege_type = 'INSERT'
          AND a.grantee <> c.relowner), 'SELECT');
END $tide$;

-- name: inbox_drop
-- Drops an inbox and its messages; with `force` also the pipelines that fill it. Raises TD001, TD008,
-- and TD012 where there are such pipelines.
CREATE OR REPLACE FUNCTION tide.inbox_drop(name text, force boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE pipelines text[];
BEGIN
    PERFORM tide._require('inbox', name, 'drop');
    pipelines := ARRAY(
        SELECT r.pipeline FROM tide.relays r WHERE r.inbox = inbox_drop.name ORDER BY 1);
    IF cardinality(pipelines) > 0 AND force IS NOT TRUE THEN
        RAISE EXCEPTION 'the inbox % is filled by %', quote_literal(name),
            array_to_string(pipelines, ', ')
            USING ERRCODE = 'TD012', HINT = format(
                'Delete those first: select tide.relay_delete(%L). Or drop all: '
                'select tide.inbox_drop(%L, force => true)', pipelines[1], name);
    END IF;
    DELETE FROM tide.relays r WHERE r.inbox = inbox_drop.name;
    EXECUTE format('DROP TABLE tide.%I', 'inbox_' || name);
    DELETE FROM tide.inboxes i WHERE i.name = inbox_drop.name;
END $tide$;

-- name: inbox_mark
-- Marks one message, found by its id or by its message_id, and returns its status. An error marks it
-- as failed once, none as processed. A processed message stays processed. Raises TD001, TD008, TD013.
CREATE OR REPLACE FUNCTION tide._inbox_mark(name text, by text, given text, failure text)
RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE retries integer; status text;
BEGIN
    SELECT i.max_retries INTO retries FROM tide.inboxes i WHERE i.name = _inbox_mark.name;
    IF NOT FOUND THEN
        PERFORM tide._require('inbox', name, 'read');
    END IF;
    EXECUTE format($mark$
UPDATE tide.%1$I SET
    status = CASE WHEN status = 'processed' THEN status WHEN $2 IS NULL THEN 'processed'
                  WHEN attempts + 1 >= $3 THEN 'failed' ELSE 'pending' END,
    attempts = attempts + (status <> 'processed')::integer,
    error = CASE WHEN status = 'processed' THEN error ELSE $2 END,
    processed_at = CASE WHEN status = 'processed' THEN processed_at
                        WHEN $2 IS NULL THEN clock_timestamp() END
WHERE %2$I = $1::%3$s RETURNING status
$mark$, 'inbox_' || name, by, CASE by WHEN 'id' THEN 'bigint' ELSE 'text' END)
        INTO status USING given, failure, retries;
    IF status IS NULL THEN
        RAISE EXCEPTION 'the inbox % has no message with % %', quote_literal(name), by,
            coalesce(quote_literal(left(given, 100)), 'null')
            USING ERRCODE = 'TD013', HINT = 'Give the id or the message_id of one of its rows; '
                'processed ones are deleted after its retention.';
    END IF;
    RETURN status;
END $tide$;

-- name: inbox_mark_processed
-- Marks a message as done, for good. Raises TD001, TD008, TD013.
CREATE OR REPLACE FUNCTION tide.inbox_mark_processed(name text, message_id text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM tide._inbox_mark(name, 'message_id', message_id, NULL);
END $tide$;
CREATE OR REPLACE FUNCTION tide.inbox_mark_processed(name text, id bigint) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM tide._inbox_mark(name, 'id', id::text, NULL);
END $tide$;

-- name: inbox_mark_failed
-- Counts a failed attempt and returns the message's status: pending, to be tried again, or failed, a dead
-- letter, after max_retries attempts. Raises TD001, TD008, TD013.
CREATE OR REPLACE FUNCTION tide.inbox_mark_failed(name text, message_id text, error text)
RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    RETURN tide._inbox_mark(name, 'message_id', message_id, coalesce(error, 'no reason was given'));
END $tide$;
CREATE OR REPLACE FUNCTION tide.inbox_mark_failed(name text, id bigint, error text) RETURNS text
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    RETURN tide._inbox_mark(name, 'id', id::text, coalesce(error, 'no reason was given'));
END $tide$;

-- name: inbox_replay
-- Makes dead letters pending again, with no attempts: one, by its message_id, or all. Returns how many.
-- Raises TD001, TD008, and TD013 where the message_id is not that of a dead letter.
CREATE OR REPLACE FUNCTION tide.inbox_replay(name text, message_id text DEFAULT NULL) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE replayed bigint;
BEGIN
    IF NOT EXISTS (SELECT FROM tide.inboxes i WHERE i.name = inbox_replay.name) THEN
        PERFORM tide._require('inbox', name, 'read');
    END IF;
    EXECUTE format('UPDATE tide.%I SET status = ''pending'', attempts = 0, error = NULL'
        ' WHERE status = ''failed'' AND ($1 IS NULL OR message_id = $1)', 'inbox_' || name)
        USING message_id;
    GET DIAGNOSTICS replayed = ROW_COUNT;
    IF replayed = 0 AND message_id IS NOT NULL THEN
        RAISE EXCEPTION 'the inbox % has no dead letter %', quote_literal(name),
            quote_literal(left(message_id, 100))
            USING ERRCODE = 'TD013', HINT = 'Give the message_id of a row whose status is failed.';
    END IF;
    RETURN replayed;
END $tide$;

-- name: inbox_status
-- How many messages an inbox has in each status, and the pipelines that fill it. Raises TD001, TD008.
CREATE OR REPLACE FUNCTION tide.inbox_status(name text) RETURNS jsonb
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE counts jsonb; found jsonb;
BEGIN
    PERFORM tide._require('inbox', name, 'read');
    EXECUTE format($count$
SELECT jsonb_build_object(
    'pending', count(*) FILTER (WHERE status = 'pending'),
    'processed', count(*) FILTER (WHERE status = 'processed'),
    'failed', count(*) FILTER (WHERE status = 'failed'),
    'oldest_pending', min(received_at) FILTER (WHERE status = 'pending'),
    'size_bytes', pg_total_relation_size('tide.%1$I'::regclass))
FROM tide.%1$I
$count$, 'inbox_' || name) INTO counts;
    SELECT jsonb_build_object('name', i.name, 'max_retries', i.max_retries,
        'retention_hours', i.retention_hours, 'created_at', i.created_at) || counts
        || jsonb_build_object('pipelines', ARRAY(
            SELECT tide.relay_status(r.pipeline) FROM tide.relays r
            WHERE r.inbox = i.name ORDER BY r.pipeline))
    INTO found FROM tide.inboxes i WHERE i.name = inbox_status.name;
    RETURN found;
END $tide$;

-- name: inbox_sweep
-- Deletes messages that were processed before the inbox's retention, at most 100,000, and returns how
-- many. Raises TD001, TD008.
CREATE OR REPLACE FUNCTION tide.inbox_sweep(name text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE before timestamptz; swept bigint;
BEGIN
    PERFORM tide._require('inbox', name, 'use');
    SELECT clock_timestamp() - make_interval(hours => i.retention_hours) INTO before
    FROM tide.inboxes i WHERE i.name = inbox_sweep.name;
    EXECUTE format('DELETE FROM tide.%1$I WHERE id = ANY (ARRAY(SELECT id FROM tide.%1$I'
        ' WHERE status = ''processed'' AND processed_at < $1 ORDER BY processed_at LIMIT 100000))',
        'inbox_' || name) USING before;
    GET DIAGNOSTICS swept = ROW_COUNT;
    RETURN swept;
END $tide$;

-- name: inbox_grant_process
-- Lets a role read an inbox, lock and mark its messages and replay its dead letters. Raises TD001,
-- TD008, TD014.
CREATE OR REPLACE FUNCTION tide.inbox_grant_process(name text, role text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM tide._require('inbox', name, 'change');
    PERFORM tide._check_grant(role);
    EXECUTE format('GRANT USAGE ON SCHEMA tide TO %I', role);
    EXECUTE format('GRANT SELECT, UPDATE (status, attempts, error, processed_at) ON tide.%I TO %I',
        'inbox_' || name, role);
    EXECUTE format('GRANT SELECT (name, max_retries) ON tide.inboxes TO %I', role);
    EXECUTE format('GRANT EXECUTE ON FUNCTION tide._check_name, tide._unknown,'
        ' tide._require, tide._inbox_mark, tide.inbox_mark_processed(text, text),'
        ' tide.inbox_mark_processed(text, bigint), tide.inbox_mark_failed(text, text, text),'
        ' tide.inbox_mark_failed(text, bigint, text), tide.inbox_replay TO %I', role);
END $tide$;

-- name: inbox_revoke_process
-- Revokes what inbox_grant_process granted on one inbox. Raises TD001, TD008, TD014.
CREATE OR REPLACE FUNCTION tide.inbox_revoke_process(name text, role text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM tide._require('inbox', name, 'change');
    PERFORM tide._check_grant(role);
    -- The table's columns lose theirs with the table.
    EXECUTE format('REVOKE SELECT, UPDATE ON tide.%I FROM %I', 'inbox_' || name, role);
END $tide$;
