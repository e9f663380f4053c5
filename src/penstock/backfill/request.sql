-- Backfills: what is asked of them on the command line, and what a run does with them. Each statement
-- checks the state that it changes, so that a command and a run that meet never undo each other.

-- name: create
-- A backfill that waits. No row: one of that sink and table has not ended yet, or, with `initial`,
-- there was one already.
INSERT INTO penstock.backfills
    (source, sink, table_schema, table_name, condition, sort_by, start, initial, rows_total)
VALUES
    (%(source)s, %(sink)s, %(schema)s, %(table)s, %(where)s, %(sort_by)s, %(start)s, %(initial)s,
     %(rows_total)s)
ON CONFLICT DO NOTHING RETURNING id

-- name: list
-- The oldest first. A null parameter is no condition. `is_run`: whether a run has the source now.
SELECT b.id, b.source, b.sink, b.table_schema, b.table_name, b.condition, b.sort_by, b.start,
       b.initial, b.state, b.cursor, b.rows_done, b.rows_total, b.error, b.created_at, b.started_at,
       b.ended_at,
       EXISTS (
           SELECT FROM penstock.sources s
           JOIN pg_catalog.pg_locks l ON l.objid = s.id::oid
           WHERE s.name = b.source AND l.locktype = 'advisory' AND l.classid = %(lock)s::oid
             AND l.objsubid = 2 AND l.granted
             AND l.database = (SELECT oid FROM pg_catalog.pg_database
                               WHERE datname = pg_catalog.current_database())) AS is_run
FROM penstock.backfills b
WHERE (%(ids)s::bigint[] IS NULL OR b.id = ANY (%(ids)s))
  AND (%(source)s::text IS NULL OR b.source = %(source)s)
  AND (%(sink)s::text IS NULL OR b.sink = %(sink)s)
  AND (%(states)s::text[] IS NULL OR b.state = ANY (%(states)s))
  AND b.id > %(after)s
ORDER BY b.id LIMIT %(limit)s

-- name: has_initial
-- The tables of a source's sinks that have had their initial backfill, or have it now.
SELECT sink, table_schema, table_name FROM penstock.backfills WHERE source = %s AND initial

-- name: claim
-- The backfill that a run goes on with: the one that was under way, or the oldest that waits.
UPDATE penstock.backfills
SET state = 'running', started_at = coalesce(started_at, now())
WHERE id = (
    SELECT id FROM penstock.backfills
    WHERE source = %s AND state IN ('running', 'waiting')
    ORDER BY state = 'waiting', id LIMIT 1
    FOR UPDATE)
RETURNING id

-- name: pause
UPDATE penstock.backfills SET state = 'paused' WHERE id = %s AND state IN ('waiting', 'running')

-- name: resume
-- One that failed goes on where it was, too, unless another one of its table has begun since.
UPDATE penstock.backfills b SET state = 'waiting', error = NULL, ended_at = NULL
WHERE id = %s AND state IN ('paused', 'failed')
  AND NOT EXISTS (
      SELECT FROM penstock.backfills o
      WHERE o.id <> b.id AND o.source = b.source AND o.sink = b.sink
        AND o.table_schema = b.table_schema AND o.table_name = b.table_name
        AND o.state IN ('waiting', 'running', 'paused'))

-- name: cancel
UPDATE penstock.backfills SET state = 'cancelled', ended_at = now()
WHERE id = %s AND state IN ('waiting', 'running', 'paused')

-- name: forget
-- Those of a source, except for some sinks, that are not done: no run goes on with them.
UPDATE penstock.backfills SET state = 'cancelled', ended_at = now()
WHERE source = %s AND NOT sink = ANY (%s::text[])
  AND state IN ('waiting', 'running', 'paused', 'failed')

-- name: progress
-- What was under way when it was paused is done too.
UPDATE penstock.backfills
SET cursor = %(cursor)s, rows_done = %(rows_done)s,
    rows_total = CASE WHEN %(rows_done)s > rows_total THEN %(rows_done)s ELSE rows_total END
WHERE id = %(id)s AND state IN ('running', 'paused')

-- name: set_error
-- Why it does not progress, null once it goes on.
UPDATE penstock.backfills SET error = %s WHERE id = %s AND state IN ('running', 'paused')

-- name: finish
UPDATE penstock.backfills
SET state = 'done', rows_done = %(rows_done)s, rows_total = %(rows_done)s, error = NULL,
    ended_at = now()
WHERE id = %(id)s AND state IN ('running', 'paused')

-- name: fail
UPDATE penstock.backfills SET state = 'failed', error = %s, ended_at = now()
WHERE id = %s AND state = 'running'
