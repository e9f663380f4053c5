-- The messages that sinks did not take in time, in blocks, and how far they were delivered since.

-- name: fall_behind
-- Another task may have added it already.
INSERT INTO penstock.backlogs (source_id, sink, code, error, drained_lsn, drained_idx)
VALUES (%s, %s, %s, %s, %s, %s) ON CONFLICT (source_id, sink) DO NOTHING

-- name: put_behind
INSERT INTO penstock.backlogs (source_id, sink, code, error) VALUES (%s, %s, %s, %s)
ON CONFLICT (source_id, sink) DO UPDATE SET code = excluded.code, error = excluded.error,
    since = CASE WHEN backlogs.code = excluded.code THEN backlogs.since ELSE excluded.since END

-- name: rewind
-- Nothing of what goes before all others was delivered. The row's lock keeps the code as it is.
UPDATE penstock.backlogs SET drained_lsn = %s, drained_idx = -1
WHERE source_id = %s AND sink = %s AND code = %s

-- name: add_block
INSERT INTO penstock.backlog_blocks
    (source_id, sink, first_lsn, first_idx, last_lsn, last_idx, rows, block)
VALUES (%s, %s, %s, %s, %s, %s, %s, %b)

-- name: all
SELECT b.source_id, b.sink, s.name, extract(epoch FROM now() - b.since)::float8, b.code, b.error,
       b.drained_lsn, b.drained_idx
FROM penstock.backlogs b JOIN penstock.sources s ON s.id = b.source_id ORDER BY b.sink, s.name

-- name: one
SELECT b.source_id, b.sink, s.name, extract(epoch FROM now() - b.since)::float8, b.code, b.error,
       b.drained_lsn, b.drained_idx, b.stream_id, b.from_lsn, b.from_idx,
       cardinality(b.ahead_lsn) > 0
FROM penstock.backlogs b JOIN penstock.sources s ON s.id = b.source_id
WHERE b.source_id = %s AND b.sink = %s

-- name: attention
-- The sinks that are behind, and the sinks and consumers of which something is asked.
SELECT source_id, sink, true FROM penstock.backlogs
UNION ALL
SELECT s.id, p.sink, false
FROM penstock.paused_sinks p JOIN penstock.sources s ON s.name = p.source
UNION ALL
SELECT st.source_id, n.name, false
FROM penstock.nats_consumers n JOIN penstock.streams st ON st.id = n.stream_id
WHERE n.paused OR n.rewind_lsn IS NOT NULL

-- name: paused
-- Who has paused a sink.
SELECT p.paused_by FROM penstock.paused_sinks p JOIN penstock.sources s ON s.name = p.source
WHERE s.id = %s AND p.sink = %s

-- name: size
-- Messages and bytes that wait; what a replay has brought a second time counts twice.
SELECT coalesce(sum(rows), 0)::bigint, coalesce(sum(octet_length(block)), 0)::bigint
FROM penstock.backlog_blocks WHERE source_id = %s AND sink = %s

-- name: first
-- The first blocks, without what is in them.
SELECT id, first_lsn, first_idx, rows, octet_length(block)
FROM penstock.backlog_blocks WHERE source_id = %s AND sink = %s
ORDER BY first_lsn, first_idx, id LIMIT %s

-- name: blocks
SELECT block FROM penstock.backlog_blocks WHERE id = ANY(%s) ORDER BY first_lsn, first_idx, id

-- name: drained
UPDATE penstock.backlogs SET drained_lsn = %s, drained_idx = %s
WHERE source_id = %s AND sink = %s

-- name: drop
DELETE FROM penstock.backlog_blocks
WHERE source_id = %(source)s AND sink = %(sink)s
  AND (first_lsn, first_idx) <= (%(lsn)s, %(idx)s) AND (last_lsn, last_idx) <= (%(lsn)s, %(idx)s)

-- name: join
-- Its blocks go with it.
DELETE FROM penstock.backlogs WHERE source_id = %s AND sink = %s
