-- The records table, in the records store. A migration that has been released is never edited.

-- name: lock
SELECT pg_advisory_xact_lock(hashtext('penstock.records'));

-- name: has_table
-- Not by to_regclass, which may remember that there was none before the lock was had.
SELECT EXISTS (
    SELECT FROM pg_tables WHERE schemaname = 'penstock' AND tablename = 'records_migrations');

-- name: version
SELECT coalesce(max(version), 0) FROM penstock.records_migrations;

-- name: server
SELECT current_setting('server_version_num')::integer, current_setting('server_encoding'),
       pg_is_in_recovery(), current_setting('wal_level');

-- name: begin_migrations
CREATE SCHEMA IF NOT EXISTS penstock;
CREATE TABLE IF NOT EXISTS penstock.records_migrations (
    version integer PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now()
);

-- name: add_migration
INSERT INTO penstock.records_migrations (version) VALUES (%s);

-- name: migration_1
-- `id` is made of sync_id, collection_id and upstream_id. What stands before `data` is short: messages
-- are made of a row's JSON by its columns' places (core/records.py), so their order matters.
-- `payload_hash` is that of the API's object, null for a tombstone of an object that was never seen.
CREATE TABLE penstock.records (
    id uuid PRIMARY KEY,
    sync_id uuid NOT NULL,
    provider text NOT NULL,
    collection_id text NOT NULL,
    upstream_id text NOT NULL,
    upstream_created_at timestamptz,
    upstream_updated_at timestamptz,
    deleted boolean NOT NULL DEFAULT false,
    inserted_at timestamptz NOT NULL DEFAULT now(),
    updated_at timestamptz NOT NULL DEFAULT now(),
    data jsonb NOT NULL,
    payload_hash uuid,
    UNIQUE (sync_id, collection_id, upstream_id)
);
ALTER TABLE penstock.records REPLICA IDENTITY FULL;

-- A sweep that runs, and the ids that it has seen. Both are unlogged: a crash of the server empties both,
-- so that a sweep which lost ids is gone itself, and deletes nothing.
CREATE UNLOGGED TABLE penstock.record_sweeps (
    id uuid PRIMARY KEY,
    sync_id uuid NOT NULL,
    collection_id text NOT NULL,
    began_at timestamptz NOT NULL DEFAULT now()
);
CREATE UNLOGGED TABLE penstock.record_sweep_ids (
    sweep_id uuid NOT NULL,
    record_id uuid NOT NULL
);
CREATE INDEX ON penstock.record_sweep_ids (sweep_id, record_id);
-- What the newest complete sweep of a collection missed: the next one deletes what it misses, too.
CREATE UNLOGGED TABLE penstock.record_missing (
    record_id uuid PRIMARY KEY,
    sync_id uuid NOT NULL,
    collection_id text NOT NULL,
    began_at timestamptz NOT NULL
);
CREATE INDEX ON penstock.record_missing (sync_id, collection_id);

-- name: session
-- Lookups are by id, and the index they need is in memory.
SET random_page_cost = 1.1;

-- name: temp_buffers
SET temp_buffers = '32MB';

-- name: staging
CREATE TEMPORARY TABLE IF NOT EXISTS penstock_seen (
    n integer, id uuid, payload_hash uuid, upstream_updated_at timestamptz, deleted boolean
) ON COMMIT DELETE ROWS;
CREATE TEMPORARY TABLE IF NOT EXISTS penstock_differing (
    id uuid, upstream_id text, upstream_created_at timestamptz, upstream_updated_at timestamptz,
    deleted boolean, payload_hash uuid, data jsonb
) ON COMMIT DELETE ROWS;

-- name: copy_seen
COPY pg_temp.penstock_seen FROM STDIN (FORMAT binary);

-- name: copy_differing
COPY pg_temp.penstock_differing FROM STDIN (FORMAT binary);

-- name: copy_new
COPY penstock.records (id, sync_id, provider, collection_id, upstream_id, upstream_created_at,
    upstream_updated_at, deleted, payload_hash, data) FROM STDIN (FORMAT binary);

-- name: differing
-- The numbers of what is new or differs. The tombstone of an object that was never seen is kept where it
-- has a time: an older version that comes late is then known as one.
SELECT s.n
FROM pg_temp.penstock_seen s LEFT JOIN penstock.records r USING (id)
WHERE CASE WHEN r.id IS NULL THEN NOT s.deleted OR s.upstream_updated_at IS NOT NULL
      ELSE (s.upstream_updated_at < r.upstream_updated_at) IS NOT TRUE
           AND (s.deleted <> r.deleted
                OR (NOT s.deleted AND s.payload_hash IS DISTINCT FROM r.payload_hash)) END
ORDER BY s.n;

