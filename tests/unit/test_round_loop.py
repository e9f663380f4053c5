"""The hand-out of rounds: to which lanes, when, and what becomes of lanes that are lost."""

from __future__ import annotations

import contextlib
import threading
import time
from functools import partial
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, Final, cast

import pyarrow as pa
import pytest
from structlog.testing import capture_logs
from tests.waits import Later, await_end

from penstock.core.blocks import Block, Opening, unpack
from penstock.core.errors import CaptureError, SparkError
from penstock.core.message import WIRE_SCHEMA, Position
from penstock.postgres.chunk import Chunk, ChunkBuilder, Piece
from penstock.postgres.reads import BackfillSpec, Reads
from penstock.spark import round_loop
from penstock.spark.lanes import Lane, Reports, read
from penstock.spark.round_loop import RoundLoop

START = Position(10, -1)
PATIENCE: Final = 30


def reading(loop: RoundLoop) -> Later[list[tuple[bytes, bytes]]]:
    """Read a lane to its end."""
    return Later(lambda: list(read(Lane(loop.address, 1, 0), 7)))


@pytest.mark.parametrize("linger", [0.0, 0.1, 3600.0])
def test_lanes_that_are_there_before_the_capture_get_what_it_has(linger: float) -> None:
    """So does a query that waits for its slot; drained, it leaves the slot, and its batch ends."""
    events: SimpleQueue[object] = SimpleQueue()

    def hand_out(after: Position, _rows: int) -> tuple[Position, list[Chunk], bool]:
        events.put(("asked", after))
        return after, [], False

    capture = SimpleNamespace(
        start=Position(20, 0),
        on_read=None,
        altered=lambda: None,
        hand_out=hand_out,
        confirm=events.put,
    )
    loop = RoundLoop(
        host="127.0.0.1", max_rows=10, in_step=False, seconds=60,
        on_settled=lambda _: None, on_failed_reads=lambda *_: None, on_joined=events.put,
        on_drained=lambda: events.put("drained"),
    )  # fmt: skip
    loop.start()
    try:
        loop.open(1)
        reader = reading(loop)
        reports = Reports(Opening(loop.address, 1, 0, 7))
        assert events.get(timeout=PATIENCE) == 1  # joined, and nothing to hand out
        loop.attach(cast("Any", capture))
        assert events.get(timeout=PATIENCE) == ("asked", Position(20, 0))
        assert loop.done == Position(20, 0)
        loop.drain(linger)
        while (found := events.get(timeout=PATIENCE)) != "drained":
            assert found == ("asked", Position(20, 0))
        if linger > PATIENCE:
            loop.drain(linger)  # asked again and again, until the slot is left
            reader.join(0.2)
            assert reader.is_alive()
            loop.drain()
        reader.result(PATIENCE)  # its batch has ended
        reports.close()
    finally:
        loop.close()


def test_no_lane_comes_before_its_batch_is_open() -> None:
    """It would be refused, as of another batch, and its rounds would wait for the next one."""
    loop = RoundLoop(
        host="127.0.0.1", max_rows=10, in_step=False, seconds=60,
        on_settled=lambda _: None, on_failed_reads=lambda *_: None, on_drained=lambda: None,
    )  # fmt: skip
    taken, gate, open_ = threading.Event(), threading.Event(), loop._open

    def held(batch: int) -> None:
        taken.set()
        assert gate.wait(PATIENCE)
        open_(batch)

    loop._open = held  # type: ignore[method-assign]  # for the test
    loop.start()
    opening = threading.Thread(target=loop.open, args=(1,), daemon=True)
    try:
        opening.start()
        assert taken.wait(PATIENCE)
        opening.join(0.2)
        assert opening.is_alive()
        gate.set()
        await_end(opening)
        assert loop._opened is not None
    finally:
        loop.close()


