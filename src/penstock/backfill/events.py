"""What a `Backfiller` reports: plain data with a JSON form.

In order: `Started`, then `Delivered` for each chunk, then `Done`; or `Failed`. `Delayed` may come at
any time. All carry the number of the backfill and of the attempt (`Backfiller.start` returns it): a late
event of an older attempt is to be ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Final

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
class Delivered(Event):
    """A chunk of so many rows is confirmed, if it has any: the backfill is at `cursor`."""

    name: ClassVar[str] = "delivered"

    chunk: int
    rows: int
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
    kind.name: kind for kind in (Started, Delivered, Done, Delayed, Failed)
}
