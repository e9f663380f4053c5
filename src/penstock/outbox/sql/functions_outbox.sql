-- Outboxes: made and dropped, published to, granted, swept.
--
-- A publisher has no right on any table. It may call tide.outbox_publish and the function
-- tide."append_<name>" of its outbox, which runs as the schema's owner; the grant is that function's.

-- name: outbox_append
-- Makes or replaces the function that adds a message to an outbox. The one of a disabled outbox refuses. So
-- publishing reads no setting, and enabling and disabling wait for no publisher.
CREATE OR REPLACE FUNCTION tide._outbox_append(name text, enabled boolean) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    EXECUTE format($make$
CREATE OR REPLACE FUNCTION tide.%1$I(payload jsonb, dedup_key text, headers jsonb) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS %2$L
$make$, 'append_' || name, CASE WHEN enabled THEN format($body$
#variable_conflict use_column
DECLARE made bigint;
BEGIN
    IF $1 IS NULL THEN
        RAISE EXCEPTION 'the payload for outbox %2$s is null'
            USING ERRCODE = 'TD005', HINT = 'Publish a JSON value; ''null''::jsonb is one too.';
    END IF;
    IF $3 <> '{}' THEN
        PERFORM tide._check_headers($3);
    END IF;
    IF $2 IS NULL THEN
        INSERT INTO tide.%1$I (payload, headers)
        VALUES ($1, coalesce($3, '{}')) RETURNING id INTO made;
        RETURN made;
    END IF;
    IF $2 = '' OR octet_length($2) > 1000 OR $2 ~ '^ | $|[\x01-\x1f\x7f]' THEN
        PERFORM tide._check_dedup_key($2);
    END IF;
    LOOP
        INSERT INTO tide.%1$I (dedup_key, payload, headers)
        VALUES ($2, $1, coalesce($3, '{}'))
        ON CONFLICT DO NOTHING RETURNING id INTO made;
        IF made IS NULL THEN
            SELECT id INTO made FROM tide.%1$I WHERE dedup_key = $2;
        END IF;
        -- Neither: the message was swept in between.
        IF made IS NOT NULL THEN
            RETURN made;
        END IF;
    END LOOP;
END $body$, 'outbox_' || name, name) ELSE format($body$
BEGIN
    RAISE EXCEPTION 'the outbox %1$s is disabled'
        USING ERRCODE = 'TD004', HINT = 'select tide.outbox_enable(''%1$s'')';
END $body$, name) END);
END $tide$;

-- name: check_headers
-- Raises TD009 unless a NATS message can carry `headers`, an object. A list is several headers of one name,
-- null is none, and any other value its JSON.
CREATE OR REPLACE FUNCTION tide._check_headers(headers jsonb) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE header record;
BEGIN
    IF jsonb_typeof(headers) <> 'object' THEN
        RAISE EXCEPTION 'the headers are a JSON %, not an object', jsonb_typeof(headers)
            USING ERRCODE = 'TD009', HINT = 'Give {"Name": "value"}.';
    END IF;
    FOR header IN SELECT h.key, h.value FROM jsonb_each(headers) AS h LOOP
        IF header.key !~ '^[!-9;-~]+$' OR header.key ~ '\n' THEN
            RAISE EXCEPTION 'the header % cannot be sent', quote_literal(left(header.key, 60))
                USING ERRCODE = 'TD009',
                HINT = 'Name it by printable ASCII characters, without blanks and colons.';
        ELSIF lower(header.key) LIKE 'nats-%' THEN
            RAISE EXCEPTION 'the header % is JetStream''s own', left(header.key, 60)
                USING ERRCODE = 'TD009', HINT = 'Give it another name; Nats-Msg-Id is the dedup_key.';
        ELSIF header.key = 'op'
              AND header.value NOT IN ('"insert"', '"update"', '"delete"', 'null') THEN
            RAISE EXCEPTION 'the header op is %, and no operation', left(header.value::text, 60)
                USING ERRCODE = 'TD009',
                HINT = 'Give "insert", "update" or "delete", or name the header otherwise.';
        -- In JSON's text a line end within a text is \n or \r; a backslash itself is \\.
        ELSIF replace(header.value::text, '\\', '') ~ '\\[nr]' THEN
            RAISE EXCEPTION 'the value of the header % holds a line end', left(header.key, 60)
                USING ERRCODE = 'TD009', HINT = 'Take it out, or put the value in the payload.';
        END IF;
    END LOOP;
