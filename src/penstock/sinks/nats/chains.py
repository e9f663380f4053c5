"""Rows of one group that go at once: linked, each naming the one before it, or as an atomic batch.

A linked message is stored only directly behind the one that it names. That keeps the order only if
whatever stands last in the stream has all before it there, too. A message that is there from an earlier
write need not: rows that come again may come in another order, as those of an outbox whose slot was
lost come in the order of their ids. Were one of them linked to the stream's last message, it would be
stored before earlier ones that were just refused. So rows are linked

* to the first of a chain, before which all is there;
* to others once the stream has stored a message of this write: from then on its last one is of this
  write too, or of another publisher. Only one writes a sink's messages at a time.

Until then two go at once. Where the stream had the first ones, the others ask: they name an id that no
message has, and so are refused, all at once, unless they are there too.

No I/O; the clock is the caller's `now`, in seconds.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, Final

from penstock.core.backoff import Backoff
from penstock.sinks.nats.chain_frames import as_batch, as_links
from penstock.sinks.nats.encoded import EncodedRows
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
_FREEZES_SINCE: Final = (2, 14)
"""From then on a replicated stream takes nothing more once it has refused a link (2.15.1 does so)."""
_NEVER: Final = secrets.token_hex(16).encode()
"""An id that no message has."""


class Chaining:
    """When rows of a sink may go at once.

    Args:
        may_link: Whether all rows are of one group; others' messages would break the links.
    """

    def __init__(self, *, may_link: bool) -> None:
        self.may_link = may_link
        self._knows_batches = self._freezes = False
        self._atomic_from = self._link_from = float("-inf")
        self._link_pause = 0.0
        self._link_backoff = Backoff(*_LINK_PAUSE)

    def connected(self, info: Mapping[str, Any]) -> None:
        """Note a server's `INFO`. One that knows no atomic batches stores their parts at once."""
        found = re.match(r"(\d+)\.(\d+)", str(info.get("version", "")))
        version = (0, 0) if found is None else (int(found[1]), int(found[2]))
        self._knows_batches = version >= _ATOMIC_SINCE
        self._freezes = bool(info.get("cluster")) and version >= _FREEZES_SINCE

    def links(self, now: float) -> bool:
        """Return whether rows may be linked."""
        return self.may_link and not self._freezes and now >= self._link_from

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
        self.linked: frozenset[int] = frozenset()
        """The rows of the newest chain that name another message; one chain is in flight at a time."""
        self.asking: frozenset[int] = frozenset()
        """Those of them that the stream refuses unless it has them already."""
        self._stream = b""  # the one that has stored a row as new
        self._last = b""  # the id of the newest row that was stored so
        self._has_copies = False
        self._count = 0
        self._alone: set[int] = set()  # the rows of batches that were refused
        self._size = size
        self._order = order
        self._frames = frames
        self._rows = rows
        self._attempts = attempts

    def note_stored(self, row: int) -> None:
        """Note the newest of the rows that a stream has stored as new."""
        if self._size > 1:
            self._last = self._frames.key(row).encode()

    def note_stream(self, name: str) -> None:
        """Note the stream that has stored a row as new, and has all before it."""
        self._stream = name.encode()

    def note_copy(self) -> None:
        """Note that a stream had a row before: it may have others."""
        self._has_copies = True

    def take(self, row: int, room: int, max_payload: int) -> tuple[list[int], bytes | memoryview]:
        """Return `row`, with rows behind it that go at once, and their frames, which are sent."""
        chain = self._of(row, room, max_payload)
        if len(chain) == 1:
            return chain, self._frames.frame(row)
        frames = [self._frames.frame(row) for row in chain]
        if self.linking:
            never = b"" if self._stream else _NEVER
            links = as_links(frames, self._last, self._stream, never)
            del chain[len(links) :]
            self.linked = frozenset(chain[1:])
            self.asking = frozenset(chain[2:] if never else ())
            return chain, b"".join(links)
        self.batches.update(dict.fromkeys(chain, chain))
        self._count += 1
        return chain, as_batch(frames)

    def _of(self, row: int, room: int, max_payload: int) -> list[int]:
        """Return `row` and the rows behind it that wait for nothing but each other, in order."""
        chain = [row]
        if self._size < 2 or row in self._attempts:
            return chain
        if not self.linking and (
            not self.atomic or row in self._alone or self._count >= _MAX_BATCHES
        ):
            return chain
        most = min(self._size, room)
        if self.linking and not self._stream and not self._has_copies:
            most = min(most, 2)
        followers, waits, state = self._order.followers, self._order.waits, self._rows.state
        block = self._frames.block(row)
        end = block.first + block.rows
        size = block.payload[row - block.first]
        for _ in range(most - 1):
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

    def remove(self, chain: Sequence[int], *, refused: bool = False) -> None:
        """Forget an atomic batch; where it was `refused`, its rows go one by one from now on."""
        if refused:
            self._alone.update(chain)
        for row in chain:
            del self.batches[row]
        self._count -= 1
