"""The decoder at a watermark: which one is known, which chunk it makes, which rows are left out."""

from __future__ import annotations

from array import array

import pytest
from tests.unit.test_decoder import Fed, T, inserts, row, transaction

from penstock.core.message import Position
from penstock.postgres.pgoutput import UNCHANGED, Begin, Commit, Delete, Message, Truncate, Update
from penstock.postgres.reads import BackfillSpec, OrderColumn, Reads, SourceTable
from penstock.postgres.table import Shape, Table
from penstock.postgres.types import Types
from penstock.postgres.watermarks import Snapshot, Watch, Watermark, Window

CONTENT = b'["run",1,0]'
SOURCE = SourceTable(
    T, Shape(("id",)), (), "d", "tag", None, None, None, False,
    (OrderColumn("id", "integer", "pg_catalog"),), None, True,
)  # fmt: skip
SNAPSHOT = Snapshot(7, 7, frozenset())


class Watched(Fed):
    """A decoder that waits for the watermark of a chunk of two ranges."""

    def __init__(self, schema: str = "public") -> None:
        super().__init__()
        ranges = (b"1\n", b"9\n")
        spec = BackfillSpec(1, "sink", schema, "t")
        reads = Reads(spec, 1, 0, ("9",), ranges, SOURCE)
        self.passed: list[Watermark] = []
        self.window = Window()
        self.watch = Watch(schema, "t", False, [self.window])
        mark = Watermark(CONTENT, self.window, reads, self.passed.append, 10, 1, 0)
        self.watch.watermarks[CONTENT] = mark

    def touched(self) -> set[int]:
        (mark,) = self.passed
        assert mark.reads is not None
        found = array("q")
        found.frombytes(mark.reads.touched)
        return set(found)


def watermark(content: bytes = CONTENT, prefix: str = "penstock", whole: bool = True) -> Message:
    return Message(whole, 0, prefix, content)


def own(*numbers: int) -> set[int]:
    """Return the hashes of rows with these keys, as their inserts have them."""
    fed = Fed()
    fed.feed(T, *transaction(1, *inserts(min(numbers), max(numbers))))
    fed.seal()
    found = [r for chunk in fed.chunks for p in chunk.pieces for r in p.messages.to_pylist()]
    hashes = {r["record"]: r["group_hash"] for r in found}
    return {hashes[f'{{"id":{number},"a":"x"}}'] for number in numbers}


def test_a_watermark_makes_a_chunk_of_its_own() -> None:
    fed = Watched()
    fed.window.set_snapshot(SNAPSHOT, None)
    fed.feed(T, *transaction(10, *inserts(1, 2)), *transaction(20, watermark()))
    fed.feed(*transaction(30, *inserts(3, 3)))
    fed.seal()
    before, chunk, after = fed.chunks
    assert (before.rows, before.end) == (2, Position(10, 1))
    assert chunk.reads is not None
    assert chunk.barrier
    assert (chunk.start, chunk.end) == (Position(10, 1), Position(20, (2 << 24) - 1))
    assert (chunk.reads.lsn, chunk.reads.xid) == (20, 7)
    assert (after.start, after.end) == (chunk.end, Position(30, 0))
    assert fed.touched() == own(1, 2)
    # Its end may be confirmed only when its reads are durable.
    fed.progress.confirm(Position(10, 1))
    assert fed.progress.flush_lsn == 18
    fed.progress.confirm(chunk.end)
    assert fed.progress.flush_lsn == 28


@pytest.mark.parametrize(
    "message",
    [watermark(b'["other",1,0]'), watermark(prefix="penstock2"), watermark(whole=False)],
)
def test_what_is_no_watermark_of_this_run_is_passed_by(message: Message) -> None:
    fed = Watched()
    fed.feed(T, *transaction(10, message), message._replace(transactional=False))
    assert fed.found() == []
    assert fed.passed == []
    fed.feed(*transaction(20, watermark()))
    assert len(fed.passed) == 1
    fed.feed(*transaction(30, watermark()))
    assert len(fed.chunks) == 1


def test_every_key_of_a_change_is_collected() -> None:
    fed = Watched()
    fed.feed(T, Begin(10, 0, 7), *inserts(1, 1))
    fed.window.set_snapshot(SNAPSHOT, fed.xid)
    fed.feed(
        Delete(1, [b"2", None], None),
        Update(1, [b"3", None], None, row(4)),
        Update(1, None, None, row(5)),
    )
    fed.feed(Commit(10, 18, 0), *transaction(20, watermark()))
    assert fed.touched() == own(1, 2, 3, 4, 5)


def test_other_tables_are_not_collected() -> None:
    fed = Watched(schema="other")
    fed.window.set_snapshot(SNAPSHOT, None)
    fed.feed(T, *transaction(10, *inserts(1, 2)), *transaction(20, watermark()))
    assert fed.touched() == set()


def test_a_truncate_has_the_chunk_planned_again() -> None:
    fed = Watched()
    fed.window.set_snapshot(SNAPSHOT, None)
    fed.feed(T, *transaction(10, Truncate((1,), False, False)), *transaction(20, watermark()))
    assert [chunk.reads for chunk in fed.chunks] == [None]
    assert fed.passed[0].reads is None


def test_rows_that_lack_values_are_to_be_read_again() -> None:
    fed = Watched()
    fed.window.set_snapshot(SNAPSHOT, None)
    left_out = Update(1, None, None, [b"3", UNCHANGED])
    moved = Update(1, [b"4", None], None, [b"5", UNCHANGED])
    fed.feed(T, *transaction(10, left_out, moved), *transaction(20, watermark()))
    assert fed.watch is not None
    assert fed.watch.incomplete == {("5",): -1, ("3",): 0}
    fed.watch.incomplete.clear()
    fed.feed(*transaction(30, left_out, moved))
    assert fed.watch.incomplete == {("5",): -1}


def test_another_attempt_reads_what_was_to_be_read_again() -> None:
    watch = Watched().watch
    assert watch is not None
    watch.incomplete[("1",)] = 7
    watch.delivered = 8
    watch.restart([("3",)])
    assert watch.incomplete == {("1",): -1, ("3",): -1}
    assert (watch.windows, watch.watermarks, watch.delivered) == ([], {}, -1)


def test_a_change_with_another_replica_identity_has_the_chunk_planned_again() -> None:
    fed = Watched()
    by_text = T._replace(columns=(T.columns[0]._replace(is_key=False), *T.columns[1:]))
    fed.watch.expected = Table(  # type: ignore[union-attr]  # it is there
        by_text, shape=Shape(("a",)), converter=Types(()).converter, database="d", tag="tag"
    )  # fmt: skip
    fed.window.set_snapshot(SNAPSHOT, None)
    fed.feed(T, *transaction(10, *inserts(1, 2)), *transaction(20, watermark()))
    assert fed.passed[0].reads is None