def test_a_batch_lasts_from_its_first_lane_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Spark has few slots its tasks wait for them, as long as a batch of others lasts."""
    asked = threading.Event()

    def hand_out(after: Position, _rows: int) -> tuple[Position, list[Chunk], bool]:
        asked.set()
        return after, [], False

    capture = SimpleNamespace(
        start=Position(20, 0), on_read=None, altered=lambda: None, hand_out=hand_out,
        confirm=lambda _: None,
    )  # fmt: skip
    loop = RoundLoop(
        host="127.0.0.1", max_rows=10, in_step=False, seconds=60,
        on_settled=lambda _: None, on_failed_reads=lambda *_: None, on_drained=lambda: None,
    )  # fmt: skip
    loop.start()
    try:
        loop.attach(cast("Any", capture))
        loop.open(1)
        later = SimpleNamespace(monotonic=lambda: time.monotonic() + 2000)
        monkeypatch.setattr(round_loop, "time", later)
        reader = reading(loop)
        reports = Reports(Opening(loop.address, 1, 0, 7))
        assert asked.wait(PATIENCE)
        assert reader.is_alive()  # its batch goes on
        loop.drain()
        reader.result(PATIENCE)
        reports.close()
    finally:
        loop.close()


def test_a_lane_that_is_lost_has_its_messages_sent_again_to_the_next() -> None:
    row = {"record": "{}", "action": "insert", "metadata": "{}", "part": 0}
    messages = pa.RecordBatch.from_pylist([row] * 3_000, schema=WIRE_SCHEMA)
    end = Position(20, 0)
    piece = Piece(frozenset([0]), messages)
    chunk = Chunk(START, end, 3_000, 100, (piece,), frozenset(), barrier=False)
    confirmed: SimpleQueue[Position] = SimpleQueue()
    when_settled: list[Position | None] = []

    def hand_out(after: Position, _rows: int) -> tuple[Position, list[Chunk], bool]:
        return (end, [chunk], False) if after < end else (end, [], False)

    capture = SimpleNamespace(
        start=START, on_read=None, altered=lambda: None, hand_out=hand_out,
        options=SimpleNamespace(splits=2), confirm=confirmed.put,
    )  # fmt: skip
    loop = RoundLoop(
        host="127.0.0.1", max_rows=10_000, in_step=False, seconds=60,
        on_settled=lambda _: when_settled.append(loop.done), on_failed_reads=lambda *_: None,
    )  # fmt: skip
    loop.start()
    try:
        loop.attach(cast("Any", capture))
        loop.open(1)
        found = []
        for session in (7, 8):  # the first ends in the middle, as a task that fails does
            reports = Reports(Opening(loop.address, 1, 0, session))
            frames = read(Lane(loop.address, 1, 0), session)
            values = [next(frames)[1], next(frames)[1]]
            batch = pa.record_batch([pa.array(values, pa.binary())], names=["block"])
            found.append([of for of in unpack(iter([batch])) if isinstance(of, Block)])
            if session == 7:
                reports.close()
        first, again = found
        assert [of.last for of in again] == [False, True]
        assert all(one.messages.equals(other.messages) for one, other in zip(*found, strict=True))
        assert first[0].part is not None
        assert again[0].part is not None
        assert again[0].part.look
        reports.send([again[0].part.id, {}, {}, None])
        assert confirmed.get(timeout=PATIENCE) == end
        # The next query goes on behind what is done: before that it is counted.
        assert when_settled == [START]
        assert loop.done == end
        reports.close()
    finally:
        loop.close()


def test_a_query_that_waits_can_end_or_fail() -> None:
    for end in (RoundLoop.drain, lambda loop: loop.fail(CaptureError("superseded", "Changed."))):
        loop = RoundLoop(
            host="127.0.0.1", max_rows=10, in_step=False, seconds=60,
            on_settled=lambda _: None, on_failed_reads=lambda *_: None,
        )  # fmt: skip
        loop.start()
        try:
            loop.open(1)
            reader = reading(loop)
            reports = Reports(Opening(loop.address, 1, 0, 7))
            end(loop)
            reader.result(PATIENCE)
            reports.close()
        finally:
            loop.close()


@pytest.mark.parametrize(
    ("in_step", "lanes", "at_once"), [(True, 2, 1), (False, 2, 2), (False, 1, 1)]
)
def test_small_rounds_do_not_queue(
    monkeypatch: pytest.MonkeyPatch, in_step: bool, lanes: int, at_once: int
) -> None:
    """What would wait in a lane shares the next round, which costs as much for all of it."""
    for name in ("_INTERVAL", "_STREAMS_INTERVAL"):
        monkeypatch.setattr(round_loop, name, 0.0)  # all that may go out goes out in one turn
    row = {"record": "{}", "action": "insert", "metadata": "{}", "part": 0}

    def hand_out(after: Position, _rows: int) -> tuple[Position, list[Chunk], bool]:
        """One message a round: of another group than the last one's."""
        end = Position(after.lsn + 1, 0)
        messages = pa.RecordBatch.from_pylist([row], schema=WIRE_SCHEMA)
        piece = Piece(frozenset([end.lsn % 2]), messages)
        return end, [Chunk(after, end, 1, 10, (piece,), frozenset(), barrier=False)], True

    capture = SimpleNamespace(
        start=START, on_read=None, altered=lambda: None, hand_out=hand_out,
        options=SimpleNamespace(splits=2), confirm=lambda _: None,
    )  # fmt: skip
    joined: SimpleQueue[int] = SimpleQueue()
    loop = RoundLoop(
        host="127.0.0.1", max_rows=10_000, in_step=in_step, seconds=60,
        on_settled=lambda _: None, on_failed_reads=lambda *_: None, on_joined=joined.put,
    )  # fmt: skip
    loop.start()
    try:
        loop.open(1)
        frames: SimpleQueue[bytes] = SimpleQueue()
        reports = [Reports(Opening(loop.address, 1, lane, 7)) for lane in range(lanes)]

        def take(lane: int) -> None:
            with contextlib.suppress(SparkError):  # the loop's end
                for _, frame in read(Lane(loop.address, 1, lane), 7):
                    frames.put(frame)

        takers = []
        for lane in range(lanes):
            takers.append(Later(partial(take, lane)))
            assert joined.get(timeout=PATIENCE) == lane + 1
        loop.attach(cast("Any", capture))
        parts = [part_of(frames.get(timeout=PATIENCE)) for _ in range(at_once)]
        for _ in range(3):
            reports[0].send([parts.pop(0), {}, {}, None])
            parts.append(part_of(frames.get(timeout=PATIENCE)))
    finally:
        loop.close()
    await_end(*takers)  # they have read all that was handed out
    assert frames.empty()
    for each in reports:
        each.close()


