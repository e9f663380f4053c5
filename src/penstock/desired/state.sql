-- The desired state's queries.

-- name: read
-- One statement, so that version and entities belong together. %(kinds)s: those kinds alone, or null.
-- The specs are texts, which Python reads faster so.
SELECT s.version, e.kind, e.name, e.id, e.spec::text, e.version, e.managed_by, e.changed_at
FROM penstock.state s
LEFT JOIN penstock.entities e ON %(kinds)s::text[] IS NULL OR e.kind = ANY (%(kinds)s)

-- name: version
SELECT version FROM penstock.state

-- name: lock
SELECT version FROM penstock.state FOR UPDATE

-- name: change
SELECT penstock.change_entities(%s, %s, %s)

-- name: moved
-- The entities that were changed behind one version, before another.
SELECT coalesce(string_agg(DISTINCT kind || ' ' || name, ', '), 'another store')
FROM penstock.audit WHERE version > %s AND version < %s

-- name: history
SELECT id, at, who, door, version, kind, name, action, before, after FROM penstock.audit
WHERE (%(kind)s::text IS NULL OR kind = %(kind)s) AND (%(name)s::text IS NULL OR name = %(name)s)
  AND (%(search)s::text IS NULL OR strpos(lower(concat_ws(' ', who, door, action, kind, name, version)), lower(%(search)s)) > 0)
  AND (%(before)s::bigint IS NULL OR id < %(before)s) AND (%(after)s::bigint IS NULL OR id > %(after)s)
ORDER BY id {direction} LIMIT %(limit)s

-- name: note_action
-- A line whose number is given counts one more each time.
INSERT INTO penstock.audit AS a (id, who, door, kind, name, action, after) OVERRIDING SYSTEM VALUE
VALUES (coalesce(%(number)s, nextval('penstock.audit_id_seq')), %(who)s, %(door)s, %(kind)s, %(name)s,
        %(action)s, %(details)s)
ON CONFLICT (id) DO UPDATE
SET after = a.after || jsonb_build_object('count', (a.after ->> 'count')::bigint + 1)

-- name: audit_number
SELECT nextval('penstock.audit_id_seq')

-- name: new_process
-- A number for a process, whose session holds the lock until it ends.
SELECT n, pg_advisory_lock(%s, n) FROM CAST(nextval('penstock.processes') AS integer) AS n

-- name: refuse
INSERT INTO penstock.refusals (kind, name, process, reason)
SELECT kind, name, %(process)s, %(reason)s FROM penstock.entities
WHERE kind = %(kind)s AND name = %(name)s
ON CONFLICT (kind, name, process) DO UPDATE SET reason = excluded.reason, at = now()

-- name: accept
-- What a process has refused, or with null all have.
DELETE FROM penstock.refusals WHERE kind = %(kind)s AND name = %(name)s
  AND (process = %(process)s OR %(process)s::integer IS NULL)

-- name: forget_ended
-- Refusals of processes that have ended.
DELETE FROM penstock.refusals r WHERE r.process <> 0 AND NOT EXISTS (
    SELECT FROM penstock.current_refusals c WHERE (c.kind, c.name) = (r.kind, r.name))

-- name: refusals
SELECT kind, name, reason, at FROM penstock.current_refusals ORDER BY kind, name

-- name: former_slots
-- The sources that a change set has read another slot, or perhaps the same in other words.
SELECT e.name, e.spec
FROM jsonb_to_recordset(%s) AS c (kind text, name text, spec jsonb)
JOIN penstock.entities e USING (kind, name)
WHERE e.kind = 'source' AND c.spec IS NOT NULL
  AND (e.spec -> 'url', e.spec -> 'slot', e.spec -> 'bastion')
      IS DISTINCT FROM (c.spec -> 'url', c.spec -> 'slot', c.spec -> 'bastion')

-- name: remove_slot
INSERT INTO penstock.removals (kind, name, spec, version) VALUES ('slot', %s, %s, %s)

-- name: remove_syncs
-- The last sync takes the source that a configuration with syncs has of itself with it.
INSERT INTO penstock.removals (kind, name, spec, version)
SELECT 'source', %s, '{}', %s WHERE NOT EXISTS (SELECT FROM penstock.entities WHERE kind = 'sync')

-- name: removals
SELECT id, kind, name, spec, version, at FROM penstock.removals ORDER BY id

-- name: remove_removal
DELETE FROM penstock.removals WHERE id = %s

