-- Checks the config of a pipeline when it is set: its keys, the types of their values, and what is known
-- of these without the relay. A key that is null counts as not given. A reference, ${env:NAME} or
-- ${file:path}, may stand in any text, and alone in the place of a number or a boolean; the relay checks
-- what it gives. Lists in braces, such as {secrets}, come from Python (`penstock.outbox.sql.rules`).

-- name: config_keys
-- The keys of a direction's configs, from `penstock.outbox.config_keys`: what `_check_value` checks, and
-- the words for it.
CREATE OR REPLACE FUNCTION tide._config_keys(direction text)
RETURNS TABLE (key text, kind text, expected text, pattern text, choices text[], required boolean,
    takes_reference boolean)
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $tide$
    SELECT k.key, k.kind, k.expected, k.pattern, k.choices, k.required, k.takes_reference FROM (VALUES
        {config_keys}
    ) AS k (direction, key, kind, expected, pattern, choices, required, takes_reference)
    WHERE k.direction IS NULL OR k.direction = _config_keys.direction
$tide$;

-- name: config_error
-- Raises TD006.
CREATE OR REPLACE FUNCTION tide._config_error(message text, hint text) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    RAISE EXCEPTION 'config: %', message USING ERRCODE = 'TD006', HINT = hint;
END $tide$;

-- name: shown
-- Returns a value as an error may show it; secrets, and texts that may hold one, are masked.
CREATE OR REPLACE FUNCTION tide._shown(key text, value jsonb) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $tide$
    SELECT CASE jsonb_typeof(value)
        WHEN 'object' THEN 'an object'
        WHEN 'array' THEN 'a list'
        WHEN 'string' THEN CASE WHEN key IN ({secrets})
            OR value::text ~ '@|BEGIN|\\n' THEN '***' ELSE left(value::text, 100) END
        WHEN 'number' THEN CASE WHEN key IN ('password', 'token') THEN '***'
            ELSE left(value::text, 100) END
        ELSE value::text END
$tide$;

-- name: check_references
-- Raises TD006 where a relay can't resolve a reference in a text. In a secret `${` may be a part of it,
-- and the error does not show it.
CREATE OR REPLACE FUNCTION tide._check_references(key text, given text) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE
    secret boolean := key IN ({secrets}, 'url');
    wrong text;
BEGIN
    SELECT f.found[1] INTO wrong
    FROM regexp_matches(given,
        CASE WHEN secret THEN '\$\{[A-Za-z_]+:[^{}]*\}' ELSE '\$\{[^{}]*\}?' END, 'g') AS f (found)
    WHERE f.found[1] !~ '^\$\{(env:[A-Za-z_][A-Za-z0-9_]*|file:[^{}]+)\}$' LIMIT 1;
    IF wrong IS NOT NULL THEN
        PERFORM tide._config_error(
            CASE WHEN secret THEN key || ' holds what is no reference'
                 ELSE format('%s: %s is no reference', key, quote_literal(left(wrong, 60))) END,
            'Write ${env:NAME} for a variable of the relay''s environment, ${file:path} for a file '
            'on its machine.');
    END IF;
END $tide$;

-- name: masked
-- Returns a text in which letters replace what `pattern` finds: all other characters keep their positions.
CREATE OR REPLACE FUNCTION tide._masked(given text, pattern text) RETURNS text
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE found text;
BEGIN
    LOOP
        found := substring(given from pattern);
        EXIT WHEN found IS NULL;
        given := overlay(given placing repeat('x', length(found))
                         from position(found in given) for length(found));
    END LOOP;
    RETURN given;
END $tide$;

-- name: subject_error
-- Returns the error of a subject template, with its position from 0, null if there is none: that of
-- `SubjectTemplate.parse` (a test compares the two).
CREATE OR REPLACE FUNCTION tide._subject_error(given text) RETURNS text
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE
    known constant text := {subject_variables};
    plain text := tide._masked(given, '\$\{[A-Za-z_]+:[^{}]*\}');
    wrong text;