def part_of(frame: bytes) -> int:
    """Return the number of the part that a frame ends."""
    batch = pa.record_batch([pa.array([frame], pa.binary())], names=["block"])
    (block,) = unpack(iter([batch]))
    assert isinstance(block, Block)
    assert block.part is not None
    return block.part.id


def test_reads_of_which_no_messages_can_be_made_end_no_query() -> None:
    """The live messages go on; the backfill gets a report, and goes back or ends."""
    reads = Reads(
        BackfillSpec(1, "events", "public", "t"), 1, 0, None, (b"1\n",), cast("Any", None)
    )
    chunk = ChunkBuilder(START, 2).reads(START, reads, 1)
    failed: list[tuple[Reads, Exception]] = []
    loop = RoundLoop(
        host="127.0.0.1", max_rows=10, in_step=False, seconds=60,
        on_settled=lambda _: None, on_failed_reads=lambda *of: failed.append(of),
    )  # fmt: skip
    loop.start()
    try:
        with capture_logs() as logs:
            whole = loop._whole(chunk, 2)
    finally:
        loop.close()
    assert (whole.reads, whole.rows, whole.pieces) == (None, 0, ())
    assert (whole.start, whole.end) == (chunk.start, chunk.end)
    ((of, error),) = failed
    assert of is reads
    assert isinstance(error, AttributeError)
    assert [entry["log_level"] for entry in logs] == ["error"]
