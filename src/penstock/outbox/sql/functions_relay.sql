-- Pipelines: from an outbox to a sink, from a source into an inbox.

-- name: relay_set
-- Makes a pipeline, disabled, or changes its config. Raises TD001, TD003.
CREATE OR REPLACE FUNCTION tide._relay_set(
    pipeline text, direction text, box text, relay_group text, config jsonb
) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE there record;
BEGIN
    PERFORM tide._check_name('pipeline', pipeline, true);
    PERFORM tide._check_name('relay group', relay_group, true);
    INSERT INTO tide.relays AS r (pipeline, direction, outbox, inbox, relay_group, config)
    VALUES (_relay_set.pipeline, _relay_set.direction,
        CASE WHEN _relay_set.direction = 'out' THEN box END,
        CASE WHEN _relay_set.direction = 'in' THEN box END,
        _relay_set.relay_group, _relay_set.config)
    ON CONFLICT ON CONSTRAINT relays_pkey DO UPDATE
        SET config = excluded.config, changed_at = clock_timestamp()
        WHERE (r.outbox, r.inbox, r.relay_group)
            IS NOT DISTINCT FROM (excluded.outbox, excluded.inbox, excluded.relay_group);
    IF NOT FOUND THEN
        SELECT * INTO there FROM tide.relays r WHERE r.pipeline = _relay_set.pipeline;
        RAISE EXCEPTION 'there is a pipeline % already, for % % in the group %',
            quote_literal(pipeline), CASE there.direction WHEN 'out' THEN 'outbox' ELSE 'inbox' END,
            coalesce(there.outbox, there.inbox), there.relay_group
            USING ERRCODE = 'TD003', HINT = 'Only its config can be changed. Choose another name, or '
                'delete it first, with its checkpoint: select tide.relay_delete('
                || quote_literal(pipeline) || ')';
    END IF;
END $tide$;

