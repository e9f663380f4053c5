-- What the relay reads and writes for pipelines into inboxes. Parameters are psycopg's.

-- name: pipelines
SELECT r.pipeline, r.inbox, r.relay_group, r.config, r.enabled,
       (SELECT system_identifier FROM pg_catalog.pg_control_system()) AS system
FROM tide.relays r WHERE r.direction = 'in'
ORDER BY r.pipeline

-- name: fill
-- Adds messages in their order, of each message_id only the first. {table} is the inbox's.
INSERT INTO {table} (message_id, subject, payload, body, headers)
SELECT g.message_id, g.subject, g.payload::pg_catalog.jsonb, g.body,
       g.headers::pg_catalog.jsonb
FROM ROWS FROM (
        pg_catalog.unnest(%(message_ids)s::pg_catalog.text[]),
        pg_catalog.unnest(%(subjects)s::pg_catalog.text[]),
        pg_catalog.unnest(%(payloads)s::pg_catalog.text[]),
        pg_catalog.unnest(%(bodies)s::pg_catalog.bytea[]),
        pg_catalog.unnest(%(headers)s::pg_catalog.text[]))
    WITH ORDINALITY AS g (message_id, subject, payload, body, headers, number)
ORDER BY g.number
ON CONFLICT (message_id) DO NOTHING

-- name: count
-- Counts the added messages, in the transaction that adds them. `last_id` is a message's number in the stream.
UPDATE tide.checkpoints AS p
SET delivered = p.delivered + %(added)s, last_id = GREATEST(p.last_id, %(last)s),
    at = pg_catalog.clock_timestamp()
WHERE (p.relay_group, p.pipeline, p.outbox) = (%(group)s, %(pipeline)s, %(inbox)s)

-- name: put_state
-- Writes nothing where the pipeline was deleted.
INSERT INTO tide.checkpoints AS p (relay_group, pipeline, outbox, state, code, error, remedy)
SELECT r.relay_group, r.pipeline, r.inbox, %(state)s, %(code)s, %(error)s, %(remedy)s
FROM tide.relays r
WHERE (r.relay_group, r.pipeline, r.inbox) = (%(group)s, %(pipeline)s, %(inbox)s)
ON CONFLICT (relay_group, pipeline, outbox) DO UPDATE
SET state = excluded.state, code = excluded.code, error = excluded.error, remedy = excluded.remedy,
    at = pg_catalog.clock_timestamp()

-- name: sweep
SELECT tide.inbox_sweep(%s)
