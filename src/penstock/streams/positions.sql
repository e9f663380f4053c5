-- Up to where each source's slot was confirmed, and which source has a gap.

-- name: get
SELECT source, tag, lsn, committed_at, at, gap FROM penstock.positions WHERE source = %s

-- name: record
-- A run's position. A gap keeps the position that it begins at.
INSERT INTO penstock.positions (source, tag, lsn, committed_at)
VALUES (%(source)s, %(tag)s, %(lsn)s, %(committed_at)s)
ON CONFLICT (source) DO UPDATE
SET tag = excluded.tag, lsn = excluded.lsn, at = now(),
    committed_at = coalesce(excluded.committed_at, positions.committed_at)
WHERE positions.gap IS NULL

-- name: note_gap
-- The first cause counts.
INSERT INTO penstock.positions (source, tag, lsn, gap) VALUES (%(source)s, %(tag)s, 0, %(gap)s)
ON CONFLICT (source) DO UPDATE SET gap = coalesce(positions.gap, excluded.gap)

-- name: open_gap
-- What `penstock recover` records before it changes anything, so that it can be run again.
INSERT INTO penstock.positions (source, tag, lsn, committed_at, gap)
VALUES (%(source)s, %(tag)s, %(lsn)s, %(committed_at)s, %(gap)s)
ON CONFLICT (source) DO UPDATE
SET tag = excluded.tag, lsn = excluded.lsn, committed_at = excluded.committed_at, gap = excluded.gap

-- name: close_gap
DELETE FROM penstock.positions WHERE source = %s