BEGIN
    SELECT v.found[1] INTO wrong FROM regexp_matches(plain, '\{[^{}]*\}', 'g') AS v (found)
    WHERE v.found[1] !~ ('^\{(stream_table|op|outbox_id'
        || '|(payload|header)\.(?!\|dots\})[^{}]+)\}$') LIMIT 1;
    IF wrong IS NOT NULL THEN
        RETURN format('position %s: ', position(wrong in plain) - 1)
            || CASE WHEN wrong ~ '^\{(stream_table|op|outbox_id)\|dots\}$'
                    THEN replace(wrong, '|dots', '') || ' is one token: leave |dots out'
                    ELSE format('unknown variable %s; known are %s', left(wrong, 60), known) END;
    END IF;
    plain := tide._masked(plain, '\{[^{}]*\}');
    wrong := substring(plain from '[\u0001-\u0020\u007f*>{}]');
    IF wrong IS NOT NULL THEN
        RETURN format('position %s: ', position(wrong in plain) - 1) || CASE
            WHEN wrong = ' ' THEN 'a blank is not allowed'
            WHEN wrong = E'\t' THEN 'a tab is not allowed'
            WHEN wrong IN (E'\n', E'\r') THEN 'a line end is not allowed'
            WHEN wrong IN ('*', '>') THEN quote_literal(wrong)
                || ' is not allowed (a wildcard, and a message goes to one subject)'
            WHEN wrong = '{' THEN quote_literal('{') || ' without its ' || quote_literal('}')
            WHEN wrong = '}' THEN quote_literal('}') || ' without its ' || quote_literal('{')
            ELSE format('the control character U+%s is not allowed',
                upper(lpad(to_hex(ascii(wrong)), 4, '0'))) END;
    ELSIF plain LIKE '$%' THEN
        RETURN 'position 0: subjects that start with ''$'' belong to the server';
    ELSIF plain LIKE '.%' THEN
        RETURN 'position 0: the token before ''.'' is empty';
    ELSIF plain LIKE '%.' THEN
        RETURN format('position %s: the token after ''.'' is empty', length(plain) - 1);
    ELSIF plain LIKE '%..%' THEN
        RETURN format('position %s: the token between two ''.'' is empty', position('..' in plain));
    END IF;
    RETURN NULL;
END $tide$;

-- name: check_value
-- Raises TD006 unless `value` fits the rule: its kind, and the pattern of a text.
CREATE OR REPLACE FUNCTION tide._check_value(
    key text, kind text, expected text, value jsonb, pattern text DEFAULT NULL,
    choices text[] DEFAULT '{}', takes_reference boolean DEFAULT true
) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE
    given text := value #>> '{}';
    type text := jsonb_typeof(value);
    -- `${}` in the place of each reference: the rest of the text is checked.
    bare text := CASE WHEN type = 'string'
        THEN regexp_replace(given, '\$\{[A-Za-z_]+:[^{}]*\}', '${}', 'g') END;
    is_reference boolean := takes_reference AND bare IS NOT DISTINCT FROM '${}';
    good boolean; wrong text;
BEGIN
    IF type = 'string' THEN
        PERFORM tide._check_references(key, given);
    END IF;
    IF type = 'string' AND kind = 'subject' AND given <> '' THEN
        wrong := tide._subject_error(given);
        IF wrong IS NOT NULL THEN
            PERFORM tide._config_error(format('%s is %s, %s', key, tide._shown(key, value), wrong),
                format('Expected %s.', expected));
        END IF;
    END IF;
    good := CASE kind
        WHEN 'boolean' THEN type = 'boolean' OR is_reference
        WHEN 'whole' THEN is_reference OR type = 'number' AND CASE WHEN given ~ '^[0-9]{1,9}$'
            THEN given::integer BETWEEN {batch_size} ELSE false END
        WHEN 'choice' THEN is_reference OR type = 'string' AND given = ANY (choices)
        WHEN 'route' THEN type = 'array' AND value <> '[]'
        ELSE type = 'string' AND given <> ''
            AND (is_reference OR pattern IS NULL OR bare ~ pattern)
        END;
    IF good IS NOT TRUE THEN
        PERFORM tide._config_error(format('%s is %s', key, tide._shown(key, value)),
            format('Expected %s.', expected));
    END IF;
END $tide$;

