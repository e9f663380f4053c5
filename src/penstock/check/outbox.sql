-- The queries of `penstock check` about outboxes.

-- name: may_relay
-- Whether the role may do in the schema tide what a relay does.
SELECT pg_catalog.has_table_privilege('tide.relays', 'SELECT')
   AND pg_catalog.has_table_privilege('tide.checkpoints', 'SELECT')
   AND pg_catalog.has_table_privilege('tide.checkpoints', 'INSERT')
   AND pg_catalog.has_table_privilege('tide.checkpoints', 'UPDATE')
   AND pg_catalog.has_table_privilege('tide.leases', 'SELECT')
   AND pg_catalog.has_table_privilege('tide.leases', 'INSERT')
   AND pg_catalog.has_table_privilege('tide.leases', 'UPDATE')
   AND pg_catalog.has_table_privilege('tide.leases', 'DELETE')
   AND pg_catalog.has_function_privilege('tide.outbox_sweep(text)', 'EXECUTE')
