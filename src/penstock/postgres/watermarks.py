"""Which rows of a table changed while a chunk of it was being planned. No I/O, no lock of its own.

A chunk's reads are at their watermark in the WAL, but show what their snapshot sees. What is before
the watermark and not in the snapshot is newer than the reads, and was delivered: the rows that it
concerns are left out of the chunk. So a `Window` collects the keys of all changes. It opens before the
snapshot is taken and closes when the watermark is decoded.

What was decoded before the window opened has to be in the snapshot. Most often it is; but a commit
record is flushed, and thus decoded, before its transaction becomes visible, and in between the
transaction may wait for a standby. Hence `Recent`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Self

from penstock.postgres.changed_row import changed_row
from penstock.postgres.pgoutput import UNCHANGED, Begin, Delete, Insert, Update
from penstock.postgres.reads import Reads
from penstock.postgres.table import Table

RECENT: Final = 65_536
TOUCHED: Final = 200_000
"""Changes of one window after which another snapshot is cheaper than their keys."""
INCOMPLETE: Final = 100_000
"""How many rows that are to be read again are remembered."""
NONE: Final = 1 << 62
"""Behind the number of any chunk."""


class Snapshot(NamedTuple):
    """What `pg_current_snapshot()` returns, in 64-bit transaction ids."""

    xmin: int
    xmax: int
    active: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the form `10:20:10,14`; raises `ValueError` on anything else."""
        xmin, xmax, active = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(map(int, filter(None, active.split(",")))))

    def sees(self, xid: int) -> bool:
        """Return whether the snapshot has a transaction's changes; `xid` has the 32 bits of pgoutput."""
        ahead = ((xid - self.xmax + 0x80000000) & 0xFFFFFFFF) - 0x80000000
        if ahead >= 0:
            # No id can be that far ahead: such an id is from before the counter went round.
            return ahead > 0x40000000
        full = self.xmax + ahead
        return full < self.xmin or full not in self.active


class Recent:
    """The ids of the last transactions that were decoded, at least in part."""

    __slots__ = ("_xids", "count")

    def __init__(self) -> None:
        self._xids = array("I")
        self.count = 0
        """How many there were in all."""

    def add(self, xid: int) -> None:
        """Remember an id, in the place of the oldest."""
        count = self.count
        if count < RECENT:
            self._xids.append(xid)
        else:
            self._xids[count & RECENT - 1] = xid
        self.count = count + 1

    def since(self, count: int) -> array[int]:
        """Return the ids behind the first `count` ones, as far as they are remembered, in no order."""
        new = min(self.count - count, RECENT, self.count)
        if new >= RECENT:
            return self._xids[:]
        end = self.count & RECENT - 1
        if new <= end:
            return self._xids[end - new : end]
        return self._xids[:end] + self._xids[end - new :]


def unseen(snapshot: Snapshot, xids: Iterable[int]) -> set[int]:
    """Return those of `xids` that `snapshot` does not see."""
    return {xid for xid in set(xids) if not snapshot.sees(xid)}


class Window:
    """The changes of one table since the window opened that `snapshot`, once known, does not see."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.is_open = True
        """Whether changes of the transaction under way belong here: the snapshot does not see them."""
        self._whole: set[int] = set()  # transactions that concern all rows
        self._xids = array("I")
        self._hashes = array("q")
        self._incomplete: list[tuple[int, tuple[str, ...]]] = []

    @property
    def everything(self) -> bool:
        """Whether all reads are outdated: a truncate, or more changes than are kept."""
        return bool(self._whole)

    def begin(self, xid: int) -> None:
        """Begin a transaction, whose changes follow."""
        self.is_open = self.snapshot is None or not self.snapshot.sees(xid)

    def set_snapshot(self, snapshot: Snapshot, xid: int | None) -> None:
        """Keep only what the snapshot does not see; `xid` is the transaction under way."""
        self.snapshot = snapshot
        xids, hashes = self._xids, self._hashes
        self._xids, self._hashes = array("I"), array("q")
        invisible = unseen(snapshot, xids)
        self._whole = unseen(snapshot, self._whole)
        for x, h in zip(xids, hashes, strict=True):
            if x in invisible:
                self._xids.append(x)
                self._hashes.append(h)
        self._incomplete = [(x, key) for x, key in self._incomplete if x in invisible]
        if xid is not None:
            self.begin(xid)

    def add(self, xid: int, hashes: Iterable[int] | None, key: tuple[str, ...] | None) -> None:
        """Add a change: its keys' hashes (None: all rows), and the key if the WAL lacks values."""
        if hashes is None or len(self._xids) >= TOUCHED:
            self._whole.add(xid)
            return
        for h in hashes:
            self._xids.append(xid)
            self._hashes.append(h)
        if key is not None:
            self._incomplete.append((xid, key))

    def touched(self) -> bytes:
        """Return the hashes, as `Reads.touched` has them."""
        return array("q", set(self._hashes)).tobytes()

    def incomplete(self) -> list[tuple[str, ...]]:
        """Return the keys of rows whose newest change left values out."""
        return [key for _, key in self._incomplete]


