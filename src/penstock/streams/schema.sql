-- The stream store: everything is in the schema `penstock`. Each migration runs once, in its order,
-- in one transaction with the others that are due. A migration that has been released is never edited.
--
-- What is on the hot path is only ever inserted: a long transaction elsewhere, whose snapshot keeps
-- dead rows alive, finds none here. What is no longer needed goes by DROP TABLE or TRUNCATE.

-- name: migration_1
-- A source's name as the configuration has it. `tag` is the first part of its messages' idempotency
-- keys. LSNs start anew in another cluster, and a stream's positions may not: `base` is added to a
-- message's commit_lsn to give its place in the streams.
CREATE TABLE penstock.sources (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    tag text NOT NULL,
    base bigint NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now()
);
-- For each source there is a table penstock.batches_<id>: what was written, see `source_table`.

-- Up to where a source's slot was confirmed, as its run records it every few seconds: what is left of
-- that where the slot is lost. `lsn` is the source's own, of the cluster and slot that `tag` stands for;
-- `committed_at` is when the newest transaction before it was committed. With a `gap`, the code of an
-- error, the source can't go on before `penstock recover`, and the position stays as it is.
CREATE TABLE penstock.positions (
    source text PRIMARY KEY,
    tag text NOT NULL,
    lsn bigint NOT NULL,
    committed_at timestamptz,
    at timestamptz NOT NULL DEFAULT now(),
    gap text
);

CREATE TABLE penstock.streams (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    source_id integer NOT NULL REFERENCES penstock.sources,
    kind text NOT NULL CHECK (kind IN ('changes', 'rows')),
    retention interval,
    created_at timestamptz NOT NULL DEFAULT now()
);

-- A stream's messages lie in segments, each a table penstock.segment_<id>. A segment holds the
-- positions behind (after_lsn, after_idx), up to and with (through_lsn, through_idx), which is null
-- while it is the stream's last one and is written to.
CREATE TABLE penstock.segments (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    stream_id integer NOT NULL REFERENCES penstock.streams ON DELETE CASCADE,
    after_lsn bigint NOT NULL,
    after_idx bigint NOT NULL,
    through_lsn bigint,
    through_idx bigint,
    opened_at timestamptz NOT NULL DEFAULT now(),
    closed_at timestamptz
);
CREATE INDEX ON penstock.segments (stream_id, after_lsn, after_idx);

-- `settings` has ack_wait_ms, max_deliver and the rest. A consumer whose `own` is true is the stream's
-- own group: it is made and dropped with the stream. For each consumer there is a table
-- penstock.consumer_<id>: the log of its deliveries and acks, see `consumer_table`.
CREATE TABLE penstock.consumers (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    stream_id integer NOT NULL REFERENCES penstock.streams ON DELETE CASCADE,
    name text NOT NULL UNIQUE,
    type text NOT NULL CHECK (type IN ('pull', 'webhook')),
    own boolean NOT NULL DEFAULT false,
    settings jsonb NOT NULL,
    disabled text, -- why a webhook gets no more deliveries
    disabled_at timestamptz,
    created_at timestamptz NOT NULL DEFAULT now()
);
CREATE UNIQUE INDEX ON penstock.consumers (stream_id) WHERE own;

-- What could not be delivered, to a sink (`sink`) or by a consumer (`consumer_id`).
CREATE TABLE penstock.dead_letters (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    sink text,
    consumer_id integer REFERENCES penstock.consumers ON DELETE CASCADE,
    lsn bigint,
    idx bigint,
    idempotency_key text,
    subject text,
    code text NOT NULL,
    reason text NOT NULL,
    message text NOT NULL,
    deliver_count integer,
    at timestamptz NOT NULL DEFAULT now(),
    replayed_at timestamptz,
    CHECK ((sink IS NULL) <> (consumer_id IS NULL)),
    UNIQUE (consumer_id, lsn, idx),
    UNIQUE (sink, idempotency_key)
);

