-- Tokens of credentials: what OAuth servers handed out, encrypted.

-- name: lock
-- Only one session asks for a token at a time: a refresh token may serve once.
select pg_advisory_xact_lock(hashtextextended('penstock.credential_tokens ' || %s, 0));

-- name: load
select origin, key_id, sealed from penstock.credential_tokens where credential = %s;

-- name: save
insert into penstock.credential_tokens (credential, origin, key_id, sealed, updated_at)
values (%s, %s, %s, %s, now())
on conflict (credential) do update
set origin = excluded.origin, key_id = excluded.key_id, sealed = excluded.sealed, updated_at = now();
