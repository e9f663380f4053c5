-- The consumers' queries. A consumer's log is {log}, a segment of its stream {segment}.

-- name: clock
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint

-- name: presence
-- The time, and whether other processes serve consumers of this store.
SELECT (extract(epoch FROM clock_timestamp()) * 1000000)::bigint,
       EXISTS (SELECT FROM pg_stat_activity WHERE datname = current_database()
               AND application_name = 'penstock api' AND pid <> pg_backend_pid())

-- name: consumers
SELECT c.id, c.name, s.name, c.type, c.own, c.settings, c.disabled, c.created_at,
       c.disabled_at, c.paused, i.id::text, s.id, s.kind, s.source_id, o.id::text
FROM penstock.consumers c JOIN penstock.streams s ON s.id = c.stream_id
JOIN penstock.ids i ON i.kind = 'consumer' AND i.name = c.name
JOIN penstock.ids o ON o.kind = 'sink' AND o.name = s.name
ORDER BY c.name

-- name: refusals
-- The consumers that can't be served as they are, why, and since when.
SELECT name, reason, extract(epoch FROM at)::float8 FROM penstock.current_refusals
WHERE kind = 'consumer' ORDER BY name

-- name: consumer_page
-- The first consumers behind a name, as `consumers` has them. The page is taken before the rest is looked
-- up: so it costs the same however many there are.
SELECT c.id, c.name, s.name, c.type, c.own, c.settings, c.disabled, c.created_at,
       c.disabled_at, c.paused, i.id::text, s.id, s.kind, s.source_id, o.id::text
FROM (SELECT * FROM penstock.consumers WHERE name > %s ORDER BY name LIMIT %s) c
JOIN penstock.streams s ON s.id = c.stream_id
JOIN penstock.ids i ON i.kind = 'consumer' AND i.name = c.name
JOIN penstock.ids o ON o.kind = 'sink' AND o.name = s.name
ORDER BY c.name

-- name: entity
-- What has a consumer's settings; a sink that fills a stream no more has none of its group's.
SELECT spec, version FROM penstock.entities
WHERE kind = %s AND name = %s AND (kind = 'consumer' OR spec ->> 'type' = 'stream')

-- name: consumers_named
-- Those of some names.
SELECT c.id, c.name, s.name, c.type, c.own, c.settings, c.disabled, c.created_at,
       c.disabled_at, c.paused, i.id::text, s.id, s.kind, s.source_id, o.id::text
FROM penstock.consumers c JOIN penstock.streams s ON s.id = c.stream_id
JOIN penstock.ids i ON i.kind = 'consumer' AND i.name = c.name
JOIN penstock.ids o ON o.kind = 'sink' AND o.name = s.name
WHERE c.name = ANY (%s)

-- name: status
-- Of some consumers: their streams, and how many dead letters were not replayed.
SELECT c.id, s.id, s.kind, s.source_id,
       (SELECT count(*) FROM penstock.dead_letters d
        WHERE d.consumer_id = c.id AND d.replayed_at IS NULL)
FROM penstock.consumers c JOIN penstock.streams s ON s.id = c.stream_id WHERE c.id = ANY (%s)

-- name: status_log
-- One of the logs that are read together; of thousands, so put together from numbers alone.
SELECT %(consumer)d, seq, entry FROM penstock.consumer_%(consumer)d WHERE seq > %(since)d

-- name: status_count
-- As `count`, behind each of some positions of a segment.
SELECT {part}, c.number, x.found, x.seen
FROM unnest({lsns}::bigint[], {idxs}::bigint[]) WITH ORDINALITY AS c (lsn, idx, number)
CROSS JOIN LATERAL (
    SELECT count(*) FILTER (WHERE {matches}) AS found, count(*) AS seen FROM (
        SELECT * FROM {segment} m WHERE (m.lsn, m.idx) > (c.lsn, c.idx)
          AND (m.lsn, m.idx) <= (%(head_lsn)s, %(head_idx)s)
        ORDER BY m.lsn, m.idx LIMIT {limit}
    ) m
) x

-- name: status_oldest
-- As `oldest`, behind each of some positions of a segment.
SELECT {part}, c.number, x.at
FROM unnest({lsns}::bigint[], {idxs}::bigint[]) WITH ORDINALITY AS c (lsn, idx, number)
CROSS JOIN LATERAL (
    SELECT regexp_replace(m.message, '\\.', '_', 'g')::json
           -> 'metadata' ->> 'commit_timestamp' AS at
    FROM (
        SELECT * FROM {segment} m WHERE (m.lsn, m.idx) > (c.lsn, c.idx)
          AND (m.lsn, m.idx) <= (%(head_lsn)s, %(head_idx)s)
        ORDER BY m.lsn, m.idx LIMIT {limit}
    ) m WHERE {condition} ORDER BY m.lsn, m.idx LIMIT 1
) x