-- Sinks that are not written to directly now: what they should have had waits in blocks (Arrow IPC
-- streams, see penstock.blocks) until a drainer has delivered it. All up to `drained` was.
CREATE TABLE penstock.backlogs (
    source_id integer NOT NULL REFERENCES penstock.sources,
    sink text NOT NULL,
    since timestamptz NOT NULL DEFAULT now(),
    code text NOT NULL,
    error text NOT NULL,
    drained_lsn bigint NOT NULL DEFAULT 0,
    drained_idx bigint NOT NULL DEFAULT -1,
    PRIMARY KEY (source_id, sink)
);
CREATE TABLE penstock.backlog_blocks (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source_id integer NOT NULL,
    sink text NOT NULL,
    first_lsn bigint NOT NULL,
    first_idx bigint NOT NULL,
    last_lsn bigint NOT NULL,
    last_idx bigint NOT NULL,
    rows integer NOT NULL,
    block bytea NOT NULL,
    FOREIGN KEY (source_id, sink) REFERENCES penstock.backlogs ON DELETE CASCADE
);
ALTER TABLE penstock.backlog_blocks ALTER COLUMN block SET STORAGE EXTERNAL;
CREATE INDEX ON penstock.backlog_blocks (source_id, sink, first_lsn, first_idx);

CREATE TABLE penstock.tokens (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name text NOT NULL UNIQUE,
    hash bytea NOT NULL UNIQUE,
    role text NOT NULL CHECK (role IN ('worker', 'admin')),
    consumers text[], -- null: all
    created_at timestamptz NOT NULL DEFAULT now(),
    revoked_at timestamptz
);

-- name: migration_2
-- Backfills: rows of a table that a run reads for one sink. `condition` is SQL, `cursor` the last row
-- that was delivered (its `sort_by` and its key, as text), `rows_total` an estimate. A source is named
-- here, as one can be asked for before the source's first run.
CREATE TABLE penstock.backfills (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    source text NOT NULL,
    sink text NOT NULL,
    table_schema text NOT NULL,
    table_name text NOT NULL,
    condition text,
    sort_by text,
    start text,
    initial boolean NOT NULL DEFAULT false,
    state text NOT NULL DEFAULT 'waiting'
        CHECK (state IN ('waiting', 'running', 'paused', 'done', 'failed', 'cancelled')),
    cursor jsonb,
    rows_done bigint NOT NULL DEFAULT 0,
    rows_total bigint,
    error text,
    created_at timestamptz NOT NULL DEFAULT now(),
    started_at timestamptz,
    ended_at timestamptz
);
CREATE UNIQUE INDEX ON penstock.backfills (source, sink, table_schema, table_name)
    WHERE state IN ('waiting', 'running', 'paused');
CREATE UNIQUE INDEX ON penstock.backfills (source, sink, table_schema, table_name) WHERE initial;

-- name: migration_3
-- A captured message has 1,024 places in a stream (see records.py) where builds before this had two. As
-- processes of theirs may still be at the streams, they are not moved but refused.
DO $penstock$ BEGIN
    IF EXISTS (SELECT FROM penstock.streams) THEN
        RAISE EXCEPTION 'they keep their messages at other places' USING ERRCODE = 'PS003';
    END IF;
END $penstock$

-- name: migration_4
-- The id of each entity, beside its name, for as long as the entity lasts: what is made again under a
-- name gets another id. A stream has that of its sink.
CREATE TABLE penstock.ids (
    kind text NOT NULL CHECK (kind IN ('source', 'sink', 'consumer', 'target')),
    name text NOT NULL,
    id uuid NOT NULL DEFAULT gen_random_uuid() UNIQUE,
    PRIMARY KEY (kind, name)
);
-- Gives the id of an entity, and makes it where there is none.
CREATE FUNCTION penstock.id_of(of_kind text, of_name text) RETURNS uuid LANGUAGE sql AS $penstock$
    INSERT INTO penstock.ids (kind, name) VALUES (of_kind, of_name)
    ON CONFLICT (kind, name) DO UPDATE SET name = excluded.name RETURNING id
$penstock$;

