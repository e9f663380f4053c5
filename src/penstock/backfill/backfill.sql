-- What a backfill asks of the source. Parameters are psycopg's; {names} are put in as SQL. Everything
-- is qualified, as the session's search_path is empty.

-- name: session
-- Limits of a session that reads a table, over those of a capture's. `row_security` off: a policy that
-- hid rows is an error. `standard_conforming_strings` on: a condition is read as it was when it was
-- checked. %(statement)s: how long a statement may last.
SELECT pg_catalog.set_config(s.name, v.value, false)
FROM (VALUES
    ('row_security', 'off'),
    ('standard_conforming_strings', 'on'),
    ('lock_timeout', '2s'),
    ('statement_timeout', %(statement)s),
    ('idle_in_transaction_session_timeout', '0'),
    ('idle_session_timeout', '0'),
    ('synchronous_commit', 'local'),
    ('default_transaction_read_only', 'off')) AS v (name, value)
JOIN pg_catalog.pg_settings AS s ON s.name = v.name

-- name: server
-- Whether a watermark can be written here, and whether text is UTF-8 for certain.
SELECT pg_catalog.pg_is_in_recovery(),
       pg_catalog.current_setting('server_encoding') <> 'SQL_ASCII'

-- name: table
-- A table by its name. %(schema)s, %(table)s. No row: there is none.
SELECT c.oid::pg_catalog.int8, c.relkind::pg_catalog.text, c.relreplident::pg_catalog.text,
       pg_catalog.row_security_active(c.oid)
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND c.relkind IN ('r', 'p')

-- name: published
-- What a publication has of a table. %(publication)s, %(schema)s, %(table)s. No row: nothing. Names
-- of columns, null for all (before Postgres 15 there are no lists), and the row filter.
SELECT (SELECT pg_catalog.array_agg(a) FROM pg_catalog.jsonb_array_elements_text(
            CASE WHEN t.j -> 'attnames' <> 'null' THEN t.j -> 'attnames' END) AS a),
       t.j ->> 'rowfilter'
FROM (SELECT pg_catalog.to_jsonb(p) AS j FROM pg_catalog.pg_publication_tables AS p
      WHERE p.pubname = %(publication)s AND p.schemaname = %(schema)s
        AND p.tablename = %(table)s) AS t

-- name: columns
-- The columns that the WAL has of a table, in its order. %(oid)s: the table. %(names)s: those that
-- are published, null for all. Before Postgres 18 no generated column is, even if the list names it.
-- Last: whether it belongs to the replica identity.
SELECT a.attname::pg_catalog.text, a.atttypid::pg_catalog.int8, a.atttypmod,
       c.relreplident = 'f' OR EXISTS (
           SELECT FROM pg_catalog.pg_index AS i
           WHERE i.indrelid = c.oid AND i.indisvalid AND i.indimmediate
             AND a.attnum = ANY ((i.indkey::pg_catalog.int2[])[0:i.indnkeyatts - 1])
             AND CASE c.relreplident WHEN 'd' THEN i.indisprimary
                                     WHEN 'i' THEN i.indisreplident ELSE false END)
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid
WHERE c.oid = %(oid)s AND a.attnum > 0 AND NOT a.attisdropped
  AND (%(names)s::pg_catalog.text[] IS NULL OR a.attname = ANY (%(names)s::pg_catalog.text[]))
  AND (a.attgenerated = '' OR (
      a.attgenerated = 's' AND %(names)s::pg_catalog.text[] IS NOT NULL
      AND pg_catalog.current_setting('server_version_num')::pg_catalog.int4 >= 180000))
ORDER BY a.attnum

