-- The catalog's word on types. Everything is qualified: the session's search_path is not ours.

-- name: types
-- Each type of the list, and whatever it is made of: elements, domain bases, composite attributes.
WITH RECURSIVE asked (oid) AS (
    SELECT pg_catalog.unnest(%(oids)s::pg_catalog.oid[])
    UNION
    SELECT part.oid
    FROM asked
    JOIN pg_catalog.pg_type AS t ON t.oid = asked.oid
    CROSS JOIN LATERAL (
        SELECT e.oid FROM pg_catalog.pg_type AS e WHERE e.oid = t.typelem AND e.typarray = t.oid
        UNION ALL
        SELECT t.typbasetype WHERE t.typbasetype <> 0
        UNION ALL
        SELECT a.atttypid
        FROM pg_catalog.pg_attribute AS a
        WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped AND t.typtype = 'c'
    ) AS part (oid)
)
SELECT
    t.oid,
    n.nspname::pg_catalog.text,
    t.typname::pg_catalog.text,
    t.typtype::pg_catalog.text,
    -- Only the array type that a type names as its own is printed as an array; int2vector, point and
    -- others have a typelem too.
    coalesce(e.oid, 0),
    t.typbasetype,
    t.typdelim::pg_catalog.text,
    attributes.names,
    attributes.types
FROM asked
JOIN pg_catalog.pg_type AS t ON t.oid = asked.oid
JOIN pg_catalog.pg_namespace AS n ON n.oid = t.typnamespace
LEFT JOIN pg_catalog.pg_type AS e ON e.oid = t.typelem AND e.typarray = t.oid
CROSS JOIN LATERAL (
    SELECT
        pg_catalog.array_agg(a.attname::pg_catalog.text ORDER BY a.attnum) AS names,
        pg_catalog.array_agg(a.atttypid::pg_catalog.int8 ORDER BY a.attnum) AS types
    FROM pg_catalog.pg_attribute AS a
    WHERE a.attrelid = t.typrelid AND a.attnum > 0 AND NOT a.attisdropped AND t.typtype = 'c'
) AS attributes
ORDER BY t.oid
