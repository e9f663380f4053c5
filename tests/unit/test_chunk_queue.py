"""The queue of a capture's chunks: what fits into a batch, what is unread, what waits."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.core.message import Position
from penstock.postgres.capture_stats import CaptureStats
from penstock.postgres.chunk import Chunk
from penstock.postgres.chunk_queue import MAX_UNREAD, ChunkQueue
from penstock.postgres.confirmations import Confirmations

START = Position(0, -1)


def chunk(number: int, rows: int = 10, size: int = 100, **fields: Any) -> Chunk:
    """Return the chunk between the positions `number` - 1 and `number`."""
    start = START if number == 1 else Position(number - 1, 0)
    values = {"content": (), "links": frozenset(), "barrier": False, **fields}
    return Chunk(start, Position(number, 0), rows, size, **values)


@pytest.fixture
def stats() -> CaptureStats:
    return CaptureStats()


@pytest.fixture
def queue(stats: CaptureStats) -> ChunkQueue:
    return ChunkQueue(START, stats)


def test_a_batch_ends_at_its_rows_at_a_barrier_and_at_an_altered_table(queue: ChunkQueue) -> None:
    for one in chunk(1), chunk(2), chunk(3, barrier=True), chunk(4), chunk(5, rows=99):
        queue.add(one)
    ends = [START]
    while (end := queue.fitting(ends[-1], 50, None)) > ends[-1]:
        ends.append(end)
    assert [end.lsn for end in ends[1:]] == [2, 3, 4, 5]  # one chunk may be larger than a batch
    assert queue.fitting(START, 50, Position(1, 0)).lsn == 1
    assert [c.end.lsn for c in queue.between(Position(2, 0), Position(4, 0))] == [3, 4]


def test_reading_stops_at_what_is_unread_unless_it_is_needed(queue: ChunkQueue) -> None:
    read = Position(1, 0)
    queue.add(chunk(1, size=MAX_UNREAD))
    assert not queue.is_full(0, read)
    assert queue.is_full(1, read)
    queue.need(Position(2, 0))
    assert not queue.is_full(1, read)
    assert queue.hand_out(read)
    assert not queue.hand_out(read)
    assert queue.unread(7) == 7
    queue.confirm(read)
    assert queue.unread(0) == 0


def test_what_waits_is_captured_and_not_confirmed(queue: ChunkQueue, stats: CaptureStats) -> None:
    assert queue.waiting(0) == (0, None)
    queue.note_unsealed()
    rows, age = queue.waiting(3)
    assert rows == 3
    assert age is not None
    queue.add(chunk(1))
    queue.add(chunk(2))
    queue.hand_out(Position(1, 0))
    assert (stats.captured, queue.waiting(0)[0]) == (20, 20)
    assert queue.confirm(Position(1, 0)) == []
    assert (stats.confirmed, queue.waiting(0)[0]) == (10, 10)
    queue.confirm(Position(2, 0))
    assert queue.waiting(0) == (0, None)


def test_confirmations_are_soon_where_there_is_something_new() -> None:
    confirmations = Confirmations()
    confirmations.connected(timeout=6.0)
    assert confirmations.due(5) < 1.0  # at once on a new connection
    confirmations.sent(5)
    quiet = confirmations.due(5)
    assert quiet - confirmations.due(6) == pytest.approx(2.0 - 0.2)
    confirmations.polls = True
    assert quiet - confirmations.due(5) == pytest.approx(2.0 - 1.0)
    confirmations.hasten()
    assert [confirmations.take_urgent(), confirmations.take_urgent()] == [True, False]


def test_what_is_emptied_is_still_counted(queue: ChunkQueue, stats: CaptureStats) -> None:
    piece: Any = object()
    for number in range(1, 5):
        queue.add(chunk(number, content=(piece,)))
    queue.hand_out(Position(3, 0))
    queue.empty(Position(1, 0), Position(3, 0))
    kept = queue.between(START, Position(4, 0))
    assert [of.pieces for of in kept] == [(piece,), (), (), (piece,)]
    assert [of.rows for of in kept] == [10] * 4
    queue.confirm(Position(3, 0))
    assert stats.confirmed == 30
    assert queue.waiting(0)[0] == 10
