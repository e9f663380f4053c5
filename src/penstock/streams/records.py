"""What is registered in the store, a class for each table's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final
from uuid import UUID

from penstock.core.message import Position

START: Final = Position(0, -1)
"""Before all positions of a stream."""


_PLACE_BITS: Final = 10
PLACES: Final = 1 << _PLACE_BITS
"""How many places a stream has for a captured message. The first is for the delete of the key that an
update left (kind rows); behind it are the messages that were made of it, 1,000 at most."""


def stream_idx(commit_idx: int, part: int = 0) -> int:
    """Return the `idx` that a message has in a stream; `part` numbers those made of one, from 0."""
    return commit_idx * PLACES + 1 + part


def stream_end(commit_idx: int) -> int:
    """Return the last `idx` that is a captured message's: where a batch that ends with it ends."""
    return (commit_idx + 1) * PLACES - 1


def commit_position(lsn: int, idx: int) -> Position:
    """Return what users know a position in a stream by: its idx is the message's `commit_idx`."""
    return Position(lsn, idx >> _PLACE_BITS)


@dataclass(frozen=True, slots=True)
class SourceRecord:
    """A source that streams are written from."""

    id: int
    name: str
    tag: str
    base: int

    def position(self, position: Position) -> Position:
        """Return a position of the source with `base` in it, as backlogs have it."""
        return Position(position.lsn + self.base, position.idx)


@dataclass(frozen=True, slots=True)
class StreamRecord:
    """A stream; `retention` is None where nothing is dropped by age."""

    id: int
    name: str
    source_id: int
    source: str
    kind: str
    retention: timedelta | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class ConsumerRecord:
    """A consumer; `own` is the group that every stream has, and `disabled` why it is."""

    id: int
    stream_id: int
    stream: str
    name: str
    type: str
    own: bool
    settings: Mapping[str, Any]
    disabled: str | None
    created_at: datetime


@dataclass(frozen=True, slots=True)
class StoredLetter:
    """A dead letter of a sink or of a consumer.

    One of a consumer that is not of type nats has its stream's position; those of sinks and of consumers
    of type nats have none.
    """

    id: int
    sink: str | None
    consumer: str | None
    lsn: int | None
    idx: int | None
    idempotency_key: str | None
    subject: str | None
    code: str
    reason: str
    message: str
    deliver_count: int | None
    at: datetime
    replayed_at: datetime | None

    @property
    def publisher(self) -> str | None:
        """The sink or the consumer of type nats that it is of, None where it is of neither."""
        return self.sink or (self.consumer if self.lsn is None else None)


@dataclass(frozen=True, slots=True)
class Token:
    """An API token; the token itself is not stored. `consumers` is None where it may use all."""

    id: UUID
    name: str
    role: str
    consumers: list[str] | None
    created_at: datetime
    revoked_at: datetime | None
