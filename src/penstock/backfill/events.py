"""What a `Backfiller` reports, and what its tasks report: plain data with a JSON form.

In order: `Started`, then `Planned` and `Delivered` for each chunk (the next may be planned before the
last is delivered), then `Done`; or `Failed`. `Delayed` may come at any time. All carry the number
of the backfill and of the attempt (`Backfiller.start` returns it): a late event of an older attempt is
to be ignored. A task reports `RangeRead`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Final, Self

from penstock.core.health import Failure
from penstock.postgres.reads import SavedCursor, cursor_from_json


@dataclass(frozen=True, slots=True)
class Event:
    """What all events have. `name` is the event's in JSON."""

    name: ClassVar[str]

    backfill: int
    attempt: int

    def to_json(self) -> dict[str, Any]:
        """Return the event as a report has it."""
        return {"event": self.name, **asdict(self)}

    @staticmethod
    def from_json(report: Mapping[str, Any]) -> Event:
        """Return the event of a report, which may have more fields; raises `KeyError`."""
        kind = _EVENTS[report["event"]]
        values = {field.name: report[field.name] for field in fields(kind)}
        if kind is Delivered:
            values["cursor"] = cursor_from_json(values["cursor"])
        return kind(**values)


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The table can be read."""

    name: ClassVar[str] = "started"


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """A chunk is on its way into a batch: that many tasks will report each of its ranges."""

    name: ClassVar[str] = "planned"

    chunk: int
    ranges: int
    rows: int
    """About as many; the rest of a table counts as a whole chunk."""


@dataclass(frozen=True, slots=True)
class Delivered(Event):
    """The batch of a chunk is confirmed, or a chunk of no ranges had no row and needed none.

    Whether its ranges were read, their tasks report. If all were, the backfill is at `cursor`; if one
    failed, call `Backfiller.start` with the cursor before.
    """

    name: ClassVar[str] = "delivered"

    chunk: int
    ranges: int
    cursor: SavedCursor


@dataclass(frozen=True, slots=True)
class Done(Event):
    """Nothing is left to read, and all chunks are delivered."""

    name: ClassVar[str] = "done"

    chunks: int


@dataclass(frozen=True, slots=True)
class Delayed(Event):
    """The backfill waits, or tries again by itself; `message` None: it goes on."""

    name: ClassVar[str] = "delayed"

    code: str | None
    message: str | None


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """The backfill has ended: trying again can't help unless the remedy is followed."""

    name: ClassVar[str] = "failed"

    code: str
    message: str
    remedy: str


_EVENTS: Final[dict[str, type[Event]]] = {
    kind.name: kind for kind in (Started, Planned, Delivered, Done, Delayed, Failed)
}


@dataclass(frozen=True, slots=True)
class RangeRead:
    """A task has read a range of a chunk, `rows` rows of it, or has failed to.

    `transient`: after this failure, the chunk can be read again.
    """

    attempt: int
    chunk: int
    range: int
    rows: int
    failure: Failure | None = None
    transient: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the report's fields."""
        report: dict[str, Any] = {
            "attempt": self.attempt, "chunk": self.chunk, "range": self.range, "rows": self.rows,
        }  # fmt: skip
        if self.failure is not None:
            report |= {
                "error": self.failure.text, "code": self.failure.code, "transient": self.transient,
            }  # fmt: skip
        return report

    @classmethod
    def from_json(cls, report: Mapping[str, Any]) -> Self:
        """Read `to_json`'s form back; raises `KeyError`."""
        failure = Failure(report["code"], report["error"]) if "error" in report else None
        return cls(
            report["attempt"], report["chunk"], report["range"], report["rows"], failure,
            bool(report.get("transient")),
        )  # fmt: skip
