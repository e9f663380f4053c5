"""The frames of one batch, encoded block by block as they are needed. No I/O and no clock."""

from __future__ import annotations

from bisect import bisect_right

import pyarrow as pa

from penstock.core.delivery import Written
from penstock.sinks.nats.frames import Encoder, FrameBlock
from penstock.sinks.nats.rows import RowTable


class EncodedRows:
    """The frames of the rows of `batch`; `base` is the number of the first row.

    `written.bytes` counts the bodies as they are encoded.
    """

    def __init__(
        self, batch: pa.RecordBatch, encoder: Encoder, base: int, rows: RowTable, written: Written
    ) -> None:
        self._batch = batch
        self._encoder = encoder
        self._base = base
        self._rows = rows
        self._written = written
        self._blocks: list[FrameBlock] = []
        self._firsts: list[int] = []
        self.mean_size = 512.0
        """Bytes of a frame, in the newest block."""

    @property
    def count(self) -> int:
        """How many rows were encoded."""
        return self._blocks[-1].first + self._blocks[-1].rows if self._blocks else 0

    def block(self, row: int) -> FrameBlock:
        """Return the block that has a row's frame."""
        while not self._blocks or row >= self._blocks[-1].first + self._blocks[-1].rows:
            self._encode_next()
        return self._blocks[bisect_right(self._firsts, row) - 1]

    def _encode_next(self) -> None:
        first = self.count
        # Frames of rows that are done are needed no more; memory stays at the blocks in flight.
        while len(self._blocks) > 1 and self._rows.all_done(*self._firsts[:2]):
            del self._blocks[0], self._firsts[0]
        block = self._encoder.block(self._batch, first, self._base)
        self._blocks.append(block)
        self._firsts.append(block.first)
        self.mean_size = len(block.data) / block.rows
        self._written.bytes += block.body_bytes

    def frame(self, row: int) -> memoryview:
        """Return the frame of a row."""
        return self.block(row).frame(row)

    def subject(self, row: int) -> str:
        """Return the subject that a row goes to."""
        return bytes(self.frame(row)).split(b" ", 2)[1].decode()

    def key(self, row: int) -> str:
        """Return the `Nats-Msg-Id` of a row."""
        _, _, rest = bytes(self.frame(row)).partition(b"\r\nNats-Msg-Id: ")
        return rest.partition(b"\r\n")[0].decode(errors="replace")

    def body(self, row: int) -> bytes:
        """Return the body of a row."""
        frame = bytes(self.frame(row))
        return frame[frame.index(b"\r\n\r\n") + 4 : -2]
