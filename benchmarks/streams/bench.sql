-- What the benchmarks of streams fill and read.

-- name: messages
-- The messages numbered `first` to `last`, for both sides the same: a small row in the envelope that
-- the capture makes, 100 to a transaction, spread over the groups as by chance.
CREATE SCHEMA bench;
CREATE FUNCTION bench.messages(first bigint, last bigint, groups bigint)
RETURNS TABLE (lsn bigint, idx bigint, group_hash bigint, message text)
LANGUAGE sql STABLE AS $$
    SELECT m.lsn, m.idx, hashint8extended(g.number, 0),
        '{"record":{"id":' || i || ',"customer_id":' || g.number
        || ',"status":"pending","amount":"' || (i % 10000) || '.50"},"changes":null,"action":"insert",'
        || '"metadata":{"table_schema":"public","table_name":"orders","database":"shop",'
        || '"commit_timestamp":"2026-11-21T11:00:00.000000Z","commit_lsn":' || m.lsn
        || ',"transaction_id":' || i / 100 || ',"idempotency_key":"9f86d081884c7d65-' || m.lsn || '-'
        || m.idx || '","commit_idx":' || m.idx || ',"record_pks":[' || i || '],"unavailable":[]}}'
    FROM generate_series(first, last) AS i,
        LATERAL (SELECT 1000000 + (i - 1) / 100 AS lsn, (i - 1) % 100 AS idx) AS m,
        LATERAL (SELECT (hashint8(i) & 2147483647) % groups AS number) AS g
$$

-- name: open_segment
SELECT id FROM penstock.segments WHERE stream_id = %s AND through_lsn IS NULL

-- name: add_to_segment
INSERT INTO {segment} (lsn, idx, group_hash, table_schema, table_name, action, message)
SELECT lsn, {places} * idx + 1, group_hash, 'public', 'orders', 'insert', message
FROM bench.messages(%s, %s, %s)

-- name: add_to_queue
-- As pgmq.send_batch does it.
INSERT INTO pgmq.q_bench (vt, message)
SELECT now(), message::jsonb FROM bench.messages(%s, %s, %s)

-- name: create_queue
SELECT pgmq.create('bench')

-- name: empty_queue
TRUNCATE pgmq.q_bench

-- name: vacuum
-- Statistics and hint bits, which a stream or a queue that is in use has had long since.
VACUUM (ANALYZE) {table}

-- name: bytes
SELECT coalesce(sum(pg_total_relation_size(c.oid)), 0)::bigint FROM pg_class c
WHERE c.relkind = 'r' AND c.oid = ANY(%s::regclass[])

-- name: message_bytes
SELECT avg(octet_length(message))::float8 FROM bench.messages(1, 1000, 100)

-- name: hold
-- A row read and a transaction id: from now on no dead row that is younger can be removed.
SELECT pg_current_xact_id(), (SELECT count(*) FROM pg_class)

-- name: read
SELECT msg_id, read_ct, message FROM pgmq.read('bench', %s, %s)

-- name: delete
-- The numbers come as one text, which costs the worker less than a list.
SELECT count(*) FROM pgmq.delete('bench', %s::text::bigint[])

-- name: delete_consumer
DELETE FROM penstock.consumers WHERE name = %s
