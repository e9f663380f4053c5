-- The stream sink's statements in the transaction of a part of a round.

-- name: begin
BEGIN

-- name: lock
SELECT pg_advisory_xact_lock_shared(%s, %s)

-- name: base
SELECT base, epoch FROM penstock.sources WHERE id = %s

-- name: open_segments
SELECT stream_id, id, after_lsn, after_idx, through_lsn, through_idx
FROM penstock.segments WHERE stream_id = ANY(%s) AND through_lsn IS NULL

-- name: segments
SELECT id, after_lsn, after_idx, through_lsn, through_idx
FROM penstock.segments WHERE stream_id = %s ORDER BY after_lsn, after_idx

-- name: backlogs
SELECT sink, code, drained_lsn, drained_idx, stream_id IS NOT NULL
FROM penstock.backlogs WHERE source_id = %s

-- name: copy
COPY {table} ({columns}) FROM STDIN (FORMAT binary)

-- name: present
-- The positions between two that a segment has.
SELECT lsn, idx FROM {table} WHERE (lsn, idx) >= (%s, %s) AND (lsn, idx) <= (%s, %s)

-- name: savepoint
SAVEPOINT penstock

-- name: to_savepoint
ROLLBACK TO SAVEPOINT penstock

-- name: add_part
INSERT INTO {batches} (start_lsn, start_idx, end_lsn, end_idx, part, parts, plan)
VALUES (%s, %s, %s, %s, %s, %s, %s)

-- name: notify
SELECT pg_notify('penstock', %s)

-- name: commit
COMMIT

-- name: rollback
ROLLBACK
