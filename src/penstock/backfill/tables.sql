-- What a backfill needs to know of a table before it starts. Parameters are psycopg's.

-- name: session
-- Values are read as the backfill itself reads them. A table that is locked delays the others only for
-- a moment.
SELECT pg_catalog.set_config('timezone', 'UTC', false),
       pg_catalog.set_config('search_path', '', false),
       pg_catalog.set_config('datestyle', 'ISO', false),
       pg_catalog.set_config('statement_timeout', '30s', false),
       pg_catalog.set_config('lock_timeout', '2s', false),
       pg_catalog.set_config('default_transaction_read_only', 'on', false)

-- name: column
-- A column's type, and whether an index begins with it. No row: there is no such column.
SELECT pg_catalog.format_type(a.atttypid, a.atttypmod),
       EXISTS (
           SELECT FROM pg_catalog.pg_index i
           JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
           JOIN pg_catalog.pg_am m ON m.oid = c.relam AND m.amname = 'btree'
           WHERE i.indrelid = a.attrelid AND i.indkey[0] = a.attnum AND i.indpred IS NULL)
FROM pg_catalog.pg_attribute a
WHERE a.attrelid = %(oid)s AND a.attname = %(column)s AND a.attnum > 0 AND NOT a.attisdropped

-- name: order
-- Whether a column has an order: planned, not run.
EXPLAIN SELECT FROM {table} ORDER BY {column}

-- name: value
-- A value as its type prints it.
SELECT CAST(%s AS {type})::pg_catalog.text

-- name: estimate
EXPLAIN (FORMAT JSON) SELECT FROM {table} WHERE {condition}