@dataclass(eq=False)
class Watermark:
    """A chunk's message in the WAL, with `content`.

    When the decoder comes to the message it completes `reads`, or sets it to None where the chunk has
    to be planned again. Then it calls `passed`, with the capture's lock held. `completes` is the oldest
    chunk that is whole only when all of this one was read.
    """

    content: bytes
    window: Window
    reads: Reads | None
    passed: Callable[[Watermark], None]
    rows: int
    attempt: int
    completes: int


@dataclass(eq=False)
class Watch:
    """A table under backfill, as the decoder sees it.

    `sorts`: rows are ordered by a column whose old value the WAL may lack. `incomplete` are keys of rows
    to be read again, whatever the cursor: an update left out large values that it had not changed, and
    the row's read was left out, or the row moved, perhaps to where the backfill was already. Each
    has the number of the chunk that is not whole without it. For a row that moved it is the newest
    chunk that is `delivered` (-1: none in this attempt), so that the cursor waits for it.
    """

    schema: str
    table: str
    sorts: bool
    windows: list[Window] = field(default_factory=list)
    watermarks: dict[bytes, Watermark] = field(default_factory=dict)
    incomplete: dict[tuple[str, ...], int] = field(default_factory=dict)
    delivered: int = -1
    overflowed: bool = False
    expected: Table | None = None
    """The table as the reads see it: where the capture sees another, hashes can't be compared."""
    _known: Table | None = None

    def begin(self, xid: int) -> None:
        """Begin a transaction."""
        for window in self.windows:
            window.begin(xid)

    def change(self, table: Table, event: Insert | Update | Delete, xid: int) -> None:
        """Add a change."""
        if table.name != self.table or table.schema != self.schema:
            return
        active = [window for window in self.windows if window.is_open]
        if not active and (isinstance(event, Delete) or UNCHANGED not in event.new):
            return
        noted = changed_row(table, event)
        hashes = noted.hashes if not active or self._is_expected(table) else None
        for window in active:
            window.add(xid, hashes, noted.key)
        if noted.key is not None and (noted.moved or self.sorts):
            self._read_again(noted.key, self.delivered)

    def _is_expected(self, table: Table) -> bool:
        if table is not self._known:
            if self.expected is not None and not table.same_grouping(self.expected):
                return False
            self._known = table
        return True

    def truncate(self, table: Table, xid: int) -> None:
        """Add a truncate."""
        if table.name == self.table and table.schema == self.schema:
            for window in self.windows:
                window.add(xid, None, None)

    def watermark(
        self, content: bytes, begin: Begin, moved: Callable[[str, str], tuple[tuple[int, int], ...]]
    ) -> Watermark | None:
        """Return the watermark with this content, complete; None if no chunk waits for it."""
        found = self.watermarks.pop(content, None)
        if found is None or found.reads is None:
            return None
        window = found.window
        self.windows.remove(window)
        if window.everything:
            found.reads = None
        else:
            for key in window.incomplete():
                self._read_again(key, found.completes)
            found.reads = replace(
                found.reads, lsn=begin.final_lsn, microseconds=begin.timestamp, xid=begin.xid,
                touched=window.touched(), moved=moved(self.schema, self.table),
            )  # fmt: skip
        return found

    def restart(self, under_way: Iterable[tuple[str, ...]]) -> None:
        """Begin another attempt: rows that were to be read again still are.

        So are those of the chunks of the attempt before that are `under_way`: these are given up.
        """
        self._known = None
        self.windows.clear()
        self.watermarks.clear()
        again, self.delivered = [*under_way, *self.incomplete], -1
        self.incomplete.clear()
        for key in again:
            self._read_again(key, -1)

    def _read_again(self, key: tuple[str, ...], chunk: int) -> None:
        if key in self.incomplete or len(self.incomplete) < INCOMPLETE:
            self.incomplete[key] = min(chunk, self.incomplete.get(key, NONE))
        else:
            self.overflowed = True