END $tide$;

-- name: check_dedup_key
-- Raises TD010 unless `given` can be part of a Nats-Msg-Id.
CREATE OR REPLACE FUNCTION tide._check_dedup_key(given text) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    IF octet_length(given) > 1000 THEN
        RAISE EXCEPTION 'the dedup_key has % bytes', octet_length(given)
            USING ERRCODE = 'TD010', HINT = 'At most 1000 are taken: use a hash of it.';
    ELSIF given = '' OR given ~ '^ | $|[\x01-\x1f\x7f]' THEN
        RAISE EXCEPTION 'the dedup_key % cannot be sent', quote_literal(left(given, 100))
            USING ERRCODE = 'TD010', HINT = 'Give at least one character, none of them a control '
                'character, and no blank at its ends; NULL for no key.';
    END IF;
END $tide$;

-- name: outbox_publish
-- Adds a message to an outbox in the caller's transaction and returns its id. If the outbox still has a
-- message of this dedup_key, it adds nothing and returns that one's id. `op`, what the event did, becomes the
-- header of that name. Raises TD001, TD002, TD004, TD005, TD009, TD010.
CREATE OR REPLACE FUNCTION tide.outbox_publish(
    name text, payload jsonb, dedup_key text DEFAULT NULL, headers jsonb DEFAULT '{}',
    op text DEFAULT NULL
) RETURNS bigint
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE made bigint;
BEGIN
    IF op IS NOT NULL THEN
        headers := coalesce(headers, '{}');
        IF jsonb_typeof(headers) = 'object' THEN
            IF coalesce(headers -> 'op', 'null') NOT IN ('null', to_jsonb(op)) THEN
                RAISE EXCEPTION 'op is %, and the header op is %', quote_literal(left(op, 60)),
                    left(headers ->> 'op', 60)
                    USING ERRCODE = 'TD009', HINT = 'They are the same: give one of them.';
            END IF;
            headers := headers || jsonb_build_object('op', op);
        END IF;
    END IF;
    -- A longer name would be cut, and may then be that of another outbox.
    IF octet_length(name) <= 56
       AND to_regclass('tide.' || quote_ident('outbox_' || name)) IS NOT NULL THEN
        EXECUTE 'SELECT tide.' || quote_ident('append_' || name) || '($1, $2, $3)'
            INTO made USING payload, dedup_key, headers;
        RETURN made;
    END IF;
    PERFORM tide._check_name('outbox', name, false);
    RAISE EXCEPTION 'there is no outbox %', quote_literal(name)
        USING ERRCODE = 'TD002', HINT = 'select tide.outbox_create(' || quote_literal(name) || ')';
END $tide$;

