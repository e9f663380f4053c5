"""Up to where each source's slot was confirmed, as the store keeps it, and which source has a gap.

A slot that is lost takes its position with it: what a run has recorded here is then all that shows
since when changes are missed. See `penstock.runtime.recovery`.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final

import psycopg

from penstock.core import queries
from penstock.core.errors import StoreError
from penstock.streams.store import Store

RECORD_SECONDS: Final = 5.0
_SQL: Final = queries.load("penstock.streams", "positions.sql")
_EPOCH: Final = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class SourcePosition:
    """All before `lsn` was delivered, or is kept in the store; `gap` is the code of an error."""

    source: str
    tag: str
    lsn: int
    committed_at: datetime | None
    at: datetime
    gap: str | None


class Positions:
    """The positions in a store. All methods raise `StoreError`."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def get(self, source: str) -> SourcePosition | None:
        """Return a source's position, None where it never had one."""
        with self._store.connection() as connection:
            row = connection.execute(_SQL["get"], [source]).fetchone()
        return None if row is None else SourcePosition(*row)

    def record(self, source: str, tag: str, lsn: int, time: int) -> None:
        """Record up to where a source is confirmed; `time` counts as `pgoutput.Begin.timestamp`."""
        at = None if time == 0 else _EPOCH + timedelta(microseconds=time)
        self._change("record", {"source": source, "tag": tag, "lsn": lsn, "committed_at": at})

    def note_gap(self, source: str, tag: str, code: str) -> None:
        """Record that a source can't go on before it is recovered, and why."""
        self._change("note_gap", {"source": source, "tag": tag, "gap": code})

    def open_gap(
        self, source: str, tag: str, lsn: int, committed_at: datetime | None, code: str
    ) -> None:
        """Record where a gap begins that is about to be closed."""
        self._change(
            "open_gap",
            {"source": source, "tag": tag, "lsn": lsn, "committed_at": committed_at, "gap": code},
        )

    def _change(self, query: str, values: Mapping[str, Any]) -> None:
        with self._store.connection() as connection:
            connection.execute(_SQL[query], values)


def close_gap(connection: psycopg.Connection[Any], source: str) -> None:
    """Forget a source's position and its gap, in the transaction of `connection`."""
    connection.execute(_SQL["close_gap"], [source])


class Recorder:
    """Records the positions of a run's sources every few seconds, in a thread of its own.

    A store that does not answer is passed by: others report that.
    """

    def __init__(self, url: str) -> None:
        self._store = Store(url)
        self._positions = Positions(self._store)
        self._newest: dict[str, tuple[str, int, int]] = {}
        self._recorded: dict[str, tuple[str, int, int]] = {}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._main, name="positions", daemon=True)
        self._thread.start()

    def note(self, source: str, tag: str, lsn: int, time: int) -> None:
        """Take the newest position of a source."""
        if lsn:
            self._newest[source] = tag, lsn, time

    def close(self) -> None:
        """Record what is newest, and end."""
        self._closing.set()
        self._thread.join(RECORD_SECONDS)
        self._store.close()

    def _main(self) -> None:
        while not self._closing.wait(RECORD_SECONDS if self._recorded else 0.2):
            self._record()
        self._record()

    def _record(self) -> None:
        for source, newest in list(self._newest.items()):
            if self._recorded.get(source) != newest:
                with contextlib.suppress(StoreError):
                    self._positions.record(source, *newest)
                    self._recorded[source] = newest