-- name: segments_of
SELECT stream_id, id, after_lsn, after_idx, through_lsn, through_idx FROM penstock.segments
WHERE stream_id = ANY (%s) ORDER BY after_lsn, after_idx

-- name: streams
SELECT s.id, s.name, s.kind, o.name, s.retention,
       (SELECT count(*) FROM penstock.segments WHERE stream_id = s.id), s.created_at, o.id, o.base,
       i.id::text
FROM penstock.streams s JOIN penstock.sources o ON o.id = s.source_id
JOIN penstock.ids i ON i.kind = 'sink' AND i.name = s.name ORDER BY s.name

-- name: stream
SELECT id, source_id, kind FROM penstock.streams WHERE name = %s

-- name: stream_ref
-- A stream, and what its LSNs have over those of today's source.
SELECT s.id, s.kind, s.source_id, o.base
FROM penstock.streams s JOIN penstock.sources o ON o.id = s.source_id WHERE s.name = %s

-- name: browsed
-- A window of a segment: its first or last messages behind one position, up to another, that fulfil what
-- an index answers. Beside each, empty, `!` and why it can't be evaluated, or null where it isn't sought.
SELECT m.lsn, m.idx, CASE WHEN left(f.passed, 1) = '!' THEN f.passed ELSE left(f.passed, 0) END
FROM (
    SELECT * FROM {segment} m
    WHERE (m.lsn, m.idx) > (%(lsn)s, %(idx)s) AND (m.lsn, m.idx) <= (%(last_lsn)s, %(last_idx)s)
      AND {indexed}
    ORDER BY m.lsn {order}, m.idx {order} LIMIT %(limit)s
) m CROSS JOIN LATERAL (SELECT CASE WHEN {condition} THEN {passed} END AS passed OFFSET 0) f
ORDER BY m.lsn {order}, m.idx {order}

-- name: tried
-- Of messages that a client has sent: null where they are left out, empty where they pass, `!` and why they
-- can't be evaluated; and whether they are ones that the filters name.
SELECT CASE WHEN left(f.passed, 1) = '!' THEN f.passed ELSE left(f.passed, 0) END, f.named
FROM (
    SELECT m.*, coalesce({matches}, false) AS named
    FROM unnest(%(schemas)s::text[], %(tables)s::text[], %(actions)s::text[], %(messages)s::text[])
        WITH ORDINALITY AS m (table_schema, table_name, action, message, number)
) m CROSS JOIN LATERAL (SELECT m.named, CASE WHEN m.named THEN {passed} END AS passed OFFSET 0) f
ORDER BY m.number

-- name: takes
-- Whether a consumer takes a message of a segment.
SELECT coalesce({matches}, false) FROM {segment} m WHERE (m.lsn, m.idx) = (%s, %s)

-- name: letters_at
-- The dead letters of some consumers at a position.
SELECT consumer_id, id, code, reason, coalesce(deliver_count, 0), at, replayed_at
FROM penstock.dead_letters WHERE consumer_id = ANY (%s) AND (lsn, idx) = (%s, %s)

-- name: named
-- Whether a stream or a consumer has the name.
SELECT FROM penstock.streams WHERE name = %(name)s
UNION ALL SELECT FROM penstock.consumers WHERE name = %(name)s

-- name: settings
-- No other session changes them until the transaction is over.
SELECT type, settings FROM penstock.consumers WHERE id = %s FOR UPDATE

-- name: set_settings
UPDATE penstock.consumers SET settings = %s WHERE id = %s

-- name: set_disabled
UPDATE penstock.consumers
SET disabled = %(disabled)s, paused = %(paused)s, disabled_at = CASE WHEN %(disabled)s::text IS NOT NULL THEN now() END
WHERE id = %(consumer)s

-- name: delete_consumer
DELETE FROM penstock.consumers WHERE id = %s

-- name: segments
SELECT id, after_lsn, after_idx, through_lsn, through_idx FROM penstock.segments
WHERE stream_id = %(stream)s ORDER BY after_lsn, after_idx

-- name: entries
SELECT seq, entry FROM {log} WHERE seq > %s ORDER BY seq

-- name: first_entry
INSERT INTO {log} (seq, entry) VALUES (1, %s) ON CONFLICT DO NOTHING

-- name: append
-- No row if another process has taken this step, or has replaced the log since.
INSERT INTO {log} (seq, entry) SELECT %(seq)s::bigint, %(entry)s::text
WHERE EXISTS (SELECT FROM {log} WHERE seq = %(seq)s::bigint - 1) ON CONFLICT DO NOTHING

