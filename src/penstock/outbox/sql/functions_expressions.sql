-- The conditions of a route, checked when they are set. The language is `penstock.expressions`': each
-- word of a condition is held against what that knows, and written anew with nulls of the columns' types
-- in the place of names. Postgres' own parser judges the rest. Nothing of what was given is evaluated,
-- and only words that are listed here get there.

-- name: expression_error
-- Raises TD006 for what is wrong with a condition, from its character `at` on.
CREATE OR REPLACE FUNCTION tide._expression_error(place text, at integer, what text) RETURNS void
LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    PERFORM tide._config_error(
        format('%s%s: %s', place, coalesce(', position ' || at, ''), what),
        'Expected a condition over record.…, metadata.… and action, as in '
        'record.payload.type = ''order.shipped''.');
END $tide$;

-- name: reference_type
-- Returns what stands for the value of a column in a condition: a null of its type, without one where
-- any type will do. Null for a column that there is not.
CREATE OR REPLACE FUNCTION tide._reference_type(root text, name text) RETURNS text
LANGUAGE sql IMMUTABLE SET search_path = pg_catalog, pg_temp AS $tide$
    SELECT k.value FROM (VALUES
        ('record', 'id', 'NULL::bigint'), ('record', 'dedup_key', 'NULL::text'),
        ('record', 'payload', 'NULL'), ('record', 'headers', 'NULL'), ('record', 'xid', 'NULL'),
        ('record', 'created_at', 'NULL::timestamptz'),
        ('metadata', 'table_schema', 'NULL::text'), ('metadata', 'table_name', 'NULL::text'),
        ('metadata', 'commit_timestamp', 'NULL::timestamptz'),
        ('metadata', 'commit_lsn', 'NULL::bigint'), ('metadata', 'commit_idx', 'NULL::bigint'),
        ('metadata', 'transaction_id', 'NULL::bigint'), ('metadata', 'database', 'NULL::text'),
        ('metadata', 'idempotency_key', 'NULL::text')
    ) AS k (root, name, value)
    WHERE k.name = _reference_type.name
      AND k.root = CASE WHEN _reference_type.root = 'changes' THEN 'record'
                        ELSE _reference_type.root END
$tide$;

-- name: check_condition
-- Raises TD006 unless a relay can read `given` as a condition over an outbox's messages. One in which a
-- reference gives more than a part of a text is the relay's to check.
CREATE OR REPLACE FUNCTION tide._check_condition(place text, given text) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $tide$
DECLARE
    words constant text[] := ARRAY['and', 'or', 'not', 'in', 'between', 'like', 'ilike', 'escape',
        'is', 'null', 'true', 'false', 'distinct', 'from', 'case', 'when', 'then', 'else', 'end',
        'cast', 'as'];
    functions constant text[] := ARRAY[
        'coalesce', 'nullif', 'greatest', 'least', 'lower', 'upper', 'length', 'char_length',
        'character_length', 'concat', 'concat_ws', 'trim', 'btrim', 'ltrim', 'rtrim', 'substring',
        'substr', 'left', 'right', 'strpos', 'position', 'starts_with', 'replace', 'translate',
        'split_part', 'reverse', 'repeat', 'lpad', 'rpad', 'ascii', 'chr', 'md5', 'abs', 'ceil',
        'ceiling', 'floor', 'round', 'trunc', 'sign', 'mod', 'power', 'pow', 'sqrt', 'now',
        'date_trunc', 'date_part', 'extract', 'jsonb_typeof', 'json_typeof', 'jsonb_array_length',
        'json_array_length'];
    types constant text[] := ARRAY['boolean', 'bool', 'smallint', 'int2', 'integer', 'int', 'int4',
        'bigint', 'int8', 'real', 'float4', 'double', 'precision', 'float8', 'float', 'numeric',
        'decimal', 'text', 'varchar', 'character', 'varying', 'char', 'uuid', 'date', 'timestamp',
        'timestamptz', 'time', 'with', 'without', 'zone', 'interval'];
    roots constant text[] := ARRAY['record', 'changes', 'metadata'];
    at integer := 1; found text; word text; name text; value text; known text[];
    before text := ''; caller text := ''; made text := ''; opened text[] := '{}'; cases boolean := false;
