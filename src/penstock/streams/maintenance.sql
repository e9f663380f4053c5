-- Segments closed, merged and dropped; see maintenance.py and rows.py.

-- name: lock_timeout
-- How long this transaction waits for a lock; sessions behind it in the queue wait as long.
SELECT set_config('lock_timeout', %s, true)

-- name: segments
-- The segments of some streams, with the seconds since each was opened and closed, its bytes,
-- and whether nothing was ever written to it.
SELECT g.stream_id, g.id, g.after_lsn, g.after_idx, g.through_lsn, g.through_idx,
       extract(epoch FROM now() - g.opened_at)::float8,
       extract(epoch FROM now() - g.closed_at)::float8,
       coalesce(pg_table_size(to_regclass('penstock.segment_' || g.id)), 0),
       coalesce(pg_relation_size(to_regclass('penstock.segment_' || g.id)), 0) = 0
FROM penstock.segments g WHERE g.stream_id = ANY(%s) ORDER BY g.after_lsn, g.after_idx

-- name: last_position
SELECT lsn, idx FROM {segment} ORDER BY lsn DESC, idx DESC LIMIT 1

-- name: close_segment
UPDATE penstock.segments SET through_lsn = %s, through_idx = %s, closed_at = clock_timestamp()
WHERE id = %s AND through_lsn IS NULL

-- name: remove_segments
DELETE FROM penstock.segments WHERE id = ANY(%s)

-- name: orphans
-- The tables of segments that are in no list any more.
SELECT substr(c.relname, 9)::integer FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
WHERE n.nspname = 'penstock' AND c.relkind = 'r' AND c.relname ~ '^segment_[0-9]{1,9}$'
  AND NOT EXISTS (SELECT FROM penstock.segments g WHERE c.relname = 'segment_' || g.id)

-- name: drop_table
DROP TABLE IF EXISTS {table}

-- name: many_parts
-- Whether a source's table of batches has more rows than this.
SELECT EXISTS (SELECT FROM {batches} OFFSET %s)

-- name: unfinished_parts
-- The parts of batches that are not there as a whole.
SELECT start_lsn, start_idx, end_lsn, end_idx, part, parts, plan FROM {batches}
WHERE (end_lsn, end_idx) > (%s, %s) ORDER BY seq

-- name: truncate
TRUNCATE {batches}

-- name: new_segment_id
SELECT nextval(pg_get_serial_sequence('penstock.segments', 'id'))

-- name: repeated
-- The keys of more than one row of the segments to be merged, and where each one's newest row is.
CREATE TEMPORARY TABLE penstock_repeated ON COMMIT DROP AS
SELECT key, max(ARRAY[lsn, idx]) AS newest FROM ({rows}) AS r
WHERE key IS NOT NULL GROUP BY key HAVING count(*) > 1

-- name: keys
SELECT key, lsn, idx FROM {segment}

-- name: analyze_repeated
ANALYZE pg_temp.penstock_repeated

-- name: merge
-- Those rows of one of the segments to be merged that have no newer version in any of them, without
-- the deletes up to a position. A row without a key is kept.
INSERT INTO {into} SELECT s.* FROM {segment} s
WHERE NOT EXISTS (
    SELECT FROM pg_temp.penstock_repeated r WHERE r.key = s.key AND r.newest <> ARRAY[s.lsn, s.idx]
) AND NOT (s.key IS NOT NULL AND s.action = 'delete' AND (s.lsn, s.idx) <= (%s, %s))
ORDER BY s.lsn, s.idx

-- name: newest
NOT EXISTS (SELECT FROM {segment} n WHERE n.key = s.key AND (n.lsn, n.idx) > (s.lsn, s.idx))

-- name: sample
-- How many rows there are in a share of a segment's pages, in percent, and how many of them have a newer
-- version, or are deletes.
SELECT count(*), count(*) FILTER (WHERE (s.key IS NOT NULL AND s.action = 'delete') OR NOT ({newest}))
FROM {segment} s TABLESAMPLE SYSTEM ({percent}::real)

-- name: add_merged
INSERT INTO penstock.segments
    (id, stream_id, after_lsn, after_idx, through_lsn, through_idx, opened_at, closed_at)
OVERRIDING SYSTEM VALUE
SELECT %s, stream_id, %s, %s, %s, %s, min(opened_at), max(closed_at)
FROM penstock.segments WHERE id = ANY(%s) GROUP BY stream_id

-- name: consumer_log
SELECT entry FROM {table} ORDER BY seq
