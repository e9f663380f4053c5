"""The decoder over messages made by hand: positions, fences, barriers, what is read again."""

from __future__ import annotations

from typing import Any

import pytest
from tests.unit.test_pgoutput import encode

from penstock.core.message import Position
from penstock.postgres import decoder as decoding
from penstock.postgres.chunk import Chunk, partition
from penstock.postgres.decoder import Decoder
from penstock.postgres.pgoutput import (
    Begin,
    Column,
    Commit,
    Delete,
    Event,
    Insert,
    ProtocolError,
    Relation,
    Row,
    Truncate,
    Update,
)
from penstock.postgres.table import Shape
from penstock.postgres.types import Types

START = Position(0, -1)
T = Relation(1, "public", "t", "d", (Column("id", 23, -1, True), Column("a", 25, -1, False)))


class Fed(Decoder):
    """A decoder with a catalog of one answer, that keeps its chunks."""

    def __init__(self, start: Position = START, **options: Any) -> None:
        self.chunks: list[Chunk] = []
        defaults: dict[str, Any] = {
            "splits": 1, "includes": lambda *_: True, "grouping": lambda *_: (None, None),
            "truncates": True, "emit": self.chunks.append,
        }  # fmt: skip
        super().__init__(start, **(defaults | options))
        self.connected("d", "tag")

    def feed(self, *events: Event) -> None:
        for event in events:
            relation = self.handle(encode(event))
            if relation is not None:
                key = tuple(c.name for c in relation.columns if c.is_key)
                self.learn(relation, Shape(key), Types().converter)

    def found(self) -> list[tuple[Position, str]]:
        self.seal()
        return [
            (Position(row["commit_lsn"], row["commit_idx"]), row["record"])
            for batch in partition(self.chunks, 1)
            for row in batch.to_pylist()
        ]


def row(number: int) -> Row:
    return [b"%d" % number, b"x"]


def transaction(lsn: int, *changes: Event) -> tuple[Event, ...]:
    return Begin(lsn, 0, 7), *changes, Commit(lsn, lsn + 8, 0)


def inserts(first: int, last: int) -> tuple[Insert, ...]:
    return tuple(Insert(1, row(i)) for i in range(first, last + 1))


def test_positions() -> None:
    fed = Fed()
    fed.feed(*transaction(100, T, *inserts(1, 2)), *transaction(200, *inserts(3, 3)))
    assert [position for position, _ in fed.found()] == [(100, 0), (100, 1), (200, 0)]
    assert fed.read == (200, 0)
    assert fed.progress.received_lsn == 208
    assert fed.progress.flush_lsn == 0


@pytest.mark.parametrize("seen", [1, 2, 3])
def test_what_comes_again_after_a_reconnect_is_passed_by(seen: int) -> None:
    fed = Fed()
    whole = transaction(200, T, *inserts(3, 5))
    fed.feed(*transaction(100, T, *inserts(1, 2)), *whole[: 2 + seen])
    fed.connected("d", "tag")
    fed.feed(*transaction(100, T, *inserts(1, 2)), *whole)
    expected = [(100, 0), (100, 1), (200, 0), (200, 1), (200, 2)]
    assert [position for position, _ in fed.found()] == expected
    fed.progress.confirm(Position(200, 1))
    assert fed.progress.flush_lsn == 108
    fed.progress.confirm(Position(200, 2))
    assert fed.progress.flush_lsn == 208


def test_a_start_inside_a_transaction() -> None:
    fed = Fed(Position(200, 1))
    fed.feed(*transaction(100, T, *inserts(1, 2)), *transaction(200, *inserts(3, 5)))
    assert [position for position, _ in fed.found()] == [(200, 2)]


def test_chunks_are_bounded_by_rows_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "CHUNK_ROWS", 10)
    monkeypatch.setattr(decoding, "CHUNK_BYTES", 1_000)
    fed = Fed()
    fed.feed(*transaction(100, T, *inserts(1, 25)))
    assert [chunk.rows for chunk in fed.chunks] == [10, 10]
    fed.feed(*transaction(200, Insert(1, [b"1", b"x" * 2_000]), *inserts(1, 1)))
    assert [chunk.rows for chunk in fed.chunks] == [10, 10, 6]
    assert fed.unsealed < 100


def test_a_shape_that_orders_otherwise_is_fenced_off() -> None:
    same = T._replace(columns=(*T.columns, Column("b", 25, -1, False)))
    other = T._replace(columns=(T.columns[0], T.columns[1]._replace(is_key=True)))
    fed = Fed()
    fed.feed(*transaction(100, T, *inserts(1, 1)))
    fed.feed(*transaction(200, T, *inserts(2, 2)))
    fed.feed(*transaction(300, same, Insert(1, [*row(3), None])))
    assert fed.chunks == []
    fed.feed(*transaction(400, other, *inserts(4, 4)), *transaction(500, *inserts(5, 5)))
    assert [(chunk.rows, chunk.barrier) for chunk in fed.chunks] == [(3, False)]
    fed.seal()
    assert [(chunk.rows, chunk.barrier) for chunk in fed.chunks] == [(3, False), (2, True)]
    # The comparison outlives a connection.
    fed.connected("d", "tag")
    fed.feed(*transaction(600, T, *inserts(6, 6)))
    fed.seal()
    assert fed.chunks[-1].barrier


def test_moved_keys_are_forgotten_behind_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "_MOVED", 3)
    fed = Fed(grouping=lambda *_: (["a"], None))
    moves = [Update(1, [b"%d" % i, None], None, row(i + 1)) for i in range(1, 6)]
    fed.feed(*transaction(100, T, *inserts(1, 1), *moves))
    fed.seal()
    fed.feed(*transaction(200, Delete(1, [b"6", None], None)))
    fed.seal()
    assert [chunk.barrier for chunk in fed.chunks] == [False, True]
    assert fed._moved == {}


def test_a_truncate_stands_alone() -> None:
    fed = Fed()
    fed.feed(*transaction(100, T, *inserts(1, 1), Truncate((1,), False, False), *inserts(2, 2)))
    fed.seal()
    assert [(chunk.rows, chunk.barrier) for chunk in fed.chunks] == [
        (1, False), (1, True), (1, False),
    ]  # fmt: skip


def test_columns_to_group_by_that_are_not_there_yet() -> None:
    fed = Fed(grouping=lambda *_: (["later"], None))
    fed.feed(*transaction(100, T, *inserts(1, 1)))
    assert len(fed.found()) == 1


@pytest.mark.parametrize(
    "events",
    [
        (Commit(1, 2, 0),),
        (Begin(1, 0, 1), Begin(2, 0, 2)),
        inserts(1, 1),
        (T, *inserts(1, 1)),
        (Begin(1, 0, 1), *inserts(1, 1)),
        (Begin(1, 0, 1), Truncate((1,), False, False)),
        (T, Truncate((1,), False, False)),
        (Begin(1, 0, 1), T, Insert(1, [b"1"])),
    ],
    ids=str,
)
def test_messages_out_of_place(events: tuple[Event, ...]) -> None:
    fed = Fed()

    def messages() -> None:
        fed.feed(*events)
        fed.found()

    with pytest.raises(ProtocolError):
        messages()
