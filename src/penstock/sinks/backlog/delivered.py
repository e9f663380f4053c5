"""What a drainer has delivered already, so that it delivers and counts nothing twice. No I/O."""

from __future__ import annotations

from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from penstock.core.delivery import Written
from penstock.core.message import Position, is_behind

_KEY: Final = "idempotency_key"


class Delivered:
    """The messages of one sink that are delivered, beyond what its row in the store holds."""

    def __init__(self) -> None:
        # Ends and keys of what was delivered beyond what is done, in joins that failed.
        self._ahead: list[tuple[Position, pa.Array]] = []
        # All up to here was counted, None where that is not known.
        self._counted: Position | None = None

    def note_counted(self, end: Position) -> None:
        """Note that all up to `end` is delivered and counted; some of it may come again."""
        self._counted = end if self._counted is None else max(self._counted, end)

    def forget(self, end: Position | None = None) -> None:
        """Forget what was delivered ahead up to `end`, None: all of it; the store holds it now."""
        self._ahead = [] if end is None else [ahead for ahead in self._ahead if ahead[0] > end]

    def note_ahead(self, messages: pa.RecordBatch, rest: pa.RecordBatch, written: Written) -> None:
        """Note what of `messages` is delivered, all but `rest`, perhaps beyond what is done.

        Dead letters are not: they are kept only if this transaction is.
        """
        lsn, idx = messages.column("commit_lsn")[-1], messages.column("commit_idx")[-1]
        dead = pa.array([letter.idempotency_key for letter in written.dead], pa.string())
        done = _without(_without(messages, rest.column(_KEY)), dead)
        self._ahead.append((Position(lsn.as_py(), idx.as_py()), done.column(_KEY)))

    def missing(self, messages: pa.RecordBatch) -> pa.RecordBatch:
        """Return those of `messages` that were not delivered ahead."""
        for _, keys in self._ahead:
            messages = _without(messages, keys)
        return messages

    def counted(self, messages: pa.RecordBatch) -> int:
        """Return how many of `messages` were counted before."""
        if self._counted is None or not messages.num_rows:
            return 0
        new = pc.sum(is_behind(messages, self._counted)).as_py() or 0
        return int(messages.num_rows - new)


def _without(messages: pa.RecordBatch, keys: pa.Array) -> pa.RecordBatch:
    return messages.filter(pc.invert(pc.is_in(messages.column(_KEY), value_set=keys)))
