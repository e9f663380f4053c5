-- The catalog's word on the columns that expressions name. Everything is qualified: the session's
-- search_path is not ours. Parameters are psycopg's.

-- name: columns
-- The columns of some tables, in their order, each with its type. %(schemas)s, %(tables)s: the
-- tables' names, side by side. A domain stands for its base type and the type modifier that it gives
-- to it. `element` is of arrays alone. `labels` are an enum's, in order. Last: the column's own type and
-- type modifier, and how a generated column is kept (s stored, v virtual) and what it is made of.
WITH RECURSIVE asked AS (
    SELECT n.nspname::pg_catalog.text AS schema_name, c.relname::pg_catalog.text AS table_name,
           a.attnum, a.attname::pg_catalog.text AS column_name, a.atttypid, a.atttypmod,
           a.attgenerated::pg_catalog.text AS generated,
           CASE WHEN a.attgenerated <> '' THEN (
               SELECT pg_catalog.pg_get_expr(d.adbin, d.adrelid)
               FROM pg_catalog.pg_attrdef AS d
               WHERE d.adrelid = a.attrelid AND d.adnum = a.attnum) END AS definition
    FROM ROWS FROM (
        pg_catalog.unnest(%(schemas)s::pg_catalog.text[]),
        pg_catalog.unnest(%(tables)s::pg_catalog.text[])
    ) AS w (schema_name, table_name)
    JOIN pg_catalog.pg_namespace AS n ON n.nspname = w.schema_name
    JOIN pg_catalog.pg_class AS c ON c.relnamespace = n.oid AND c.relname = w.table_name
    JOIN pg_catalog.pg_attribute AS a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
    WHERE c.relkind IN ('r', 'p', 'v', 'm', 'f')
),
-- A step goes from a domain to its base type, and from an array to its element.
steps (type_oid, typmod, of_oid, of_typmod, element) AS (
    SELECT DISTINCT atttypid, atttypmod, atttypid, atttypmod, false FROM asked
    UNION
    SELECT CASE t.typtype WHEN 'd' THEN t.typbasetype ELSE e.oid END,
           CASE WHEN t.typtype = 'd' AND t.typtypmod <> -1 THEN t.typtypmod ELSE s.typmod END,
           s.of_oid, s.of_typmod, s.element OR t.typtype <> 'd'
    FROM steps AS s
    JOIN pg_catalog.pg_type AS t ON t.oid = s.type_oid
    LEFT JOIN pg_catalog.pg_type AS e ON e.oid = t.typelem AND e.typarray = t.oid
    WHERE t.typtype = 'd' OR e.oid IS NOT NULL
),
resolved AS (
    SELECT s.of_oid, s.of_typmod, s.element, s.typmod,
           n.nspname::pg_catalog.text AS type_schema, t.typname::pg_catalog.text AS type_name,
           t.typtype::pg_catalog.text AS type_kind, e.oid IS NOT NULL AS is_array,
           ARRAY(SELECT l.enumlabel::pg_catalog.text FROM pg_catalog.pg_enum AS l
                 WHERE l.enumtypid = t.oid ORDER BY l.enumsortorder) AS labels
    FROM steps AS s
    JOIN pg_catalog.pg_type AS t ON t.oid = s.type_oid
    JOIN pg_catalog.pg_namespace AS n ON n.oid = t.typnamespace
    LEFT JOIN pg_catalog.pg_type AS e ON e.oid = t.typelem AND e.typarray = t.oid
    WHERE t.typtype <> 'd'
)
SELECT w.schema_name, w.table_name, w.column_name,
       b.type_schema, b.type_name, b.type_kind, b.typmod, b.labels,
       e.type_schema, e.type_name, e.type_kind, e.typmod, e.labels,
       w.atttypid::pg_catalog.int8, w.atttypmod, w.generated, w.definition
FROM asked AS w
JOIN resolved AS b ON b.of_oid = w.atttypid AND b.of_typmod = w.atttypmod AND NOT b.element
LEFT JOIN resolved AS e ON e.of_oid = w.atttypid AND e.of_typmod = w.atttypmod AND e.element
    AND NOT e.is_array
ORDER BY w.schema_name, w.table_name, w.attnum