-- name: relay_set_outbox
-- Makes a pipeline from an outbox to a sink, disabled, or changes its config, which a relay reads within
-- seconds. Raises TD001, TD002, TD003, TD006.
CREATE OR REPLACE FUNCTION tide.relay_set_outbox(
    pipeline text, outbox text, relay_group text, config jsonb
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM tide._check_name('pipeline', pipeline, true);
    PERFORM tide._require('outbox', outbox, 'use');
    PERFORM tide._relay_set(
        pipeline, 'out', outbox, relay_group, tide._check_config('out', config));
END $tide$;

-- name: relay_set_inbox
-- Makes a pipeline from a source into an inbox, disabled, or changes its config. Raises TD001, TD003,
-- TD006, TD008.
CREATE OR REPLACE FUNCTION tide.relay_set_inbox(
    pipeline text, inbox text, relay_group text, config jsonb
) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM tide._check_name('pipeline', pipeline, true);
    PERFORM tide._require('inbox', inbox, 'use');
    PERFORM tide._relay_set(
        pipeline, 'in', inbox, relay_group, tide._check_config('in', config));
END $tide$;

-- name: require_pipeline
-- Raises TD001 or TD007 unless there is a pipeline of this name.
CREATE OR REPLACE FUNCTION tide._require_pipeline(given text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM tide._check_name('pipeline', given, true);
    IF NOT EXISTS (SELECT FROM tide.relays r WHERE r.pipeline = given) THEN
        PERFORM tide._unknown('pipeline', given,
            ARRAY(SELECT r.pipeline FROM tide.relays r ORDER BY 1), 'TD007');
    END IF;
END $tide$;

-- name: relay_switch
-- Raises TD001, TD007.
CREATE OR REPLACE FUNCTION tide._relay_switch(given text, enable boolean) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    UPDATE tide.relays r SET enabled = enable, changed_at = clock_timestamp()
    WHERE r.pipeline = given AND r.enabled <> enable;
    IF NOT FOUND THEN
        PERFORM tide._require_pipeline(given);
    END IF;
END $tide$;

-- name: relay_enable
-- Starts a pipeline from its checkpoint. Raises TD001, TD007.
CREATE OR REPLACE FUNCTION tide.relay_enable(pipeline text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM tide._relay_switch(pipeline, true);
END $tide$;

-- name: relay_disable
-- Stops a pipeline. It keeps its checkpoint, and its outbox keeps what it has not delivered. Raises TD001,
-- TD007.
CREATE OR REPLACE FUNCTION tide.relay_disable(pipeline text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM tide._relay_switch(pipeline, false);
END $tide$;

-- name: slot
-- The name of a group's replication slot, as `slot_of` in Python makes it.
CREATE OR REPLACE FUNCTION tide._slot(relay_group text) RETURNS text
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $tide$
    SELECT 'tide_' || left(regexp_replace(lower(relay_group), '[^a-z0-9_]', '_', 'g'), 49) || '_'
        || left(encode(sha256(convert_to(current_database(), 'UTF8') || '\x00'::bytea
            || convert_to(relay_group, 'UTF8')), 'hex'), 8)
$tide$;

-- name: drop_slots
-- Drops the slots of this database's groups that have no pipeline any more, as they would keep WAL for
-- ever. A NOTICE names a slot that can't be dropped now, with the statement that drops it. A relay drops
-- the slot that it reads itself.
CREATE OR REPLACE FUNCTION tide._drop_slots() RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE slot record; allowed boolean; statement text;
    -- An older snapshot may lack a pipeline that was made meanwhile.
    is_now CONSTANT boolean NOT NULL
        := current_setting('transaction_isolation') IN ('read committed', 'read uncommitted');
BEGIN
    SELECT r.rolsuper OR r.rolreplication INTO allowed
    FROM pg_roles r WHERE r.rolname = current_user;
    FOR slot IN
        SELECT s.slot_name, s.active FROM pg_replication_slots s
        WHERE s.database = current_database() AND s.plugin = 'pgoutput'
          AND s.slot_name ~ '^tide_.*_[0-9a-f]{8}$'
          AND s.slot_name NOT IN (
              SELECT tide._slot(r.relay_group) FROM tide.relays r WHERE r.direction = 'out')
    LOOP
        statement := format('select pg_drop_replication_slot(%L);', slot.slot_name);
        IF NOT slot.active AND allowed AND is_now THEN
            BEGIN
                PERFORM pg_drop_replication_slot(slot.slot_name);
                CONTINUE;
            EXCEPTION
                WHEN undefined_object THEN CONTINUE;  -- a relay was faster
                WHEN object_in_use THEN slot.active := true;
            END;
        END IF;
        -- Its relay drops it within seconds.
        CONTINUE WHEN (allowed OR slot.active) AND EXISTS (SELECT FROM tide.leases l
            WHERE l.state = 'running' AND l.heartbeat > clock_timestamp() - interval '10 s');
        IF slot.active THEN
            RAISE NOTICE 'the replication slot % is still in use, by process %, and keeps WAL',
                slot.slot_name,
                (SELECT s.active_pid FROM pg_replication_slots s WHERE s.slot_name = slot.slot_name)
                USING HINT = 'Once that has ended: ' || statement;
        ELSIF allowed THEN
            RAISE NOTICE 'the replication slot % keeps WAL, and is not dropped in a transaction with the '
                'isolation level %', slot.slot_name, current_setting('transaction_isolation')
                USING HINT = 'In another transaction: ' || statement;
        ELSE
            RAISE NOTICE 'the replication slot % keeps WAL, and the role % may not drop it',
                slot.slot_name, current_user
                USING HINT = 'As a role with REPLICATION: ' || statement;
        END IF;
    END LOOP;
END $tide$;

-- name: relay_delete
-- Deletes a pipeline and its checkpoint, and with the last one of a group the group's slot. Raises TD001,
-- TD007.
CREATE OR REPLACE FUNCTION tide.relay_delete(pipeline text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    DELETE FROM tide.relays r WHERE r.pipeline = relay_delete.pipeline;
    IF NOT FOUND THEN
        PERFORM tide._require_pipeline(pipeline);
    END IF;
    PERFORM tide._drop_slots();
END $tide$;

-- name: safe_config
-- Returns a config without secrets, and without a file's content in the place of its path; references stay.
CREATE OR REPLACE FUNCTION tide._safe_config(config jsonb) RETURNS jsonb
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $tide$
    SELECT coalesce(jsonb_object_agg(c.key, CASE
        WHEN jsonb_typeof(c.value) <> 'string' THEN c.value
        WHEN c.key IN ({secrets})
             AND c.value #>> '{}' !~ '^\$\{(env|file):[^}]+\}$' THEN to_jsonb('***'::text)
        WHEN c.key IN ({paths}) AND c.value #>> '{}' ~ {file_content} THEN to_jsonb('***'::text)
        WHEN c.key = 'url' THEN to_jsonb(regexp_replace(c.value #>> '{}',
            '((?:^|,)\s*(?:\w+://)?)[^,]*@', '\1***@', 'g'))
        ELSE c.value END), '{}')
    FROM jsonb_each(config) AS c
$tide$;
