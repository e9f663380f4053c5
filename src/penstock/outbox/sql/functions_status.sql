-- The status of outboxes, pipelines and relays, and the rights of a relay's role.

-- name: lock_pid
-- The process of the session that holds a group's lock, null where none holds it. 7383 is `LOCK_GROUP`.
CREATE OR REPLACE FUNCTION tide._lock_pid(relay_group text) RETURNS integer
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $tide$
    SELECT l.pid FROM pg_locks l
    WHERE l.locktype = 'advisory' AND l.objsubid = 1 AND l.granted
      AND l.database = (SELECT d.oid FROM pg_database d WHERE d.datname = current_database())
      AND (l.classid::bigint << 32 | l.objid::bigint) = hashtextextended(relay_group, 7383)
    LIMIT 1
$tide$;

-- name: leases
-- The relay processes of a group: each `running`, `standby`, `stopped`, or `dead`, which is one without
-- a heartbeat for 10 s, by the server's clock; then `was` is its state before.
CREATE OR REPLACE FUNCTION tide._leases(given text) RETURNS TABLE (
    host text, pid integer, state text, warm boolean, was text, lock_pid integer, code text,
    error text, remedy text, since timestamptz, heartbeat timestamptz, age numeric
)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $tide$
    SELECT l.host, l.pid, CASE WHEN d.dead THEN 'dead' ELSE l.state END, l.warm, l.state,
           l.lock_pid, l.code, l.error, l.remedy,
           CASE WHEN d.dead THEN l.heartbeat ELSE l.since END, l.heartbeat,
           round(greatest(extract(epoch FROM clock_timestamp() - l.heartbeat), 0)::numeric, 1)
    FROM tide.leases l
    CROSS JOIN LATERAL (SELECT l.state <> 'stopped'
        AND l.heartbeat < clock_timestamp() - interval '10 s') AS d (dead)
    WHERE l.relay_group = given
    ORDER BY d.dead, l.state = 'stopped', l.state, l.heartbeat DESC
$tide$;

-- name: relay
-- The relay of a group. `state`: `running`; `stopped` or `dead`, as the last relay ended; `standby` where one
-- is about to take over; null where none has a lease. `code`, `error` and `remedy`: why the group does
-- not move.
CREATE OR REPLACE FUNCTION tide._relay(
    relay_group text, OUT state text, OUT code text, OUT error text, OUT remedy text,
    OUT info jsonb
)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE
    last record; holder integer := tide._lock_pid(relay_group); ready boolean; at text;
    again text := format('penstock relay --url … --group %s', relay_group);
