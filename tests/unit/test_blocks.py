"""Blocks on their way through Spark: none of them waits for what comes later."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.blocks import (
    ROWS_AT_ONCE,
    Block,
    Opening,
    blocks,
    opening,
    unpack,
    with_part,
)
from penstock.core.message import WIRE_SCHEMA, Position, RoundPart
from penstock.expressions.types import TEXT, Field, Reference
from penstock.spark.lanes import LAST, MORE, Lane
from penstock.spark.partitions import PartitionReader
from penstock.spark.settings import SETTINGS

NUMBERS = st.integers(0, 1 << 62)
LANE = Lane("127.0.0.1:1:key", 3, 1)
PART = RoundPart(Position(1, 2), Position(3, 4), 0, 1, 5, None, 6, Position(1, 2), look=False)


def messages(record: str, rows: int = 1) -> pa.RecordBatch:
    row = {"record": record, "action": "insert", "metadata": "{}", "part": 0}
    return pa.RecordBatch.from_pylist([row] * rows, schema=WIRE_SCHEMA)


class Socket(io.RawIOBase):
    """What has left Python's writer."""

    def __init__(self) -> None:
        self.data = b""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self.data += bytes(data)
        return len(data)


def rows_read(data: bytes) -> list[bytes]:
    """Return the values of all batches that are there to their last byte."""
    stream, rows = pa.BufferReader(data), list[bytes]()
    with pa.ipc.open_stream(stream) as reader:
        while True:
            try:
                message = pa.ipc.read_message(stream)
            except (EOFError, OSError, pa.ArrowInvalid):
                return rows
            batch = pa.ipc.read_record_batch(message, reader.schema)
            rows += batch.column(0).field("block").to_pylist()


@pytest.mark.parametrize("fields", [(), (Field(Reference("action", ""), TEXT),)])
@given(
    sends=st.lists(
        st.tuples(st.integers(0, 3), st.text("aé", max_size=90)),
        max_size=6,
    )
)
def test_all_that_is_sent_at_once_comes_through(
    fields: tuple[Field, ...], sends: list[tuple[int, str]]
) -> None:
    out = Socket()
    sent: list[bytes] = [opening(Opening(LANE.address, LANE.batch, LANE.number, 7))]

    def check() -> None:
        there = rows_read(out.data)
        # The JVM hands a batch on when it has the row behind it.
        whole = max(len(there) - 1, 0) // ROWS_AT_ONCE * ROWS_AT_ONCE
        found = [value for value in there[:whole] if value]
        assert len(found) == len(sent)
        assert found[1:] == sent[1:]  # the opening has a number of its own

    def frames(_lane: Lane, _session: int) -> Iterator[tuple[bytes, Any]]:
        check()
        for more, record in sends:
            (value,) = blocks(messages(record), PART)
            for _ in range(more):
                sent.append(value)
                yield MORE, value
            sent.append(value)
            yield LAST, value
            check()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.spark.lanes.read", frames)
        writer = None
        stream = io.BufferedWriter(out, int(SETTINGS["spark.buffer.size"]))
        for batch in PartitionReader(blocks=True, fields=fields).read(LANE):
            # As pyspark does: the columns in one, and no flush.
            struct = pa.StructArray.from_arrays(batch.columns, fields=list(batch.schema))
            wrapped = pa.RecordBatch.from_arrays([struct], ["_0"])
            if writer is None:
                writer = pa.RecordBatchStreamWriter(stream, wrapped.schema)
            writer.write_batch(wrapped)


@given(address=st.text(max_size=200), numbers=st.tuples(NUMBERS, NUMBERS, NUMBERS))
def test_an_opening_is_read_back(address: str, numbers: tuple[int, int, int]) -> None:
    value = Opening(address, *numbers)
    assert list(unpack(iter([column([opening(value)])]))) == [value]


@given(record=st.text(max_size=200), rows=st.sampled_from([0, 1, 40]))
def test_a_block_is_read_back(record: str, rows: int) -> None:
    batch = messages(record, rows)
    (value,) = blocks(batch, PART)
    (found,) = unpack(iter([column([b"", value])]))
    assert isinstance(found, Block)
    assert (found.part, found.last) == (PART, True)
    assert isinstance(found.part, RoundPart)
    assert isinstance(found.part.done, Position)
    assert found.messages.equals(batch)


@given(record=st.text(max_size=2_000), plan=NUMBERS)
def test_a_block_goes_to_another_part(record: str, plan: int) -> None:
    batch = messages(record, 2_001)
    other = PART._replace(plan=plan, done=Position(2, plan), look=True)
    moved = [with_part(with_part(value, other), other) for value in blocks(batch, PART)]
    found = list(unpack(iter([column(moved)])))
    assert [(of.part, of.last) for of in found if isinstance(of, Block)] == [
        (other, False), (other, True),
    ]  # fmt: skip
    there = [of.messages for of in found if isinstance(of, Block)]
    assert pa.Table.from_batches(there).equals(pa.Table.from_batches([batch]))


def column(values: list[bytes]) -> pa.RecordBatch:
    return pa.record_batch([pa.array(values, pa.binary())], names=["block"])
