"""The backlog of a sink: what tasks add, in parts and again, comes out in order and once."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pyarrow as pa
import pytest
from tests.isolation_help import messages, position
from tests.streams_help import Change, wire

from penstock.core.errors import SinkError
from penstock.core.message import SUBJECT_FIELD, Position
from penstock.sinks.backlog import store as backlog
from penstock.sinks.backlog.store import Connection
from penstock.streams.records import SourceRecord
from penstock.streams.store import Store

SOURCE = 1
SINK = "jetstream"
ERROR = SinkError("connection_refused", "Nothing listens.", remedy="Start it.")


@pytest.fixture
def source(store: Store) -> SourceRecord:
    source = store.register_source("shop", "tag")
    assert source.id == SOURCE
    return source


@pytest.fixture
def connection(store: Store, source: SourceRecord) -> Iterator[Connection]:
    with store.connection() as connection:
        backlog.fall_behind(connection, SOURCE, SINK, ERROR)
        yield connection


def drain(
    connection: Connection, until: Position | None = None, *, look_at: int = 512
) -> list[int]:
    """Take all up to `until`, and return the numbers."""
    numbers: list[int] = []
    while True:
        of = backlog.behind(connection, SOURCE, SINK)
        assert of is not None
        taken = backlog.take(connection, of, until, look_at=look_at)
        if taken is None:
            return numbers
        assert taken.end > of.drained or not taken.messages.num_rows
        lsns = taken.messages.column("commit_lsn").to_pylist()
        idxs = taken.messages.column("commit_idx").to_pylist()
        numbers += [5 * ((lsn - 1000) // 8) + idx for lsn, idx in zip(lsns, idxs, strict=True)]
        backlog.drained(connection, SOURCE, SINK, taken.end)


def left(connection: Connection) -> int:
    return backlog.size(connection, SOURCE, SINK)[0]


@pytest.mark.parametrize("look_at", [2, 7, 512])
@pytest.mark.parametrize("seed", range(4))
def test_parts_and_replays(
    connection: Connection, monkeypatch: pytest.MonkeyPatch, seed: int, look_at: int
) -> None:
    """Whatever is spilled in whatever pieces: each message comes once, in the order of positions."""
    monkeypatch.setattr(backlog, "ROWS", 40)
    chance = random.Random(seed)
    got: list[int] = []
    done = written = 0
    for _ in range(30):
        # After a crash a batch begins anywhere behind what was done, and is cut otherwise.
        first = chance.choice([written, chance.randint(done, written)])
        written = max(written, first + chance.randint(1, 90))
        parts = chance.randint(1, 3)
        rows = messages(first, written)
        for part in range(parts):
            mine = rows.filter([n % parts == part for n in range(first, written)])
            backlog.spill(connection, SOURCE, SINK, mine, 0)
        if chance.random() < 0.6:
            done = written
            got += drain(connection, position(done - 1), look_at=look_at)
            assert got == list(range(done))
    got += drain(connection, look_at=look_at)
    assert got == list(range(written))
    assert left(connection) == 0


def test_messages_that_were_made_of_one_stay_together_with_their_subjects(
    connection: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many of one position, in several blocks, some of them again, some without a subject."""
    monkeypatch.setattr(backlog, "ROWS", 1)
    whole = wire([Change({"id": 1}, position=Position(9, 4), part=n) for n in range(5000)])
    named = pa.array([None if n % 7 == 3 else f"a.{n}" for n in range(5000)], pa.string())
    routed = whole.append_column(SUBJECT_FIELD, named)
    before = wire([Change({"id": 1}, position=Position(9, 3))])  # spilled before there was a route
    backlog.spill(connection, SOURCE, SINK, before, 0)
    backlog.spill(connection, SOURCE, SINK, routed, 0)
    backlog.spill(connection, SOURCE, SINK, routed.slice(1000, 2500), 0)
    of = backlog.behind(connection, SOURCE, SINK)
    assert of is not None
    taken = backlog.take(connection, of, Position(9, 3))
    assert taken is not None
    assert taken.messages.num_rows == 1
    backlog.drained(connection, SOURCE, SINK, taken.end)
    of = backlog.behind(connection, SOURCE, SINK)
    assert of is not None
    taken = backlog.take(connection, of, Position(9, 4), look_at=2)
    assert taken is not None
    assert taken.messages.column("part").to_pylist() == list(range(5000))
    assert taken.messages.column("subject").to_pylist() == named.to_pylist()
    backlog.drained(connection, SOURCE, SINK, taken.end)
    assert left(connection) == 0


def test_a_block_of_an_older_build_is_read(connection: Connection) -> None:
    """It knows neither parts nor subjects."""
    old = messages(0, 3).drop_columns(["part"])
    backlog.spill(connection, SOURCE, SINK, old, 0)
    backlog.spill(connection, SOURCE, SINK, messages(3, 5), 0)
    of = backlog.behind(connection, SOURCE, SINK)
    assert of is not None
    taken = backlog.take(connection, of)
    assert taken is not None
    assert taken.messages.column("part").to_pylist() == [0] * 5
    assert taken.messages.column("subject").to_pylist() == [None] * 5


