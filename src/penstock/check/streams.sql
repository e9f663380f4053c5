-- The queries of `penstock check` about a store; they change nothing.

-- name: server
-- The server, the role's rights, and the schema `penstock` if it is there: `owned` is whether it and
-- all in it are the role's to change, `owner` whose it is.
SELECT pg_catalog.current_setting('server_version_num')::int AS version_num,
       pg_catalog.current_setting('server_version') AS version,
       pg_catalog.current_setting('server_encoding') AS encoding,
       pg_catalog.pg_is_in_recovery() AS is_standby,
       pg_catalog.current_database()::text AS database,
       current_user::text AS role,
       pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE') AS may_create,
       n.oid IS NOT NULL AS has_schema,
       EXISTS (SELECT FROM pg_catalog.pg_class c
               WHERE c.relnamespace = n.oid AND c.relname = 'migrations') AS has_tables,
       pg_catalog.pg_get_userbyid(n.nspowner)::text AS owner,
       COALESCE(pg_catalog.pg_has_role(n.nspowner, 'USAGE'), true) AND NOT EXISTS (
           SELECT FROM pg_catalog.pg_class c
           WHERE c.relnamespace = n.oid AND c.relkind = 'r'
             AND NOT pg_catalog.pg_has_role(c.relowner, 'USAGE')) AS owned
FROM (SELECT 1) AS one
LEFT JOIN pg_catalog.pg_namespace n ON n.nspname = 'penstock'

-- name: version
SELECT COALESCE(pg_catalog.max(version), 0) FROM penstock.migrations

-- name: streams
SELECT st.name, so.name, st.kind
FROM penstock.streams st JOIN penstock.sources so ON so.id = st.source_id

-- name: consumers
SELECT co.name, st.name, co.own
FROM penstock.consumers co JOIN penstock.streams st ON st.id = co.stream_id
