-- The schema `tide` in an application's own database: outboxes, inboxes, pipelines and relays. Each
-- migration runs once, in its order, in one transaction with the others that are due and with the
-- functions (`functions_*.sql`), which are replaced as a whole. A released migration is never edited;
-- functions that change in a release come with a new number.
--
-- No text here has a psycopg placeholder: `penstock outbox install --print` prints it as it is.

-- name: begin
-- One installation at a time, by any tool, and always by the same role: all functions act with its
-- rights. The schema and the publication may be there already. {after} is the version to start from.
DO $tide$ DECLARE
    there integer := 0;
    owner name := (SELECT nspowner::pg_catalog.regrole FROM pg_catalog.pg_namespace
                   WHERE nspname = 'tide');
BEGIN
    PERFORM pg_catalog.pg_advisory_xact_lock(1886741603, 116);
    IF owner IS NULL THEN
        CREATE SCHEMA tide;
    ELSIF owner <> current_user THEN
        RAISE EXCEPTION 'the schema tide belongs to the role %, and this is %', owner, current_user
            USING ERRCODE = 'insufficient_privilege', HINT = 'Run this as that role.';
    END IF;
    IF EXISTS (SELECT FROM pg_catalog.pg_tables
               WHERE schemaname = 'tide' AND tablename = 'migrations') THEN
        SELECT pg_catalog.max(version) INTO there FROM tide.migrations;
    ELSIF EXISTS (SELECT FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n
                  ON n.oid = c.relnamespace WHERE n.nspname = 'tide') THEN
        RAISE EXCEPTION 'there is a schema tide that is not Penstock''s'
            USING ERRCODE = 'duplicate_schema', HINT = 'Rename it, or use another database.';
    END IF;
    IF there IS DISTINCT FROM {after} THEN
        RAISE EXCEPTION 'the schema tide has version %, and this script starts from {after}', there
            USING ERRCODE = 'object_not_in_prerequisite_state',
            HINT = 'penstock outbox install brings any version up to date; or print with --from.';
    END IF;
    -- Blocks all functions that make, change, drop or grant, but no publisher. In the functions' order.
    IF there > 0 THEN
        LOCK TABLE tide.outboxes, tide.inboxes, tide.relays IN EXCLUSIVE MODE;
    END IF;
    PERFORM pg_catalog.pg_advisory_xact_lock(1886741603, 117);
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_publication WHERE pubname = 'tide') THEN
        CREATE PUBLICATION tide WITH (publish = 'insert');
    ELSIF EXISTS (SELECT FROM pg_catalog.pg_publication WHERE pubname = 'tide'
                  AND (puballtables OR pubowner::pg_catalog.regrole::name <> current_user
                       OR NOT pubinsert)) THEN
        RAISE EXCEPTION 'there is a publication tide of another role or for all tables'
            USING ERRCODE = 'duplicate_object', HINT = 'Drop it: DROP PUBLICATION tide';
    END IF;
END $tide$;

-- name: migration_1
-- What was installed, and when; `functions` is a digest of the functions of that version.
CREATE TABLE tide.migrations (
    version integer PRIMARY KEY,
    functions text NOT NULL,
    at timestamptz NOT NULL DEFAULT pg_catalog.now()
);

-- Each outbox has a table tide."outbox_<name>", see tide.outbox_create.
CREATE TABLE tide.outboxes (
    name text PRIMARY KEY,
    retention_hours integer NOT NULL CHECK (retention_hours >= 0),
    enabled boolean NOT NULL DEFAULT true,
    created_at timestamptz NOT NULL DEFAULT pg_catalog.now()
);

-- The last id of a dropped outbox: one of the same name continues from it, so that ids stay unique.
CREATE TABLE tide.dropped_outboxes (
    name text PRIMARY KEY,
    last_id bigint NOT NULL
);

-- Each inbox has a table tide."inbox_<name>", see tide.inbox_create.
CREATE TABLE tide.inboxes (
    name text PRIMARY KEY,
    max_retries integer NOT NULL CHECK (max_retries >= 0),
    retention_hours integer NOT NULL CHECK (retention_hours >= 0),
    created_at timestamptz NOT NULL DEFAULT pg_catalog.now()
);