-- name: migration_5
-- The desired state: one row an entity. `spec` has its keys as penstock.yaml has them, with `${NAME}` as it
-- stands: each process fills it from its own environment. `shown` is `spec` with its secrets masked,
-- `version` the state's when the entity was last changed.
CREATE TABLE penstock.entities (
    kind text NOT NULL CHECK (kind IN ('source', 'sink', 'consumer', 'target')),
    name text NOT NULL,
    id uuid NOT NULL UNIQUE,
    spec jsonb NOT NULL,
    shown jsonb NOT NULL,
    version bigint NOT NULL,
    managed_by text NOT NULL CHECK (managed_by IN ('file', 'api', 'console')),
    changed_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (kind, name)
);
-- One row. Each change set adds one to the version, and holds the row's lock until it is committed.
CREATE TABLE penstock.state (
    single boolean PRIMARY KEY DEFAULT true CHECK (single),
    version bigint NOT NULL
);
INSERT INTO penstock.state (version) VALUES (0);
-- Who changed what. `door` is how: by a file, the API or the console; the specs are masked.
CREATE TABLE penstock.audit (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at timestamptz NOT NULL DEFAULT now(),
    who text NOT NULL,
    door text NOT NULL,
    version bigint NOT NULL,
    kind text NOT NULL,
    name text NOT NULL,
    action text NOT NULL CHECK (action IN ('create', 'update', 'delete')),
    before jsonb,
    after jsonb
);
CREATE INDEX ON penstock.audit (kind, name, id);
-- Deleted sources and sinks whose slot, stream or backlog is still there: a run drops it when nothing
-- writes to it any more. `spec` is what the entity was.
CREATE TABLE penstock.removals (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind text NOT NULL,
    name text NOT NULL,
    spec jsonb NOT NULL,
    version bigint NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
);
-- Entities that a process can't run as they are, and why; a change of the entity removes the row.
CREATE TABLE penstock.refusals (
    kind text NOT NULL,
    name text NOT NULL,
    reason text NOT NULL,
    at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (kind, name)
);
-- Applies a change set, an array of {kind, name, spec, shown, expected}: without a spec it deletes.
-- `expected` is the version that the entity must have, 0 if it must not be there, null for any.
-- Raises PS004 where one has another. Returns the state's new version.
CREATE FUNCTION penstock.change_entities(changes jsonb, by_whom text, through text) RETURNS bigint
LANGUAGE plpgsql AS $penstock$
DECLARE
    new_version bigint;
    moved text;
BEGIN
    UPDATE penstock.state SET version = version + 1 RETURNING version INTO new_version;
    SELECT string_agg(c.kind || ' ' || c.name, ', ' ORDER BY c.kind, c.name) INTO moved
    FROM jsonb_to_recordset(changes) AS c (kind text, name text, expected bigint)
    LEFT JOIN penstock.entities e USING (kind, name)
    WHERE c.expected IS NOT NULL AND c.expected <> coalesce(e.version, 0);
    IF moved IS NOT NULL THEN
        RAISE EXCEPTION '%', moved USING ERRCODE = 'PS004';
    END IF;
    INSERT INTO penstock.audit (who, door, version, kind, name, action, before, after)
    SELECT by_whom, through, new_version, c.kind, c.name,
           CASE WHEN c.spec IS NULL THEN 'delete' WHEN e.name IS NULL THEN 'create'
                ELSE 'update' END, e.shown, c.shown
    FROM jsonb_to_recordset(changes) AS c (kind text, name text, spec jsonb, shown jsonb)
    LEFT JOIN penstock.entities e USING (kind, name)
    WHERE c.spec IS NOT NULL OR e.name IS NOT NULL
    ORDER BY c.kind, c.name;
    INSERT INTO penstock.removals (kind, name, spec, version)
    SELECT e.kind, e.name, e.spec, new_version
    FROM jsonb_to_recordset(changes) AS c (kind text, name text, spec jsonb)
    JOIN penstock.entities e USING (kind, name)
    WHERE c.spec IS NULL AND e.kind IN ('source', 'sink');
    DELETE FROM penstock.refusals r
    USING jsonb_to_recordset(changes) AS c (kind text, name text)
    WHERE (r.kind, r.name) = (c.kind, c.name);
    DELETE FROM penstock.entities e
    USING jsonb_to_recordset(changes) AS c (kind text, name text, spec jsonb)
    WHERE (e.kind, e.name) = (c.kind, c.name) AND c.spec IS NULL;
    DELETE FROM penstock.ids i
    USING jsonb_to_recordset(changes) AS c (kind text, name text, spec jsonb)
    WHERE (i.kind, i.name) = (c.kind, c.name) AND c.spec IS NULL;
    INSERT INTO penstock.entities AS e (kind, name, id, spec, shown, version, managed_by)
    SELECT c.kind, c.name, penstock.id_of(c.kind, c.name), c.spec, c.shown, new_version, through
    FROM jsonb_to_recordset(changes) AS c (kind text, name text, spec jsonb, shown jsonb)
    WHERE c.spec IS NOT NULL
    ON CONFLICT (kind, name) DO UPDATE
    SET spec = excluded.spec, shown = excluded.shown, version = excluded.version,
        managed_by = excluded.managed_by, changed_at = now();
    PERFORM pg_notify('penstock_state', new_version::text);
    RETURN new_version;
