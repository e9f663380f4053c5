-- What a backfill needs to know of a table before it starts. Parameters are psycopg's.

-- name: session
-- Values and conditions are read as the backfill itself reads them. A table that is locked delays the
-- others only for a moment.
SELECT pg_catalog.set_config('timezone', 'UTC', false),
       pg_catalog.set_config('search_path', '', false),
       pg_catalog.set_config('standard_conforming_strings', 'on', false),
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

-- name: refused
-- Of some names, those of built-in functions that no condition may call. A volatile one may have an
-- effect. A stable one may read settings, the catalog or other tables, but for those that are listed.
-- The parameter: the names.
SELECT p.proname::pg_catalog.text
FROM pg_catalog.pg_proc AS p
WHERE p.pronamespace = 'pg_catalog'::pg_catalog.regnamespace AND p.proname = ANY (%s::pg_catalog.text[])
GROUP BY p.proname
HAVING pg_catalog.bool_or(p.provolatile = 'v')
    OR (pg_catalog.bool_and(p.provolatile = 's') AND p.proname <> ALL (ARRAY[
        'array_to_json', 'array_to_string', 'concat', 'concat_ws', 'format', 'json_build_array',
        'json_build_object', 'jsonb_build_array', 'jsonb_build_object', 'jsonb_path_exists_tz',
        'jsonb_path_match_tz', 'jsonb_path_query_array_tz', 'jsonb_path_query_first_tz',
        'make_timestamptz', 'now', 'row_to_json', 'statement_timestamp', 'to_char', 'to_date', 'to_json',
        'to_jsonb', 'to_number', 'transaction_timestamp']))
ORDER BY 1

-- name: condition
-- Parsed and looked up, not planned.
PREPARE penstock_condition AS SELECT FROM {table} WHERE ({condition})

-- name: bare_condition
-- The same without the parentheses that a text may close.
PREPARE penstock_condition AS SELECT FROM {table} WHERE {condition}