def test_only_what_is_done_is_taken(connection: Connection) -> None:
    backlog.spill(connection, SOURCE, SINK, messages(0, 50), 0)
    assert drain(connection, position(19)) == list(range(20))
    assert left(connection) == 50  # a block goes as a whole
    # Another task of the same batch comes late, with what lies between.
    backlog.spill(connection, SOURCE, SINK, messages(20, 30), 0)
    assert drain(connection, position(49)) == list(range(20, 50))
    assert left(connection) == 0


def test_a_crash_loop_brings_the_same_block_very_often(connection: Connection) -> None:
    for _ in range(40):
        backlog.spill(connection, SOURCE, SINK, messages(0, 3), 0)
    backlog.spill(connection, SOURCE, SINK, messages(3, 6), 0)
    assert drain(connection, position(5), look_at=4) == list(range(6))
    assert left(connection) == 0


def test_a_large_backlog_is_taken_in_pieces(connection: Connection) -> None:
    for first in range(0, 50_000, 5_000):
        backlog.spill(connection, SOURCE, SINK, messages(first, first + 5_000), 0)
    of = backlog.behind(connection, SOURCE, SINK)
    assert of is not None
    taken = backlog.take(connection, of)
    assert taken is not None
    assert 15_000 < taken.messages.num_rows < 25_000
    assert drain(connection) == list(range(50_000))


def test_another_cluster_goes_on_behind_what_waits(
    store: Store, source: SourceRecord, connection: Connection
) -> None:
    """LSNs start anew there, and a source without streams has nothing but the backlog to go by."""
    backlog.spill(connection, SOURCE, SINK, messages(100, 110), source.base)
    other = store.register_source("shop", "another")
    last = position(109)
    assert other.base == last.lsn
    backlog.spill(connection, SOURCE, SINK, messages(0, 10), other.base)
    of = backlog.behind(connection, SOURCE, SINK)
    assert of is not None
    taken = backlog.take(connection, of)
    assert taken is not None
    keys = taken.messages.column("idempotency_key").to_pylist()
    first = [f"tag-{position(n).lsn}-{position(n).idx}" for n in range(100, 110)]
    assert keys == first + [f"tag-{position(n).lsn}-{position(n).idx}" for n in range(10)]
    assert taken.end == other.position(position(9))
    # What was drained counts as well, when nothing waits any more.
    backlog.drained(connection, SOURCE, SINK, taken.end)
    assert store.register_source("shop", "third").base == taken.end.lsn


def test_blocks_of_an_older_version(connection: Connection) -> None:
    old = messages(0, 5).drop_columns(["old_group_hash"])
    backlog.spill(connection, SOURCE, SINK, old, 0)
    backlog.spill(connection, SOURCE, SINK, messages(5, 10), 0)
    assert drain(connection) == list(range(10))


def test_what_is_known_of_a_sink(store: Store, connection: Connection) -> None:
    backlog.fall_behind(connection, SOURCE, SINK, SinkError("timeout", "Later."))  # is not news
    (of,) = backlog.all_behind(connection)
    assert of == backlog.behind(connection, SOURCE, SINK)._replace(seconds=of.seconds)  # type: ignore[union-attr]  # it is there
    assert (of.sink, of.source, of.code, of.drained) == (SINK, "shop", ERROR.code, Position(0, -1))
    assert of.error == str(ERROR)
    assert 0 <= of.seconds < 60
    backlog.spill(connection, SOURCE, SINK, messages(0, 3), 0)
    backlog.spill(connection, SOURCE, SINK, messages(0, 0), 0)
    waiting, size = backlog.size(connection, SOURCE, SINK)
    assert waiting == 3
    assert size > 100
    backlog.join(connection, SOURCE, SINK)
    assert backlog.behind(connection, SOURCE, SINK) is None
    assert backlog.size(connection, SOURCE, SINK) == (0, 0)


def test_sources_that_name_their_sinks_alike(store: Store, connection: Connection) -> None:
    """What one of them has waiting, and has had delivered, is nothing to the other."""
    other = store.register_source("orders", "another").id
    backlog.spill(connection, SOURCE, SINK, messages(0, 10), 0)
    assert backlog.behind(connection, other, SINK) is None
    backlog.fall_behind(connection, other, SINK, ERROR)
    backlog.spill(connection, other, SINK, messages(2, 5), 0)
    assert {(of.source, of.sink) for of in backlog.all_behind(connection)} == {
        ("shop", SINK),
        ("orders", SINK),
    }
    assert [backlog.size(connection, n, SINK)[0] for n in (SOURCE, other)] == [10, 3]
    assert drain(connection) == list(range(10))
    backlog.join(connection, SOURCE, SINK)
    of = backlog.behind(connection, other, SINK)
    assert of is not None
    assert of.source_id == other
    assert of.drained == Position(0, -1)
    assert backlog.size(connection, other, SINK)[0] == 3
    taken = backlog.take(connection, of)
    assert taken is not None
    assert taken.messages.num_rows == 3
