"""The protocol that every sink follows, and what a sink reports about a batch.

A sink lives in a Spark executor's Python worker, is built once from its configuration and lasts
for the worker's life. `write` is called with one batch at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import pyarrow as pa

from penstock.core.errors import SinkError


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """A message that can never be delivered to this sink, and why.

    `body` is what was to go to `subject`. Where that is empty, `body` is the message as it was captured,
    of which a replay makes anew what is sent.
    """

    idempotency_key: str
    subject: str
    code: str
    reason: str
    body: str


def as_captured(messages: pa.RecordBatch, row: int, code: str, reason: str) -> DeadLetter:
    """Return the dead letter of a message that is stored as it was captured."""
    names = ("record", "changes", "action", "metadata", "idempotency_key")
    record, changes, action, metadata, key = (messages.column(n)[row].as_py() for n in names)
    body = (
        f'{{"record":{record or "null"},"changes":{changes or "null"},'
        f'"action":"{action}","metadata":{metadata or "{}"}}}'
    )
    return DeadLetter(key or "", "", code, reason, body)


@dataclass(slots=True)
class Written:
    """What became of a batch: counts of messages and bytes, and the dead letters themselves."""

    delivered: int = 0
    duplicates: int = 0  # acked by the server as already there
    bytes: int = 0
    dead: list[DeadLetter] = field(default_factory=list)


class Unfinished(Exception):  # noqa: N818 - what was done is done, and the rest is at hand
    """A sink took a part of a batch: why, which messages are left in their order, what it took."""

    def __init__(self, error: SinkError, rest: pa.RecordBatch, written: Written):
        super().__init__(str(error))
        self.error = error
        self.rest = rest
        self.written = written


OnRetry = Callable[[SinkError, float], None]
"""Called before each wait with the error and the seconds until the next try."""


class Sink(Protocol):
    """Where a pipeline writes."""

    def write(self, batch: pa.RecordBatch, patience: float | None = None) -> Written:
        """Make every message of `batch` durable, or a dead letter, and only then return.

        `batch` has `penstock.core.message.WIRE_SCHEMA`. Messages of a group (rows that share a
        `group_hash`; an `old_group_hash` ties a row to that group too) become durable in the order
        of their rows. Transient failures are retried inside, with backoff, for as long as it takes;
        raises `SinkError` only for what needs an operator.

        With `patience`, in seconds, it raises `Unfinished` in the place of any `SinkError`, and
        also where nothing gets on for so long.
        """

    def connect(self, patience: float | None = None) -> None:
        """Connect now rather than at the first write; waits and raises as `write` does."""

    def check(self, patience: float) -> None:
        """See whether the sink answers, without a message to it; raises `Unfinished`."""

    def close(self) -> None:
        """Close connections; the sink is not used again."""