END $penstock$;
-- Consumers that were there before are the API's, until a file names them. Their secrets stay out of
-- `shown` as a whole.
WITH old AS (
    SELECT c.name, jsonb_build_object('type', c.type, 'stream', s.name) AS base, c.settings
    FROM penstock.consumers c JOIN penstock.streams s ON s.id = c.stream_id WHERE NOT c.own
)
INSERT INTO penstock.entities (kind, name, id, spec, shown, version, managed_by)
SELECT 'consumer', name, penstock.id_of('consumer', name),
       base || replace(settings::text, '${', '$${')::jsonb,
       base || (settings - 'secrets' - 'headers' - 'url'), 0, 'api'
FROM old

-- name: migration_6
-- Which process runs a source. It holds the source's advisory lock (LOCK_RUN) and beats; `-infinity`: it has
-- ended in an orderly way, `infinity`: it does not beat, its lock alone counts. What beats no longer
-- is gone by the store's clock, even where the server still has its session. The epoch is another one
-- after each change of hands, and what writes for an earlier one is refused.
CREATE TABLE penstock.leases (
    source_id integer PRIMARY KEY REFERENCES penstock.sources ON DELETE CASCADE,
    token text NOT NULL,
    holder text NOT NULL,
    beat_at timestamptz NOT NULL
);
ALTER TABLE penstock.sources ADD COLUMN epoch bigint NOT NULL DEFAULT 0;

-- name: migration_7
-- A viewer reads what an admin may change.
ALTER TABLE penstock.tokens DROP CONSTRAINT tokens_role_check;
ALTER TABLE penstock.tokens
    ADD CONSTRAINT tokens_role_check CHECK (role IN ('worker', 'viewer', 'admin'))

-- name: migration_8
-- Streams and consumers that were there before have ids as well.
SELECT penstock.id_of('sink', name) FROM penstock.streams;
SELECT penstock.id_of('consumer', name) FROM penstock.consumers;

-- The tables and columns of a source, as the run that captures it knows them: filters of consumers are
-- checked against these.
CREATE TABLE penstock.catalogs (
    source text PRIMARY KEY,
    tables jsonb NOT NULL,
    at timestamptz NOT NULL DEFAULT now()
);

