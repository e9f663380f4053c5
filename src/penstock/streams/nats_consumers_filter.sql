-- The functions of the filters of consumers of type nats; see nats_consumers_filter.py.

-- name: functions
-- By what they are known, all but those of other consumers.
SELECT substr(p.proname, length('filter_') + 1) FROM pg_proc p
JOIN pg_namespace n ON n.oid = p.pronamespace
WHERE n.nspname = 'penstock' AND starts_with(p.proname, 'filter_' || %s)

-- name: evaluated
-- Once each, although the answer is used twice: OFFSET 0 keeps the planner from repeating the call.
SELECT CASE WHEN left(f.passed, 1) = '!' THEN f.passed ELSE left(f.passed, 0) END
FROM unnest(%s::text[], %s::text[]) WITH ORDINALITY AS m (message, action, n)
CROSS JOIN LATERAL (SELECT {passed} AS passed OFFSET 0) AS f
ORDER BY m.n