-- name: runtime_consumers
SELECT c.id, c.name, s.name, c.type, c.settings, c.own
FROM penstock.consumers c JOIN penstock.streams s ON s.id = c.stream_id

-- name: most_consumers
-- How many consumers one transaction may make or drop. Each takes four locks that only its end gives
-- back; past half of what there is in all, other sessions could find none left.
SELECT current_setting('max_locks_per_transaction')::integer
    * (current_setting('max_connections')::integer
       + current_setting('max_prepared_transactions')::integer) / 2 / 4

-- name: targets
SELECT name, spec FROM penstock.entities WHERE kind = 'target'

-- name: consumer_specs
-- All consumers, or those of these names.
SELECT name, spec FROM penstock.entities WHERE kind = 'consumer'
  AND (%(names)s::text[] IS NULL OR name = ANY(%(names)s))

-- name: filtered_consumers
-- Those with a filter in SQL whose stream is of a source.
SELECT c.name, c.spec FROM penstock.entities c
JOIN penstock.streams s ON s.name = c.spec ->> 'stream'
JOIN penstock.sources o ON o.id = s.source_id
WHERE c.kind = 'consumer' AND c.spec #> '{filters,sql}' IS NOT NULL AND o.name = %(source)s

-- name: consumers_of_targets
SELECT name, spec FROM penstock.entities WHERE kind = 'consumer' AND spec->>'target' = ANY(%s)

-- name: streams
SELECT name, id FROM penstock.streams

-- name: insert_consumers
INSERT INTO penstock.consumers (stream_id, name, type, own, settings)
SELECT * FROM unnest(%s::int[], %s::text[], %s::text[], %s::bool[], %s::jsonb[]) RETURNING id

-- name: update_consumers
UPDATE penstock.consumers c SET type = n.type, settings = n.settings
FROM unnest(%s::int[], %s::text[], %s::jsonb[]) AS n (id, type, settings) WHERE c.id = n.id

-- name: notify_consumers
SELECT pg_notify('penstock', 'c' || id) FROM unnest(%s::int[]) AS n (id)

-- name: delete_consumers
DELETE FROM penstock.consumers WHERE id = ANY(%s)

-- name: stream_consumers
-- The consumers of a stream, its own too.
SELECT c.id FROM penstock.consumers c JOIN penstock.streams s ON s.id = c.stream_id
WHERE s.name = %s

-- name: stream_segments
SELECT g.id FROM penstock.segments g JOIN penstock.streams s ON s.id = g.stream_id WHERE s.name = %s

-- name: stream_source
SELECT source_id FROM penstock.streams WHERE name = %s

-- name: delete_backfills
-- A sink of that name that comes later has initial backfills of its own.
DELETE FROM penstock.backfills WHERE sink = %s

-- name: delete_stream
DELETE FROM penstock.streams WHERE name = %s

-- name: delete_id
-- Unless an entity has the name again.
DELETE FROM penstock.ids i WHERE i.kind = %(kind)s AND i.name = %(name)s
  AND NOT EXISTS (SELECT FROM penstock.entities e WHERE (e.kind, e.name) = (i.kind, i.name))

-- name: delete_backlog
DELETE FROM penstock.backlogs b USING penstock.sources s
WHERE s.id = b.source_id AND s.name = %(source)s AND b.sink = %(sink)s

-- name: delete_pause
DELETE FROM penstock.paused_sinks WHERE source = %(source)s AND sink = %(sink)s

-- name: delete_reader_backlogs
-- What waits for the consumers of type nats of a stream; they go with it.
DELETE FROM penstock.backlogs b USING penstock.nats_consumers n, penstock.streams s
WHERE s.name = %s AND n.stream_id = s.id AND b.source_id = s.source_id AND b.sink = n.name

-- name: remove_nats_consumer
-- The run that publishes for a consumer of type nats removes it.
INSERT INTO penstock.removals (kind, name, spec, version)
SELECT 'consumer', n.name, jsonb_build_object('type', 'nats', 'source', so.name), s.version
FROM penstock.nats_consumers n JOIN penstock.streams st ON st.id = n.stream_id
JOIN penstock.sources so ON so.id = st.source_id, penstock.state s
WHERE n.name = %s

-- name: nats_consumers
SELECT name FROM penstock.nats_consumers

-- name: nats_consumer
SELECT st.source_id FROM penstock.nats_consumers n JOIN penstock.streams st ON st.id = n.stream_id
WHERE n.name = %s

-- name: delete_position
DELETE FROM penstock.positions WHERE source = %s
