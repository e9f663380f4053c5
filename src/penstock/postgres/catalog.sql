-- The look-ups of a capture. Parameters are psycopg's.

-- name: shapes
-- What the WAL of tables lacks. %(oids)s: the tables; no row: it was dropped since. `primary_key`
-- is in key order. `identities` are the replica identities of a partitioned table's partitions. Last:
-- whether the primary key is deferrable, and the generated columns, which the WAL may lack.
SELECT
    c.oid,
    COALESCE((
        SELECT pg_catalog.array_agg(a.attname::pg_catalog.text ORDER BY k.place)
        FROM pg_catalog.pg_index AS i
        CROSS JOIN LATERAL pg_catalog.unnest(i.indkey::pg_catalog.int2[])
            WITH ORDINALITY AS k (attnum, place)
        JOIN pg_catalog.pg_attribute AS a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
        WHERE i.indrelid = c.oid AND i.indisprimary AND k.place <= i.indnkeyatts), '{}'),
    CASE WHEN c.relkind = 'p' THEN COALESCE((
        SELECT pg_catalog.array_agg(DISTINCT l.relreplident::pg_catalog.text)
        FROM pg_catalog.pg_partition_tree(c.oid) AS t
        JOIN pg_catalog.pg_class AS l ON l.oid = t.relid
        WHERE t.isleaf), '{}') END,
    EXISTS (
        SELECT FROM pg_catalog.pg_index AS i
        WHERE i.indrelid = c.oid AND i.indisprimary AND NOT i.indimmediate),
    ARRAY(
        SELECT a.attname::pg_catalog.text
        FROM pg_catalog.pg_attribute AS a
        WHERE a.attrelid = c.oid AND a.attnum > 0 AND a.attgenerated <> '' AND NOT a.attisdropped
        ORDER BY a.attnum)
FROM pg_catalog.pg_class AS c
WHERE c.oid = ANY (%(oids)s::pg_catalog.oid[])

-- name: published
-- Tables of a publication, so many at most. %(publication)s: its name.
SELECT ARRAY(
    SELECT t.relid FROM pg_catalog.pg_get_publication_tables(%(publication)s) AS t LIMIT 1000)

-- name: position
-- Where the WAL ends now: what is looked up next is at least as new as what stands before it.
SELECT CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
            ELSE pg_catalog.pg_current_wal_insert_lsn() END::pg_catalog.text

-- name: slot
-- Where a slot stands. %(slot)s: its name. No row: there is no such slot.
SELECT s.confirmed_flush_lsn::pg_catalog.text,
       CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
            ELSE pg_catalog.pg_current_wal_flush_lsn() END::pg_catalog.text
FROM pg_catalog.pg_replication_slots AS s
WHERE s.slot_name = %(slot)s AND s.slot_type = 'logical'

-- name: is_read
-- Whether some session reads a slot. %(slot)s: its name.
SELECT s.active
FROM pg_catalog.pg_replication_slots AS s
WHERE s.slot_name = %(slot)s

-- name: settings
-- Fixes what a value's text depends on, and what could end the stream, whatever the server, the
-- database or the role has set; a setting that an older server lacks is passed by.
SELECT pg_catalog.set_config(s.name, v.value, false)
FROM (VALUES
    ('timezone', 'UTC'),
    ('datestyle', 'ISO'),
    ('intervalstyle', 'iso_8601'),
    ('extra_float_digits', '3'),
    ('bytea_output', 'hex'),
    ('quote_all_identifiers', 'off'),
    ('search_path', ''),
    ('client_min_messages', 'warning'),
    ('statement_timeout', '0'),
    ('lock_timeout', '0'),
    ('transaction_timeout', '0'),
    ('idle_session_timeout', '0')) AS v (name, value)
JOIN pg_catalog.pg_settings AS s ON pg_catalog.lower(s.name) = v.name

-- name: wal_end
-- Up to where a primary's WAL is on disk; null on a standby.
SELECT CASE WHEN NOT pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_current_wal_flush_lsn()
       END::pg_catalog.text

-- name: stream
-- What there is to know before a stream starts, in one row. %(slot)s, %(publication)s: names.
SELECT
    s.plugin::pg_catalog.text,
    s.slot_type,
    s.database::pg_catalog.text,
    s.wal_status = 'lost' OR pg_catalog.to_jsonb(s) ->> 'invalidation_reason' IS NOT NULL,
    s.confirmed_flush_lsn::pg_catalog.text,
    EXISTS (SELECT FROM pg_catalog.pg_publication AS p WHERE p.pubname = %(publication)s),
    CASE WHEN pg_catalog.pg_is_in_recovery() THEN pg_catalog.pg_last_wal_replay_lsn()
         ELSE pg_catalog.pg_current_wal_flush_lsn() END::pg_catalog.text,
    (SELECT setting::pg_catalog.int8 FROM pg_catalog.pg_settings WHERE name = 'wal_sender_timeout')
FROM (SELECT) AS one
LEFT JOIN pg_catalog.pg_replication_slots AS s ON s.slot_name = %(slot)s