-- How many receives each process may serve at a time (`max_waiting`). A process that was not seen for
-- some seconds has ended, and what it held is free.
CREATE TABLE penstock.receivers (
    process uuid PRIMARY KEY,
    seen_at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE penstock.receive_permits (
    consumer_id integer NOT NULL REFERENCES penstock.consumers ON DELETE CASCADE,
    process uuid NOT NULL REFERENCES penstock.receivers ON DELETE CASCADE,
    permits integer NOT NULL,
    PRIMARY KEY (consumer_id, process)
);
CREATE INDEX ON penstock.receive_permits (process);

-- name: migration_9
-- What Penstock keeps for the bastion of a target or a source of that name: the private key that it has
-- made, in OpenSSH's form, and the host key that was pinned by `penstock target trust`.
CREATE TABLE penstock.bastions (
    name text PRIMARY KEY,
    private_key text,
    host_key text
);

-- name: migration_10
-- Consumers of type nats, which a run publishes for as for a sink of their name; `settings` is what may
-- be shown of them. A rewind waits in `rewind_lsn` and `rewind_idx`, in the streams' positions, until the
-- run has done it. `dropped` counts the messages that retention took before they were published.
CREATE TABLE penstock.nats_consumers (
    id integer GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    stream_id integer NOT NULL REFERENCES penstock.streams ON DELETE CASCADE,
    name text NOT NULL UNIQUE,
    settings jsonb NOT NULL,
    paused boolean NOT NULL DEFAULT false,
    rewind_lsn bigint,
    rewind_idx bigint,
    dropped bigint NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now()
);
-- One that is behind has a backlog as a sink has. With a `stream_id` its messages are left in the stream:
-- those behind (from_lsn, from_idx), but for those at the positions in `ahead_lsn` and `ahead_idx`, which
-- were published, or wait in blocks, when this began.
ALTER TABLE penstock.backlogs
    ADD stream_id integer REFERENCES penstock.streams ON DELETE CASCADE,
    ADD from_lsn bigint NOT NULL DEFAULT 0,
    ADD from_idx bigint NOT NULL DEFAULT -1,
    ADD ahead_lsn bigint[] NOT NULL DEFAULT '{}',
    ADD ahead_idx bigint[] NOT NULL DEFAULT '{}';

-- name: migration_11
-- Which process has refused an entity: one with that number, which holds the advisory lock
-- (LOCK_PROCESS, number) for as long as it lives, or with 0 none: the entity itself can't be used.
DELETE FROM penstock.refusals;
ALTER TABLE penstock.refusals ADD process integer NOT NULL DEFAULT 0;
ALTER TABLE penstock.refusals DROP CONSTRAINT refusals_pkey;
ALTER TABLE penstock.refusals ADD PRIMARY KEY (kind, name, process);
CREATE SEQUENCE penstock.processes AS integer;
-- One refusal of each refused entity, the newest; those of processes that have ended do not count.
CREATE VIEW penstock.current_refusals AS
SELECT DISTINCT ON (r.kind, r.name) r.kind, r.name, r.reason, r.at FROM penstock.refusals r
WHERE r.process = 0 OR EXISTS (
    SELECT FROM pg_locks l JOIN pg_database d ON d.oid = l.database
    WHERE l.locktype = 'advisory' AND l.granted AND l.classid = 7386 AND l.objid = r.process::oid
      AND l.objsubid = 2 AND d.datname = current_database())
ORDER BY r.kind, r.name, r.at DESC;
-- As before, but the ids of sources and sinks last until what is left of them is removed: a stream is served
-- until then. What is made again before that has another id.
CREATE OR REPLACE FUNCTION penstock.change_entities(changes jsonb, by_whom text, through text) RETURNS bigint
LANGUAGE plpgsql AS $penstock$
DECLARE
    new_version bigint;
    moved text;
BEGIN
    UPDATE penstock.state SET version = version + 1 RETURNING version INTO new_version;
    SELECT string_agg(c.kind || ' ' || c.name, ', ' ORDER BY c.kind, c.name) INTO moved
    FROM jsonb_to_recordset(changes) AS c (kind text, name text, expected bigint)
    LEFT JOIN penstock.entities e USING (kind, name)
    WHERE c.expected IS NOT NULL AND c.expected <> coalesce(e.version, 0);
    IF moved IS NOT NULL THEN
        RAISE EXCEPTION '%', moved USING ERRCODE = 'PS004';
    END IF;
    INSERT INTO penstock.audit (who, door, version, kind, name, action, before, after)
    SELECT by_whom, through, new_version, c.kind, c.name,
           CASE WHEN c.spec IS NULL THEN 'delete' WHEN e.name IS NULL THEN 'create'
                ELSE 'update' END, e.shown, c.shown
    FROM jsonb_to_recordset(changes) AS c (kind text, name text, spec jsonb, shown jsonb)
    LEFT JOIN penstock.entities e USING (kind, name)
    WHERE c.spec IS NOT NULL OR e.name IS NOT NULL
    ORDER BY c.kind, c.name;
    INSERT INTO penstock.removals (kind, name, spec, version)
    SELECT e.kind, e.name, e.spec, new_version
    FROM jsonb_to_recordset(changes) AS c (kind text, name text, spec jsonb)
    JOIN penstock.entities e USING (kind, name)
    WHERE c.spec IS NULL AND e.kind IN ('source', 'sink');
    DELETE FROM penstock.refusals r
    USING jsonb_to_recordset(changes) AS c (kind text, name text)
    WHERE (r.kind, r.name) = (c.kind, c.name);
    DELETE FROM penstock.entities e
    USING jsonb_to_recordset(changes) AS c (kind text, name text, spec jsonb)
    WHERE (e.kind, e.name) = (c.kind, c.name) AND c.spec IS NULL;
    DELETE FROM penstock.ids i
    USING jsonb_to_recordset(changes) AS c (kind text, name text, spec jsonb)
    WHERE (i.kind, i.name) = (c.kind, c.name)
      AND CASE WHEN c.spec IS NULL THEN c.kind NOT IN ('source', 'sink')
               ELSE EXISTS (SELECT FROM penstock.removals r
                            WHERE (r.kind, r.name) = (c.kind, c.name))
                    AND NOT EXISTS (SELECT FROM penstock.entities e
                                    WHERE (e.kind, e.name) = (c.kind, c.name)) END;
    INSERT INTO penstock.entities AS e (kind, name, id, spec, shown, version, managed_by)
    SELECT c.kind, c.name, penstock.id_of(c.kind, c.name), c.spec, c.shown, new_version, through
    FROM jsonb_to_recordset(changes) AS c (kind text, name text, spec jsonb, shown jsonb)
    WHERE c.spec IS NOT NULL
    ON CONFLICT (kind, name) DO UPDATE
    SET spec = excluded.spec, shown = excluded.shown, version = excluded.version,
        managed_by = excluded.managed_by, changed_at = now();
    PERFORM pg_notify('penstock_state', new_version::text);
    RETURN new_version;
END $penstock$

-- name: migration_12
-- Syncs, their credentials and the providers that users describe are entities too.
ALTER TABLE penstock.ids DROP CONSTRAINT ids_kind_check,
    ADD CONSTRAINT ids_kind_check CHECK
        (kind IN ('source', 'sink', 'consumer', 'target', 'provider', 'credential', 'sync'));
ALTER TABLE penstock.entities DROP CONSTRAINT entities_kind_check,
    ADD CONSTRAINT entities_kind_check CHECK
        (kind IN ('source', 'sink', 'consumer', 'target', 'provider', 'credential', 'sync'));
-- Syncs that are paused, beside what the desired state says of them.
CREATE TABLE penstock.paused_syncs (
    sync_id uuid PRIMARY KEY,
    paused_by text NOT NULL,
    paused_at timestamptz NOT NULL DEFAULT now()
);
-- What is asked of the run that has the syncs, oldest first, until it has taken it. Without a collection
-- it is asked of all of a sync.
CREATE TABLE penstock.sync_commands (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    sync_id uuid NOT NULL,
    collection_id text,
    command text NOT NULL CHECK (command IN ('run', 'backfill', 'resume')),
    asked_by text NOT NULL,
    asked_at timestamptz NOT NULL DEFAULT now()
);
-- How far each collection of a sync is: `progress` is for the scheduler, `shown` for all others.
CREATE TABLE penstock.sync_collections (
    sync_id uuid NOT NULL,
    collection_id text NOT NULL,
    progress jsonb NOT NULL,
    shown jsonb NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (sync_id, collection_id)
);
-- Tokens that OAuth servers have handed out for a credential, encrypted; `origin` is a hash of what the
-- user gave for them.
CREATE TABLE penstock.credential_tokens (
    credential text PRIMARY KEY,
    origin text NOT NULL,
    key_id text NOT NULL,
    sealed bytea NOT NULL,
    updated_at timestamptz NOT NULL DEFAULT now()
);

-- name: migration_13
-- Logins at the console, by the SHA-256 of what the browser has. One ends with its token.
CREATE TABLE penstock.console_sessions (
    hash bytea PRIMARY KEY,
    token_id integer NOT NULL REFERENCES penstock.tokens ON DELETE CASCADE,
    created_at timestamptz NOT NULL DEFAULT now(),
    seen_at timestamptz NOT NULL DEFAULT now()
);

-- name: migration_14
-- Whether someone has paused the consumer; `disabled` is by whom, and no receive gets its messages.
ALTER TABLE penstock.consumers ADD COLUMN paused boolean NOT NULL DEFAULT false;

-- name: migration_15
-- Sinks that are paused, beside what the desired state says of them: their messages wait in backlogs.
CREATE TABLE penstock.paused_sinks (
    source text NOT NULL,
    sink text NOT NULL,
    paused_by text NOT NULL,
    paused_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (source, sink)
);

-- name: migration_16
-- The audit log has actions too, such as a rewind: no change of the state, so without a version of it.
-- `after` says how it was done.
ALTER TABLE penstock.audit DROP CONSTRAINT audit_action_check;
ALTER TABLE penstock.audit ALTER COLUMN version DROP NOT NULL;
ALTER TABLE penstock.tokens ADD COLUMN uuid uuid NOT NULL DEFAULT gen_random_uuid()

-- name: migration_17
-- A dead letter of a consumer of type nats has the consumer's name: it outlives the consumer, and was a
-- sink's by that name before.
ALTER TABLE penstock.dead_letters ADD COLUMN consumer text, ADD UNIQUE (consumer, idempotency_key),
    DROP CONSTRAINT dead_letters_check;
UPDATE penstock.dead_letters SET sink = NULL, consumer = sink
WHERE sink IN (SELECT name FROM penstock.nats_consumers);
ALTER TABLE penstock.dead_letters ADD CONSTRAINT dead_letters_check
    CHECK (num_nonnulls(sink, consumer, consumer_id) = 1)

-- name: source_table
-- One row for each part of each round whose messages are written, in the same transaction as
-- they. A batch (start, end] is there when all parts of one plan of it are, and then all before it are
-- too, as a source's batches run one after the other.
CREATE TABLE penstock.{table} (
    seq bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    start_lsn bigint NOT NULL,
    start_idx bigint NOT NULL,
    end_lsn bigint NOT NULL,
    end_idx bigint NOT NULL,
    part integer NOT NULL,
    parts integer NOT NULL,
    plan bigint NOT NULL
)

-- name: segment_table
-- `key` distinguishes the rows of a table (kind rows; null in kind changes). `message` is the JSON that a
-- consumer gets, but for its metadata's last member, `consumer`. core/group_hash.py defines the hashes.
CREATE TABLE penstock.{table} (
    lsn bigint NOT NULL,
    idx bigint NOT NULL,
    group_hash bigint NOT NULL,
    old_group_hash bigint,
    key text,
    table_schema text NOT NULL,
    table_name text NOT NULL,
    action text NOT NULL,
    message text NOT NULL,
    PRIMARY KEY (lsn, idx)
)

-- name: segment_indexes
-- The next message of a group whose earlier one is done is found by these.
CREATE INDEX ON penstock.{table} (group_hash, lsn, idx);
CREATE INDEX ON penstock.{table} (old_group_hash, lsn, idx) WHERE old_group_hash IS NOT NULL

-- name: segment_key_index
-- Kind rows only: whether there is a newer version of a row.
CREATE INDEX ON penstock.{table} (key, lsn, idx)

-- name: consumer_table
-- One row for each step that a consumer took; its state is what they come to, in their order. Two
-- processes that would take the same step meet in the primary key, and one looks again.
CREATE TABLE penstock.{table} (
    seq bigint PRIMARY KEY,
    entry text NOT NULL
);
ALTER TABLE penstock.{table} ALTER COLUMN entry SET STORAGE EXTERNAL
