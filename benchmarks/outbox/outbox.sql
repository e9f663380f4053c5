-- What the benchmarks of the outbox do in Postgres.

-- name: payload
-- About 200 bytes, of a message by its number.
jsonb_build_object('id', {i}, 'type', 'order.shipped', 'customer_id', mod({i}, 1000),
    'amount', mod({i}, 10000) / 100.0, 'note', repeat('a note of the order ', 5) || {i},
    'created_at', clock_timestamp())

-- name: create
SELECT tide.outbox_create({outbox})

-- name: drop
SELECT tide.outbox_drop({outbox}, force => true)

-- name: rows
SELECT tide.outbox_publish({outbox}, {payload}) FROM generate_series(%s::bigint, %s::bigint) AS i

-- name: single_rows
DO $do$ BEGIN
    FOR i IN {first}..{last} LOOP
        PERFORM tide.outbox_publish({outbox}, {payload});
        COMMIT;
    END LOOP;
END $do$

-- name: snapshot
SELECT pg_current_snapshot()::text

-- name: set_relay
SELECT tide.relay_set_outbox(%(name)s, %(outbox)s, %(name)s, %(config)s)

-- name: enable
SELECT tide.relay_enable(%(name)s)

-- name: place
-- What a relay leaves that has run, and has delivered all that `snapshot` shows.
INSERT INTO tide.checkpoints (relay_group, pipeline, outbox, lsn, delivered_snapshot)
VALUES (%(name)s, %(name)s, %(outbox)s, '0/0', %(snapshot)s)

-- name: delete_relay
SELECT tide.relay_delete(%(name)s)

-- name: peer
-- A table like the outbox's: its columns, defaults and indexes.
CREATE TABLE public.published (LIKE tide.outbox_published INCLUDING ALL)

-- name: drop_peer
DROP TABLE public.published

-- name: bulk_publish
SELECT count(tide.outbox_publish('published', {payload})) FROM generate_series(1, {rows}) AS i

-- name: bulk_loop
DO $do$ BEGIN
    FOR i IN 1..{rows} LOOP
        INSERT INTO public.published (payload, headers) VALUES ({payload}, '{{}}');
    END LOOP;
END $do$

-- name: bulk_insert
INSERT INTO public.published (payload, headers)
SELECT {payload}, '{{}}' FROM generate_series(1, {rows}) AS i
