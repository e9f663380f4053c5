-- Checks the conditions of a route when they are set. The language is that of `penstock.expressions`, and
-- its words come from there (`penstock.outbox.sql.rules`). Each word of a condition must be one of them. A
-- null of the column's type replaces each name, and Postgres parses the result: it evaluates nothing, and
-- gets no other words.

-- name: expression_error
-- Raises TD006 for a mistake in a condition, at its character `at`.
CREATE OR REPLACE FUNCTION tide._expression_error(place text, at integer, what text) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM tide._config_error(
        format('%s%s: %s', place, coalesce(', position ' || at, ''), what),
        'Expected a condition over record.…, metadata.… and action, as in '
        'record.payload.type = ''order.shipped''.');
END $tide$;

-- name: reference_type
-- Returns what replaces a column in a condition: a null of its type, or without one where any type fits.
-- Null for an unknown column.
CREATE OR REPLACE FUNCTION tide._reference_type(root text, name text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $tide$
    SELECT k.value FROM (VALUES
        ('record', 'id', 'NULL::bigint'), ('record', 'dedup_key', 'NULL::text'),
        ('record', 'payload', 'NULL'), ('record', 'headers', 'NULL'), ('record', 'xid', 'NULL'),
        ('record', 'created_at', 'NULL::timestamptz'),
        {metadata_columns}
    ) AS k (root, name, value)
    WHERE k.name = _reference_type.name
      AND k.root = CASE WHEN _reference_type.root = 'changes' THEN 'record'
                        ELSE _reference_type.root END
$tide$;

-- name: check_condition
-- Raises TD006 unless a relay can read `given` as a condition over an outbox's messages. The relay checks a
-- condition with a reference outside of quotes.
CREATE OR REPLACE FUNCTION tide._check_condition(place text, given text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE
    words constant text[] := {condition_words};
    functions constant text[] := {condition_functions};
    types constant text[] := {condition_types};
    roots constant text[] := {condition_roots};
    quantifiers constant text[] := {condition_quantifiers};
    at integer := 1; found text; word text; name text; value text; known text[];
    before text := ''; caller text := ''; made text := ''; opened text[] := '{}'; cases boolean := false;
BEGIN
    IF regexp_replace(given, '''[^'']*''', '', 'g') LIKE '%${%' THEN
        RETURN;
    ELSIF length(given) > {condition_characters} THEN
        PERFORM tide._expression_error(place, {condition_characters} + 1,
            'at most {condition_characters} characters are allowed');
    END IF;
    WHILE at <= length(given) LOOP
        found := substring(substr(given, at) from '^[ \t\r\n]+');
        IF found IS NOT NULL THEN
            at := at + length(found);
            CONTINUE;
        END IF;
        IF substr(given, at, 2) IN ('--', '/*') THEN
            PERFORM tide._expression_error(place, at, 'comments are not allowed');
        END IF;
        found := substring(substr(given, at) from '^''(?:[^'']|'''')*''');
        IF found IS NOT NULL THEN
            -- The value of a reference may be of the type that is expected.
            value := CASE WHEN found LIKE '%${%' THEN 'NULL'
                ELSE quote_literal(replace(substr(found, 2, length(found) - 2), '''''', '''')) END;
            word := '''';
        ELSIF substr(given, at, 1) IN ('''', '"') THEN
            PERFORM tide._expression_error(place, at, CASE
                WHEN substr(given, at, 1) = '"' AND substr(given, at + 1) LIKE '%"%'
                    THEN 'unknown name; values are record.…, changes.…, metadata.… and action'
                ELSE 'a quote that is opened here is not closed' END);
        ELSE
            found := substring(substr(given, at) from '^[[:alpha:]_][[:alnum:]_$]*');
            word := lower(found);
            value := word;
            IF word = ANY (roots) THEN
                -- The column, and the path into its JSON.
                name := substring(substr(given, at + length(word))
                    from '^\s*\.\s*([[:alpha:]_][[:alnum:]_$]*|"(?:[^"]|"")+")');
                IF name IS NULL THEN
                    PERFORM tide._expression_error(place, at,
                        format('%s is no value; name a column: %s.…', word, word));
                END IF;
                found := substring(substr(given, at) from '^\w+\s*(?:\.\s*'
                    '(?:[[:alpha:]_][[:alnum:]_$]*|"(?:[^"]|"")+")\s*|\[\s*[0-9]+\s*\]\s*)+');
                name := CASE WHEN name LIKE '"%'
                    THEN replace(substr(name, 2, length(name) - 2), '""', '"') ELSE lower(name) END;
                value := tide._reference_type(word, name);
                IF value IS NULL THEN
                    known := CASE word WHEN 'metadata' THEN {metadata_names}
                        ELSE ARRAY['id', 'dedup_key', 'payload', 'headers', 'xid', 'created_at'] END;
                    PERFORM tide._expression_error(place, at, format('unknown column %s.%s; there are %s',
                        word, left(name, 60), array_to_string(known, ', ')));
                ELSIF value <> 'NULL' AND found ~ '^\w+\s*\.\s*("[^"]*"|[^".[]+)+[.[]' THEN
                    PERFORM tide._expression_error(place, at,
                        format('%s.%s has no parts', word, left(name, 60)));
                ELSIF name IN ('payload', 'headers') AND found !~ '^\w+\s*\.\s*("[^"]*"|[^".[]+)+[.[]'
                      AND (before IN ('=', '<>', '!=', '<', '<=', '>', '>=')
                           OR substr(given, at + length(found)) ~* '^\s*([=<>!]|in\M|between\M)') THEN
                    PERFORM tide._expression_error(place, at, format('%s.%s is JSON as a whole; '
                        'compare a part of it (%1$s.%2$s.key) or its text (%1$s.%2$s::text)',
                        word, name));
                ELSIF value = 'NULL' AND before = '(' AND caller IN ('abs', 'round')
                      AND substr(given, at + length(found)) ~ '^\s*[,)]' THEN
                    PERFORM tide._expression_error(place, at,
                        format('%s takes a number; cast it by ::numeric', caller));
                ELSIF before = '(' AND caller = ANY (quantifiers) THEN
                    PERFORM tide._expression_error(place, at,
                        format('%s takes array[…] or ''{…}''; no column is an array', caller));
                -- Without a type the operators of JSON would be ambiguous.
                ELSIF value = 'NULL' AND (before = '<@'
                      OR substr(given, at + length(found)) ~ '^\s*(->|#>|@>|\?)') THEN
                    value := 'NULL::jsonb';
                END IF;
                word := 'record';
            ELSIF word = 'action' THEN
                value := 'NULL::text';
            ELSIF word = ANY (functions) THEN
                IF substr(given, at + length(word)) !~ '^\s*\(' THEN
                    PERFORM tide._expression_error(place, at, word || ' is a function: ( is expected');
                END IF;
            ELSIF word = ANY (quantifiers) AND before NOT IN ('=', '<>', '!=') THEN
                PERFORM tide._expression_error(place, at, word || '(…) stands behind = and <> alone');
            ELSIF word = 'array' AND NOT (before = '(' AND caller = ANY (quantifiers)) THEN
                PERFORM tide._expression_error(place, at, 'array[…] stands in any(…) and all(…) alone');
            ELSIF word IS NULL THEN
                found := coalesce(
                    substring(substr(given, at) from '^(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?'),
                    substring(substr(given, at) from {condition_operators}));
                IF found IS NULL THEN
                    PERFORM tide._expression_error(place, at,
                        quote_literal(substr(given, at, 1)) || ' is not expected here');
                ELSIF found ~ '[0-9]' AND substr(given, at + length(found), 1) ~ '[[:alnum:]_$.]' THEN
                    PERFORM tide._expression_error(place, at, 'a number can''t be read');
                END IF;
                word := CASE WHEN found ~ '[0-9]' THEN '0' ELSE found END;
                value := found;
            ELSIF NOT word = ANY (words || types)
                  AND NOT (before = '(' AND caller = 'extract') THEN  -- a unit, such as year
                PERFORM tide._expression_error(place, at,
                    format('unknown name %s', left(found, 60)) || CASE
                        WHEN tide._reference_type('record', word) IS NOT NULL
                            THEN format('; did you mean record.%s?', word)
                        ELSE '; values are record.…, changes.…, metadata.… and action' END);
            END IF;
        END IF;
        IF word = '[' AND before <> 'array' THEN
            PERFORM tide._expression_error(place, at, '''['' is not expected here');
        ELSIF word IN ('(', '[') THEN
            opened := opened || CASE WHEN word = '[' THEN 'array'
                WHEN before = ANY (functions || types || ARRAY['in', 'cast']) THEN 'list'
                ELSE 'group' END;
        ELSIF word IN (')', ']') THEN
            IF cardinality(opened) = 0 OR (word = ']') <> (opened[cardinality(opened)] = 'array') THEN
                PERFORM tide._expression_error(place, at,
                    format('"%s" without "%s"', word, translate(word, ')]', '([')));
            END IF;
            opened := trim_array(opened, 1);
        ELSIF word = ',' AND (cardinality(opened) = 0 OR opened[cardinality(opened)] = 'group') THEN
            PERFORM tide._expression_error(place, at, ''','' is not expected here');
        ELSIF before IN ('like', 'ilike', '~', '~*', '!~', '!~*') AND word NOT IN ('''', '(') THEN
            PERFORM tide._expression_error(place, at,
                format('the pattern of %s must be a ''…'' literal', before));
        END IF;
        IF cardinality(opened) > 64 THEN
            PERFORM tide._expression_error(place, at, 'it is nested too deep');
        END IF;
        cases := cases OR before = 'case' AND word <> 'when';
        made := made || ' ' || value;
        caller := before;
        before := word;
        at := at + length(found);
    END LOOP;
    IF made = '' THEN
        PERFORM tide._expression_error(place, 1, 'it is empty');
    END IF;
    BEGIN
        EXECUTE 'SELECT false AND (' || made || ')';
    EXCEPTION
        WHEN SQLSTATE '42601' OR ambiguous_function OR undefined_function OR undefined_column
             OR undefined_object OR datatype_mismatch OR invalid_text_representation
             OR invalid_datetime_format OR datetime_field_overflow OR numeric_value_out_of_range
             OR invalid_parameter_value OR cannot_coerce THEN
            -- Postgres takes the first value after `case` for a text where its type is unknown.
            IF cases AND SQLSTATE IN ('42883', '42804') THEN
                RETURN;
            END IF;
            PERFORM tide._expression_error(place, NULL, replace(replace(SQLERRM,
                'argument of AND must be type boolean, not type', 'a condition is expected, not'),
                ' at end of input', ' at its end'));
    END;
END $tide$;