-- Pipelines: from an outbox to a sink (direction out), or from a source into an inbox (in). Messages that
-- are visible in `since` were published before the pipeline was made.
CREATE TABLE tide.relays (
    pipeline text PRIMARY KEY,
    direction text NOT NULL CHECK (direction IN ('out', 'in')),
    outbox text REFERENCES tide.outboxes,
    inbox text REFERENCES tide.inboxes,
    relay_group text NOT NULL,
    config jsonb NOT NULL,
    enabled boolean NOT NULL DEFAULT false,
    since pg_snapshot NOT NULL DEFAULT pg_catalog.pg_current_snapshot(),
    created_at timestamptz NOT NULL DEFAULT pg_catalog.now(),
    changed_at timestamptz NOT NULL DEFAULT pg_catalog.now(),
    CHECK ((direction = 'out') = (outbox IS NOT NULL)),
    CHECK ((direction = 'in') = (inbox IS NOT NULL)),
    UNIQUE (pipeline, created_at)
);

-- The checkpoint of each pipeline, written by its relay. `outbox` is the outbox's or the inbox's name. All
-- messages that are visible in `delivered_snapshot` are delivered. `store` is the store that has the
-- backlog. `pipeline_created_at` keeps a relay that still runs a deleted pipeline from writing for the next
-- one of its name. `dead_letters` counts its dead letters in the relay's store; `dead_letter` is the
-- newest one's cause.
CREATE TABLE tide.checkpoints (
    relay_group text NOT NULL,
    pipeline text NOT NULL REFERENCES tide.relays ON DELETE CASCADE,
    outbox text NOT NULL,
    lsn pg_lsn,
    delivered_snapshot pg_snapshot,
    delivered bigint NOT NULL DEFAULT 0,
    last_id bigint,
    store text,
    pipeline_created_at timestamptz,
    state text,
    code text,
    error text,
    remedy text,
    dead_letters bigint NOT NULL DEFAULT 0,
    dead_letter text,
    dead_letter_at timestamptz,
    at timestamptz NOT NULL DEFAULT pg_catalog.now(),
    PRIMARY KEY (relay_group, pipeline, outbox),
    FOREIGN KEY (pipeline, pipeline_created_at) REFERENCES tide.relays (pipeline, created_at)
        ON DELETE CASCADE
);
CREATE INDEX ON tide.checkpoints (pipeline);

-- The lease of each relay process on each of its groups, renewed every two seconds by the server's clock
-- while the process works. `state`: `running` with the group's lock, `standby` without it, `stopped` after
-- an orderly end. `warm`: whether a standby has Spark's session and workers ready. `since`: when this state
-- began. `lock_pid`: the server's process of the session that has the lock. `code`, `error` and `remedy`:
-- what keeps the whole group from moving. Pages have room for new versions of a row, so that no index is
-- written (HOT).
CREATE TABLE tide.leases (
    relay_group text NOT NULL,
    instance text NOT NULL,
    host text NOT NULL,
    pid integer NOT NULL,
    state text NOT NULL CHECK (state IN ('running', 'standby', 'stopped')),
    warm boolean NOT NULL,
    lock_pid integer,
    code text,
    error text,
    remedy text,
    since timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    heartbeat timestamptz NOT NULL DEFAULT pg_catalog.clock_timestamp(),
    PRIMARY KEY (relay_group, instance)
) WITH (fillfactor = 50);

-- name: end
-- Makes the outboxes' functions again, and revokes all rights of PUBLIC, which may call each new function.
DO $tide$ BEGIN
    PERFORM tide._outbox_append(o.name, o.enabled) FROM tide.outboxes o;
END $tide$;
REVOKE ALL ON ALL TABLES IN SCHEMA tide FROM PUBLIC;
REVOKE ALL ON ALL FUNCTIONS IN SCHEMA tide FROM PUBLIC;
REVOKE ALL ON SCHEMA tide FROM PUBLIC;
INSERT INTO tide.migrations (version, functions) VALUES ({version}, '{digest}')
ON CONFLICT (version) DO UPDATE SET functions = excluded.functions, at = excluded.at;
