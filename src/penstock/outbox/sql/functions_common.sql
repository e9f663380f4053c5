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
            HINT = 'Start with a letter or _, go on with letters, digits'
                || CASE WHEN dotted THEN ', _, - and .' ELSE ' and _' END
                || '; at most 56 characters.';
    END IF;
END $tide$;

-- name: nearest
-- Returns the one of `known` that takes the fewest edits to make `given` of; where all are far off the
-- shortest that begins with it, or else null.
CREATE OR REPLACE FUNCTION tide._nearest(given text, known text[]) RETURNS text
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE
    word text; best text; best_edits integer := 1000;
    above integer[]; below integer[]; i integer; j integer;
BEGIN
    IF length(given) > 60 THEN
        RETURN NULL;
    END IF;
    FOREACH word IN ARRAY known LOOP
        -- Row by row of the table of edit distances between the beginnings of both.
        above := ARRAY(SELECT generate_series(0, length(word)));
        FOR i IN 1 .. length(given) LOOP
            below := ARRAY[i];
            FOR j IN 1 .. length(word) LOOP
                below := below || least(above[j + 1] + 1, below[j] + 1, above[j]
                    + (lower(substr(given, i, 1)) <> substr(word, j, 1))::integer);
            END LOOP;
            above := below;
        END LOOP;
        IF above[length(word) + 1] < best_edits THEN
            best := word;
            best_edits := above[length(word) + 1];
        END IF;
    END LOOP;
    IF best_edits <= greatest(2, length(given) / 3) THEN
        RETURN best;
    END IF;
    RETURN (SELECT k FROM unnest(known) AS k
            WHERE length(given) >= 3 AND starts_with(lower(k), lower(given))
            ORDER BY length(k), k LIMIT 1);
END $tide$;

-- name: unknown
-- Raises the error for a name that nothing of its kind has, with the nearest that there is.
CREATE OR REPLACE FUNCTION tide._unknown(what text, given text, known text[], code text)
RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    RAISE EXCEPTION 'there is no % %', what, quote_literal(left(given, 100))
        USING ERRCODE = code, HINT = coalesce(
            'Did you mean ' || quote_literal(tide._nearest(given, known)) || '?',
            CASE WHEN cardinality(known) = 0 THEN 'There is none yet'
                 ELSE 'There are: ' || array_to_string(known[1:20], ', ') END
            || CASE what WHEN 'outbox' THEN '; tide.outbox_create makes one.'
                         WHEN 'inbox' THEN '; tide.inbox_create makes one.'
                         ELSE '; tide.relay_set_outbox and tide.relay_set_inbox make one.' END);
END $tide$;

-- name: require
-- Raises TD001, TD002 or TD008 unless there is an outbox or inbox of this name. `purpose` is for how
-- long: `read`, it may be gone the next moment; `use`, it is there until the transaction ends; `change`,
-- and others that would change it wait; `drop`, and others that would use it wait. All but the first
-- wait for a drop.
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
-- Raises TD014 unless there is such a role, and waits for others that grant: two that change the rights
-- of one function at a time would fail.
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
                'deleted as soon as it was delivered.';
    END IF;
END $tide$;

-- name: changed
-- Tells relays that what they run by is no longer as it was.
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
