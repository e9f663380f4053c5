-- What is asked of syncs, and what is shown of them.

-- name: pause
INSERT INTO penstock.paused_syncs (sync_id, paused_by) VALUES (%s, %s) ON CONFLICT DO NOTHING

-- name: unpause
DELETE FROM penstock.paused_syncs WHERE sync_id = %s

-- name: paused
SELECT sync_id FROM penstock.paused_syncs

-- name: ask
INSERT INTO penstock.sync_commands (sync_id, collection_id, command, asked_by) VALUES (%s, %s, %s, %s)

-- name: notify
SELECT pg_notify('penstock_syncs', '')

-- name: asked
-- All that is asked and not done yet, oldest first.
SELECT sync_id, collection_id, command, id FROM penstock.sync_commands ORDER BY id

-- name: done
DELETE FROM penstock.sync_commands WHERE id = ANY (%s)

-- name: status
-- Of each sync whether it is paused; of each of its collections what is shown.
SELECT s.id, p.sync_id IS NOT NULL, c.collection_id, c.shown
FROM unnest(%s::uuid[]) AS s (id)
LEFT JOIN penstock.paused_syncs p ON p.sync_id = s.id
LEFT JOIN penstock.sync_collections c ON c.sync_id = s.id
ORDER BY s.id, c.collection_id

-- name: forget
-- What is left of syncs and credentials that are no more; records stay.
WITH gone AS (
    SELECT sync_id FROM penstock.sync_collections UNION SELECT sync_id FROM penstock.paused_syncs
    UNION SELECT sync_id FROM penstock.sync_commands
    EXCEPT SELECT id FROM penstock.entities WHERE kind = 'sync'
), paused AS (
    DELETE FROM penstock.paused_syncs p USING gone g WHERE p.sync_id = g.sync_id
), commands AS (
    DELETE FROM penstock.sync_commands c USING gone g WHERE c.sync_id = g.sync_id
), tokens AS (
    DELETE FROM penstock.credential_tokens t WHERE NOT EXISTS (
        SELECT FROM penstock.entities e WHERE e.kind = 'credential' AND e.name = t.credential)
)
DELETE FROM penstock.sync_collections c USING gone g WHERE c.sync_id = g.sync_id
