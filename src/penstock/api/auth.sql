-- name: tokens
-- The tokens that are valid.
SELECT hash, name, role, consumers FROM penstock.tokens WHERE revoked_at IS NULL
