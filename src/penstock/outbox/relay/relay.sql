-- What the relay reads from the schema tide, and writes there. Parameters are psycopg's.

-- name: access
-- Whether the schema is installed, and whether the role may read it.
SELECT c.oid IS NOT NULL AS installed, pg_catalog.current_database()::pg_catalog.text,
       current_user::pg_catalog.text,
       COALESCE(pg_catalog.has_schema_privilege(c.relnamespace, 'USAGE')
           AND pg_catalog.has_table_privilege(c.oid, 'SELECT'), false) AS allowed
FROM (SELECT 1) AS one
LEFT JOIN (pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace)
    ON n.nspname = 'tide' AND c.relname = 'relays'

-- name: listen
LISTEN tide_relay

-- name: pipelines
-- The pipelines from outboxes. `checkpointed`: whether a relay runs it. The messages that are visible in
-- `snapshot` are delivered, or the pipeline need not deliver them; a snapshot from the future is of another
-- cluster, from which this database was restored, and is ignored. `outbox_tag` differs for each outbox
-- that was ever made, in any database and cluster.
SELECT r.pipeline, r.outbox, r.relay_group, r.config, r.enabled, r.created_at,
       pg_catalog.left(pg_catalog.encode(pg_catalog.sha256(pg_catalog.convert_to(
           pg_catalog.concat_ws('/', c.system_identifier, pg_catalog.current_database(), o.name,
               (pg_catalog.date_part('epoch', o.created_at) * 1000000)::pg_catalog.int8), 'UTF8')),
           'hex'), 8) AS outbox_tag,
       p.lsn IS NOT NULL AS checkpointed, p.store,
       CASE WHEN pg_catalog.pg_snapshot_xmax(s.snapshot)
               <= pg_catalog.pg_snapshot_xmax(pg_catalog.pg_current_snapshot())
           THEN s.snapshot::pg_catalog.text END AS snapshot,
       COALESCE(p.delivered, 0) AS delivered
FROM tide.relays r LEFT JOIN tide.checkpoints p
    ON (p.relay_group, p.pipeline, p.outbox) = (r.relay_group, r.pipeline, r.outbox)
JOIN tide.outboxes o ON o.name = r.outbox
CROSS JOIN pg_catalog.pg_control_system() AS c
CROSS JOIN LATERAL (
    SELECT COALESCE(p.delivered_snapshot,
        CASE WHEN r.config ->> 'start' = 'end' THEN r.since END) AS snapshot) AS s
WHERE r.direction = 'out'
ORDER BY r.pipeline

-- name: try_lock
-- A group's lock, held by the session; `class` is the kind of lock. The hash has 64 bits: of two groups with
-- one lock the second would never run.
SELECT pg_catalog.pg_try_advisory_lock(pg_catalog.hashtextextended(%(group)s, %(class)s))

-- name: short
-- A session whose client's machine is gone ends within seconds, and with it the lock. No statement waits
-- long for an open transaction of another session.
SELECT pg_catalog.set_config(s.name, v.value, false)
FROM (VALUES
    ('idle_session_timeout', '0'),
    ('statement_timeout', '0'),
    ('lock_timeout', %s),
    ('tcp_keepalives_idle', '2'),
    ('tcp_keepalives_interval', '1'),
    ('tcp_keepalives_count', '3'),
    ('tcp_user_timeout', '5s')) AS v (name, value)
JOIN pg_catalog.pg_settings AS s ON s.name = v.name

-- name: alive
SELECT

-- name: snapshot
SELECT pg_catalog.pg_current_snapshot()::pg_catalog.text

-- name: wal_end
-- Read after a snapshot: all that is visible in the snapshot was committed before this LSN.
SELECT pg_catalog.pg_wal_lsn_diff(pg_catalog.pg_current_wal_insert_lsn(), '0/0')::pg_catalog.int8

-- name: slot
-- No row: there is no such slot.
SELECT wal_status = 'lost' FROM pg_catalog.pg_replication_slots WHERE slot_name = %s

-- name: idle_slots
-- The slots of this database's relays that no session reads. Read it before the pipelines: a slot is made
-- after the pipelines of its group.
SELECT slot_name::pg_catalog.text FROM pg_catalog.pg_replication_slots
WHERE database = pg_catalog.current_database() AND plugin = 'pgoutput' AND NOT active
  AND slot_name ~ '^tide_.*_[0-9a-f]{8}$'

