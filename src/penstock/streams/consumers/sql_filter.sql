-- The function of a consumer's filter in SQL; see sql_filter.py.

-- name: create
CREATE OR REPLACE FUNCTION {function}(message text, act text) RETURNS text
LANGUAGE plpgsql STABLE PARALLEL SAFE
SET search_path = pg_catalog, pg_temp SET timezone = 'UTC' SET datestyle = 'ISO'
AS {body}

-- name: body
-- json refuses a text that has \u0000, or half a surrogate pair, anywhere: they are replaced.
DECLARE
    whole json;
    r json;
    c json;
    md json;
    kept boolean;
BEGIN
    IF strpos(message, '\u0000') > 0 OR strpos(message, '\ud') > 0 OR strpos(message, '\uD') > 0 THEN
        whole := regexp_replace(message,
            '\\u(?:0000|[dD][89abAB][0-9a-fA-F][0-9a-fA-F](?!\\u[dD][c-fC-F]))', '\\ufffd', 'g')::json;
    ELSE
        whole := message::json;
    END IF;
    r := coalesce(whole -> 'record', whole -> 'event');
    c := coalesce(whole -> 'changes', whole -> 'event' -> 'changes');
    md := whole -> 'metadata';
    kept := {condition};
    IF kept THEN
        RETURN message;
    END IF;
    IF kept IS NULL AND ({bad}) THEN
        RETURN '!the filter can''t be evaluated: ' || concat_ws(', ', {missing})
            || ' not in the message (REPLICA IDENTITY FULL has all columns there)';
    END IF;
    RETURN NULL;
EXCEPTION WHEN data_exception OR program_limit_exceeded OR feature_not_supported THEN
    RETURN '!the filter can''t be evaluated: ' || SQLERRM;
END

-- name: drop
DROP FUNCTION IF EXISTS {function}(text, text)

-- name: catalog
SELECT c.tables, so.name, current_setting('server_version_num')::int
FROM penstock.streams st JOIN penstock.sources so ON so.id = st.source_id
LEFT JOIN penstock.catalogs c ON c.source = so.name
WHERE st.id = %s

-- name: save_catalog
INSERT INTO penstock.catalogs (source, tables) VALUES (%s, %s)
ON CONFLICT (source) DO UPDATE SET tables = excluded.tables, at = now()
WHERE catalogs.tables IS DISTINCT FROM excluded.tables

-- name: add_letters
-- Messages of a segment whose filter can't be evaluated. One that comes again after a replay is the same
-- dead letter, and waits again.
INSERT INTO penstock.dead_letters
    (consumer_id, lsn, idx, idempotency_key, code, reason, message, deliver_count)
SELECT %(consumer)s, m.lsn, m.idx,
       regexp_replace(m.message, '\\.', '_', 'g')::json -> 'metadata' ->> 'idempotency_key',
       %(code)s, p.reason, m.message, 0
FROM unnest(%(lsns)s::bigint[], %(idxs)s::bigint[], %(reasons)s::text[]) AS p (lsn, idx, reason)
JOIN {segment} m ON (m.lsn, m.idx) = (p.lsn, p.idx)
ON CONFLICT (consumer_id, lsn, idx) DO UPDATE
SET reason = excluded.reason, at = now(), replayed_at = NULL
WHERE dead_letters.replayed_at IS NOT NULL
