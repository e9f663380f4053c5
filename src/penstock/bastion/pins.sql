-- name: pinned
SELECT host_key FROM penstock.bastions WHERE name = %s
