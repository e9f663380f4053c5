"""The demo's ledger: what was committed, what arrived, and what follows from comparing the two.

The writer's own log is the truth. What arrived is judged by the content of the messages alone (the
row's key, its version, the action), never by anything that the pipeline reports. No I/O, no
clock: both sides come with their times.
"""

from __future__ import annotations

import threading
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

DELETED: Final = 1 << 62
"""The version that stands for a row's deletion: the last one, whatever it was before."""

_RECENT = 2000


class Change(NamedTuple):
    """One change of one row: its version is 1 at the insert and grows by 1 with every update."""

    table: str
    id: int
    action: str
    version: int


class Latency(NamedTuple):
    """Median and 99th percentile, in milliseconds; None before the first message."""

    p50: float | None
    p99: float | None


class TableCount(NamedTuple):
    """Where one table stands."""

    table: str
    committed: int
    delivered: int
    lag: int
    latency: Latency


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome. `unexpected` counts messages that no committed change explains."""

    committed: int
    delivered: int
    lost: int
    duplicates: int
    out_of_order: int
    unexpected: int
    rows_per_second: float
    latency: Latency
    examples: tuple[str, ...] = ()

    @property
    def good(self) -> bool:
        """Whether all arrived in order. Duplicates are allowed: delivery is at least once."""
        return not (self.lost or self.out_of_order or self.unexpected)

    def as_dict(self) -> dict[str, Any]:
        """Return what `penstock demo --json` prints."""
        return {
            "committed": self.committed,
            "delivered": self.delivered,
            "lost": self.lost,
            "duplicates": self.duplicates,
            "out_of_order": self.out_of_order,
            "unexpected": self.unexpected,
            "rows_per_second": round(self.rows_per_second, 1),
            "latency_ms": {"p50": _rounded(self.latency.p50), "p99": _rounded(self.latency.p99)},
        }


@dataclass(slots=True)
class _Row:
    """What is known of one row; `missing` and `early` map versions to times."""

    missing: dict[int, float] = field(default_factory=dict)  # committed, not received
    early: dict[int, float] = field(default_factory=dict)  # received, commit not yet recorded
    seen: set[int] = field(default_factory=set)
    highest: int = 0


@dataclass(slots=True)
class _Table:
    committed: int = 0
    delivered: int = 0
    rows: dict[int, _Row] = field(default_factory=dict)
    latencies: array[float] = field(default_factory=lambda: array("d"))
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))


class Ledger:
    """Takes both sides from any thread.

    With `newest_only` a message has the newest version of its row, and stands for those before it:
    they count as delivered with it.
    """

    def __init__(self, tables: Iterable[str], *, newest_only: bool = False) -> None:
        self._newest_only = newest_only
        self._tables = {table: _Table() for table in tables}
        self._lock = threading.Lock()
        self._duplicates = 0
        self._out_of_order = 0
        self._strays: list[str] = []
        self._examples: list[str] = []
        self._first: float | None = None
        self._last = 0.0
        self._before = 0  # delivered before the clock began

    def committed(self, changes: Iterable[Change], at: float) -> None:
        """Record the changes of one transaction; `at` is when its COMMIT returned, in seconds."""
        with self._lock:
            if self._first is None:
                self._first = at
            for change in changes:
                table = self._tables[change.table]
                table.committed += 1
                row = table.rows.setdefault(change.id, _Row())
                received = row.early.pop(change.version, None)
                if received is not None:
                    self._match(table, at, received)
                elif self._newest_only and change.version < row.highest:
                    table.delivered += 1
                else:
                    row.missing[change.version] = at

    def received(self, change: Change, at: float) -> None:
        """Record a message, which may come before its own `committed`."""
        with self._lock:
            table = self._tables.get(change.table)
            if table is None:
                self._strays.append(f"a message of table {change.table!r}")
                return
            row = table.rows.setdefault(change.id, _Row())
            if change.version in row.seen:
                self._duplicates += 1  # a replay is no change of order
                return
            row.seen.add(change.version)
            replaced = change.version < row.highest
            if replaced:
                self._out_of_order += 1
                self._example(f"{_name(change)} came after {_version(row.highest)}")
            row.highest = max(row.highest, change.version)
            committed = row.missing.pop(change.version, None)
            if committed is not None:
                self._match(table, committed, at)
            elif not (replaced and self._newest_only):
                row.early[change.version] = at
            if self._newest_only:
                for version in [each for each in row.missing if each < change.version]:
                    del row.missing[version]
                    table.delivered += 1

    def restart_clock(self) -> None:
        """Measure rate and latency from the next commit on; what was counted stays counted."""
        with self._lock:
            self._first = None
            self._before = sum(table.delivered for table in self._tables.values())
            for table in self._tables.values():
                table.latencies = array("d")
                table.recent.clear()

    def stray(self, what: str) -> None:
        """Record a message that cannot be one of the shop's changes."""
        with self._lock:
            self._strays.append(what)

    def _match(self, table: _Table, committed: float, received: float) -> None:
        # The pipeline may be quicker than the writer's own thread: below zero means at once.
        latency = max(0.0, received - committed)
        table.delivered += 1
        table.latencies.append(latency)
        table.recent.append(latency)
        self._last = max(self._last, received, committed)

    def _example(self, text: str) -> None:
        if len(self._examples) < 5:
            self._examples.append(text)

    def counts(self) -> list[TableCount]:
        """Return where each table stands now, with the latency of the latest messages."""
        with self._lock:
            recent = {name: list(table.recent) for name, table in self._tables.items()}
            numbers = {name: (t.committed, t.delivered) for name, t in self._tables.items()}
        return [
            TableCount(name, committed, delivered, committed - delivered, latency(recent[name]))
            for name, (committed, delivered) in numbers.items()
        ]

    def outstanding(self) -> int:
        """Return how many committed changes have not arrived."""
        with self._lock:
            return sum(table.committed - table.delivered for table in self._tables.values())

    def result(self) -> Result:
        """Return the outcome as it is now; final once writer and pipeline have ended."""
        with self._lock:
            committed = sum(table.committed for table in self._tables.values())
            delivered = sum(table.delivered for table in self._tables.values())
            examples, unexpected = list(self._examples), len(self._strays)
            examples += [f"unexpected: {stray}" for stray in self._strays[:3]]
            lost: list[str] = []
            for name, table in self._tables.items():
                for key, row in table.rows.items():
                    unexpected += len(row.early)
                    never = f"{name} {key} was received, but never committed in"
                    examples += [f"{never} {_version(v)}" for v in list(row.early)[:1]]
                    if len(lost) < 3:
                        gone = f"{name} {key} never arrived in"
                        lost += [f"{gone} {_version(version)}" for version in row.missing]
            took, timed = self._last - (self._first or 0.0), delivered - self._before
            return Result(
                committed=committed,
                delivered=delivered,
                lost=committed - delivered,
                duplicates=self._duplicates,
                out_of_order=self._out_of_order,
                unexpected=unexpected,
                rows_per_second=timed / took if timed and took > 0 else 0.0,
                latency=latency([x for t in self._tables.values() for x in t.latencies]),
                examples=tuple((lost[:3] + examples)[:6]),
            )


def latency(seconds: Sequence[float]) -> Latency:
    """Return the percentiles of a list of latencies, by the nearest rank."""
    if not seconds:
        return Latency(None, None)
    ordered = sorted(seconds)
    p50, p99 = (ordered[-(-len(ordered) * percent // 100) - 1] * 1000 for percent in (50, 99))
    return Latency(p50, p99)


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 1)


def _version(version: int) -> str:
    return "its deletion" if version == DELETED else f"version {version}"


def _name(change: Change) -> str:
    return f"{change.table} {change.id}, {_version(change.version)},"
