"""The reads of a backfill at the sinks: its own gets them, the others' batches stay whole."""

from __future__ import annotations

import uuid

from tests.isolation_help import (
    Source,
    nats_settings,
    published,
    stream_settings,
    write_part,
)
from tests.streams_help import Change, wire

from penstock.config.sinks import NatsSinkSettings, StreamSinkSettings
from penstock.core.message import READ, Position, RoundPart
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats


def test_reads_go_to_one_sink(
    database: Database, nats: JetStream, nats_server: EmbeddedNats
) -> None:
    prefix = f"t{uuid.uuid4().hex[:8]}"
    nats.add_stream(prefix, f"{prefix}.>")
    sinks: dict[str, NatsSinkSettings | StreamSinkSettings] = {
        "asked": stream_settings(actions=["delete"]),
        "other": stream_settings(),
        "out": nats_settings(nats_server.url, subject=f"{prefix}.{{table}}"),
    }
    with Source(database.url, sinks) as source:

        def deliver(sink: str, lsn: int) -> None:
            reads = [Change({"id": n}, READ, position=Position(lsn, n)) for n in range(5)]
            part = RoundPart(Position(lsn - 1, 0), Position(lsn, 4), 0, 1, 0, sink)
            assert write_part(source.workers[0], wire(reads), part).total == 5

        deliver("asked", 1000)
        assert source.streamed("asked") == [0, 1, 2, 3, 4]
        assert source.streamed("other") == []
        assert published(nats, prefix) == []
        deliver("out", 1001)
        assert published(nats, prefix) == [0, 1, 2, 3, 4]
        assert source.streamed("asked") == [0, 1, 2, 3, 4]
        # Nobody waits for what the others did not get.
        assert source.store.head(source.source.id).lsn == 1001
