-- What a capture needs of the server: looked up before it starts, and made where it is missing.
-- Parameters are psycopg's. `to_jsonb(row) ->> 'column'` reads columns that older servers lack.

-- name: server
-- The server's settings, how much of them is taken, and what the role may do.
SELECT pg_catalog.current_setting('server_version_num')::int AS version_num,
       pg_catalog.current_setting('server_version') AS version,
       pg_catalog.current_setting('wal_level') AS wal_level,
       pg_catalog.current_setting('max_replication_slots')::int AS max_slots,
       (SELECT pg_catalog.count(*) FROM pg_catalog.pg_replication_slots) AS slots,
       pg_catalog.current_setting('max_wal_senders')::int AS max_senders,
       (SELECT pg_catalog.count(*) FROM pg_catalog.pg_stat_replication) AS senders,
       pg_catalog.pg_is_in_recovery() AS is_standby,
       pg_catalog.current_database()::text AS database,
       r.rolname::text AS role,
       r.rolsuper AS is_superuser,
       -- Amazon RDS has a role to be a member of in the attribute's place.
       r.rolreplication OR r.rolsuper OR EXISTS (
           SELECT FROM pg_catalog.pg_roles g
           WHERE g.rolname = 'rds_replication'
             AND pg_catalog.pg_has_role(r.oid, g.oid, 'MEMBER')) AS may_replicate,
       pg_catalog.has_database_privilege(pg_catalog.current_database(), 'CREATE') AS may_create
FROM pg_catalog.pg_roles r
WHERE r.rolname = current_user

-- name: publication
-- A publication's options. %(name)s: its name. No row: there is none.
SELECT p.puballtables AS all_tables,
       p.pubinsert AS inserts, p.pubupdate AS updates, p.pubdelete AS deletes,
       p.pubtruncate AS truncates,
       p.pubviaroot AS via_root,
       COALESCE(pg_catalog.to_jsonb(p) ->> 'pubgencols', 'n') AS generated
FROM pg_catalog.pg_publication p
WHERE p.pubname = %(name)s

-- name: published_schemas
-- The schemas that a publication has as a whole (Postgres 15 and later). %(name)s: its name.
SELECT n.nspname::text
FROM pg_catalog.pg_publication p
JOIN pg_catalog.pg_publication_namespace pn ON pn.pnpubid = p.oid
JOIN pg_catalog.pg_namespace n ON n.oid = pn.pnnspid
WHERE p.pubname = %(name)s

-- name: published_tables
-- The tables of a publication, with the row filter that limits each. %(name)s: its name.
SELECT t.schemaname::text, t.tablename::text, pg_catalog.to_jsonb(t) ->> 'rowfilter'
FROM pg_catalog.pg_publication_tables t
WHERE t.pubname = %(name)s

-- name: published_columns
-- The columns of a publication's tables, null for all but generated ones (before Postgres 15). %(name)s:
-- its name.
SELECT t.schemaname::text, t.tablename::text, pg_catalog.to_jsonb(t) -> 'attnames'
FROM pg_catalog.pg_publication_tables t
WHERE t.pubname = %(name)s

-- name: written_lsn
-- Where the WAL ends, also what is not on disk yet.
SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
            ELSE pg_catalog.pg_current_wal_insert_lsn() END::text

-- name: limited_tables
-- The tables of which a publication has some rows or some columns only, and of each that is a partition
-- the root. %(name)s: the publication's name.
SELECT n.nspname::text, c.relname::text,
       CASE WHEN c.relispartition THEN pg_catalog.pg_partition_root(c.oid)::oid::bigint END
FROM pg_catalog.pg_publication p
JOIN pg_catalog.pg_publication_rel pr ON pr.prpubid = p.oid
JOIN pg_catalog.pg_class c ON c.oid = pr.prrelid
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE p.pubname = %(name)s
  AND (pg_catalog.to_jsonb(pr) ->> 'prqual' IS NOT NULL
       OR pg_catalog.to_jsonb(pr) ->> 'prattrs' IS NOT NULL)
ORDER BY 1, 2

-- name: schemas
-- Every schema that a user may have made.
SELECT nspname::text FROM pg_catalog.pg_namespace
WHERE nspname NOT IN ('pg_catalog', 'information_schema') AND nspname !~ '^pg_(toast|temp_)'

-- name: relations
-- What may be taken for a table in some schemas. %(schemas)s: their names.
SELECT c.oid::bigint AS oid, n.nspname::text AS schema, c.relname::text AS name,
       c.relkind::text AS kind, c.relpersistence::text AS persistence,
       c.relispartition AS is_partition,
       CASE WHEN c.relispartition THEN pg_catalog.pg_partition_root(c.oid)::regclass::text END AS root,
       pg_catalog.pg_has_role(c.relowner, 'USAGE') AS owned,
       pg_catalog.has_schema_privilege(n.oid, 'USAGE')
           AND pg_catalog.has_table_privilege(c.oid, 'SELECT') AS readable,
       -- By the table's own indexes: EXISTS is planned to read those of the whole database.
       COALESCE((SELECT pg_catalog.bool_or(i.indisprimary) FROM pg_catalog.pg_index i
                 WHERE i.indrelid = c.oid), false) AS has_key,
       a.columns, a.generated
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
CROSS JOIN LATERAL (
    SELECT COALESCE(pg_catalog.array_agg(a.attname::text ORDER BY a.attnum), '{}') AS columns,
           COALESCE(pg_catalog.jsonb_object_agg(a.attname::text, a.attgenerated::text)
                        FILTER (WHERE a.attgenerated <> ''), '{}') AS generated
    FROM pg_catalog.pg_attribute a
    WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped) a