-- name: upsert
-- How many rows are inserted, updated and deleted. What is new, or back, has both times alike. Rows are
-- locked in the order of their ids, whoever writes: so no two writers wait for each other. A text that
-- has changed without its value (the order of members, 1.0 for 1.00) changes nothing.
WITH done AS (
    INSERT INTO penstock.records AS r (
        id, sync_id, provider, collection_id, upstream_id, upstream_created_at,
        upstream_updated_at, deleted, data, payload_hash)
    SELECT id, %(sync)s, %(provider)s, %(collection)s, upstream_id, upstream_created_at,
           upstream_updated_at, deleted, data, payload_hash
    FROM pg_temp.penstock_differing ORDER BY id
    ON CONFLICT (id) DO UPDATE SET
        upstream_created_at = coalesce(excluded.upstream_created_at, r.upstream_created_at),
        upstream_updated_at = greatest(excluded.upstream_updated_at, r.upstream_updated_at),
        deleted = excluded.deleted,
        inserted_at = CASE WHEN r.deleted THEN excluded.inserted_at ELSE r.inserted_at END,
        updated_at = CASE WHEN r.deleted THEN excluded.updated_at
                     ELSE greatest(excluded.updated_at, r.inserted_at + interval '1 microsecond') END,
        data = CASE WHEN excluded.payload_hash IS NULL THEN r.data ELSE excluded.data END,
        payload_hash = coalesce(excluded.payload_hash, r.payload_hash)
    WHERE (excluded.upstream_updated_at < r.upstream_updated_at) IS NOT TRUE
      AND (excluded.deleted <> r.deleted
           OR (NOT excluded.deleted AND excluded.payload_hash IS DISTINCT FROM r.payload_hash
               AND excluded.data IS DISTINCT FROM r.data))
    RETURNING r.deleted, r.inserted_at = r.updated_at AS is_new
)
SELECT count(*) FILTER (WHERE is_new AND NOT deleted),
       count(*) FILTER (WHERE NOT is_new AND NOT deleted),
       count(*) FILTER (WHERE NOT is_new AND deleted)
FROM done;

-- name: begin_sweep
INSERT INTO penstock.record_sweeps (id, sync_id, collection_id) VALUES (%s, %s, %s);

-- name: copy_sweep_ids
COPY penstock.record_sweep_ids FROM STDIN (FORMAT binary);

-- name: sweep
-- The sweep, locked until it is completed or given up.
SELECT sync_id, collection_id, began_at FROM penstock.record_sweeps WHERE id = %s FOR UPDATE;

-- name: missing
-- How many records the sweep should have seen, and how many of them it has not. What was written since it
-- began may have come behind the place where it was.
SELECT count(*), count(*) FILTER (WHERE NOT EXISTS (
    SELECT FROM penstock.record_sweep_ids s WHERE s.sweep_id = %(sweep)s AND s.record_id = r.id))
FROM penstock.records r
WHERE r.sync_id = %(sync)s AND r.collection_id = %(collection)s AND NOT r.deleted
  AND r.updated_at < %(began)s;

-- name: delete_missing
-- Marks some of them as deleted, and returns how many: those that the sweep before missed, too, and that
-- were not written since that began.
WITH gone AS (
    SELECT r.id FROM penstock.records r JOIN penstock.record_missing m ON m.record_id = r.id
    WHERE r.updated_at < m.began_at AND r.sync_id = %(sync)s AND r.collection_id = %(collection)s AND NOT r.deleted
      AND r.updated_at < %(began)s AND NOT EXISTS (
        SELECT FROM penstock.record_sweep_ids s WHERE s.sweep_id = %(sweep)s AND s.record_id = r.id)
    ORDER BY r.id LIMIT %(rows)s FOR UPDATE
)
UPDATE penstock.records r
SET deleted = true, updated_at = greatest(now(), r.inserted_at + interval '1 microsecond')
FROM gone WHERE r.id = gone.id AND NOT r.deleted;

-- name: forget_missing
DELETE FROM penstock.record_missing WHERE sync_id = %(sync)s
  AND (%(collection)s::text IS NULL OR collection_id = %(collection)s);

-- name: note_missing
-- Notes what the sweep missed, and is not deleted.
INSERT INTO penstock.record_missing (record_id, sync_id, collection_id, began_at)
SELECT r.id, r.sync_id, r.collection_id, %(began)s
FROM penstock.records r
WHERE r.sync_id = %(sync)s AND r.collection_id = %(collection)s AND NOT r.deleted
  AND r.updated_at < %(began)s AND NOT EXISTS (
    SELECT FROM penstock.record_sweep_ids s WHERE s.sweep_id = %(sweep)s AND s.record_id = r.id);

-- name: end_sweep
WITH ids AS (DELETE FROM penstock.record_sweep_ids WHERE sweep_id = %(sweep)s)
DELETE FROM penstock.record_sweeps WHERE id = %(sweep)s;

-- name: count
SELECT count(*) FROM penstock.records
WHERE sync_id = %(sync)s AND (%(collection)s::text IS NULL OR collection_id = %(collection)s);

-- name: purge
-- Removes some of the records of a sync, or of one of its collections.
WITH gone AS (
    SELECT id FROM penstock.records
    WHERE sync_id = %(sync)s AND (%(collection)s::text IS NULL OR collection_id = %(collection)s)
    ORDER BY id LIMIT %(rows)s FOR UPDATE
)
DELETE FROM penstock.records r USING gone WHERE r.id = gone.id;