-- name: check_rules
-- Raises TD006 unless a relay can read a route's rules.
CREATE OR REPLACE FUNCTION tide._check_rules(rules jsonb) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE rule jsonb; number integer := 0; place text; wrong text;
BEGIN
    FOR rule IN SELECT r.value FROM jsonb_array_elements(rules) AS r LOOP
        place := format('route[%s]', number);
        number := number + 1;
        IF jsonb_typeof(rule) <> 'object' THEN
            PERFORM tide._config_error(format('%s is %s', place, tide._shown(place, rule)),
                'Expected {"when": condition, "to": subject}.');
        END IF;
        SELECT k.key INTO wrong FROM jsonb_object_keys(rule) AS k (key)
        WHERE k.key NOT IN ('when', 'to') LIMIT 1;
        IF wrong IS NOT NULL THEN
            PERFORM tide._config_error(
                format('%s has the unknown key %s', place, quote_literal(left(wrong, 60))),
                'A rule has "when", a condition, and "to", a subject.');
        ELSIF NOT rule ? 'to' THEN
            PERFORM tide._config_error(format('%s has no "to"', place), 'Add the subject.');
        ELSIF NOT rule ? 'when' AND number < jsonb_array_length(rules) THEN
            PERFORM tide._config_error(
                format('%s has no "when", so the rules behind it are never reached', place),
                'Put it last, or add its condition.');
        END IF;
        PERFORM tide._check_value(place || '.to', 'subject', {subject_expected}, rule -> 'to');
        IF rule ? 'when' THEN
            PERFORM tide._check_value(place || '.when', 'text', 'a condition', rule -> 'when');
            PERFORM tide._check_condition(place || '.when', rule ->> 'when');
        END IF;
    END LOOP;
END $tide$;

-- name: check_config
-- Returns `config` without its nulls; raises TD006 unless a pipeline of this direction can have it.
CREATE OR REPLACE FUNCTION tide._check_config(direction text, config jsonb) RETURNS jsonb
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE
    known text[] := ARRAY(SELECT k.key FROM tide._config_keys(direction) AS k);
    entry record; ways text[]; pair text[];
BEGIN
    IF config IS NULL OR jsonb_typeof(config) <> 'object' THEN
        PERFORM tide._config_error(
            coalesce('it is a JSON ' || jsonb_typeof(config) || ', not an object', 'it is null'),
            format('Give {"%s": "nats", "url": …, …}.', known[1]));
    END IF;
    FOR entry IN
        SELECT c.key, jsonb_strip_nulls(nullif(c.value, 'null')) AS value, k.kind, k.expected,
               k.pattern, k.choices, k.takes_reference
        FROM jsonb_each(config) AS c LEFT JOIN tide._config_keys(direction) AS k USING (key)
        ORDER BY k.kind IS NOT NULL, c.key
    LOOP
        IF entry.kind IS NULL THEN
            PERFORM tide._config_error(
                format('unknown key %s', quote_literal(left(entry.key, 60))),
                format('The keys are: %s.', array_to_string(known, ', ')));
        END IF;
        IF entry.value IS NOT NULL THEN
            PERFORM tide._check_value(entry.key, entry.kind, entry.expected, entry.value,
                entry.pattern, entry.choices, entry.takes_reference);
        END IF;
    END LOOP;
    config := jsonb_strip_nulls(config);
    IF config ? 'route' THEN
        PERFORM tide._check_rules(config -> 'route');
    END IF;
    FOR entry IN SELECT k.key, k.expected FROM tide._config_keys(direction) AS k
        WHERE k.required AND NOT config ? k.key
    LOOP
        PERFORM tide._config_error(format('%s is missing', entry.key),
            format('Expected %s.', entry.expected));
    END LOOP;
    IF direction = 'in' AND NOT config ?| ARRAY['stream', 'subject'] THEN
        PERFORM tide._config_error('stream is missing',
            'Name the stream to read, or a subject by which it is found.');
    END IF;
    ways := ARRAY(SELECT w.way FROM (VALUES
        ('username and password', ARRAY['username', 'password']), ('token', ARRAY['token']),
        ('credentials_file', ARRAY['credentials_file']), ('nkey_seed', ARRAY['nkey_seed'])
    ) AS w (way, keys) WHERE config ?| w.keys);
    IF cardinality(ways) > 1 THEN
        PERFORM tide._config_error(
            format('%s: use one way to log in, not %s', array_to_string(ways, ', '), cardinality(ways)),
            'Keep one of them.');
    END IF;
    FOREACH pair SLICE 1 IN ARRAY ARRAY[['username', 'password'], ['tls_cert', 'tls_key']] LOOP
        IF config ? pair[1] <> config ? pair[2] THEN
            PERFORM tide._config_error(
                format('%s is missing', CASE WHEN config ? pair[1] THEN pair[2] ELSE pair[1] END),
                format('%s and %s go together.', pair[1], pair[2]));
        END IF;
    END LOOP;
    IF config -> 'tls_enabled' = 'false' AND config ?| ARRAY['tls_ca_cert', 'tls_cert'] THEN
        PERFORM tide._config_error('tls_enabled is false, but tls_ca_cert or tls_cert is set',
            'Remove one of them.');
    END IF;
    RETURN config;
END $tide$;
