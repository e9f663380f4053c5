"""The micro-batches of a user's own query: what is there, up to a number of messages, at once.

Spark asks `latest_offset(start)` when all up to `start` is in the sink. That, not the later `confirm`,
is what confirms the slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pyspark.sql.datasource import InputPartition

from penstock.core.message import Position
from penstock.postgres.capture import Capture
from penstock.postgres.chunk import partition
from penstock.spark.options import SourceOptions
from penstock.spark.partitions import Partitions

_POLL_SECONDS: Final = 1.0
_FLUSH_SECONDS: Final = 5.0
_ONE_TASK_ROWS: Final = 2_000  # a second task costs more than it saves below this

Offset = dict[str, Any]


class MicroBatches:
    """Plans batches out of a capture, up to the end of what was written before `until_lsn`, if given."""

    def __init__(self, options: SourceOptions, capture: Capture, until_lsn: int | None) -> None:
        self._options = options
        self._capture = capture
        self._until_lsn = until_lsn
        self._partitions = Partitions(options.host)
        self._planned: tuple[tuple[Offset, Offset], Sequence[InputPartition]] | None = None
        self.done: Position | None = None
        """Up to where all is in the sink, None before Spark has asked."""

    def latest_offset(self, start: Offset, max_rows: int) -> Offset:
        """Return the end of the next batch, waiting up to a second for there to be one."""
        capture, until = self._capture, self._until_lsn
        position = _position(start, capture)
        capture.confirm(position)
        self.done = position
        if until is not None and position.lsn >= until:
            capture.flush(_FLUSH_SECONDS)
            return start
        # Even a read of all that is available goes in batches that fit into memory; under
        # availableNow Spark asks again until nothing is left.
        end = capture.available(position, max_rows, _POLL_SECONDS, until)
        if end == position:
            capture.flush(_FLUSH_SECONDS if until is not None else 0.0)
            return start
        return end.to_offset()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        """Return the tasks of a batch; a group's messages are all in one of them, in order."""
        # A query that uses the stream twice plans each batch twice.
        if self._planned is None or self._planned[0] != (start, end):
            self._planned = (start, end), self._plan(start, end)
        return self._planned[1]

    def _plan(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        first, last = _position(start, self._capture), _position(end, self._capture)
        if last <= first:
            return []
        chunks = self._capture.take(first, last)
        rows = sum(chunk.rows for chunk in chunks)
        batches = partition(chunks, 1 if rows < _ONE_TASK_ROWS else self._options.splits)
        self._partitions.forget()
        return [self._partitions.make(batch) for batch in batches]

    def confirm(self, end: Offset) -> None:
        """Confirm a batch."""
        self._capture.confirm(_position(end, self._capture))

    def close(self) -> None:
        """Stop serving batches."""
        self._partitions.close()


def _position(offset: Offset, capture: Capture) -> Position:
    """Return the position of an offset; a query that was `realtime` before begins where the slot is."""
    return Position.from_offset(offset) if "lsn" in offset else capture.start
