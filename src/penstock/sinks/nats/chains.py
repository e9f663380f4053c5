"""Rows of one group that go at once: linked, each naming the one before it, or as an atomic batch.

No I/O; the clock is the caller's `now`, in seconds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.core.backoff import Backoff
from penstock.sinks.nats.encoded import EncodedRows
from penstock.sinks.nats.frames import as_batch, as_links
from penstock.sinks.nats.order import GroupOrder
from penstock.sinks.nats.rows import WAITING, RowTable

_MAX_BATCHES: Final = 16
"""Atomic batches in flight. A stream takes 50 from all its publishers."""
_BATCH_BYTES: Final = 4 * 1024 * 1024
"""How large an atomic batch may be: the server keeps it aside until its last message is there."""
_LINK_PAUSE: Final = (0.1, 60.0)
"""Seconds for which messages are not linked after another client has published between two of them."""
_ATOMIC_RETRY: Final = 60.0
"""Seconds after which a stream that takes no atomic batches is asked again."""
_ATOMIC_SINCE: Final = (2, 12)


class Chaining:
    """When rows of a sink may go at once.

    Args:
        may_link: Whether all rows are of one group; others' messages would break the links.
    """

    def __init__(self, *, may_link: bool) -> None:
        self.may_link = may_link
        self._knows_batches = False
        self._atomic_from = self._link_from = float("-inf")
        self._link_pause = 0.0
        self._link_backoff = Backoff(*_LINK_PAUSE)

    def connected(self, info: Mapping[str, Any]) -> None:
        """Note a server's `INFO`. One that knows no atomic batches stores their parts at once."""
        found = re.match(r"(\d+)\.(\d+)", str(info.get("version", "")))
        self._knows_batches = found is not None and (int(found[1]), int(found[2])) >= _ATOMIC_SINCE

    def links(self, now: float) -> bool:
        """Return whether rows may be linked."""
        return self.may_link and now >= self._link_from

    def batches(self, now: float) -> bool:
        """Return whether rows may go as an atomic batch."""
        return self._knows_batches and now >= self._atomic_from

    def pause_links(self, now: float) -> None:
        """Link no messages for a while, longer each time: another client publishes to the stream."""
        if now >= self._link_from + 4 * self._link_pause:
            self._link_backoff.reset()
        self._link_pause = self._link_backoff.after_failure()
        self._link_from = now + self._link_pause

    def pause_batches(self, now: float) -> None:
        """Send no atomic batches for a while: the stream takes none."""
        self._atomic_from = now + _ATOMIC_RETRY


class Chains:
    """The chains of one batch: which rows may go behind a row, and the atomic batches in flight.

    Args:
        size: How many rows a chain may have.
        attempts: Of each row that has failed, how often; such a row begins no chain.
    """

    def __init__(
        self,
        size: int,
        order: GroupOrder,
        frames: EncodedRows,
        rows: RowTable,
        attempts: Mapping[int, int],
    ) -> None:
        self.linking = self.atomic = False
        """Whether rows may be linked now; or else go as an atomic batch."""
        self.batches: dict[int, list[int]] = {}
        """Of each row in an atomic batch in flight, all rows of the batch, in order."""
        self._count = 0
        self._alone: set[int] = set()  # the rows of batches that were refused
        self._size = size
        self._order = order
        self._frames = frames
        self._rows = rows
        self._attempts = attempts

    def of(self, row: int, room: int, max_payload: int) -> list[int]:
        """Return `row` and the rows behind it that wait for nothing but each other, in order."""
        chain = [row]
        if self._size < 2 or row in self._attempts:
            return chain
        if not self.linking and (
            not self.atomic or row in self._alone or self._count >= _MAX_BATCHES
        ):
            return chain
        followers, waits, state = self._order.followers, self._order.waits, self._rows.state
        block = self._frames.block(row)
        end = block.first + block.rows
        size = block.payload[row - block.first]
        for _ in range(min(self._size, room) - 1):
            behind = followers.get(row)
            if behind is None or len(behind) > 1 or waits[behind[0]] > 1:
                break
            row = behind[0]
            if row >= end:
                block = self._frames.block(row)
                end = block.first + block.rows
            payload = block.payload[row - block.first]
            size += payload
            if row in block.refused or payload > max_payload or size > _BATCH_BYTES:
                break
            if state[row] != WAITING or (row in self._alone and not self.linking):
                break
            chain.append(row)
        return chain

    def frame(self, chain: list[int]) -> memoryview:
        """Return the frames of a chain of several rows, which is sent."""
        frames = [self._frames.frame(row) for row in chain]
        if self.linking:
            return memoryview(as_links(frames))
        self.batches.update(dict.fromkeys(chain, chain))
        self._count += 1
        return memoryview(as_batch(frames))

    def remove(self, chain: Sequence[int], *, refused: bool = False) -> None:
        """Forget an atomic batch; where it was `refused`, its rows go one by one from now on."""
        if refused:
            self._alone.update(chain)
        for row in chain:
            del self.batches[row]
        self._count -= 1