BEGIN
    IF regexp_replace(given, '''[^'']*''', '', 'g') LIKE '%${%' THEN
        RETURN;
    ELSIF length(given) > 4000 THEN
        PERFORM tide._expression_error(place, 4001, 'at most 4000 characters are allowed');
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
            -- What a reference gives may be of the type that is expected.
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
                -- The column, and the way into its JSON.
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
                    known := CASE word WHEN 'metadata' THEN ARRAY['table_schema', 'table_name',
                        'commit_timestamp', 'commit_lsn', 'commit_idx', 'transaction_id', 'database',
                        'idempotency_key']
                        ELSE ARRAY['id', 'dedup_key', 'payload', 'headers', 'xid', 'created_at'] END;
                    PERFORM tide._expression_error(place, at, format('unknown column %s.%s', word,
                        left(name, 60)) || coalesce(
                            format('; did you mean %s.', word) || tide._nearest(name, known) || '?',
                            '; there are ' || array_to_string(known, ', ')));
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
                ELSIF value = 'NULL' AND substr(given, at + length(found)) ~ '^\s*(->|#>|@>|\?)' THEN
                    value := 'NULL::jsonb';
                END IF;
                word := 'record';
            ELSIF word = 'action' THEN
                value := 'NULL::text';
            ELSIF word = ANY (functions) THEN
                IF substr(given, at + length(word)) !~ '^\s*\(' THEN
                    PERFORM tide._expression_error(place, at, word || ' is a function: ( is expected');
                END IF;
            ELSIF word IS NULL THEN
                found := coalesce(
                    substring(substr(given, at) from '^(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?'),
                    substring(substr(given, at) from
                        '^(?:<>|!=|<=|>=|\|\||::|->>?|#>>?|@>|!?~\*?|\?|[-=<>+*/%(),])'));
                IF found IS NULL THEN
                    PERFORM tide._expression_error(place, at,
                        quote_literal(substr(given, at, 1)) || ' is not expected here');
                ELSIF found ~ '[0-9]' AND substr(given, at + length(found), 1) ~ '[[:alnum:]_$.]' THEN
                    PERFORM tide._expression_error(place, at, 'a number can''t be read');
                END IF;
                word := CASE WHEN found ~ '[0-9]' THEN '0' ELSE found END;
                value := found;
            ELSIF NOT word = ANY (words || types) THEN
                PERFORM tide._expression_error(place, at,
                    format('unknown name %s', left(found, 60)) || CASE
                        WHEN tide._reference_type('record', word) IS NOT NULL
                            THEN format('; did you mean record.%s?', word)
                        ELSE '; values are record.…, changes.…, metadata.… and action' END);
            END IF;
        END IF;
        IF word = '(' THEN
            opened := opened || CASE WHEN before = ANY (functions || types || ARRAY['in', 'cast'])
                THEN 'list' ELSE 'group' END;
        ELSIF word = ')' THEN
            IF cardinality(opened) = 0 THEN
                PERFORM tide._expression_error(place, at, '")" without "("');
            END IF;
            opened := trim_array(opened, 1);
        ELSIF word = ',' AND (cardinality(opened) = 0 OR opened[cardinality(opened)] <> 'list') THEN
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
            -- To Postgres the first value after `case` is a text, where its type is not known.
            IF cases AND SQLSTATE IN ('42883', '42804') THEN
                RETURN;
            END IF;
            PERFORM tide._expression_error(place, NULL, replace(replace(SQLERRM,
                'argument of AND must be type boolean, not type', 'a condition is expected, not'),
                ' at end of input', ' at its end'));
    END;
END $tide$;
