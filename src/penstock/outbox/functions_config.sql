-- The config of a pipeline, checked when it is set.

-- name: check_config
-- Raises TD006 unless `config` can be a pipeline's.
CREATE OR REPLACE FUNCTION tide._check_config(direction text, config jsonb) RETURNS void
LANGUAGE plpgsql STABLE SET search_path = pg_catalog, pg_temp AS $tide$
BEGIN
    IF config IS NULL OR jsonb_typeof(config) <> 'object' THEN
        RAISE EXCEPTION 'the config is %, not an object',
            coalesce('a JSON ' || jsonb_typeof(config), 'null')
            USING ERRCODE = 'TD006', HINT = 'Give {"sink_type": "nats", "url": …, "subject": …}.';
    END IF;
END $tide$;