-- name: fingerprint
-- All that `inspect` depends on and that may change while a backfill runs, to be compared with what it was:
-- the table, its columns, its keys, its partitions' replica identities, what the publication has of it,
-- and the fields of composite types. %(schema)s, %(table)s, %(publication)s. No row: there is no table.
SELECT c.oid::pg_catalog.int8, c.relkind::pg_catalog.text, c.relreplident::pg_catalog.text,
       pg_catalog.row_security_active(c.oid),
       (SELECT pg_catalog.array_agg(
            ROW(a.attnum, a.attname, a.atttypid, a.atttypmod, a.attcollation,
                a.attgenerated)::pg_catalog.text ORDER BY a.attnum)
        FROM pg_catalog.pg_attribute AS a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped),
       (SELECT pg_catalog.array_agg(k.key ORDER BY k.key)
        FROM (SELECT ROW(i.indkey, i.indnkeyatts, i.indisprimary, i.indisreplident, i.indisvalid,
                         i.indimmediate)::pg_catalog.text AS key
              FROM pg_catalog.pg_index AS i
              WHERE i.indrelid = c.oid AND (i.indisprimary OR i.indisreplident)) AS k),
       CASE WHEN c.relkind = 'p' THEN (
           SELECT pg_catalog.array_agg(DISTINCT l.relreplident::pg_catalog.text)
           FROM pg_catalog.pg_partition_tree(c.oid) AS t
           JOIN pg_catalog.pg_class AS l ON l.oid = t.relid
           WHERE t.isleaf) END,
       (SELECT pg_catalog.array_agg(pg_catalog.to_jsonb(p)::pg_catalog.text)
        FROM pg_catalog.pg_publication_tables AS p
        WHERE p.pubname = %(publication)s AND p.schemaname = n.nspname
          AND p.tablename = c.relname),
       (WITH RECURSIVE used (oid) AS (
            SELECT a.atttypid FROM pg_catalog.pg_attribute AS a
            WHERE a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
              AND a.atttypid >= 16384
            UNION
            SELECT l.oid
            FROM used AS u
            JOIN pg_catalog.pg_type AS t ON t.oid = u.oid
            CROSS JOIN LATERAL (
                SELECT t.typelem UNION ALL SELECT t.typbasetype UNION ALL
                SELECT a.atttypid FROM pg_catalog.pg_attribute AS a
                WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped) AS l (oid)
            WHERE l.oid >= 16384)
        SELECT pg_catalog.array_agg(
                   ROW(f.attrelid, f.attnum, f.attname, f.atttypid, f.atttypmod)::pg_catalog.text
                   ORDER BY f.attrelid, f.attnum)
        FROM used AS u
        JOIN pg_catalog.pg_type AS t ON t.oid = u.oid
        JOIN pg_catalog.pg_attribute AS f ON f.attrelid = t.typrelid
        WHERE f.attnum > 0 AND NOT f.attisdropped)
FROM pg_catalog.pg_class AS c
JOIN pg_catalog.pg_namespace AS n ON n.oid = c.relnamespace
WHERE n.nspname = %(schema)s AND c.relname = %(table)s AND c.relkind IN ('r', 'p')

