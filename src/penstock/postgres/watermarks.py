"""Which rows of a table changed while a chunk of it was being planned. No I/O, no lock of its own.

A chunk's reads stand at their watermark in the WAL, but show what their snapshot saw. What stands
before the watermark and is not in the snapshot is newer than the reads, and was delivered: the rows
that it concerns are left out of the chunk. So from before the snapshot is taken until the watermark
is decoded, a `Noting` collects the keys of all that changes.

What was decoded before the noting began has to be in the snapshot. Most often it is; but a commit
record is flushed, and thus decoded, before its transaction becomes visible, and in between the
transaction may wait for a standby. Hence `Recent`.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Final, NamedTuple, Self

from penstock.postgres.pgoutput import UNCHANGED, Begin, Delete, Insert, Update
from penstock.postgres.reads import Reads
from penstock.postgres.table import Table

RECENT: Final = 65_536
TOUCHED: Final = 200_000
"""Changes after which it is cheaper to take another snapshot than to carry their keys around."""
INCOMPLETE: Final = 100_000
"""Rows to be read again that are remembered."""
NONE: Final = 1 << 62
"""Behind the number of any chunk."""


class Snapshot(NamedTuple):
    """What `pg_current_snapshot()` says, in 64-bit transaction ids."""

    xmin: int
    xmax: int
    active: frozenset[int]

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read the form `10:20:10,14`; raises `ValueError` on anything else."""
        xmin, xmax, active = text.split(":")
        return cls(int(xmin), int(xmax), frozenset(map(int, filter(None, active.split(",")))))

    def sees(self, xid: int) -> bool:
        """Tell whether the snapshot has what a transaction did; `xid` has the 32 bits of pgoutput."""
        ahead = ((xid - self.xmax + 0x80000000) & 0xFFFFFFFF) - 0x80000000
        if ahead >= 0:
            # Nothing can be that far ahead: such an id is from before the counter went round.
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


class Noting:
    """The changes of one table since the noting began that `snapshot`, once known, does not see."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None
        self.on = True
        """Whether the snapshot does not see the transaction under way: its changes are to be added."""
        self._whole: set[int] = set()  # transactions that concern all rows
        self._xids = array("I")
        self._hashes = array("q")
        self._incomplete: list[tuple[int, tuple[str, ...]]] = []

    @property
    def everything(self) -> bool:
        """Whether no read can be trusted: a truncate, or more changes than are kept."""
        return bool(self._whole)

    def begin(self, xid: int) -> None:
        """Note that the changes that follow are a transaction's."""
        self.on = self.snapshot is None or not self.snapshot.sees(xid)

    def taken(self, snapshot: Snapshot, xid: int | None) -> None:
        """Take the snapshot; `xid` is the transaction under way."""
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
        """Note a change: its keys' hashes (None: all rows), and the key if the WAL lacks values."""
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
    """A chunk on its way through the WAL: `content` is what its message there says.

    `reads` is complete once the decoder has come to the message, or None if the chunk can't be used
    and has to be planned again; then `passed` is called, with the capture's lock held. `since` is the
    oldest chunk that is whole only when all of this one was read.
    """

    content: bytes
    noting: Noting
    reads: Reads | None
    passed: Callable[[Watermark], None]
    rows: int
    attempt: int
    since: int


@dataclass(eq=False)
class Watch:
    """A table under backfill, as the decoder sees it.

    `sorts`: rows come by a column that may change without the WAL telling its old value. `incomplete`
    are keys of rows to be read once more, whatever the cursor: an update left out what it had not
    changed, and the row's read was left out, or it moved, perhaps to where the backfill has been
    already. Each has the number of the chunk that is not whole without it: where it moved, of the newest
    that is `delivered` (-1: none in this attempt), so that the cursor waits for it. `read` are those
    that delivered chunks had a range for, though a task may have failed to read it.
    """

    schema: str
    table: str
    sorts: bool
    notings: list[Noting] = field(default_factory=list)
    watermarks: dict[bytes, Watermark] = field(default_factory=dict)
    incomplete: dict[tuple[str, ...], int] = field(default_factory=dict)
    delivered: int = -1
    read: dict[tuple[str, ...], None] = field(default_factory=dict)
    overflowed: bool = False
    expected: Table | None = None
    """The table as the reads see it: a change that is seen in another way has other hashes."""
    _known: Table | None = None

    def begin(self, xid: int) -> None:
        """Note that a transaction begins."""
        for noting in self.notings:
            noting.begin(xid)

    def change(self, table: Table, event: Insert | Update | Delete, xid: int) -> None:
        """Note a change."""
        if table.name != self.table or table.schema != self.schema:
            return
        active = [noting for noting in self.notings if noting.on]
        if not active and (isinstance(event, Delete) or UNCHANGED not in event.new):
            return
        noted = table.changed_row(event)
        hashes = noted.hashes if not active or self._is_expected(table) else None
        for noting in active:
            noting.add(xid, hashes, noted.key)
        if noted.key is not None and (noted.moved or self.sorts):
            self._again(noted.key, self.delivered)

    def _is_expected(self, table: Table) -> bool:
        if table is not self._known:
            if self.expected is not None and not table.same_grouping(self.expected):
                return False
            self._known = table
        return True

    def truncate(self, table: Table, xid: int) -> None:
        """Note that the table was emptied."""
        if table.name == self.table and table.schema == self.schema:
            for noting in self.notings:
                noting.add(xid, None, None)

    def watermark(
        self, content: bytes, begin: Begin, moved: Callable[[str, str], tuple[tuple[int, int], ...]]
    ) -> Watermark | None:
        """Return the watermark with this content, complete, or None if nobody waits for one."""
        found = self.watermarks.pop(content, None)
        if found is None or found.reads is None:
            return None
        noting = found.noting
        self.notings.remove(noting)
        if noting.everything:
            found.reads = None
        else:
            for key in noting.incomplete():
                self._again(key, found.since)
            found.reads = replace(
                found.reads, lsn=begin.final_lsn, microseconds=begin.timestamp, xid=begin.xid,
                touched=noting.touched(), moved=moved(self.schema, self.table),
            )  # fmt: skip
        return found

    def was_read(self, keys: Iterable[tuple[str, ...]]) -> None:
        """Note keys of rows that a delivered chunk had a range for."""
        self.read.update(dict.fromkeys(keys))
        while len(self.read) > INCOMPLETE:
            del self.read[next(iter(self.read))]

    def restart(self, under_way: Iterable[tuple[str, ...]]) -> None:
        """Begin another attempt: rows that were to be read once more still are.

        So are those that the attempt before, in its chunks `under_way`, has read or was to read: it
        may be another attempt because that failed.
        """
        self._known = None
        self.notings.clear()
        self.watermarks.clear()
        again, self.delivered = [*self.read, *under_way, *self.incomplete], -1
        self.read.clear()
        self.incomplete.clear()
        for key in again:
            self._again(key, -1)

    def _again(self, key: tuple[str, ...], since: int) -> None:
        if key in self.incomplete or len(self.incomplete) < INCOMPLETE:
            self.incomplete[key] = min(since, self.incomplete.get(key, NONE))
        else:
            self.overflowed = True
