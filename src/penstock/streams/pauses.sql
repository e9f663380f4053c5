-- Pausing by name, whatever the type. `by` is who does it, null to resume.

-- name: http_consumer
UPDATE penstock.consumers
SET disabled = %(by)s || ' paused it', paused = %(by)s::text IS NOT NULL,
    disabled_at = CASE WHEN %(by)s::text IS NOT NULL THEN now() END
WHERE name = %(name)s

-- name: consumers
SELECT name FROM penstock.consumers UNION ALL SELECT name FROM penstock.nats_consumers ORDER BY 1

-- name: notify
-- To the processes that serve consumers.
SELECT pg_notify('penstock', 'k')
