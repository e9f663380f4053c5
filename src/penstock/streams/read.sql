-- A stream's messages as they were written to it, for consumers of type nats; see read.py.

-- name: segments
SELECT id, after_lsn, after_idx, through_lsn, through_idx
FROM penstock.segments WHERE stream_id = %s ORDER BY after_lsn, after_idx

-- name: messages
SELECT m.lsn, m.idx, m.group_hash, m.old_group_hash, m.table_schema, m.table_name, m.action, m.message,
       {verdict}
FROM {segment} m {asked}
WHERE (m.lsn, m.idx) > (%(lsn)s, %(idx)s) AND (m.lsn, m.idx) <= (%(last_lsn)s, %(last_idx)s)
  AND {condition}
ORDER BY m.lsn, m.idx

-- name: count
SELECT count(*) FROM (
    SELECT FROM {segment} m {asked}
    WHERE (m.lsn, m.idx) > (%(lsn)s, %(idx)s) AND (m.lsn, m.idx) <= (%(last_lsn)s, %(last_idx)s)
      AND {condition}
    LIMIT %(limit)s) AS found

-- name: asked
-- The filter in SQL, once for each message: OFFSET 0 keeps the planner from repeating the call.
CROSS JOIN LATERAL (SELECT {passed} AS passed OFFSET 0) AS f

-- name: verdict
-- Empty of a message that passes, else why that is not known.
CASE WHEN left(f.passed, 1) = '!' THEN f.passed ELSE '' END

-- name: not_ahead
-- As a condition: the message was not published, or kept in a block, when the backlog began.
(m.lsn, m.idx) NOT IN (
    SELECT unnest(b.ahead_lsn), unnest(b.ahead_idx)
    FROM penstock.backlogs b WHERE b.source_id = %(source)s AND b.sink = %(sink)s)

-- name: last_position
SELECT lsn, idx FROM {segment} ORDER BY lsn DESC, idx DESC LIMIT 1

-- name: positions
SELECT lsn, idx FROM {segment} WHERE (lsn, idx) > (%s, %s)

-- name: at_time
-- The first message at or behind an LSN, and when it was committed. json is read without its escapes: it
-- refuses a text that has \u0000, or half a surrogate pair, anywhere.
SELECT lsn, regexp_replace(message, '\\.', '_', 'g')::json -> 'metadata' ->> 'commit_timestamp'
FROM {segment}
WHERE lsn >= %s ORDER BY lsn, idx LIMIT 1
