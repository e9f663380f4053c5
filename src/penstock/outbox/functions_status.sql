-- What an outbox holds and why, and what a relay's role may do.

-- name: outbox_backlog
-- How far one pipeline is behind: how many of the newest 100,000 messages it has not delivered, and when
-- the oldest of them was published.
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
-- An outbox: its settings, what it holds, who may publish to it, how far its pipelines are, which of
-- these hold messages and why, and whether there are any beyond its retention (overdue). Rows are
-- counted up to 100,000, beyond that they are an estimate, and `rows_exact` is false. Raises TD001,
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
               'state', p.state, 'code', p.code, 'error', p.error, 'remedy', p.remedy,
               'delivered', coalesce(p.delivered, 0), 'last_id', p.last_id,
               'pending', b.messages, 'pending_since', b.oldest, 'at', p.at) ORDER BY r.pipeline),
               '[]'),
           coalesce(jsonb_agg(jsonb_build_object('pipeline', r.pipeline, 'reason', h.reason,
               'remedy', h.remedy) ORDER BY r.pipeline) FILTER (WHERE b.messages > 0), '[]')
    INTO pipelines, holding
    FROM tide.relays r
    LEFT JOIN tide.places p USING (relay_group, pipeline, outbox)
    CROSS JOIN LATERAL tide._outbox_backlog(outbox_status.name, coalesce(p.delivered_snapshot,
        CASE WHEN r.config ->> 'start' = 'end' THEN r.since END)) AS b
    CROSS JOIN LATERAL (
        SELECT 'disabled', format('select tide.relay_enable(%L), or tide.relay_delete(%1$L)',
                                  r.pipeline) WHERE NOT r.enabled
        UNION ALL
        SELECT p.error, coalesce(p.remedy, '') WHERE r.enabled AND p.error IS NOT NULL
        UNION ALL
        SELECT 'no relay has run it yet', 'penstock relay --url … --group ' || r.relay_group
        WHERE r.enabled AND p.at IS NULL
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
-- Lets a role run relays: read outboxes, pipelines and how they are, keep their places, fill inboxes,
-- sweep; also those that are made later. It needs the attribute REPLICATION too, and CREATE on the database where
-- it is the store. Raises TD014.
CREATE OR REPLACE FUNCTION tide.relay_grant(role text) RETURNS void
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM tide._check_grant(role);
    EXECUTE format('GRANT USAGE ON SCHEMA tide TO %1$I;'
        ' GRANT SELECT ON ALL TABLES IN SCHEMA tide TO %1$I;'
        ' GRANT INSERT, UPDATE ON tide.places TO %1$I;'
        ' GRANT EXECUTE ON FUNCTION tide.outbox_sweep, tide.inbox_sweep, tide.outbox_status,'
        ' tide.inbox_status, tide.relay_status, tide.relay_list TO %1$I;'
        ' ALTER DEFAULT PRIVILEGES IN SCHEMA tide GRANT SELECT ON TABLES TO %1$I', role);
    EXECUTE coalesce((SELECT string_agg(format('GRANT INSERT ON tide.%I TO %I',
        'inbox_' || i.name, role), '; ') FROM tide.inboxes i), 'SELECT');
END $tide$;