WHERE n.nspname = ANY(%(schemas)s) AND c.relkind IN ('r', 'p', 'v', 'm', 'f')
ORDER BY n.nspname, c.relname

-- name: fingerprint
-- Another row after each change of a table, a column, an enum or a publication's tables: each row of the
-- catalogs has the transaction that wrote it.
SELECT (SELECT pg_catalog.sum(pg_catalog.hashtextextended(
            c.oid::pg_catalog.text || ' ' || c.relname || ' ' || a.attnum || ' ' || a.xmin::pg_catalog.text, 0))
        FROM pg_catalog.pg_class c JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid
        WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND a.attnum > 0
          AND c.relnamespace <> 'pg_catalog'::pg_catalog.regnamespace),
       (SELECT pg_catalog.sum(pg_catalog.hashtextextended(
            e.oid::pg_catalog.text || ' ' || e.xmin::pg_catalog.text, 0)) FROM pg_catalog.pg_enum e),
       (SELECT pg_catalog.sum(pg_catalog.hashtextextended(
            p.oid::pg_catalog.text || ' ' || p.xmin::pg_catalog.text, 0)) FROM pg_catalog.pg_publication_rel p)

-- name: identities
-- The replica identity of tables. %(oids)s: the tables. A partitioned table has none of its own:
-- each partition's counts, and is a row here. `columns` are the old values that the WAL has.
SELECT t.oid::bigint AS oid, n.nspname::text AS schema, c.relname::text AS name,
       c.relreplident::text AS identity,
       COALESCE((
           SELECT pg_catalog.array_agg(a.attname::text ORDER BY a.attnum)
           FROM pg_catalog.pg_index i
           JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid
            AND a.attnum = ANY ((i.indkey::smallint[])[0:i.indnkeyatts - 1])
           WHERE i.indrelid = c.oid AND i.indisvalid
             AND CASE c.relreplident WHEN 'd' THEN i.indisprimary
                                     WHEN 'i' THEN i.indisreplident ELSE false END), '{}') AS columns
FROM pg_catalog.unnest(%(oids)s::oid[]) AS t (oid)
CROSS JOIN LATERAL (
    SELECT relid FROM pg_catalog.pg_partition_tree(t.oid) WHERE isleaf
    UNION
    SELECT p.oid FROM pg_catalog.pg_class p WHERE p.oid = t.oid AND p.relkind = 'r') l (relid)
-- By oid: a join is planned to read all relations of the database, as it expects many partitions.
CROSS JOIN LATERAL (SELECT * FROM pg_catalog.pg_class p WHERE p.oid = l.relid OFFSET 0) c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
ORDER BY n.nspname, c.relname

-- name: slots
-- Where the server's slots stand. %(name)s: the one that is asked for; null: all. `lag_seconds` is what
-- the server measured last between writing WAL and hearing that it was confirmed, if somebody reads.
SELECT s.slot_name::text AS name, s.plugin::text AS plugin, s.slot_type AS slot_type,
       s.database::text AS database, s.active AS active, s.active_pid AS active_pid,
       s.wal_status AS wal_status,
       pg_catalog.to_jsonb(s) ->> 'invalidation_reason' AS invalidation_reason,
       s.restart_lsn::text AS restart_lsn, s.confirmed_flush_lsn::text AS confirmed_flush_lsn,
       w.lsn::text AS current_lsn,
       pg_catalog.pg_wal_lsn_diff(w.lsn, s.restart_lsn)::bigint AS retained_bytes,
       GREATEST(pg_catalog.pg_wal_lsn_diff(w.lsn, s.confirmed_flush_lsn), 0)::bigint AS lag_bytes,
       EXTRACT(epoch FROM r.flush_lag)::float8 AS lag_seconds
FROM pg_catalog.pg_replication_slots s
LEFT JOIN pg_catalog.pg_stat_replication r ON r.pid = s.active_pid
CROSS JOIN LATERAL (
    SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
                ELSE pg_catalog.pg_current_wal_flush_lsn() END) w (lsn)
WHERE %(name)s::text IS NULL OR s.slot_name = %(name)s

-- name: end_reader
-- %(name)s: the slot's name.
SELECT pg_catalog.pg_terminate_backend(s.active_pid)
FROM pg_catalog.pg_replication_slots s
JOIN pg_catalog.pg_stat_activity a ON a.pid = s.active_pid
WHERE s.slot_name = %(name)s AND a.backend_type = 'walsender' AND a.usename = current_user

-- name: drop_slot
-- %(name)s: its name.
SELECT pg_catalog.pg_drop_replication_slot(%(name)s)

-- name: position
-- Up to where the WAL is on disk, or replayed on a standby, and the server's clock.
SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
            ELSE pg_catalog.pg_current_wal_flush_lsn() END::pg_catalog.text,
       pg_catalog.clock_timestamp()

-- name: create_slot
-- Makes a logical slot; waits for the transactions that are open now. %(name)s: its name.
SELECT pg_catalog.pg_create_logical_replication_slot(%(name)s, 'pgoutput')
