"""A run's part in its store: what it registers, and what it leaves alone until it may have it."""

from __future__ import annotations

import threading
from dataclasses import asdict
from queue import SimpleQueue

import psycopg
import pytest
from structlog.testing import capture_logs
from tests.streams_help import (
    Change,
    in_stream,
    inserted,
    make_stream,
    read,
    wire,
    write_part,
    writer_of,
)
from tests.waits import Later, await_true

from penstock.config.nats_consumers import NatsConsumer
from penstock.config.settings import Config
from penstock.core.delivery import DeadLetter
from penstock.core.errors import SinkError, StoreError
from penstock.core.message import Position, RoundPart
from penstock.core.monitor import Report
from penstock.embedded.handles import Database
from penstock.postgres.replication import Identity, identify
from penstock.runtime import store_session
from penstock.runtime.store_session import StoreSession
from penstock.sinks.backlog import store as backlog
from penstock.sinks.backlog.drainers import CONNECTIONS
from penstock.streams import claim
from penstock.streams.names import LOCK_RUN
from penstock.streams.records import StreamRecord
from penstock.streams.store import Store

SLOT = "penstock_shop"
IDLE = threading.Event()


def config(database: Database, **sinks: object) -> Config:
    source = {"type": "postgres", "url": database.url, "slot": SLOT}
    return Config.model_validate(
        {
            "sources": {"shop": source},
            "sinks": {"events": {"type": "stream", "source": "shop"}, **sinks},
            "store": database.url,
        }
    )


def session(database: Database, **sinks: object) -> StoreSession:
    return StoreSession(config(database, **sinks), database.url, lambda _: None)


def registered(database: Database) -> tuple[int, list[str]]:
    """Register the source as a run does; return its base, and what was warned of."""
    with session(database) as run, capture_logs() as logs:
        run.register("shop", IDLE)
        return run.target("shop").base, [entry["event"] for entry in logs]


def test_a_run_that_is_refused_changes_nothing(
    store: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as one with the same store and another cluster, or another slot."""
    monkeypatch.setattr(store_session, "_CLAIM_PATIENCE", 0.0)
    stream = make_stream(store)  # with a tag that is not this cluster's
    with store.claim_source(stream.source_id), session(database) as other:
        writer = writer_of(store, stream)
        with pytest.raises(StoreError) as refused:
            other.register("shop", IDLE)
        assert refused.value.code == "source_claimed"
        assert store.source("shop").tag == "tag"  # type: ignore[union-attr]  # it is there
        writer.begin()
        writer.close()
    registered(database)
    assert store.source("shop").tag == identify(database.url, SLOT).tag  # type: ignore[union-attr]  # it is there


def test_dead_letters_are_of_the_sink_or_the_consumer_that_reports_them(
    store: Store, database: Database
) -> None:
    sink = {"type": "nats", "source": "shop", "url": "nats://nats.invalid"}
    mail = {"type": "nats", "stream": "events", "url": "nats://nats.invalid"}
    consumers = {"mail": NatsConsumer.model_validate(mail)}
    whole = config(database, out=sink).model_copy(update={"nats_consumers": consumers})
    letter = asdict(DeadLetter("k", "s", "too_large", "2 MiB", "{}"))
    with StoreSession(whole, database.url, lambda _: None) as run:
        for name in ("out", "mail"):
            assert run.handle({"sink": name, "dead": [letter]}) is None
    found = [(each.sink, each.consumer) for each in store.letters.page()]
    assert found == [("out", None), (None, "mail")]


class Sessions:
    """The sessions that hold the lock of a source."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def find(self, *, granted: bool = True) -> list[int]:
        query = "SELECT l.pid FROM pg_locks AS l JOIN pg_database AS d ON d.oid = l.database"
        query += " WHERE locktype = 'advisory' AND granted = %s AND classid = %s"
        query += " AND datname = current_database()"
        return [row[0] for row in self._database.execute(query, [granted, LOCK_RUN])]

    def end(self) -> None:
        for pid in self.find():
            self._database.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])


def test_a_claim_whose_session_ends_is_made_again(store: Store, database: Database) -> None:
    sessions = Sessions(database)
    with session(database) as run, capture_logs() as logs:
        run.register("shop", IDLE)
        (before,) = sessions.find()
        sessions.end()
        await_true(lambda: bool(sessions.find()))
        assert sessions.find() != [before]
        source = store.source("shop")
        assert source is not None
        with store.claim_source(source.id) as taken:
            assert not taken
        await_true(lambda: "the source is claimed again" in [entry["event"] for entry in logs])
    await_true(lambda: sessions.find() == [])  # the server ends a session after its client
    assert [entry["event"] for entry in logs] == [
        "the claim on the source is lost: its session in the store ended",
        "the source is claimed again",
    ]


