"""What a `Backfiller` tells whoever started it. Plain data: `orjson.dumps` takes them as they are.

In order: `Started`, then `Planned` and `Delivered` for each chunk (the next may be planned before the
last is delivered), then `Done`; or `Failed`. `Troubled` may come at any time. All carry the number
of the backfill and of the attempt (`Backfiller.start`'s answer): what an older attempt tells late,
when another one has begun, is to be passed by.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.postgres.reads import Place


@dataclass(frozen=True, slots=True)
class Event:
    """What all events have."""

    backfill: int
    attempt: int


@dataclass(frozen=True, slots=True)
class Started(Event):
    """The table was looked at, and can be read."""


@dataclass(frozen=True, slots=True)
class Planned(Event):
    """A chunk is on its way into a batch: that many tasks will report each of its ranges."""

    chunk: int
    ranges: int
    rows: int
    """About as many; the rest of a table counts as a whole chunk."""


@dataclass(frozen=True, slots=True)
class Delivered(Event):
    """The batch of a chunk is confirmed, or a chunk of no ranges had no row and needed none.

    Whether its ranges were read is for the tasks to say. If all were, the backfill stands at
    `cursor`; if one failed, call `Backfiller.start` with the cursor before.
    """

    chunk: int
    ranges: int
    cursor: Place


@dataclass(frozen=True, slots=True)
class Done(Event):
    """Nothing is left to read, and all chunks are delivered."""

    chunks: int


@dataclass(frozen=True, slots=True)
class Troubled(Event):
    """The backfill can't go on for now and tries again by itself; `message` None: it goes on."""

    code: str | None
    message: str | None


@dataclass(frozen=True, slots=True)
class Failed(Event):
    """The backfill has ended: trying again can't help unless the remedy is followed."""

    code: str
    message: str
    remedy: str
