-- The store's queries outside the hot path: its schema, sources, streams, consumers, dead letters
-- and tokens.

-- name: session
-- What a session needs, whatever the server, the database or the role has set; what an older server
-- lacks is passed by. A statement that has waited for a lock sees what its holder did. A client whose
-- network is gone ends within a minute, and then holds no lock any longer.
SELECT set_config(s.name, v.value, false)
FROM (VALUES
    ('default_transaction_isolation', 'read committed'),
    ('idle_in_transaction_session_timeout', '60s'),
    ('idle_session_timeout', '0'),
    ('tcp_keepalives_idle', '20'),
    ('tcp_keepalives_interval', '5'),
    ('tcp_keepalives_count', '4'),
    ('tcp_user_timeout', '30s')) AS v (name, value)
JOIN pg_settings AS s ON s.name = v.name

-- name: claim_session
-- What the session that claims a source needs besides: where its client's machine is gone, another
-- run shall have the source within seconds.
SELECT set_config(s.name, v.value, false)
FROM (VALUES
    ('tcp_keepalives_idle', '2'),
    ('tcp_keepalives_interval', '1'),
    ('tcp_keepalives_count', '3'),
    ('tcp_user_timeout', '5s')) AS v (name, value)
JOIN pg_settings AS s ON s.name = v.name

-- name: server
-- The server's version (180001), the database's encoding, and whether it is a standby.
SELECT current_setting('server_version_num')::int, current_setting('server_encoding'),
       pg_is_in_recovery()

-- name: lock
-- Advisory lock (class, id), exclusive, for the rest of the transaction.
SELECT pg_advisory_xact_lock(%s, %s)

-- name: try_session_lock
SELECT pg_try_advisory_lock(%s, %s)

-- name: lease
-- Who has a source, and whether it beats no longer; a server that has just started gives it time anew.
SELECT token, holder,
       greatest(beat_at, CASE WHEN beat_at > '-infinity' THEN pg_postmaster_start_time() END)
           < clock_timestamp() - %(seconds)s * interval '1 second',
       beat_at = '-infinity',
       (SELECT epoch FROM penstock.sources WHERE id = source_id)
FROM penstock.leases WHERE source_id = %(source)s

-- name: take_lease
INSERT INTO penstock.leases (source_id, token, holder, beat_at)
SELECT id, %(token)s, %(holder)s, CASE WHEN %(beats)s THEN clock_timestamp() ELSE 'infinity' END
FROM penstock.sources WHERE id = %(source)s
ON CONFLICT (source_id) DO UPDATE
SET token = excluded.token, holder = excluded.holder, beat_at = excluded.beat_at

-- name: change_hands
-- The epoch, a new one where another process had the source.
UPDATE penstock.sources SET epoch = epoch + %(changed)s::bool::int WHERE id = %(source)s
RETURNING epoch

-- name: beat
UPDATE penstock.leases SET beat_at = clock_timestamp()
WHERE source_id = %(source)s AND token = %(token)s RETURNING 1

-- name: release_lease
UPDATE penstock.leases SET beat_at = '-infinity' WHERE source_id = $1::int AND token = $2::text

-- name: end_holder
-- Ends the session that holds a source's lock though its process is gone.
SELECT pg_terminate_backend(l.pid)
FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database
WHERE l.locktype = 'advisory' AND l.granted AND l.classid = %(lock)s::oid
  AND l.objid = %(source)s::oid AND d.datname = current_database()

-- name: notify
SELECT pg_notify('penstock', %s)

-- name: has_schema
-- Not by to_regclass, which may remember that there was none before the lock was had.
SELECT EXISTS (SELECT FROM pg_tables WHERE schemaname = 'penstock' AND tablename = 'migrations')

-- name: create_schema
CREATE SCHEMA IF NOT EXISTS penstock;
CREATE TABLE penstock.migrations (
    version integer PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now()
)

-- name: version
SELECT coalesce(max(version), 0) FROM penstock.migrations

-- name: lock_state
-- Before anything else that a change of the desired state locks.
SELECT FROM penstock.state FOR UPDATE

-- name: entity
SELECT spec FROM penstock.entities WHERE kind = %s AND name = %s

-- name: change_entities
SELECT penstock.change_entities(%s, %s, 'api')

