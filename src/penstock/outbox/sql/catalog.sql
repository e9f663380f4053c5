-- What the installation reads from a database.

-- name: server
-- The server's version (180001), the database's encoding, whether it is a standby, and the setting that
-- relays need.
SELECT pg_catalog.current_setting('server_version_num')::pg_catalog.int4,
       pg_catalog.current_setting('server_encoding'), pg_catalog.pg_is_in_recovery(),
       pg_catalog.current_setting('wal_level')

-- name: schema
-- The schema tide: whether it is there, its owner, whether this role may act as that one, whether it is
-- Penstock's, and whether it has tables. The role, the database, and whether the role may make a schema.
SELECT n.oid IS NOT NULL AS there, o.rolname::pg_catalog.text AS owner,
       COALESCE(pg_catalog.pg_has_role(n.nspowner, 'MEMBER'), false) AS owned,
       m.oid IS NOT NULL AS installed,
       EXISTS (SELECT FROM pg_catalog.pg_class c WHERE c.relnamespace = n.oid) AS filled,
       COALESCE(pg_catalog.has_table_privilege(m.oid, 'SELECT')
           AND pg_catalog.has_schema_privilege(n.oid, 'USAGE'), false) AS readable,
       current_user::pg_catalog.text AS role, pg_catalog.current_database()::pg_catalog.text AS database,
       pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE') AS may_create
FROM (SELECT 1) AS one
LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = 'tide'
LEFT JOIN pg_catalog.pg_roles o ON o.oid = n.nspowner
LEFT JOIN pg_catalog.pg_class m ON m.relnamespace = n.oid AND m.relname = 'migrations'

-- name: version
-- The newest version that is installed, and the digest of its functions.
SELECT version, functions FROM tide.migrations ORDER BY version DESC LIMIT 1

-- name: lock
-- The lock of an installation, for the rest of the transaction.
SELECT pg_catalog.pg_advisory_xact_lock(1886741603, 116)

-- name: act_as
-- Acts as that role for the rest of the transaction: it owns what is made.
SELECT pg_catalog.set_config('role', %s, true)

-- name: status
-- Every outbox, inbox and pipeline, and the processes of relays.
SELECT pg_catalog.jsonb_build_object(
    'outboxes', ARRAY(SELECT tide.outbox_status(name) FROM tide.outboxes ORDER BY name),
    'inboxes', ARRAY(SELECT tide.inbox_status(name) FROM tide.inboxes ORDER BY name),
    'pipelines', ARRAY(SELECT tide.relay_status(pipeline) FROM tide.relays ORDER BY pipeline),
    'relays', ARRAY(SELECT pg_catalog.to_jsonb(r) FROM tide.relay_processes() AS r))
