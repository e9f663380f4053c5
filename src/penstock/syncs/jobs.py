"""What passes between the scheduler and the lanes: jobs down, reports up. Small, and never data."""

from __future__ import annotations

from typing import Any, Final

import msgspec

from penstock.syncs.connectors.contract import Deletes, Json, Kind

FINISH: Final = -1
"""The number of the job that ends a sweep: it deletes what the sweep has not seen."""


class Job(msgspec.Struct, frozen=True):
    """One slice of a collection to read, or with `slice` None to plan.

    A job that plans goes on with the first slice, unless it `only_plans`.

    Attributes:
        number: Its own; no other job has it, before or after a restart of the lanes.
        sync: The sync's id.
        collection: The collection's id.
        kind: What is done.
        slice: The slice, as the connector planned it.
        resume: From where in the slice.
        cursor: The collection's cursor, for the plan.
        sweep: The sweep that it belongs to; of a job that plans one, an earlier one to give up.
        finish: Whether it ends the sweep, and deletes what that has not seen.
        max_share: The share that this may delete; see `penstock.syncs.deletes`.
        confirmed: How many more an operator has agreed to.
        max_age: How old a record may be, in seconds.
    """

    number: int
    sync: str
    collection: str
    kind: Kind
    slice: Json | None = None
    resume: Json | None = None
    cursor: Json | None = None
    only_plans: bool = False
    sweep: str | None = None
    finish: bool = False
    max_share: float = 1.0
    confirmed: int = 0
    max_age: float | None = None


class Facts(msgspec.Struct, frozen=True, array_like=True):
    """What a connector reports of a collection."""

    deletes: Deletes = Deletes.NONE
    notes: str = ""
    has_cursor: bool = False


class Planned(msgspec.Struct, frozen=True, array_like=True, tag="planned"):
    """The slices that a job has planned, of the sweep that it has begun.

    Where it `goes_on`, the first one is its own.
    """

    job: int
    slices: list[Json]
    facts: Facts
    goes_on: bool = False
    sweep: str | None = None


class PageDone(msgspec.Struct, frozen=True, array_like=True, tag="page"):
    """A page is in the table.

    `newest` is the highest `updated_at` of the new and changed records, in Unix time; `undated` counts
    those of them that have none.
    """

    job: int
    read: int = 0
    inserted: int = 0
    changed: int = 0
    deleted: int = 0
    unreadable: int = 0
    skipped: int = 0
    newest: float | None = None
    undated: int = 0
    resume: Json | None = None
    cursor: Json | None = None
    is_last: bool = False


class JobFailure(msgspec.Struct, frozen=True, array_like=True):
    """Why a job failed: the fields of a `SyncError`."""

    code: str
    cause: str
    remedy: str = ""
    transient: bool = False
    retry_after: float | None = None


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="ended"):
    """A job has ended: its slice is done, or it `yielded` between two pages, or it failed."""

    job: int
    yielded: bool = False
    problem: JobFailure | None = None
    requests: int = 0


class Swept(msgspec.Struct, frozen=True, array_like=True, tag="swept"):
    """A sweep was complete: of `known` records it missed some.

    Those of them that the sweep before missed, too, are deleted, and others are `waiting` for the next;
    or neither, as they are too many.
    """

    job: int
    known: int
    missing: int
    deleted: int
    waiting: int = 0


Report = Planned | PageDone | Ended | Swept

_job: Final = msgspec.msgpack.Decoder(Job)


def encode(message: Any) -> bytes:
    """Return a job or a report as bytes."""
    return msgspec.msgpack.encode(message)


def decode_job(data: bytes) -> Job:
    """Return the job that `encode` made bytes of."""
    return _job.decode(data)


def report_of(fields: list[Any]) -> Report:
    """Return the report that a lane has sent; raises `msgspec.ValidationError`."""
    report: Report = msgspec.convert(fields, Report)
    return report
