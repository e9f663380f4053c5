"""Published by SQL, captured from the WAL, sent to NATS: a subscriber reads what was published."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import SecretStr

from penstock.config.sources import PostgresSource
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.outbox.settings import read
from penstock.outbox.sql.install import install
from penstock.postgres.chunk import Chunk
from penstock.sinks.nats.frames import Encoder
from penstock.trial import live

from ..forms_help import FORMATS, check, headers_given, keys, payloads
from .backfilling import Backfilling
from .capturing import prepare
from .nats_servers import Writer

Published = tuple[str, dict[str, Any], str | None]


@pytest.fixture
def app(database: Database) -> Database:
    with database.connect(autocommit=True) as connection:
        install(connection)
    return database


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.lists(st.tuples(payloads, headers_given, keys), min_size=5, max_size=10))
def test_a_subscriber_reads_what_was_published(
    app: Database, nats_server: EmbeddedNats, nats: JetStream, published: list[Published]
) -> None:
    name = f"f{uuid.uuid4().hex[:8]}"
    app.execute(f"select tide.outbox_create('{name}')")
    keyed = [key for _, _, key in published if key is not None]

    def publish() -> None:
        with app.connect() as connection:
            for payload, given_headers, key in published:
                values = [name, payload, key, json.dumps(given_headers)]
                connection.execute(
                    "select tide.outbox_publish(%s, %s::jsonb, %s, %s::jsonb)", values
                )

    source = PostgresSource(
        type="postgres", url=SecretStr(app.url), tables=(f"tide.outbox_{name}",), publication="tide"
    )
    count = len(published) - len(keyed) + len(set(keyed))
    captured = live.read(source, lambda batch: batch, count, 30, publish)
    assert captured is not None
    rows = app.execute(
        "select id, dedup_key, payload::text, headers::text, to_char(created_at at time zone 'utc',"
        f' \'YYYY-MM-DD"T"HH24:MI:SS.US"Z"\') from tide.outbox_{name} order by id'
    )
    assert captured.num_rows == len(rows) == count
    for form in FORMATS:
        stream = f"{name}-{form}"
        nats.add_stream(stream, f"{stream}.>")
        config = {
            "sink_type": "nats", "url": nats_server.url, "subject": f"{stream}.x", "format": form
        }  # fmt: skip
        sink = read(config, {}).sink(source="group", outbox=name)
        assert Writer(sink).write(captured).delivered == count
        for at, (number, key, payload, headers, created) in enumerate(rows, 1):
            sent, body = stored(nats, stream, at)
            check(
                form,
                payload,
                json.loads(headers),
                f"{name}:{key}" if key else f"{name}#{number}",
                sent,
                body,
                created,
                "orders",
            )
        nats.delete_stream(stream)


def stored(nats: JetStream, stream: str, number: int) -> tuple[list[tuple[str, str]], bytes]:
    """Return headers and body of a message, byte by byte, but for those of the relay's own order."""
    message = nats.api(f"STREAM.MSG.GET.{stream}", {"seq": number})["message"]
    head = base64.b64decode(message["hdrs"]).removeprefix(b"NATS/1.0\r\n").removesuffix(b"\r\n\r\n")
    pairs = [line.decode().split(": ", 1) for line in head.split(b"\r\n")]
    own = ("Nats-Expected-", "Nats-Batch-")
    headers = [(name, value) for name, value in pairs if not name.startswith(own)]
    return headers, base64.b64decode(message.get("data", ""))


def test_a_message_that_was_kept_has_no_more_than_its_row(app: Database) -> None:
    """Published, then read from the WAL and from the table: one id, and no position that is made up."""
    app.execute("select tide.outbox_create('kept')")
    captured: list[pa.RecordBatch] = []
    prepare(app)
    app.execute("alter publication p add table tide.outbox_kept")
    with Backfilling(app.url) as driver:
        read_chunk = driver._batches

        def noted(chunk: Chunk) -> Iterator[pa.RecordBatch]:
            for batch in read_chunk(chunk):
                captured.append(batch)
                yield batch

        driver._batches = noted  # type: ignore[method-assign]  # for the test
        for op in ("insert", "update"):
            app.execute("select tide.outbox_publish('kept', '{}', %s, op => %s)", [f"k-{op}", op])
        driver.run(lambda: len(driver.received) == 2)
        # As of a server that has had more transactions than the WAL can number.
        app.execute(
            "update tide.outbox_kept set xid = (xid::text::int8 + (1::int8 << 32))::text::xid8"
        )
        driver.start("tide.outbox_kept")
        driver.run()
    of_wal, of_table = (enveloped(captured, action) for action in ("insert", "read"))
    rows = app.execute(
        "select id, (xid::text::numeric % (2^32)::numeric)::int8, to_char(created_at at time zone 'utc',"
        ' \'YYYY-MM-DD"T"HH24:MI:SS.US"Z"\') from tide.outbox_kept order by id'
    )
    assert len(of_wal) == len(of_table) == len(rows) == 2
    for at, (number, xid, created) in enumerate(rows):
        (live_id, live), (kept_id, kept) = of_wal[at], of_table[at]
        metadata, op = kept["metadata"], ("insert", "update")[at]
        assert live_id == kept_id == metadata["idempotency_key"] == f"kept/11111111:k-{op}"
        assert live["metadata"]["idempotency_key"] == live_id
        later = str(int(live["record"]["xid"]) + (1 << 32))
        assert kept["record"] == live["record"] | {"xid": later}
        assert (live["action"], kept["action"]) == (op, op)
        assert metadata["commit_timestamp"] == created == kept["record"]["created_at"]
        assert metadata["transaction_id"] == live["metadata"]["transaction_id"] == xid
        assert metadata["record_pks"] == [number]
        assert {"commit_lsn", "commit_idx"} <= live["metadata"].keys()
        assert not {"commit_lsn", "commit_idx"} & metadata.keys()


def enveloped(captured: list[pa.RecordBatch], action: str) -> list[tuple[str, Any]]:
    """Return ids and bodies of the envelopes of some rows, in the order of their ids."""
    config = {"sink_type": "nats", "url": "nats://nowhere", "format": "envelope"}
    sink = read(config, {}).sink(source="g", outbox="kept", tag="1" * 8)
    found = []
    for batch in captured:
        rows = batch.filter(pc.equal(batch.column("action"), action))
        for row in range(rows.num_rows):
            frame = bytes(Encoder(sink, "notify", "g", b"_").block(rows.slice(row, 1), 0, 1).data)
            head, _, body = frame.partition(b"\r\n\r\n")
            found.append(
                (head.decode().partition("Nats-Msg-Id: ")[2].splitlines()[0], json.loads(body))
            )
    return sorted(found, key=lambda message: int(message[1]["record"]["id"]))