-- name: drop_slot
SELECT pg_catalog.pg_drop_replication_slot(slot_name)
FROM pg_catalog.pg_replication_slots WHERE slot_name = %s AND NOT active

-- name: has_rows
-- Whether an outbox holds a message that meets the condition.
SELECT EXISTS (SELECT FROM {table} WHERE {condition})

-- name: last_id
-- The newest message that is visible in a snapshot.
SELECT id FROM {table} WHERE pg_catalog.pg_visible_in_snapshot(xid, %s::pg_catalog.pg_snapshot)
ORDER BY id DESC LIMIT 1

-- name: put_checkpoint
-- Writes nothing where the pipeline was deleted, or made again; a foreign key is violated where it is deleted
-- while this waits. Columns for which null is given keep their values, except the error's.
INSERT INTO tide.checkpoints AS p
    (relay_group, pipeline, outbox, pipeline_created_at, store, lsn, delivered_snapshot, last_id,
     delivered, state, code, error, remedy, dead_letters, dead_letter, dead_letter_at, at)
SELECT %(group)s, r.pipeline, r.outbox, r.created_at, %(store)s, %(lsn)s::pg_lsn,
       %(snapshot)s::pg_snapshot, %(last_id)s, %(delivered)s, %(state)s, %(code)s, %(error)s,
       %(remedy)s, COALESCE(%(dead_letters)s, 0), %(dead_letter)s, %(dead_letter_at)s,
       pg_catalog.clock_timestamp()
FROM tide.relays r
WHERE r.pipeline = %(pipeline)s AND r.relay_group = %(group)s AND r.created_at = %(created_at)s
ON CONFLICT (relay_group, pipeline, outbox) DO UPDATE
SET pipeline_created_at = excluded.pipeline_created_at,
    store = COALESCE(excluded.store, p.store), lsn = COALESCE(excluded.lsn, p.lsn),
    delivered_snapshot = COALESCE(excluded.delivered_snapshot, p.delivered_snapshot),
    last_id = COALESCE(excluded.last_id, p.last_id),
    delivered = GREATEST(excluded.delivered, p.delivered),
    state = excluded.state, code = excluded.code, error = excluded.error, remedy = excluded.remedy,
    dead_letters = COALESCE(%(dead_letters)s, p.dead_letters),
    dead_letter = CASE WHEN %(dead_letters)s IS NULL THEN p.dead_letter ELSE excluded.dead_letter END,
    dead_letter_at = CASE WHEN %(dead_letters)s IS NULL THEN p.dead_letter_at
                          ELSE excluded.dead_letter_at END,
    at = excluded.at

-- name: put_failure
-- Reports a failure of the whole group in its pipelines' checkpoints; how far these are stays.
INSERT INTO tide.checkpoints AS p
    (relay_group, pipeline, outbox, pipeline_created_at, state, code, error, remedy)
SELECT r.relay_group, r.pipeline, r.outbox, r.created_at, 'error', %(code)s, %(error)s, %(remedy)s
FROM tide.relays r
JOIN ROWS FROM (
        pg_catalog.unnest(%(pipelines)s::pg_catalog.text[]),
        pg_catalog.unnest(%(created_at)s::pg_catalog.timestamptz[])) AS given (pipeline, created_at)
    USING (pipeline, created_at)
WHERE r.relay_group = %(group)s AND r.direction = 'out' AND r.enabled
ON CONFLICT (relay_group, pipeline, outbox) DO UPDATE
SET pipeline_created_at = excluded.pipeline_created_at, state = excluded.state, code = excluded.code,
    error = excluded.error, remedy = excluded.remedy, at = pg_catalog.clock_timestamp()

-- name: clear_checkpoints
-- Clears the LSNs of a group's pipelines except some: these no longer get what is committed, until they
-- start again.
UPDATE tide.checkpoints SET lsn = NULL
WHERE relay_group = %(group)s AND lsn IS NOT NULL AND NOT pipeline = ANY (%(but)s::pg_catalog.text[])

-- name: outboxes
SELECT name FROM tide.outboxes ORDER BY name

