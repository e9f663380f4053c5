-- The console's logins, by the hash of what the browser has.

-- name: begin
WITH gone AS (
    DELETE FROM penstock.console_sessions
    WHERE seen_at < now() - %(idle)s OR created_at < now() - %(longest)s
)
INSERT INTO penstock.console_sessions (hash, token_id)
SELECT %(hash)s, id FROM penstock.tokens WHERE hash = %(token)s AND revoked_at IS NULL

-- name: find
SELECT t.name, t.role, s.seen_at < now() - %(stale)s
FROM penstock.console_sessions s JOIN penstock.tokens t ON t.id = s.token_id
WHERE s.hash = %(hash)s AND t.revoked_at IS NULL AND t.role <> 'worker'
    AND s.seen_at >= now() - %(idle)s AND s.created_at >= now() - %(longest)s

-- name: touch
UPDATE penstock.console_sessions SET seen_at = now() WHERE hash = %(hash)s

-- name: end
DELETE FROM penstock.console_sessions WHERE hash = %(hash)s
