"""The run's backfills: which one each source reads now, how far it is, and what follows.

The store has the desired state; a thread here brings it about. It takes up what the command line asks
for when the store notifies it, or within seconds, and stores how far each backfill is. After a failure
that may pass, a backfill starts again at its cursor, with a backoff; after any other it has failed. The
live messages go on in any case.
"""

from __future__ import annotations

import itertools
import select
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import psycopg
import structlog
from psycopg import sql

from penstock.backfill.initial import InitialBackfills
from penstock.backfill.request import NOTICE, OPEN, Backfill, Backfills
from penstock.backfill.source import SourceBackfills
from penstock.config.settings import Config
from penstock.core.errors import StoreError
from penstock.core.monitor import Report
from penstock.streams.connect import connect
from penstock.streams.names import CHANNEL
from penstock.streams.store import Store

_POLL_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = 0.1  # between two rounds, however many reports come
_LIST_SECONDS: Final = 1.0
_LISTEN_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 5.0

log = structlog.get_logger("penstock")


class BackfillSupervisor:
    """The backfills of `sources`, while a run lasts.

    `command(source, report)` reaches a source's reader. `is_behind(sink)` returns whether a sink has a
    backlog, to which a backfill adds nothing. `on_list` gets the backfills that are open, and those
    that failed in this run, whenever the store was read.
    """

    def __init__(
        self,
        config: Config,
        store_url: str,
        sources: Sequence[str],
        command: Callable[[str, Report], None],
        is_behind: Callable[[str], bool],
        on_list: Callable[[Sequence[Backfill]], None],
    ) -> None:
        self._url = store_url
        self._store = Store(store_url)
        self._backfills = Backfills(self._store)
        self._command = command
        self._on_list = on_list
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._commanding = threading.Lock()
        self._draining = False
        self._stale = True
        self._store_logged = False
        tokens = itertools.count(1)
        self._sources = {
            name: SourceBackfills(
                name,
                config,
                self._backfills,
                tokens,
                partial(self._send, name),
                is_behind,
                self._refresh,
            )
            for name in sources
        }
        self._initial = {
            name: InitialBackfills(config, name, self._backfills, self._refresh) for name in sources
        }
        self._threads = [
            threading.Thread(target=work, name="backfills", daemon=True)
            for work in (self._main, self._listen)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def drain(self) -> None:
        """Command and begin nothing more; how far each backfill is, is still stored."""
        with self._commanding:
            self._draining = True

    def close(self) -> None:
        """Store how far each backfill is, and end."""
        self.drain()
        self._closing.set()
        for initial in self._initial.values():
            initial.close()
        self._wake.set()
        self._threads[0].join(_CLOSE_SECONDS)  # the other ends within a second
        self._store.close()

    # -- what the processes of the run report, in their threads

    def handle(self, report: Report) -> None:
        """Take a report of a reader; others are ignored."""
        if "sink" in report and ("state" in report or "behind" in report):
            self._wake.set()
        found = report.get("backfill")
        if found is None:
            return
        if found.get("event") == "ready":
            self._sources[report["capture"]].take_ready(found["reader"])
        elif not any(source.take_report(report) for source in self._sources.values()):
            return
        self._wake.set()

    def _send(self, source: str, command: Report) -> bool:
        """Command a source's reader; return False where a command to drain was the last."""
        with self._commanding:
            if not self._draining:
                self._command(source, command)
            return not self._draining

    # -- the threads

    def _listen(self) -> None:
        """Wait for notices of the store that a backfill was asked for."""
        while not self._closing.is_set():
            try:
                with connect(self._url) as connection:
                    connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(CHANNEL)))
                    self._refresh()
                    poll = select.poll()
                    poll.register(connection, select.POLLIN)
                    while not self._closing.is_set():
                        for notice in connection.notifies(timeout=0):
                            if notice.payload == NOTICE:
                                self._refresh()
                        # To wait, `notifies` wakes ten times a second.
                        poll.poll(_LISTEN_SECONDS * 1000)
            except psycopg.Error:  # the other thread logs it; it reads the store every few seconds
                self._closing.wait(_POLL_SECONDS)

    def _refresh(self) -> None:
        self._stale = True
        self._wake.set()

    def _main(self) -> None:
        read_at = listed_at = 0.0
        while True:
            closing = self._closing.is_set()
            now = time.monotonic()
            if now - read_at > _POLL_SECONDS:
                self._stale = True
            refresh, self._stale = self._stale, False
            try:
                for name in self._sources:
                    self._tend(name, refresh and not closing)
                if refresh:
                    read_at = now
                if refresh or now - listed_at > _LIST_SECONDS:
                    listed_at = now
                    self._list()
                self._log_store(None)
            except StoreError as error:
                self._log_store(error)
            except Exception:
                log.exception("the supervisor of backfills failed")
            if closing:
                return
            self._closing.wait(_PAUSE_SECONDS)
            self._wake.wait(self._patience())
            self._wake.clear()

    def _patience(self) -> float:
        waits = [
            current.retry_at - time.monotonic()
            for source in self._sources.values()
            if (current := source.current) is not None
            and current.retry_at is not None
            and not current.paused
        ]
        return 0.0 if self._stale else max(0.0, min([_POLL_SECONDS, *waits]))

    def _log_store(self, error: StoreError | None) -> None:
        if error is not None and not self._store_logged:
            log.warning("backfills wait for the store", code=error.code, error=str(error))
        self._store_logged = error is not None

    def _list(self) -> None:
        self._on_list(
            [
                found
                for name, source in self._sources.items()
                for found in self._backfills.find(source=name, states=[*OPEN, "failed"])
                if found.is_open or found.id in source.failed
            ]
        )

    def _tend(self, name: str, refresh: bool) -> None:
        source, initial = self._sources[name], self._initial[name]
        source.save()
        if self._draining:
            return
        if refresh or source.current is None:
            initial.tend()
            source.choose()
        source.command()


def log_left_out(config: Config, store_url: str, sources: Sequence[str]) -> None:
    """Log, in one line, which backfills a run that reads none leaves out. Raises `StoreError`."""
    with Store(store_url) as store:
        backfills = Backfills(store)
        waiting = [
            found.id
            for name in sources
            for found in backfills.find(source=name, states=["waiting", "running"])
        ]
        initial = [
            sink
            for name in sources
            for sink in InitialBackfills(config, name, backfills, lambda: None).missing()
        ]
    if waiting or initial:
        log.warning("backfills are left out: a run with --once reads none; start `penstock run`",
                    waiting=waiting, initial=initial)  # fmt: skip
