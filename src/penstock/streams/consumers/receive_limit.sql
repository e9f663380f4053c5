-- The permits of `receive_limit.py`.

-- name: lock_permits
SELECT pg_advisory_xact_lock(%(lock)s, %(consumer)s)

-- name: take_permits
-- What a process may hold from now on: `wanted` or more, half of what is free, as far as there is
-- enough. What processes held that were not seen for a while is free.
WITH seen AS (
    INSERT INTO penstock.receivers (process) VALUES (%(process)s::uuid)
    ON CONFLICT (process) DO UPDATE SET seen_at = clock_timestamp()
    RETURNING process
), gone AS (
    DELETE FROM penstock.receivers
    WHERE process <> %(process)s::uuid
      AND seen_at < clock_timestamp() - make_interval(secs => %(expiry)s)
), others AS (
    SELECT greatest(%(most)s - coalesce(sum(p.permits), 0), 0)::int AS free
    FROM penstock.receive_permits p JOIN penstock.receivers r USING (process)
    WHERE p.consumer_id = %(consumer)s AND p.process <> %(process)s::uuid
      AND r.seen_at >= clock_timestamp() - make_interval(secs => %(expiry)s)
)
INSERT INTO penstock.receive_permits AS p (consumer_id, process, permits)
SELECT c.id, s.process,
       least(o.free, greatest(%(wanted)s, %(held)s + (o.free - %(held)s + 1) / 2))
FROM others o, seen s, penstock.consumers c WHERE c.id = %(consumer)s
ON CONFLICT (consumer_id, process) DO UPDATE SET permits = excluded.permits
RETURNING p.permits

-- name: put_permits
UPDATE penstock.receive_permits SET permits = %(keep)s
WHERE consumer_id = %(consumer)s AND process = %(process)s::uuid

-- name: see_receiver
UPDATE penstock.receivers SET seen_at = clock_timestamp() WHERE process = %s::uuid

-- name: remove_receiver
DELETE FROM penstock.receivers WHERE process = %s::uuid
