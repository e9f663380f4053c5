"""The store as the tasks of a pipeline write to it: streams, and the backlogs of sinks."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

import pyarrow as pa

from penstock.core.backoff import Backoff
from penstock.core.errors import SinkError
from penstock.core.message import Position
from penstock.core.monitor import Reporter
from penstock.sinks import reports
from penstock.sinks.backlog import store as backlog
from penstock.sinks.stream import StreamRoute, StreamWriter
from penstock.streams import nats_consumers_filter as sql_filter
from penstock.streams.copy import placed
from penstock.streams.nats_consumers import SQL
from penstock.streams.records import START

BACKOFF_SECONDS: Final = (0.1, 5.0)

T = TypeVar("T")


@dataclass(frozen=True)
class StoreTarget:
    """The store, and what the source is called in it; the URL, with its password, is not shown.

    `epoch` is the lease's under which it is written; None for what writes without one.
    """

    url: str
    source_id: int
    base: int
    epoch: int | None = None

    def __repr__(self) -> str:
        return f"StoreTarget(source_id={self.source_id}, base={self.base})"


class StoreWriter:
    """Writes to the store over one connection, which `streams` has."""

    def __init__(
        self, target: StoreTarget, routes: Sequence[StreamRoute], reporter: Reporter
    ) -> None:
        self.streams = StreamWriter(target.url, target.source_id, target.base, routes, target.epoch)
        self._target = target
        self._reporter = reporter
        # A process before this one may have ended after it reported an error of the store.
        self._failure_reported = True

    def patiently(self, step: Callable[[], T]) -> T:
        """Return what `step`, a transaction, returns; try again while the store fails it."""
        backoff = Backoff(*BACKOFF_SECONDS)
        while True:
            try:
                result = step()
            except SinkError as error:
                self._failure_reported = True
                self._reporter.send(reports.store_failure(error))
                if not error.transient:
                    raise
            else:
                if self._failure_reported:
                    self._failure_reported = False
                    self._reporter.send(reports.STORE_WORKS)
                return result
            time.sleep(backoff.after_failure())

    def behind(self) -> set[str]:
        """Return the names of the sinks that are behind."""

        def step() -> set[str]:
            names = set(self.streams.begin())
            self.streams.rollback()
            return names

        return self.patiently(step)

    def fall_behind(
        self,
        left: Mapping[str, tuple[SinkError, Sequence[pa.RecordBatch]]],
        done: Position = START,
        first: Collection[str] = (),
    ) -> None:
        """Put sinks behind, with the messages that they have not taken; they have all up to `done`.

        Those of the sinks in `first` go before all that waits for these.
        """
        if not left:
            return
        target = self._target
        done = done._replace(lsn=done.lsn + target.base)

        def step() -> None:
            self.streams.begin()
            for name, (error, batches) in sorted(left.items()):
                with self.streams.statements() as connection:
                    backlog.fall_behind(connection, target.source_id, name, error, done)
                for batch in batches:
                    self.spill(name, batch, first=name in first)
            self.streams.commit(None)

        self.patiently(step)
        for name, (error, _) in left.items():
            self._reporter.send(reports.behind(name, error))

    def spill(self, sink: str, messages: pa.RecordBatch, *, first: bool) -> None:
        """Add messages to a sink's backlog, in the open transaction."""
        target = self._target
        with self.streams.statements() as connection:
            backlog.spill(connection, target.source_id, sink, messages, target.base, first=first)

    def verdicts(self, function: str, kind: str, messages: pa.RecordBatch) -> pa.StringArray:
        """Return, in the open transaction, what the function of a filter makes of each message."""
        with self.streams.statements() as connection:
            return sql_filter.evaluated(connection, function, kind, messages)

    def note_ahead(self, consumer: str, messages: pa.RecordBatch) -> None:
        """Note, in the open transaction, that messages which a consumer's stream has are published."""
        places = placed(messages, "changes", self._target.base)
        values = [places.column(name).to_pylist() for name in ("commit_lsn", "commit_idx")]
        with self.streams.statements() as connection:
            connection.execute(SQL["add_ahead"], [*values, self._target.source_id, consumer])
