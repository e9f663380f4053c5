-- What a plan's consequences are read from.

-- name: streams
-- Without those of deleted sinks, which are dropped before another sink of their name begins.
SELECT st.name, so.name, st.kind FROM penstock.streams st
JOIN penstock.sources so ON so.id = st.source_id
WHERE NOT EXISTS (SELECT FROM penstock.removals r WHERE r.kind = 'sink' AND r.name = st.name)

-- name: consumers
-- The consumers but for the streams' own, each with the dead letters that go with it: those of one of
-- type nats stay.
SELECT c.name, s.name,
       (SELECT count(*) FROM penstock.dead_letters d WHERE d.consumer_id = c.id)
FROM penstock.consumers c JOIN penstock.streams s ON s.id = c.stream_id WHERE NOT c.own
UNION ALL
SELECT n.name, s.name, 0 FROM penstock.nats_consumers n JOIN penstock.streams s ON s.id = n.stream_id

-- name: backlogs
SELECT b.sink, s.name, coalesce(sum(k.rows), 0)::bigint
FROM penstock.backlogs b JOIN penstock.sources s ON s.id = b.source_id
LEFT JOIN penstock.backlog_blocks k USING (source_id, sink)
WHERE NOT EXISTS (SELECT FROM penstock.removals r WHERE r.kind = 'sink' AND r.name = b.sink)
  AND NOT EXISTS (SELECT FROM penstock.nats_consumers n WHERE n.name = b.sink)
GROUP BY b.sink, s.name

-- name: positions
-- The sources that have run, with when the newest transaction before their position was committed.
SELECT source, to_char(committed_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS') FROM penstock.positions

-- name: segments
-- The segments of streams, with the planner's estimate of their messages, -1 where it has none.
SELECT st.name, g.id, c.reltuples::bigint FROM penstock.segments g
JOIN penstock.streams st ON st.id = g.stream_id
JOIN pg_class c ON c.oid = to_regclass('penstock.segment_' || g.id)
WHERE st.name = ANY(%s)
