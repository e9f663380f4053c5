"""Retention: sweeps every outbox of a database, with and without pipelines that run."""

from __future__ import annotations

import time
from typing import Any, Final

import psycopg
import structlog

from penstock.core import queries

LOCK_SWEEP: Final = 7384
"""The class of the advisory lock on an outbox while it is swept; other relays skip the outbox."""

_SQL: Final = queries.load("penstock.outbox.relay", "relay.sql")
_EVERY_SECONDS: Final = 60.0
_AT_ONCE_SECONDS: Final = 1.0
_MOST_ROWS: Final = 100_000
"""A sweep that deleted this many rows has more to do."""

log = structlog.get_logger("penstock")


class Sweeper:
    """Sweeps the outboxes every minute, first after a minute; one thread calls it."""

    def __init__(self) -> None:
        self._next = time.monotonic() + _EVERY_SECONDS
        self._left: list[str] = []
        self._logged: dict[str, str | None] = {}

    @property
    def busy(self) -> bool:
        """Whether there is more to do now."""
        return bool(self._left)

    def sweep(self, connection: psycopg.Connection[Any]) -> None:
        """Sweep the outboxes that are due, for about a second; raises `psycopg.Error`."""
        now = time.monotonic()
        if not self._left and now >= self._next:
            self._next = now + _EVERY_SECONDS
            self._left = [name for (name,) in connection.execute(_SQL["outboxes"])]
        # An outbox with more to do goes behind the others.
        while self._left:
            outbox = self._left.pop(0)
            if self._sweep_outbox(connection, outbox) >= _MOST_ROWS:
                self._left.append(outbox)
            if time.monotonic() - now > _AT_ONCE_SECONDS:
                break

    def _sweep_outbox(self, connection: psycopg.Connection[Any], outbox: str) -> int:
        try:
            values = {"class": LOCK_SWEEP, "outbox": outbox}
            row = connection.execute(_SQL["sweep"], values).fetchone()
        except psycopg.Error as error:
            if connection.closed:
                raise
            if self._logged.get(outbox) != error.sqlstate:
                self._logged[outbox] = error.sqlstate
                log.warning("outbox could not be swept; trying again", outbox=outbox,
                            error=str(error))  # fmt: skip
            return 0
        self._logged.pop(outbox, None)
        deleted = row[0] if row is not None and row[0] is not None else 0
        if deleted:
            log.info("outbox swept", outbox=outbox, deleted=deleted)
        return int(deleted)
