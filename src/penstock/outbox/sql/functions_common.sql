-- What the functions of `tide` share. Those that begin with `_` are no interface.

-- name: check_name
-- Raises TD001 unless `given` can name a `what`: an identifier of SQL, or with `dotted` also with `-`
-- and `.` behind its first character.
CREATE OR REPLACE FUNCTION tide._check_name(what text, given text, dotted boolean) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    IF given IS NULL THEN
        RAISE EXCEPTION 'the name of the % is null', what
            USING ERRCODE = 'TD001', HINT = 'Give it a name.';
    ELSIF given !~ '^[A-Za-z_][A-Za-z0-9_.-]{0,55}$' OR NOT dotted AND given ~ '[.-]' THEN
        RAISE EXCEPTION '% cannot name %', quote_literal(left(given, 100)),
            CASE WHEN what ~ '^[aeiou]' THEN 'an ' ELSE 'a ' END || what
            USING ERRCODE = 'TD001',
            HINT = 'Start with a letter or _, continue with letters, digits'
                || CASE WHEN dotted THEN ', _, - and .' ELSE ' and _' END
                || '; at most 56 characters.';
    END IF;
END $tide$;

-- name: unknown
-- Raises the error for a name that nothing of its kind has. The hint lists the names that there are, at
-- most 20, and first those with the same beginning.
CREATE OR REPLACE FUNCTION tide._unknown(what text, given text, known text[], code text)
RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE names text := (
    SELECT string_agg(quote_literal(n.name), ', ') FROM (
        SELECT k.name FROM unnest(known) AS k (name)
        ORDER BY starts_with(lower(k.name), lower(left(given, 3))) DESC, k.name LIMIT 20) AS n);
BEGIN
    RAISE EXCEPTION 'there is no % %', what, quote_literal(left(given, 100))
        USING ERRCODE = code, HINT = CASE
            WHEN names IS NULL THEN 'There is none yet'
            WHEN cardinality(known) > 20 THEN format('There are %s, among them: %s',
                                                     cardinality(known), names)
            ELSE 'There are: ' || names END
            || CASE what WHEN 'outbox' THEN '; tide.outbox_create makes one.'
                         WHEN 'inbox' THEN '; tide.inbox_create makes one.'
                         ELSE '; tide.relay_set_outbox and tide.relay_set_inbox make one.' END;
END $tide$;

-- name: require
-- Raises TD001, TD002 or TD008 unless there is an outbox or inbox of this name. `purpose` is what it is
-- locked for until the transaction ends: `read` is no lock; `use` blocks a drop; `change` blocks other
-- changes too; `drop` blocks all uses.
CREATE OR REPLACE FUNCTION tide._require(what text, given text, purpose text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE there boolean;
BEGIN
    PERFORM tide._check_name(what, given, false);
    EXECUTE format('SELECT true FROM tide.%I b WHERE b.name = $1 ', what || 'es')
        || CASE purpose WHEN 'use' THEN 'FOR KEY SHARE' WHEN 'change' THEN 'FOR NO KEY UPDATE'
                        WHEN 'drop' THEN 'FOR UPDATE' ELSE '' END
        INTO there USING given;
    IF there IS NOT NULL THEN
        RETURN;
    ELSIF what = 'outbox' THEN
        PERFORM tide._unknown(what, given,
            ARRAY(SELECT o.name FROM tide.outboxes o ORDER BY 1), 'TD002');
    ELSE
        PERFORM tide._unknown(what, given,
            ARRAY(SELECT i.name FROM tide.inboxes i ORDER BY 1), 'TD008');
    END IF;
END $tide$;

-- name: check_grant
-- Raises TD014 unless there is such a role. Waits for other grants: two that change the rights of one
-- function at a time would fail.
CREATE OR REPLACE FUNCTION tide._check_grant(role text) RETURNS void
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    IF NOT EXISTS (SELECT FROM pg_roles r WHERE r.rolname = role) OR role IS NULL THEN
        RAISE EXCEPTION 'there is no role %', coalesce(quote_literal(left(role, 100)), 'NULL')
            USING ERRCODE = 'TD014', HINT = 'Give a role''s name as \du shows it, without quotes; '
                'CREATE ROLE makes one. PUBLIC is none.';
    END IF;
    PERFORM pg_advisory_xact_lock(1886741603, 117);
END $tide$;

-- name: check_hours
-- Raises TD011 unless `given` hours can be a retention.
CREATE OR REPLACE FUNCTION tide._check_hours(given integer) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    IF given IS NULL OR given NOT BETWEEN 0 AND 1000000 THEN
        RAISE EXCEPTION 'retention_hours is %', coalesce(given::text, 'null')
            USING ERRCODE = 'TD011', HINT = 'Give hours from 0 to 1000000; with 0 a message is '
                'deleted once it is delivered.';
    END IF;
END $tide$;

-- name: changed
-- Notifies relays of a change of the pipelines, outboxes or inboxes.
CREATE OR REPLACE FUNCTION tide._changed() RETURNS trigger
LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM pg_notify('tide_relay', '');
    RETURN NULL;
END $tide$;
CREATE OR REPLACE TRIGGER changed AFTER INSERT OR UPDATE OR DELETE ON tide.relays
    FOR EACH STATEMENT EXECUTE FUNCTION tide._changed();
CREATE OR REPLACE TRIGGER changed AFTER INSERT OR UPDATE OR DELETE ON tide.outboxes
    FOR EACH STATEMENT EXECUTE FUNCTION tide._changed();
CREATE OR REPLACE TRIGGER changed AFTER INSERT OR UPDATE OR DELETE ON tide.inboxes
    FOR EACH STATEMENT EXECUTE FUNCTION tide._changed();