-- name: replace_log
-- A whole state takes the place of all entries up to it, unless there is a newer one. In one statement, so
-- that no process waits for one that has stopped in the middle.
DO $penstock$ BEGIN
    SET LOCAL lock_timeout = '100ms';
    LOCK TABLE {log} IN ACCESS EXCLUSIVE MODE;
    IF (SELECT max(seq) FROM {log}) = {seq} THEN
        TRUNCATE {log};
        INSERT INTO {log} (seq, entry) VALUES ({seq} + 1, {state});
    END IF;
END $penstock$

-- name: read
-- Messages of a segment behind one position, up to another.
SELECT m.lsn, m.idx, m.group_hash, m.old_group_hash, {message}
FROM {segment} m
WHERE (m.lsn, m.idx) > (%(lsn)s, %(idx)s) AND (m.lsn, m.idx) <= (%(last_lsn)s, %(last_idx)s)
ORDER BY m.lsn, m.idx LIMIT %(limit)s

-- name: look_up
-- The next messages of groups, each from a position on, up to another.
SELECT g.number, m.lsn, m.idx, m.group_hash, m.old_group_hash, m.message
FROM unnest(%(groups)s::bigint[], %(lsns)s::bigint[], %(idxs)s::bigint[], %(last_lsns)s::bigint[],
            %(last_idxs)s::bigint[], %(limits)s::bigint[])
     WITH ORDINALITY AS g (group_hash, lsn, idx, last_lsn, last_idx, n, number)
CROSS JOIN LATERAL (
    (SELECT m.* FROM {segment} m WHERE m.group_hash = g.group_hash
     AND (m.lsn, m.idx) >= (g.lsn, g.idx) AND (m.lsn, m.idx) <= (g.last_lsn, g.last_idx)
     AND {condition} ORDER BY m.lsn, m.idx LIMIT g.n)
    UNION ALL
    (SELECT m.* FROM {segment} m WHERE m.old_group_hash = g.group_hash
     AND m.group_hash <> m.old_group_hash
     AND (m.lsn, m.idx) >= (g.lsn, g.idx) AND (m.lsn, m.idx) <= (g.last_lsn, g.last_idx)
     AND {condition} ORDER BY m.lsn, m.idx LIMIT g.n)
    ORDER BY lsn, idx LIMIT g.n
) m ORDER BY g.number, m.lsn, m.idx

-- name: messages
-- Messages of a segment by their positions.
SELECT m.lsn, m.idx, m.message
FROM unnest(%(lsns)s::bigint[], %(idxs)s::bigint[]) AS p (lsn, idx)
JOIN {segment} m ON (m.lsn, m.idx) = (p.lsn, p.idx) WHERE {condition}

-- name: groups
SELECT m.group_hash, m.old_group_hash FROM {segment} m WHERE (m.lsn, m.idx) = (%s, %s)

-- name: count
-- Of the first messages of a segment behind one position, up to another: the last one's position, how
-- many are for the consumer, and how many there are.
SELECT lsn, idx, count(*) FILTER (WHERE {matches}) OVER (), count(*) OVER () FROM (
    SELECT * FROM {segment} m
    WHERE (m.lsn, m.idx) > (%(lsn)s, %(idx)s) AND (m.lsn, m.idx) <= (%(last_lsn)s, %(last_idx)s)
    ORDER BY m.lsn, m.idx LIMIT %(limit)s
) m ORDER BY lsn DESC, idx DESC LIMIT 1

-- name: oldest
-- When the first message behind one position, up to another, was committed that is for the consumer.
SELECT regexp_replace(m.message, '\\.', '_', 'g')::json -> 'metadata' ->> 'commit_timestamp'
FROM (
    SELECT * FROM {segment} m
    WHERE (m.lsn, m.idx) > (%(lsn)s, %(idx)s) AND (m.lsn, m.idx) <= (%(last_lsn)s, %(last_idx)s)
    ORDER BY m.lsn, m.idx LIMIT %(limit)s
) m WHERE {condition} ORDER BY m.lsn, m.idx LIMIT 1

-- name: window
-- Where the messages end that `oldest` read, if more come behind them.
SELECT lsn, idx FROM {segment}
WHERE (lsn, idx) > (%(lsn)s, %(idx)s) AND (lsn, idx) <= (%(last_lsn)s, %(last_idx)s)
ORDER BY lsn, idx OFFSET %(limit)s - 1 LIMIT 1