-- name: made_at
-- When the schema was made: it identifies this store among others, and one that is made in its place.
SELECT to_char(at AT TIME ZONE 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"')
FROM penstock.migrations WHERE version = 1

-- name: add_migration
INSERT INTO penstock.migrations (version) VALUES (%s)

-- name: sources
SELECT id, name, tag, base FROM penstock.sources ORDER BY id

-- name: source
SELECT id, name, tag, base FROM penstock.sources WHERE name = %s

-- name: create_source
INSERT INTO penstock.sources (name, tag) VALUES (%s, %s) RETURNING id, name, tag, base

-- name: change_source
UPDATE penstock.sources SET tag = %s, base = %s WHERE id = %s RETURNING id, name, tag, base

-- name: last_lsn
-- The highest place that any part of any batch of a source, or any backlog of its sinks, spoke of.
SELECT greatest(
    (SELECT max(end_lsn) FROM {batches}),
    (SELECT max(greatest(g.drained_lsn, b.last_lsn))
     FROM penstock.backlogs g LEFT JOIN penstock.backlog_blocks b USING (source_id, sink)
     WHERE source_id = {source}),
    0)

-- name: head
-- Up to where a source's messages are all there: the end of the newest batch with all of its parts, or
-- the start of the newest one, as a batch starts when all before it are done. No row: nothing yet.
WITH recent AS (
    SELECT start_lsn, start_idx, end_lsn, end_idx, part, parts, plan FROM {batches}
    ORDER BY seq DESC
    LIMIT greatest(32, 4 * coalesce((SELECT parts FROM {batches} ORDER BY seq DESC LIMIT 1), 0))
)
SELECT lsn, idx FROM (
    SELECT start_lsn, start_idx FROM recent
    UNION ALL
    SELECT end_lsn, end_idx FROM recent
    GROUP BY plan, start_lsn, start_idx, end_lsn, end_idx, parts
    HAVING count(DISTINCT part) = parts
) AS ends (lsn, idx)
ORDER BY lsn DESC, idx DESC LIMIT 1

-- name: streams
SELECT st.id, st.name, st.source_id, so.name, st.kind, st.retention, st.created_at
FROM penstock.streams st JOIN penstock.sources so ON so.id = st.source_id ORDER BY st.id

-- name: ids_of
SELECT name, penstock.id_of(%s, name) FROM unnest(%s::text[]) AS name

-- name: create_stream
INSERT INTO penstock.streams (name, source_id, kind, retention)
VALUES (%(name)s, %(source)s, %(kind)s, %(retention)s)
RETURNING id, penstock.id_of('sink', %(name)s)

-- name: set_retention
UPDATE penstock.streams SET retention = %s WHERE id = %s

-- name: create_segment
INSERT INTO penstock.segments (stream_id, after_lsn, after_idx) VALUES (%s, %s, %s) RETURNING id

-- name: consumers
SELECT co.id, co.stream_id, st.name, co.name, co.type, co.own, co.settings, co.disabled,
       co.created_at
FROM penstock.consumers co JOIN penstock.streams st ON st.id = co.stream_id ORDER BY co.id

-- name: create_consumer
INSERT INTO penstock.consumers (stream_id, name, type, own, settings)
VALUES (%(stream)s, %(name)s, %(type)s, %(own)s, %(settings)s)
RETURNING id, penstock.id_of('consumer', %(name)s)

-- name: own_consumer
SELECT id, settings FROM penstock.consumers WHERE stream_id = %s AND own

-- name: change_consumer
UPDATE penstock.consumers SET type = %s, settings = %s WHERE id = %s

-- name: known_dead_letters
SELECT idempotency_key FROM penstock.dead_letters WHERE sink = %s AND idempotency_key = ANY (%s)

-- name: add_dead_letter
-- One that comes again, after a replay or a crash, is the same dead letter, and waits again. Its
-- subject is no part of its identity: that may be longer than an index takes. {kind}: `sink`, or
-- `consumer` of one of type nats.
INSERT INTO penstock.dead_letters ({kind}, idempotency_key, subject, code, reason, message)
VALUES (%s, %s, %s, %s, %s, %s)
ON CONFLICT ({kind}, idempotency_key) DO UPDATE
SET subject = excluded.subject, code = excluded.code, reason = excluded.reason,
    message = excluded.message, at = now(), replayed_at = NULL

-- name: letter_fits
-- The condition that a dead letter `d` fits all that is given.
(%(sink)s::text IS NULL OR d.sink = %(sink)s)
  AND (%(consumer)s::text IS NULL OR d.consumer = %(consumer)s
       OR d.consumer_id = (SELECT id FROM penstock.consumers WHERE name = %(consumer)s))
  AND (%(id)s::bigint IS NULL OR d.id = %(id)s)
  AND d.id > %(after)s AND (%(through)s::bigint IS NULL OR d.id <= %(through)s)
  AND (%(code)s::text IS NULL OR d.code = %(code)s)
  AND (%(key)s::text IS NULL OR d.idempotency_key = %(key)s)
  AND (%(replayed)s::bool IS NULL OR (d.replayed_at IS NOT NULL) = %(replayed)s)
  AND (%(text)s::text IS NULL
       OR strpos(lower(concat_ws(' ', d.idempotency_key, d.subject, d.reason, d.message)),
                 lower(%(text)s)) > 0)

-- name: dead_letters
SELECT d.id, d.sink, coalesce(d.consumer, c.name), d.lsn, d.idx, d.idempotency_key, d.subject, d.code,
       d.reason, d.message, d.deliver_count, d.at, d.replayed_at
FROM penstock.dead_letters d LEFT JOIN penstock.consumers c ON c.id = d.consumer_id
WHERE {fits}
ORDER BY d.id {direction} LIMIT %(limit)s OFFSET %(offset)s

-- name: dead_letter_causes
-- How many dead letters of each sink and consumer have each cause, with the reason of the newest.
SELECT g.sink, g.consumer, g.code, g.waiting, g.replayed, g.first_at, g.last_at, g.last_id,
       (SELECT left(n.reason, 500) FROM penstock.dead_letters n WHERE n.id = g.last_id)
FROM (
    SELECT d.sink, coalesce(d.consumer, c.name) AS consumer, d.code,
           count(*) - count(d.replayed_at) AS waiting, count(d.replayed_at) AS replayed,
           min(d.at) AS first_at, max(d.at) AS last_at, max(d.id) AS last_id
    FROM penstock.dead_letters d LEFT JOIN penstock.consumers c ON c.id = d.consumer_id
    WHERE {fits} GROUP BY 1, 2, 3
) g

-- name: mark_replayed
UPDATE penstock.dead_letters SET replayed_at = now() WHERE id = %s

-- name: purge
DELETE FROM penstock.dead_letters d WHERE {fits}

-- name: create_token
INSERT INTO penstock.tokens (name, hash, role, consumers) VALUES (%s, %s, %s, %s)

-- name: tokens
SELECT uuid, name, role, consumers, created_at, revoked_at FROM penstock.tokens ORDER BY id

-- name: revoke_token
UPDATE penstock.tokens SET revoked_at = now() WHERE name = %s AND revoked_at IS NULL
