-- name: bastions
-- The keys that Penstock keeps of the bastions of targets and sources, by the names of these.
SELECT name, private_key, host_key FROM penstock.bastions WHERE name = ANY (%s)

-- name: keep_private_key
-- The first one that is made counts.
INSERT INTO penstock.bastions (name, private_key) VALUES (%s, %s)
ON CONFLICT (name) DO UPDATE SET private_key = coalesce(penstock.bastions.private_key, excluded.private_key)
RETURNING private_key

-- name: pin
INSERT INTO penstock.bastions (name, host_key) VALUES (%s, %s)
ON CONFLICT (name) DO UPDATE SET host_key = excluded.host_key
