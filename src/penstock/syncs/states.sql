-- The progress of syncs.

-- name: load
SELECT sync_id, collection_id, progress FROM penstock.sync_collections WHERE sync_id = ANY (%s)

-- name: save
INSERT INTO penstock.sync_collections AS c (sync_id, collection_id, progress, shown)
SELECT sync_id, collection_id, progress, shown
FROM jsonb_to_recordset(%s) AS r (sync_id uuid, collection_id text, progress jsonb, shown jsonb)
ON CONFLICT (sync_id, collection_id) DO UPDATE
SET progress = excluded.progress, shown = excluded.shown, updated_at = now()
