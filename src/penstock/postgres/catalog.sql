-- The catalog look-ups of a capture. Parameters are psycopg's.

-- name: primary_key
-- The columns of a table's primary key, in key order. %(oid)s: the table. No row: it has none.
SELECT a.attname
FROM pg_catalog.pg_index i
CROSS JOIN LATERAL unnest(i.indkey::smallint[]) WITH ORDINALITY AS k (attnum, place)
JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
WHERE i.indrelid = %(oid)s AND i.indisprimary AND k.place <= i.indnkeyatts
ORDER BY k.place

-- name: slot
-- Where a slot stands. %(slot)s: its name. No row: there is no such slot.
SELECT confirmed_flush_lsn::text, pg_catalog.pg_current_wal_flush_lsn()::text
FROM pg_catalog.pg_replication_slots
WHERE slot_name = %(slot)s AND slot_type = 'logical'
