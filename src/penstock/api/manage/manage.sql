-- What the Management API reads of the store.

-- name: name_of
-- The name of the entity of a kind that has a UUID.
SELECT name FROM penstock.ids WHERE kind = %s AND id = %s

-- name: spec
SELECT spec, id FROM penstock.entities WHERE kind = %s AND name = %s

-- name: entity_page
-- The first entities of a kind behind a name, as they may be shown, and why a process can't run them.
SELECT e.name, e.id, e.version, e.managed_by, e.changed_at, e.shown, r.reason, r.at
FROM penstock.entities e LEFT JOIN penstock.current_refusals r USING (kind, name)
WHERE e.kind = %(kind)s AND e.name > %(after)s ORDER BY e.name LIMIT %(limit)s

-- name: entities
-- All of a kind.
SELECT e.name, e.id, e.version, e.managed_by, e.changed_at, e.shown, r.reason, r.at
FROM penstock.entities e LEFT JOIN penstock.current_refusals r USING (kind, name)
WHERE e.kind = %(kind)s

-- name: entity
-- One of them.
SELECT e.name, e.id, e.version, e.managed_by, e.changed_at, e.shown, r.reason, r.at
FROM penstock.entities e LEFT JOIN penstock.current_refusals r USING (kind, name)
WHERE e.kind = %(kind)s AND e.name = %(name)s

-- name: session
-- For the questions to a source's server: none may keep the request waiting.
SELECT pg_catalog.set_config('statement_timeout', '4s', false),
       pg_catalog.set_config('lock_timeout', '2s', false)

-- name: tables
-- The tables of a source's database behind one of a name, by schema and name. `rows` is the server's
-- estimate, null before it has one.
SELECT c.oid::bigint AS oid, n.nspname::text AS schema, c.relname::text AS name,
       c.relkind = 'p' AS partitioned,
       CASE WHEN c.reltuples >= 0 THEN c.reltuples::bigint END AS rows,
       -- By the table's own indexes: EXISTS is planned to read those of the whole database.
       COALESCE((SELECT pg_catalog.bool_or(i.indisprimary) FROM pg_catalog.pg_index i
                 WHERE i.indrelid = c.oid), false) AS has_key,
       pg_catalog.has_schema_privilege(n.oid, 'USAGE')
           AND pg_catalog.has_table_privilege(c.oid, 'SELECT') AS readable,
       EXISTS (SELECT FROM pg_catalog.pg_publication_tables t
               WHERE t.pubname = %(publication)s
                 AND (t.schemaname, t.tablename) = (n.nspname, c.relname)) AS published
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
WHERE c.relkind IN ('r', 'p') AND c.relpersistence = 'p' AND NOT c.relispartition
  AND n.nspname NOT IN ('pg_catalog', 'information_schema', 'penstock', 'tide')
  AND n.nspname !~ '^pg_(toast|temp_)'
  AND (n.nspname::text COLLATE "C", c.relname::text COLLATE "C")
      > (%(schema)s::text COLLATE "C", %(name)s::text COLLATE "C")
ORDER BY n.nspname::text COLLATE "C", c.relname::text COLLATE "C" LIMIT %(limit)s

-- name: columns
-- The columns of a table in their order; `key` is the place in the primary key, from 1. No row: there
-- is no such table.
SELECT a.attname::text AS name, pg_catalog.format_type(a.atttypid, a.atttypmod) AS type,
       NOT a.attnotnull AS nullable, a.attgenerated <> '' AS generated,
       pg_catalog.array_position((i.indkey::smallint[])[0:i.indnkeyatts - 1], a.attnum) AS key
FROM pg_catalog.pg_class c
JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
JOIN pg_catalog.pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_catalog.pg_index i ON i.indrelid = c.oid AND i.indisprimary
WHERE n.nspname = %(schema)s AND c.relname = %(name)s AND c.relkind IN ('r', 'p')
ORDER BY a.attnum

-- name: target_counts
-- How many sinks and consumers name each of some targets. %(names)s: the targets.
SELECT spec ->> 'target', count(*) FILTER (WHERE kind = 'sink'),
       count(*) FILTER (WHERE kind = 'consumer')
FROM penstock.entities
WHERE kind IN ('sink', 'consumer') AND spec ->> 'target' = ANY (%(names)s)
GROUP BY 1

-- name: target_uses
-- The sinks and consumers that name a target, behind one of them.
SELECT kind, name, coalesce(spec ->> 'type', 'pull') AS type
FROM penstock.entities
WHERE kind IN ('sink', 'consumer') AND spec ->> 'target' = %(target)s
  AND (kind, name) > (%(kind)s, %(name)s)
ORDER BY kind, name LIMIT %(limit)s
