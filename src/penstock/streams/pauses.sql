-- Pausing by name, whatever the type. `by` is who does it, null to resume.

-- name: http_consumer
UPDATE penstock.consumers
SET disabled = %(by)s || ' paused it', paused = %(by)s::text IS NOT NULL,
    disabled_at = CASE WHEN %(by)s::text IS NOT NULL THEN now() END
WHERE name = %(name)s

-- name: consumers
SELECT name FROM penstock.consumers UNION ALL SELECT name FROM penstock.nats_consumers ORDER BY 1

-- name: sink
-- What a sink is, as it is configured.
SELECT spec ->> 'source', spec ->> 'type' FROM penstock.entities WHERE kind = 'sink' AND name = %s

-- name: sinks
SELECT name FROM penstock.entities WHERE kind = 'sink' ORDER BY 1

-- name: pause_sink
INSERT INTO penstock.paused_sinks (source, sink, paused_by)
VALUES (%(source)s, %(sink)s, %(by)s) ON CONFLICT DO NOTHING

-- name: resume_sink
DELETE FROM penstock.paused_sinks WHERE source = %(source)s AND sink = %(sink)s

-- name: paused_sinks
SELECT source, sink, paused_by FROM penstock.paused_sinks

-- name: notify
-- To the processes that serve consumers.
SELECT pg_notify('penstock', 'k')