BEGIN
    SELECT l.* INTO last FROM tide._leases(relay_group) l
    ORDER BY l.state = 'running' DESC, l.was <> 'standby' DESC, l.heartbeat DESC LIMIT 1;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    ready := EXISTS (SELECT FROM tide._leases(relay_group) l WHERE l.state = 'standby');
    state := last.state;
    at := to_char(last.heartbeat AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS"Z"');
    IF state = 'running' THEN
        code := last.code; error := last.error; remedy := last.remedy;
    ELSIF state = 'dead' THEN
        code := 'relay_dead';
        error := format('The relay of group %s is dead since %s: no heartbeat of process %s on %s.',
            relay_group, at, last.pid, last.host);
        IF last.was = 'running' AND holder = last.lock_pid THEN
            error := error || ' It hangs: its session still holds the group''s lock'
                || CASE WHEN ready THEN ', so that the standby cannot take over.' ELSE '.' END;
            remedy := format('On %s: kill -9 %s. ', last.host, last.pid)
                || CASE WHEN ready THEN 'The standby then takes over.' ELSE 'Then: ' || again END;
        ELSE
            remedy := CASE WHEN ready THEN 'A standby takes over within seconds.'
                ELSE 'Start it again: ' || again END;
        END IF;
    ELSIF ready THEN
        state := 'standby';
        code := 'relay_standby';
        error := format('No relay runs the group %s, and a standby waits for the group''s lock', relay_group)
            || coalesce(', which process ' || holder || ' of Postgres holds.', '.');
        remedy := coalesce('If that lasts: select pg_terminate_backend(' || holder || ')',
            'It takes over within seconds.');
    ELSE
        code := 'relay_stopped';
        error := format('The relay of group %s was stopped at %s.', relay_group, at);
        remedy := 'Start it again: ' || again;
    END IF;
    info := jsonb_build_object('state', state, 'since', last.since, 'host', last.host,
        'pid', last.pid, 'heartbeat_at', last.heartbeat, 'heartbeat_age', last.age,
        'standbys', (SELECT count(*) FROM tide._leases(relay_group) l WHERE l.state = 'standby'),
        'warm_standbys', (SELECT count(*) FROM tide._leases(relay_group) l
                          WHERE l.state = 'standby' AND l.warm));
END $tide$;

-- name: pipeline_state
-- The state of a pipeline: what its relay wrote last, if that is alive, and else the state of the relay. A
-- disabled pipeline is `stopping` until its relay has stopped it.
CREATE OR REPLACE FUNCTION tide._pipeline_state(
    given text, OUT state text, OUT code text, OUT error text, OUT remedy text, OUT relay jsonb
)
LANGUAGE sql STABLE SET search_path = pg_catalog, pg_temp AS $tide$
    SELECT
        CASE WHEN NOT r.enabled AND g.state = 'running' AND p.state NOT IN ('disabled', 'error')
                  AND (p.lsn IS NOT NULL OR r.direction = 'in') THEN 'stopping'
             WHEN NOT r.enabled THEN 'disabled'
             WHEN g.state IS NULL AND p.at IS NULL THEN 'no relay yet'
             WHEN g.state IS NULL THEN 'stopped'
             WHEN g.state <> 'running' THEN g.state
             WHEN coalesce(p.error, g.error) IS NOT NULL THEN 'error'
             WHEN p.state IS NULL OR p.state = 'disabled' THEN 'starting'
             ELSE p.state END,
        e.code, e.error, e.remedy, g.info
    FROM tide.relays r
    LEFT JOIN tide.checkpoints p ON (p.relay_group, p.pipeline, p.outbox)
        = (r.relay_group, r.pipeline, coalesce(r.outbox, r.inbox))
    CROSS JOIN LATERAL tide._relay(r.relay_group) AS g
    LEFT JOIN LATERAL (
        SELECT g.code, g.error, g.remedy WHERE g.state <> 'running'
        UNION ALL
        SELECT 'relay_stopped', format('No relay runs the group %s.', r.relay_group),
               'Start one: penstock relay --url … --group ' || r.relay_group
        WHERE g.state IS NULL AND p.at IS NOT NULL
        UNION ALL
        SELECT 'no_relay', format('No relay has run the group %s yet.', r.relay_group),
               'Start one: penstock relay --url … --group ' || r.relay_group
        WHERE g.state IS NULL
        UNION ALL
        SELECT p.code, p.error, p.remedy WHERE p.error IS NOT NULL
        UNION ALL
        SELECT g.code, g.error, g.remedy WHERE g.error IS NOT NULL
        LIMIT 1) AS e (code, error, remedy) ON r.enabled
    WHERE r.pipeline = given
$tide$;

-- name: relay_list
-- All pipelines, with their configs without secrets.
CREATE OR REPLACE FUNCTION tide.relay_list() RETURNS TABLE (
    pipeline text, direction text, outbox text, inbox text, relay_group text, enabled boolean,
    state text, config jsonb, created_at timestamptz, changed_at timestamptz
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
    SELECT r.pipeline, r.direction, r.outbox, r.inbox, r.relay_group, r.enabled, s.state,
           tide._safe_config(r.config), r.created_at, r.changed_at
    FROM tide.relays r CROSS JOIN LATERAL tide._pipeline_state(r.pipeline) AS s
    ORDER BY r.pipeline
$tide$;

-- name: relay_status
-- One pipeline: its config without secrets, its checkpoint, whether its relay is alive, and the error that
-- keeps it from moving, with the remedy. Raises TD001, TD007.
CREATE OR REPLACE FUNCTION tide.relay_status(pipeline text) RETURNS jsonb
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE found jsonb;
BEGIN
    PERFORM tide._require_pipeline(pipeline);
    SELECT jsonb_build_object(
        'pipeline', r.pipeline, 'direction', r.direction, 'outbox', r.outbox, 'inbox', r.inbox,
        'relay_group', r.relay_group, 'enabled', r.enabled, 'config', tide._safe_config(r.config),
        'created_at', r.created_at, 'changed_at', r.changed_at, 'state', s.state, 'code', s.code,
        'error', s.error, 'remedy', s.remedy, 'relay', s.relay, 'lsn', p.lsn,
        'delivered', coalesce(p.delivered, 0), 'last_id', p.last_id,
        'dead_letters', coalesce(p.dead_letters, 0), 'dead_letter', p.dead_letter,
        'dead_letter_at', p.dead_letter_at, 'at', p.at)
    INTO found
    FROM tide.relays r CROSS JOIN LATERAL tide._pipeline_state(r.pipeline) AS s
    LEFT JOIN tide.checkpoints p
        ON (p.relay_group, p.pipeline, p.outbox)
         = (r.relay_group, r.pipeline, coalesce(r.outbox, r.inbox))
    WHERE r.pipeline = relay_status.pipeline;
    RETURN found;
END $tide$;

-- name: outbox_backlog
-- The lag of one pipeline: how many of the newest 100,000 messages it has not delivered, and when the
-- oldest of them was published.
CREATE OR REPLACE FUNCTION tide._outbox_backlog(
    name text, delivered pg_snapshot, OUT messages bigint, OUT oldest timestamptz
)
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    EXECUTE format('SELECT count(*), min(created_at) FROM'
        ' (SELECT xid, created_at FROM tide.%I ORDER BY id DESC LIMIT 100000) AS newest'
        ' WHERE $1 IS NULL OR NOT pg_visible_in_snapshot(xid, $1)', 'outbox_' || name)
        INTO messages, oldest USING delivered;
END $tide$;

-- name: outbox_status
-- An outbox: its settings, its size, the roles that may publish to it, its pipelines, those for which it
-- keeps messages and why, and whether it has messages beyond its retention (overdue). Rows are counted
-- up to 100,000; more are an estimate, and `rows_exact` is false. Raises TD001,
-- TD002.
CREATE OR REPLACE FUNCTION tide.outbox_status(name text) RETURNS jsonb
LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE
    box tide.outboxes;
    counted bigint; oldest timestamptz; size bigint; overdue boolean;
    pipelines jsonb; holding jsonb;
BEGIN
    PERFORM tide._require('outbox', name, 'read');
    SELECT * INTO box FROM tide.outboxes o WHERE o.name = outbox_status.name;
    EXECUTE format($count$
SELECT (SELECT count(*) FROM (SELECT FROM tide.%1$I LIMIT 100001) AS counted),
       (SELECT created_at FROM tide.%1$I ORDER BY id LIMIT 1),
       pg_total_relation_size('tide.%1$I'::regclass)
$count$, 'outbox_' || name) INTO counted, oldest, size;
    overdue := coalesce(
        oldest < clock_timestamp() - make_interval(hours => box.retention_hours), false);
    SELECT coalesce(jsonb_agg(jsonb_build_object(
               'pipeline', r.pipeline, 'relay_group', r.relay_group, 'enabled', r.enabled,
               'state', s.state, 'code', s.code, 'error', s.error, 'remedy', s.remedy,
               'relay', s.relay, 'delivered', coalesce(p.delivered, 0), 'last_id', p.last_id,
               'dead_letters', coalesce(p.dead_letters, 0), 'dead_letter', p.dead_letter,
               'dead_letter_at', p.dead_letter_at,
               'pending', b.messages, 'pending_since', b.oldest, 'at', p.at) ORDER BY r.pipeline),
               '[]'),
           coalesce(jsonb_agg(jsonb_build_object('pipeline', r.pipeline, 'reason', h.reason,
               'remedy', h.remedy) ORDER BY r.pipeline) FILTER (WHERE b.messages > 0), '[]')
    INTO pipelines, holding
    FROM tide.relays r
    LEFT JOIN tide.checkpoints p USING (relay_group, pipeline, outbox)
    CROSS JOIN LATERAL tide._pipeline_state(r.pipeline) AS s
    CROSS JOIN LATERAL tide._outbox_backlog(outbox_status.name, coalesce(p.delivered_snapshot,
        CASE WHEN r.config ->> 'start' = 'end' THEN r.since END)) AS b
    CROSS JOIN LATERAL (
        SELECT 'disabled', format('select tide.relay_enable(%L), or tide.relay_delete(%1$L)',
                                  r.pipeline) WHERE NOT r.enabled
        UNION ALL
        SELECT s.error, coalesce(s.remedy, '') WHERE s.error IS NOT NULL
        UNION ALL
        SELECT 'not delivered yet', ''
        LIMIT 1) AS h (reason, remedy)
    WHERE r.outbox = outbox_status.name;
    RETURN jsonb_build_object(
        'name', box.name, 'enabled', box.enabled, 'retention_hours', box.retention_hours,
        'created_at', box.created_at,
        'rows', CASE WHEN counted <= 100000 THEN counted ELSE greatest(counted,
            (SELECT c.reltuples::bigint FROM pg_class c
             WHERE c.oid = to_regclass('tide.' || quote_ident('outbox_' || outbox_status.name)))) END,
        'rows_exact', counted <= 100000, 'oldest', oldest, 'size_bytes', size,
        'publishers', ARRAY(
            SELECT DISTINCT a.grantee::regrole::text
            FROM pg_proc f CROSS JOIN LATERAL aclexplode(f.proacl) AS a
            WHERE f.pronamespace = 'tide'::regnamespace
              AND f.proname = 'append_' || outbox_status.name
              AND a.grantee NOT IN (0, f.proowner) ORDER BY 1),
        'pipelines', pipelines, 'held_by', holding, 'overdue', overdue);
END $tide$;

-- name: relay_grant
-- Lets a role run relays: read outboxes, pipelines and their status, write checkpoints and leases, fill
-- inboxes, sweep; also those that are made later. It needs the attribute REPLICATION too, and
-- CREATE on the database where it is the store. Raises TD014.
CREATE OR REPLACE FUNCTION tide.relay_grant(role text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM tide._check_grant(role);
    EXECUTE format('GRANT USAGE ON SCHEMA tide TO %1$I;'
        ' GRANT SELECT ON ALL TABLES IN SCHEMA tide TO %1$I;'
        ' GRANT INSERT, UPDATE ON tide.checkpoints TO %1$I;'
        ' GRANT INSERT, UPDATE, DELETE ON tide.leases TO %1$I;'
        ' GRANT EXECUTE ON FUNCTION tide.outbox_sweep, tide.inbox_sweep, tide.outbox_status,'
        ' tide.inbox_status, tide.relay_status, tide.relay_list, tide.relay_processes TO %1$I;'
        ' ALTER DEFAULT PRIVILEGES IN SCHEMA tide GRANT SELECT ON TABLES TO %1$I', role);
    EXECUTE coalesce((SELECT string_agg(format('GRANT INSERT ON tide.%I TO %I',
        'inbox_' || i.name, role), '; ') FROM tide.inboxes i), 'SELECT');
END $tide$;

-- name: relay_processes
-- The relay processes of each group that has pipelines.
CREATE OR REPLACE FUNCTION tide.relay_processes() RETURNS TABLE (
    relay_group text, host text, pid integer, state text, warm boolean, error text, remedy text,
    since timestamptz, heartbeat_at timestamptz, heartbeat_age numeric
)
LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
    SELECT g.relay_group, l.host, l.pid, l.state, l.warm, l.error, l.remedy, l.since, l.heartbeat,
           l.age
    FROM (SELECT DISTINCT r.relay_group FROM tide.relays r) AS g
    CROSS JOIN LATERAL tide._leases(g.relay_group) AS l
    ORDER BY g.relay_group, l.state = 'running' DESC, l.heartbeat DESC
$tide$;
