-- What the Management API reads of the records table, which is in the records store.

-- name: sync_id
-- In the store itself.
SELECT id FROM penstock.ids WHERE kind = 'sync' AND name = %s

-- name: records
SELECT id, sync_id, sync_id AS resource_id, provider, collection_id, upstream_id, data::text AS data,
       upstream_created_at, upstream_updated_at, deleted, inserted_at, updated_at
FROM penstock.records
WHERE (%(after)s::uuid IS NULL OR id > %(after)s)
  AND (%(sync)s::uuid IS NULL OR sync_id = %(sync)s)
  AND (%(provider)s::text IS NULL OR provider = %(provider)s)
  AND (%(collection)s::text IS NULL OR collection_id = %(collection)s)
  AND (%(upstream)s::text IS NULL OR upstream_id = %(upstream)s)
  AND (%(deleted)s::boolean IS NULL OR deleted = %(deleted)s)
ORDER BY id LIMIT %(limit)s