-- name: outbox_create
-- Makes an outbox that keeps messages for `retention_hours` at least. Its ids continue those of the last
-- outbox of its name. Raises TD001, TD003, TD011.
CREATE OR REPLACE FUNCTION tide.outbox_create(name text, retention_hours integer DEFAULT 24)
RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE made text;
BEGIN
    PERFORM tide._check_name('outbox', name, false);
    PERFORM tide._check_hours(retention_hours);
    INSERT INTO tide.outboxes AS o (name, retention_hours)
    VALUES (outbox_create.name, outbox_create.retention_hours)
    ON CONFLICT DO NOTHING RETURNING o.name INTO made;
    IF made IS NULL THEN
        RAISE EXCEPTION 'there is an outbox % already', quote_literal(name)
            USING ERRCODE = 'TD003', HINT = 'Use it, choose another name, or drop it first: '
                'select tide.outbox_drop(' || quote_literal(name) || ')';
    END IF;
    -- No outbox can have a table with the name of these indexes and sequences.
    EXECUTE format($make$
CREATE TABLE tide.%1$I (
    id bigint GENERATED ALWAYS AS IDENTITY (SEQUENCE NAME tide.%2$I START WITH %5$s)
        CONSTRAINT %3$I PRIMARY KEY,
    dedup_key text CONSTRAINT %4$I UNIQUE,
    payload jsonb NOT NULL,
    headers jsonb NOT NULL,
    xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
ALTER PUBLICATION tide ADD TABLE tide.%1$I
$make$, 'outbox_' || name, 'ids_' || name, 'key_' || name, 'dedup_' || name,
        coalesce((SELECT d.last_id + 1 FROM tide.dropped_outboxes d
                  WHERE d.name = outbox_create.name), 1));
    PERFORM tide._outbox_append(name, true);
    EXECUTE format('REVOKE ALL ON FUNCTION tide.%I FROM PUBLIC', 'append_' || name);
END $tide$;

-- name: outbox_drop
-- Drops an outbox and its messages; with `force` also the pipelines that read it. Raises TD001, TD002,
-- and TD012 where there are such pipelines.
CREATE OR REPLACE FUNCTION tide.outbox_drop(name text, force boolean DEFAULT false) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE pipelines text[];
BEGIN
    PERFORM tide._require('outbox', name, 'drop');
    pipelines := ARRAY(
        SELECT r.pipeline FROM tide.relays r WHERE r.outbox = outbox_drop.name ORDER BY 1);
    IF cardinality(pipelines) > 0 AND force IS NOT TRUE THEN
        RAISE EXCEPTION 'the outbox % is read by %', quote_literal(name),
            array_to_string(pipelines, ', ')
            USING ERRCODE = 'TD012', HINT = format(
                'Delete those first: select tide.relay_delete(%L). Or drop all, with what was not '
                'delivered: select tide.outbox_drop(%L, force => true)', pipelines[1], name);
    END IF;
    DELETE FROM tide.relays r WHERE r.outbox = outbox_drop.name;
    EXECUTE format('DROP FUNCTION tide.%I(jsonb, text, jsonb)', 'append_' || name);
    -- Waits for publishers, so that no id after the one that is read is used.
    EXECUTE format('LOCK TABLE tide.%I', 'outbox_' || name);
    EXECUTE format('INSERT INTO tide.dropped_outboxes (name, last_id)'
        ' SELECT $1, last_value - CASE WHEN is_called THEN 0 ELSE 1 END FROM tide.%I'
        ' ON CONFLICT (name) DO UPDATE SET last_id = excluded.last_id', 'ids_' || name) USING name;
    EXECUTE format('DROP TABLE tide.%I', 'outbox_' || name);
    DELETE FROM tide.outboxes o WHERE o.name = outbox_drop.name;
    PERFORM tide._drop_slots();
END $tide$;

-- name: outbox_enable
-- Lets an outbox take messages again. Raises TD001, TD002.
CREATE OR REPLACE FUNCTION tide.outbox_enable(name text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM tide._require('outbox', name, 'change');
    UPDATE tide.outboxes o SET enabled = true WHERE o.name = outbox_enable.name AND NOT o.enabled;
    IF FOUND THEN
        PERFORM tide._outbox_append(name, true);
    END IF;
END $tide$;

-- name: outbox_disable
-- Makes publishing to an outbox fail with TD004; its messages are delivered. Raises TD001, TD002.
CREATE OR REPLACE FUNCTION tide.outbox_disable(name text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM tide._require('outbox', name, 'change');
    UPDATE tide.outboxes o SET enabled = false WHERE o.name = outbox_disable.name AND o.enabled;
    IF FOUND THEN
        PERFORM tide._outbox_append(name, false);
    END IF;
END $tide$;

-- name: outbox_grant_publish
-- Lets a role publish to an outbox, and do nothing else. Raises TD001, TD002, TD014.
CREATE OR REPLACE FUNCTION tide.outbox_grant_publish(name text, role text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM tide._require('outbox', name, 'change');
    PERFORM tide._check_grant(role);
    EXECUTE format('GRANT USAGE ON SCHEMA tide TO %I', role);
    EXECUTE format('GRANT EXECUTE ON FUNCTION tide.outbox_publish, tide.%I TO %I',
        'append_' || name, role);
    -- Called with the publisher's rights, for an error about a name.
    EXECUTE format('GRANT EXECUTE ON FUNCTION tide._check_name TO %I', role);
END $tide$;

-- name: outbox_revoke_publish
-- Revokes what outbox_grant_publish granted on one outbox. Raises TD001, TD002, TD014.
CREATE OR REPLACE FUNCTION tide.outbox_revoke_publish(name text, role text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM tide._require('outbox', name, 'change');
    PERFORM tide._check_grant(role);
    EXECUTE format('REVOKE EXECUTE ON FUNCTION tide.%I FROM %I', 'append_' || name, role);
END $tide$;

-- name: outbox_sweep
-- Deletes the messages of an outbox that are older than its retention and that all its pipelines have
-- delivered, and returns how many. It ends after 100,000, to keep its transaction short: call it again.
-- A pipeline keeps no message that it need not deliver. Raises TD001, TD002.
CREATE OR REPLACE FUNCTION tide.outbox_sweep(name text) RETURNS bigint
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE
    window_size constant integer := 10000;
    enough constant integer := 100000;
    before timestamptz;
    snapshots pg_snapshot[];
    swept bigint := 0; deleted bigint; after_id bigint := 0; last_id bigint; ahead boolean;
BEGIN
    PERFORM tide._require('outbox', name, 'use');
    SELECT clock_timestamp() - make_interval(hours => o.retention_hours) INTO before
    FROM tide.outboxes o WHERE o.name = outbox_sweep.name;
    -- A snapshot from the future is of another cluster, from which this database was restored.
    SELECT array_agg(s.snapshot) INTO snapshots
    FROM tide.relays r
    LEFT JOIN tide.checkpoints p USING (relay_group, pipeline, outbox)
    CROSS JOIN LATERAL (
        SELECT coalesce(p.delivered_snapshot,
            CASE WHEN r.config ->> 'start' = 'end' THEN r.since END) AS snapshot) AS s
    WHERE r.outbox = outbox_sweep.name;
    IF EXISTS (SELECT FROM unnest(snapshots) AS s
               WHERE s IS NULL OR pg_snapshot_xmax(s) > pg_snapshot_xmax(pg_current_snapshot())) THEN
        RETURN 0;
    END IF;
    -- Ids follow the time, except for moments. The oldest windows are read until one has nothing to delete:
    -- no index on the time is needed, and a sweep without work is short. A window with times in the future,
    -- from a clock that ran ahead, does not end the sweep.
    WHILE swept < enough LOOP
        EXECUTE format('SELECT max(id), min(created_at) > clock_timestamp() FROM'
            ' (SELECT id, created_at FROM tide.%I WHERE id > $1 ORDER BY id LIMIT $2) w',
            'outbox_' || name)
            INTO last_id, ahead USING after_id, least(window_size, enough - swept);
        EXIT WHEN last_id IS NULL;
        EXECUTE format('DELETE FROM tide.%I WHERE id > $1 AND id <= $2 AND created_at < $3'
            ' AND NOT EXISTS (SELECT FROM unnest($4) s WHERE NOT pg_visible_in_snapshot(xid, s))',
            'outbox_' || name) USING after_id, last_id, before, snapshots;
        GET DIAGNOSTICS deleted = ROW_COUNT;
        EXIT WHEN deleted = 0 AND NOT ahead;
        swept := swept + deleted;
        after_id := last_id;
    END LOOP;
    RETURN swept;
END $tide$;