-- name: ordered
-- How columns are compared: the type that a value is cast to (a domain's base), and the schema of its
-- operators `>`, `=` and the others; whether it is a domain; its collation. %(oid)s: the table;
-- %(columns)s: its columns, in this order. A schema is null where the type has no order.
SELECT k.name,
       pg_catalog.format_type(b.oid, -1),
       o.nspname::pg_catalog.text,
       a.atttypid <> b.oid,
       COALESCE((SELECT pg_catalog.quote_ident(s.nspname) || '.' || pg_catalog.quote_ident(l.collname)
                 FROM pg_catalog.pg_collation AS l
                 JOIN pg_catalog.pg_namespace AS s ON s.oid = l.collnamespace
                 WHERE l.oid = a.attcollation), '')
FROM pg_catalog.unnest(%(columns)s::pg_catalog.text[]) WITH ORDINALITY AS k (name, place)
JOIN pg_catalog.pg_attribute AS a ON a.attrelid = %(oid)s AND a.attname = k.name
CROSS JOIN LATERAL (
    WITH RECURSIVE base (oid) AS (
        SELECT a.atttypid
        UNION ALL
        SELECT t.typbasetype FROM base JOIN pg_catalog.pg_type AS t ON t.oid = base.oid
        WHERE t.typtype = 'd')
    SELECT t.oid, t.typtype, t.typcategory
    FROM base JOIN pg_catalog.pg_type AS t ON t.oid = base.oid
    WHERE t.typtype <> 'd') AS b
LEFT JOIN LATERAL (
    -- The default operator class for B-trees, as ORDER BY finds it.
    SELECT n.nspname
    FROM pg_catalog.pg_opclass AS c
    JOIN pg_catalog.pg_am AS m ON m.oid = c.opcmethod AND m.amname = 'btree'
    JOIN pg_catalog.pg_amop AS p ON p.amopfamily = c.opcfamily AND p.amopstrategy = 5
     AND p.amoplefttype = c.opcintype AND p.amoprighttype = c.opcintype
    JOIN pg_catalog.pg_operator AS g ON g.oid = p.amopopr AND g.oprname = '>'
    JOIN pg_catalog.pg_namespace AS n ON n.oid = g.oprnamespace
    JOIN pg_catalog.pg_type AS i ON i.oid = c.opcintype
    WHERE c.opcdefault AND (
        c.opcintype = b.oid
        OR i.typname = CASE b.typtype WHEN 'e' THEN 'anyenum' WHEN 'r' THEN 'anyrange'
                                      WHEN 'm' THEN 'anymultirange' WHEN 'c' THEN 'record'
                                      ELSE CASE b.typcategory WHEN 'A' THEN 'anyarray' END END
        OR EXISTS (SELECT FROM pg_catalog.pg_cast AS x
                   WHERE x.castsource = b.oid AND x.casttarget = c.opcintype
                     AND x.castmethod = 'b'))
    ORDER BY c.opcintype = b.oid DESC, i.typispreferred DESC
    LIMIT 1) AS o ON true
WHERE a.attnum > 0 AND NOT a.attisdropped
ORDER BY k.place

-- name: begin
-- A transaction that sees one state of the database.
BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY

-- name: lock
-- Before the snapshot is taken: a rewrite or truncation after it would show no row.
LOCK TABLE {table} IN ACCESS SHARE MODE

-- name: snapshot
-- What the transaction's snapshot sees.
SELECT pg_catalog.pg_current_snapshot()::pg_catalog.text

-- name: waiting
-- Transactions whose commit record was written, and that a standby has not confirmed yet: their ids,
-- and whether there may be others, as the role may not see, or who commits is not who began. No row:
-- commits wait for no standby.
SELECT COALESCE(pg_catalog.array_agg(a.backend_xid::pg_catalog.text::pg_catalog.int8)
                FILTER (WHERE a.backend_xid IS NOT NULL), '{}'),
       COALESCE(pg_catalog.bool_or(a.backend_xid IS NULL), false)
FROM pg_catalog.pg_stat_activity AS a
WHERE pg_catalog.current_setting('synchronous_standby_names') <> ''
  AND (a.wait_event = 'SyncRep' OR a.query = '<insufficient privilege>')

-- name: end
-- Where the WAL ends that can be decoded.
SELECT (pg_catalog.pg_current_wal_flush_lsn() - '0/0'::pg_catalog.pg_lsn)::pg_catalog.int8

-- name: newest
-- The newest transaction id that was given out.
SELECT pg_catalog.pg_current_xact_id()::pg_catalog.text::pg_catalog.int8

-- name: watermark
-- Writes a message into the WAL, in a transaction of its own. %(content)s: bytes.
SELECT pg_catalog.pg_logical_emit_message(true, 'penstock', %(content)s::pg_catalog.bytea)

-- name: bound
-- The last key of the next rows, behind `offset` others.
SELECT {key} FROM {table} WHERE {condition} ORDER BY {order} OFFSET {offset} LIMIT 1

-- name: weight
-- How many bytes a row of the next few has on average, as text. {bytes}: those of a row.
SELECT pg_catalog.avg({bytes})::pg_catalog.float8
FROM (SELECT {columns} FROM {table} WHERE {condition} ORDER BY {order} LIMIT 16) AS next

-- name: scan
-- Of the next `scanned` rows, the key of the one that the filter holds for as the `rows`th, and of the last
-- one looked at. Before the key: for how many it held up to there, and whether there may be more rows
-- behind.
SELECT s.matched, s.places >= {scanned}, {names}
FROM (
    SELECT {names}, passed,
           pg_catalog.row_number() OVER w AS place,
           pg_catalog.count(*) OVER () AS places,
           pg_catalog.count(*) FILTER (WHERE passed) OVER w AS matched
    FROM (SELECT {named}, ({filter}) IS TRUE AS passed FROM {table} WHERE {condition}
          ORDER BY {order} LIMIT {scanned}) AS looked
    WINDOW w AS (ORDER BY {names} ROWS UNBOUNDED PRECEDING)) AS s
WHERE (s.passed AND s.matched = {rows}) OR s.place = s.places
ORDER BY s.place

-- name: copy
-- A range's rows, in the one order that they have whenever they are read again.
COPY (SELECT {columns} FROM {table} WHERE {condition} ORDER BY {order})
TO STDOUT (FORMAT csv, ENCODING {encoding})
