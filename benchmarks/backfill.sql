-- What the benchmark of backfills asks of the table and of a stream's segments.

-- name: widen
-- Eight columns: the drain's six, and one of a type of its own each.
ALTER TABLE {table}
    ADD COLUMN reference uuid NOT NULL DEFAULT gen_random_uuid(),
    ADD COLUMN paid boolean NOT NULL DEFAULT true

-- name: settle
-- Statistics, hint bits, visibility: what a table that was there for a while has.
VACUUM (ANALYZE, FREEZE) {table}

-- name: last_id
SELECT coalesce(max(id), 0) FROM {table}

-- name: row_bytes
SELECT avg(octet_length(t::text))::float8 FROM (SELECT * FROM {table} LIMIT 1000) AS t

-- name: copy
COPY {table} TO STDOUT

-- name: states
SELECT state, rows_done, error FROM penstock.backfills ORDER BY id

-- name: segments
SELECT id, pg_relation_size(format('penstock.segment_%s', id)::regclass) FROM penstock.segments
ORDER BY id

-- name: messages
-- A segment's messages: the row's id, whether it is a read, and when it was committed.
SELECT (message::json -> 'record' ->> 'id')::bigint AS row, action, pg_xact_commit_timestamp(xmin) AS at
FROM {segment}

-- name: tally
SELECT count(*), count(DISTINCT row), count(*) FILTER (WHERE action = 'read'), min(at), max(at)
FROM ({messages}) AS m
