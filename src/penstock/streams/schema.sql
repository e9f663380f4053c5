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