def test_a_claim_that_another_run_has_taken(
    store: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "PATIENCE", 0.0)
    sessions, reports = Sessions(database), list[Report]()
    with (
        StoreSession(config(database), database.url, reports.append) as run,
        psycopg.connect(database.url, options="-c lock_timeout=60s") as other,
    ):
        run.register("shop", IDLE)
        source = store.source("shop")
        assert source is not None
        values = [LOCK_RUN, source.id]
        taken = Later(lambda: other.execute("SELECT pg_advisory_lock(%s, %s)", values))
        await_true(lambda: bool(sessions.find(granted=False)))
        sessions.end()
        taken.result(10)
        await_true(lambda: bool(reports))
    (report,) = reports
    assert (report["claim"], report["code"]) == ("shop", "source_claimed")
    assert "Another penstock run writes source shop" in report["error"]
    assert report["remedy"] == "Stop it, or give this source another name."


def test_a_source_whose_lsns_went_back(store: Store, database: Database) -> None:
    """It was restored: what is new lies before what its stream has, and is not left out."""
    assert registered(database) == (0, [])
    stream = store.stream("events")
    assert stream is not None
    wal_end = identify(database.url, SLOT).wal_end
    assert wal_end is not None
    put(store, stream, 1, wal_end)
    assert registered(database) == (0, [])
    lost = wal_end + 2**40
    put(store, stream, 2, lost)
    base, (warning,) = registered(database)
    assert base == lost
    assert "its streams go on behind what they hold" in warning
    put(store, stream, 3, wal_end + 8)
    assert registered(database) == (base, [])
    assert [(s.position, s.message["record"]["id"]) for s in read(store, stream)] == [
        (in_stream(Position(lsn, 0)), n)
        for n, lsn in enumerate([wal_end, lost, lost + wal_end + 8], 1)
    ]


def test_a_source_that_another_run_writes_meanwhile(
    store: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run is prepared beside the one that it follows, which goes on: nothing was restored."""
    assert registered(database) == (0, [])
    stream = store.stream("events")
    assert stream is not None
    asked: list[Identity] = []

    def identify_and_write(url: str, slot: str) -> Identity:
        found = identify(url, slot)
        if not asked:
            database.execute("SELECT pg_logical_emit_message(false, 'penstock', 'more')")
            database.execute("SELECT pg_switch_wal()")
            put(store, stream, 1, identify(url, slot).wal_end or 0)
        asked.append(found)
        return found

    monkeypatch.setattr(store_session, "identify", identify_and_write)
    assert registered(database) == (0, [])
    (message,) = read(store, stream)
    assert message.position.lsn > (asked[0].wal_end or 0)


def put(store: Store, stream: StreamRecord, number: int, lsn: int) -> None:
    """Write a message that was committed at `lsn`."""
    before = Position(lsn - 1, -1)
    part = RoundPart(before, Position(lsn, 0), 0, 1)
    assert write_part(store, stream, wire([inserted(number)], before), part) == 1


def test_another_pipelines_backlog(
    store: Store, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sink of that name of a source that is not ours is not our sink."""
    out = {"type": "nats", "source": "shop", "url": "nats://127.0.0.1:9"}
    theirs = store.register_source("theirs", "tag").id
    with store.connection() as connection:
        backlog.fall_behind(connection, theirs, "out", SinkError("timeout", "Late."))
    with session(database, out=out) as run, capture_logs() as logs:
        run.register("shop", IDLE)
        run.start()
        run.look()
        await_true(run.is_drained)
    assert not [entry for entry in logs if entry["log_level"] != "info"]


def test_a_hundred_sinks_that_are_behind_share_a_few_connections(
    store: Store, database: Database
) -> None:
    """Postgres takes 100 by default, of all its clients."""
    nats = {"type": "nats", "source": "shop", "url": "nats://127.0.0.1:1"}  # nothing listens there
    sinks: dict[str, object] = {f"s{n}": {**nats, "subject": f"x.{n}"} for n in range(100)}
    late, reports = SinkError("timeout", "Late."), SimpleQueue[Report]()
    with StoreSession(config(database, **sinks), database.url, reports.put) as run:
        run.register("shop", IDLE)
        run.register_consumers()
        source = run.source("shop")
        with store.connection() as connection:
            for name in sinks:
                backlog.put_behind(connection, source.id, name, late)
                backlog.spill(connection, source.id, name, wire([Change()]), source.base)
        run.start()
        run.handle({"capture": "shop", "done": [1 << 40, 0]})
        tried = set[str]()
        while len(tried) < len(sinks):
            report = reports.get(timeout=60)
            if report.get("code") == "connection_refused":
                tried.add(report["sink"])
        query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
        ((count,),) = database.execute(query)
    assert count <= CONNECTIONS + 12