-- name: at_time
-- The first message of a segment at or behind an LSN, and when it was committed. Here and below json
-- is read without its escapes: it refuses a text that has \u0000, or half a surrogate pair, anywhere.
SELECT lsn, regexp_replace(message, '\\.', '_', 'g')::json -> 'metadata' ->> 'commit_timestamp'
FROM {segment}
WHERE lsn >= %s ORDER BY lsn, idx LIMIT 1

-- name: last_lsn
SELECT lsn FROM {segment} ORDER BY lsn DESC, idx DESC LIMIT 1

-- name: last_message
-- The newest message of a segment, up to a position, that fulfils a condition.
SELECT m.lsn, m.idx FROM {segment} m
WHERE (m.lsn, m.idx) <= (%s, %s) AND {condition}
ORDER BY m.lsn DESC, m.idx DESC LIMIT 1

-- name: add_dead_letters
-- A message that comes again after a replay is the same dead letter, and waits again. What is in no
-- segment any more is not returned.
INSERT INTO penstock.dead_letters
    (consumer_id, lsn, idx, idempotency_key, code, reason, message, deliver_count)
SELECT %(consumer)s, m.lsn, m.idx,
       regexp_replace(m.message, '\\.', '_', 'g')::json -> 'metadata' ->> 'idempotency_key',
       'max_deliver', p.reason, m.message, p.count
FROM unnest(%(lsns)s::bigint[], %(idxs)s::bigint[], %(counts)s::int[], %(reasons)s::text[])
     AS p (lsn, idx, count, reason)
JOIN {segment} m ON (m.lsn, m.idx) = (p.lsn, p.idx)
ON CONFLICT (consumer_id, lsn, idx) DO UPDATE
SET reason = excluded.reason, deliver_count = excluded.deliver_count, at = now(), replayed_at = NULL
RETURNING lsn, idx

-- name: dead_again
-- Those that are dead letters already: their messages may be in no segment any more.
UPDATE penstock.dead_letters d
SET deliver_count = p.count, reason = p.reason, at = now(), replayed_at = NULL
FROM unnest(%(lsns)s::bigint[], %(idxs)s::bigint[], %(counts)s::int[], %(reasons)s::text[])
     AS p (lsn, idx, count, reason)
WHERE d.consumer_id = %(consumer)s AND (d.lsn, d.idx) = (p.lsn, p.idx) RETURNING d.lsn, d.idx

-- name: dead_letters
SELECT id, lsn, idx, coalesce(deliver_count, 0), code, reason, message, at, replayed_at
FROM penstock.dead_letters WHERE consumer_id = %(consumer)s AND id > %(after)s
AND (%(replayed)s OR replayed_at IS NULL) ORDER BY id LIMIT %(limit)s

-- name: dead_letter
SELECT lsn, idx FROM penstock.dead_letters WHERE consumer_id = %s AND id = %s

-- name: count_dead_letters
SELECT count(*) FROM penstock.dead_letters WHERE consumer_id = %s AND replayed_at IS NULL

-- name: mark_replayed
UPDATE penstock.dead_letters SET replayed_at = now() WHERE id = %s

-- name: replayed
-- Messages of replayed dead letters by their positions, with what a segment has beside each. What is
-- taken out of one has its escapes again at the end.
SELECT m.lsn, m.idx, m.message FROM (
    SELECT d.lsn, d.idx, d.message, j.message ->> 'action' AS action,
           CASE WHEN octet_length(k.key) > 1000 -- as in copy.py
                THEN 'sha256:' || encode(sha256(convert_to(k.key, 'UTF8')), 'hex')
                ELSE k.key END AS key
    FROM unnest(%(lsns)s::bigint[], %(idxs)s::bigint[]) AS p (lsn, idx)
    JOIN penstock.dead_letters d
      ON d.consumer_id = %(consumer)s AND (d.lsn, d.idx) = (p.lsn, p.idx)
    CROSS JOIN LATERAL (
        SELECT replace(replace(replace(d.message,
            '\\', U&'\FDD0'), '\"', U&'\FDD1'), '\', U&'\FDD2')::json AS message
    ) j
    CROSS JOIN LATERAL (
        SELECT concat('"', j.message #>> '{{metadata,table_schema}}', '.',
                      j.message #>> '{{metadata,table_name}}', ':"') AS name,
               j.message #>> '{{metadata,record_pks}}' AS pks
    ) w
    CROSS JOIN LATERAL (
        SELECT (replace(replace(replace(w.name,
                    U&'\FDD2', '\'), U&'\FDD1', '\"'), U&'\FDD0', '\\')::json #>> '{{}}')
               || replace(replace(replace(w.pks,
                    U&'\FDD2', '\'), U&'\FDD1', '\"'), U&'\FDD0', '\\') AS key
    ) k
) m WHERE {condition}

-- name: drop_log
DROP TABLE IF EXISTS {log}
