-- What the benchmark of the console writes into its store, besides the messages.

-- name: orders
-- The table that the messages are of, for filters.
CREATE TABLE public.orders (
    id bigint PRIMARY KEY, customer_id bigint, status text, amount numeric(10, 2)
)

-- name: set_group
-- One message that is found by its key: the others have hashes of their own making.
UPDATE {segment} SET group_hash = %s WHERE (lsn, idx) = (%s, %s)

-- name: add_letters
-- A hundred dead letters for each of some consumers.
INSERT INTO penstock.dead_letters
    (consumer_id, lsn, idx, idempotency_key, code, reason, message, deliver_count)
SELECT c.id, m.lsn, {places} * m.idx + 1, 'bench-' || m.lsn || '-' || m.idx,
    CASE WHEN m.idx %% 4 = 0 THEN 'filter' ELSE 'max_deliver' END,
    'status 500: the endpoint failed', m.message, 5
FROM penstock.consumers c, bench.messages(1, 100, 10) AS m WHERE c.name = ANY(%s)

-- name: add_backfills
INSERT INTO penstock.backfills
    (source, sink, table_schema, table_name, state, rows_done, rows_total, started_at, ended_at)
SELECT 'shop', 's' || i % {sinks}, 'public', 't' || i % {sinks}, 'done', 1000, 1000, now(), now()
FROM generate_series(1, {backfills}) AS i

-- name: first_entry
INSERT INTO {log} (seq, entry) VALUES (1, {state})