-- name: sweep
-- Null where another relay is sweeping it.
SELECT CASE WHEN pg_catalog.pg_try_advisory_xact_lock(
    pg_catalog.hashtextextended(%(outbox)s, %(class)s)) THEN tide.outbox_sweep(%(outbox)s) END

-- name: backlog
-- For each sink of a source that is behind: the first LSN that is not delivered, null where all is. The
-- parameter: the source's id in the store.
SELECT b.sink, CASE WHEN count(k.id) > 0 THEN GREATEST(min(k.first_lsn), b.drained_lsn) END
FROM penstock.backlogs b LEFT JOIN penstock.backlog_blocks k USING (source_id, sink)
WHERE b.source_id = %s
GROUP BY b.sink, b.drained_lsn

-- name: open_backfills
-- For each sink of a source with a backfill that is not done: whether it has failed, and why it stands
-- still. The parameter: the source's name.
SELECT sink, bool_or(state = 'failed'), max(error) FROM penstock.backfills
WHERE source = %s AND state NOT IN ('done', 'cancelled')
GROUP BY sink

-- name: dead_letters
-- For each of a source's sinks: how many dead letters are in the store, the newest one's cause and time.
-- Another source may have sinks of the same names; its dead letters have its tag.
SELECT d.sink, d.waiting, n.code || ': ' || n.reason, n.at
FROM (SELECT l.sink, count(*) AS waiting, max(l.id) AS newest FROM penstock.dead_letters l
      WHERE l.sink = ANY (%(sinks)s) AND l.replayed_at IS NULL AND NOT EXISTS (
          SELECT FROM penstock.sources s
          WHERE s.tag <> %(tag)s AND pg_catalog.starts_with(l.idempotency_key, s.tag || '-'))
      GROUP BY l.sink) AS d
JOIN penstock.dead_letters n ON n.id = d.newest

-- name: beat
-- Renews the leases of a process on groups, and deletes those of other processes on groups that it runs:
-- a group has one lock, so none of them runs. Standbys stay for an hour after their last heartbeat.
WITH mine AS (
    SELECT * FROM ROWS FROM (
        pg_catalog.unnest(%(groups)s::pg_catalog.text[]),
        pg_catalog.unnest(%(states)s::pg_catalog.text[]),
        pg_catalog.unnest(%(warm)s::pg_catalog.bool[]),
        pg_catalog.unnest(%(lock_pids)s::pg_catalog.int4[]),
        pg_catalog.unnest(%(codes)s::pg_catalog.text[]),
        pg_catalog.unnest(%(errors)s::pg_catalog.text[]),
        pg_catalog.unnest(%(remedies)s::pg_catalog.text[]))
    AS g (relay_group, state, warm, lock_pid, code, error, remedy)
), gone AS (
    DELETE FROM tide.leases l USING mine
    WHERE l.relay_group = mine.relay_group AND mine.state = 'running'
      AND l.instance <> %(instance)s
      AND (l.state <> 'standby'
           OR l.heartbeat < pg_catalog.clock_timestamp() - interval '1 hour')
)
INSERT INTO tide.leases AS l
    (relay_group, instance, host, pid, state, warm, lock_pid, code, error, remedy)
SELECT relay_group, %(instance)s, %(host)s, %(pid)s, state, warm, lock_pid, code, error, remedy
FROM mine
ON CONFLICT (relay_group, instance) DO UPDATE
SET state = excluded.state, warm = excluded.warm, lock_pid = excluded.lock_pid,
    code = excluded.code, error = excluded.error, remedy = excluded.remedy,
    since = CASE WHEN l.state = excluded.state THEN l.since ELSE excluded.since END,
    heartbeat = excluded.heartbeat

-- name: stopped
-- Records the orderly end of a process.
UPDATE tide.leases SET state = 'stopped', since = pg_catalog.clock_timestamp(),
    heartbeat = pg_catalog.clock_timestamp(), lock_pid = NULL, code = NULL, error = NULL,
    remedy = NULL
WHERE instance = %s

-- name: no_flush
-- A heartbeat need not outlive a crash of the server: its commit waits for no disk.
SELECT pg_catalog.set_config('synchronous_commit', 'off', false)
