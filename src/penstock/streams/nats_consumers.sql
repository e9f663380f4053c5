-- Consumers of type nats: what is registered, and what is asked of the run that publishes for them.

-- name: all
SELECT penstock.id_of('consumer', n.name), n.name, n.stream_id, st.name, st.kind, so.id, so.name, so.base, n.settings, n.paused,
       n.rewind_lsn, n.rewind_idx, n.dropped, n.created_at,
       b.since, b.code, b.error, b.drained_lsn, b.drained_idx,
       b.stream_id, b.from_lsn, b.from_idx, cardinality(b.ahead_lsn) > 0
FROM penstock.nats_consumers n
JOIN penstock.streams st ON st.id = n.stream_id
JOIN penstock.sources so ON so.id = st.source_id
LEFT JOIN penstock.backlogs b ON b.source_id = so.id AND b.sink = n.name
WHERE (%(name)s::text IS NULL OR n.name = %(name)s) AND n.name > %(after)s
ORDER BY n.name LIMIT %(limit)s

-- name: streams
SELECT n.name, s.name FROM penstock.nats_consumers n JOIN penstock.streams s ON s.id = n.stream_id

-- name: taken
-- Whether a consumer of another type has the name.
SELECT EXISTS (SELECT FROM penstock.consumers WHERE name = %s)

-- name: create
INSERT INTO penstock.nats_consumers (stream_id, name, settings) VALUES (%s, %s, %s)

-- name: change
UPDATE penstock.nats_consumers SET settings = %s WHERE name = %s

-- name: delete
DELETE FROM penstock.nats_consumers WHERE name = %s

-- name: conditions
-- The filters in SQL, each with the name of its stream.
SELECT DISTINCT st.name, n.settings -> 'filters' ->> 'sql'
FROM penstock.nats_consumers n JOIN penstock.streams st ON st.id = n.stream_id
WHERE n.settings -> 'filters' ->> 'sql' IS NOT NULL

-- name: pause
UPDATE penstock.nats_consumers SET paused = %s WHERE name = %s

-- name: rewind
UPDATE penstock.nats_consumers SET rewind_lsn = %s, rewind_idx = %s WHERE name = %s

-- name: rewound
-- Another rewind may have been asked for since.
UPDATE penstock.nats_consumers SET rewind_lsn = NULL, rewind_idx = NULL
WHERE name = %s AND (rewind_lsn, rewind_idx) = (%s, %s)

-- name: asked
SELECT paused, rewind_lsn, rewind_idx FROM penstock.nats_consumers WHERE name = %s

-- name: leave_in_stream
-- From now on its messages are left in the stream. What waits in blocks stays there.
INSERT INTO penstock.backlogs (source_id, sink, code, error, drained_lsn, drained_idx, stream_id,
    from_lsn, from_idx, ahead_lsn, ahead_idx)
VALUES (%(source)s, %(sink)s, %(code)s, %(error)s, %(lsn)s, %(idx)s, %(stream)s,
    %(lsn)s, %(idx)s, %(ahead_lsn)s, %(ahead_idx)s)
ON CONFLICT (source_id, sink) DO UPDATE SET stream_id = excluded.stream_id,
    from_lsn = excluded.from_lsn, from_idx = excluded.from_idx,
    ahead_lsn = excluded.ahead_lsn, ahead_idx = excluded.ahead_idx

-- name: why
UPDATE penstock.backlogs SET code = %s, error = %s, since = now()
WHERE source_id = %s AND sink = %s AND code <> %s

-- name: forget_backlog
DELETE FROM penstock.backlogs WHERE source_id = %s AND sink = %s

-- name: skip
UPDATE penstock.backlogs SET drained_lsn = %(lsn)s, drained_idx = %(idx)s,
    from_lsn = %(lsn)s, from_idx = %(idx)s
WHERE source_id = %(source)s AND sink = %(sink)s

-- name: add_ahead
-- Messages that a task publishes although it has found the consumer behind: it had begun to before.
UPDATE penstock.backlogs SET ahead_lsn = ahead_lsn || %s::bigint[], ahead_idx = ahead_idx || %s::bigint[]
WHERE source_id = %s AND sink = %s

-- name: in_blocks
SELECT coalesce(sum(rows), 0)::bigint FROM penstock.backlog_blocks WHERE source_id = %s AND sink = %s

-- name: readers
-- The consumers whose messages are left in a stream: source, name, filters, and up to where it is read.
SELECT b.source_id, b.sink, n.settings, b.drained_lsn, b.drained_idx, b.from_lsn, b.from_idx,
       cardinality(b.ahead_lsn) > 0
FROM penstock.backlogs b JOIN penstock.nats_consumers n ON n.name = b.sink
WHERE b.stream_id = %s

-- name: add_dropped
UPDATE penstock.nats_consumers SET dropped = dropped + %s WHERE name = %s
