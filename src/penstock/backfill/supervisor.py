"""The run's backfills: which one each source reads now, what became of it, and what follows.

The store says what shall be; a thread here brings about that it is. It takes up what the command line
asks for when the store tells, or within seconds, and keeps in the store how far each backfill is. A
backfill that can't go on for now is started again at its cursor, later and later; one that can't at
all has failed. The live messages go on in any case.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import psycopg
import structlog
from psycopg import sql

from penstock.backfill.current import Current, Source, unfit
from penstock.backfill.initial import InitialBackfills
from penstock.backfill.progress import Failure
from penstock.backfill.requests import NOTICE, OPEN, Backfill, Backfills
from penstock.config.file import Config
from penstock.core.errors import StoreError
from penstock.core.monitor import Report
from penstock.streams.connect import connect
from penstock.streams.names import CHANNEL
from penstock.streams.store import Store

_POLL_SECONDS: Final = 3.0
_PAUSE_SECONDS: Final = 0.1  # between two looks at what was told, however much that is
_SHOW_SECONDS: Final = 1.0
_LISTEN_SECONDS: Final = 1.0
_RANGE_PATIENCE: Final = 30.0
_CLOSE_SECONDS: Final = 5.0

log = structlog.get_logger("penstock")


class Backfilling:
    """The backfills of `sources`, while a run lasts.

    `command(source, report)` reaches a source's reader. `is_behind(sink)` tells whether a sink has a
    backlog, to which a backfill adds nothing. `on_look` gets the backfills that are open, and those
    that failed in this run, whenever the store was asked.
    """

    def __init__(
        self,
        config: Config,
        store_url: str,
        sources: Sequence[str],
        command: Callable[[str, Report], None],
        is_behind: Callable[[str], bool],
        on_look: Callable[[Sequence[Backfill]], None],
    ) -> None:
        self._config = config
        self._url = store_url
        self._store = Store(store_url)
        self._backfills = Backfills(self._store)
        self._sources = {
            name: Source(name, InitialBackfills(config, name, self._backfills, self._look_again))
            for name in sources
        }
        self._command = command
        self._is_behind = is_behind
        self._on_look = on_look
        self._lock = threading.Lock()  # of what is told, in many threads
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._steering = threading.Lock()
        self._draining = False
        self._stale = True
        self._store_told = False
        self._tokens = 0
        self._failed: set[int] = set()
        self._threads = [
            threading.Thread(target=work, name="backfills", daemon=True)
            for work in (self._main, self._listen)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def drain(self) -> None:
        """Command and begin nothing more; how far everything is, is kept still."""
        with self._steering:
            self._draining = True

    def close(self) -> None:
        """Keep how far everything is, and end."""
        self.drain()
        self._closing.set()
        for source in self._sources.values():
            source.initial.close()
        self._wake.set()
        self._threads[0].join(_CLOSE_SECONDS)  # the other hears it within a second
        self._store.close()

    # -- what the processes of the run report, in their threads

    def handle(self, report: Report) -> None:
        """Take in a report of a reader or of a task; others are passed by."""
        if "sink" in report and ("state" in report or "behind" in report):
            self._wake.set()
        told = report.get("backfill") or report.get("backfill_range")
        if told is None:
            return
        with self._lock:
            if told.get("event") == "ready":
                source = self._sources[report["capture"]]
                # It says so until it is commanded.
                source.restarted |= source.reader != told["reader"]
                source.reader = told["reader"]
            else:
                current = self._with_token(told["token"])
                if current is None:
                    return
                if "backfill" in report:
                    current.progress.take_event(told, time.monotonic())
                else:
                    current.progress.take_range(told)
        self._wake.set()

    def _with_token(self, token: int) -> Current | None:
        for source in self._sources.values():
            if source.current is not None and source.current.token == token:
                return source.current
        return None

    # -- the threads

    def _listen(self) -> None:
        """Hear of what is asked for."""
        while not self._closing.is_set():
            try:
                with connect(self._url) as connection:
                    connection.execute(sql.SQL("LISTEN {}").format(sql.Identifier(CHANNEL)))
                    self._look_again()
                    while not self._closing.is_set():
                        for notice in connection.notifies(timeout=_LISTEN_SECONDS):
                            if notice.payload == NOTICE:
                                self._look_again()
            except psycopg.Error:  # the other thread tells; it looks every few seconds, too
                self._closing.wait(_POLL_SECONDS)

    def _look_again(self) -> None:
        self._stale = True
        self._wake.set()

    def _main(self) -> None:
        looked_at = shown_at = 0.0
        while True:
            closing = self._closing.is_set()
            now = time.monotonic()
            if now - looked_at > _POLL_SECONDS:
                self._stale = True
            look, self._stale = self._stale, False
            try:
                for source in self._sources.values():
                    self._tend(source, look and not closing)
                if look:
                    looked_at = now
                if look or now - shown_at > _SHOW_SECONDS:
                    shown_at = now
                    self._show()
                self._say_store(None)
            except StoreError as error:
                self._say_store(error)
            except Exception:
                log.exception("backfills could not be tended")
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

    def _say_store(self, error: StoreError | None) -> None:
        if error is not None and not self._store_told:
            log.warning("backfills wait for the store", code=error.code, error=str(error))
        self._store_told = error is not None

    def _show(self) -> None:
        names = list(self._sources)
        found = [
            backfill
            for name in names
            for backfill in self._backfills.find(source=name, states=[*OPEN, "failed"])
        ]
        self._on_look([b for b in found if b.is_open or b.id in self._failed])

    # -- one source

    def _tend(self, source: Source, look: bool) -> None:
        if source.current is not None:
            self._save(source)
        if self._draining:
            return
        if look or source.current is None:
            source.initial.tend()
            self._choose(source)
        self._steer(source)

    def _save(self, source: Source) -> None:
        """Keep how far the current backfill is; one that has ended is the current one no more."""
        current = source.current
        assert current is not None  # noqa: S101 - the caller has looked
        backfill = current.backfill
        with self._lock:
            progress = current.progress
            progress.check(time.monotonic(), _RANGE_PATIENCE)
            state = progress.cursor, progress.rows
            finished, failure, note = progress.finished, progress.failure, progress.note
            moved, progress.moved = progress.moved, False
        if moved:
            current.went_on()
        if finished:
            if self._backfills.finish(backfill.id, state[1]):
                log.info("backfill done", **_fields(backfill), rows=state[1])
            self._drop(source)
            return
        if state != current.saved:
            self._backfills.progress(backfill.id, *state)
            current.saved = state
        if failure is not None:
            self._failed_start(source, current, failure)
            return
        current.held = self._is_behind(backfill.sink)
        held = f"Sink {backfill.sink} is behind: its backlog goes first." if current.held else None
        self._tell_trouble(current, note or current.interrupted or held)

    def _tell_trouble(self, current: Current, note: str | None) -> None:
        if note != current.saved_note:
            self._backfills.trouble(current.backfill.id, note)
            current.saved_note = note

    def _failed_start(self, source: Source, current: Current, failure: Failure) -> None:
        backfill = current.backfill
        if not failure.transient:
            self._fail(source, backfill, failure.code, failure.message)
            return
        if current.retry_at is None:
            delay = current.put_off(failure.message)
            log.warning("backfill interrupted", **_fields(backfill), code=failure.code,
                        error=failure.message, retry_in=delay)  # fmt: skip
            self._tell_trouble(current, failure.message)
        elif time.monotonic() >= current.retry_at and not current.paused:
            self._begin(current)

    def _fail(self, source: Source, backfill: Backfill, code: str, message: str) -> None:
        if self._backfills.fail(backfill.id, message):
            self._failed.add(backfill.id)
            log.error("backfill failed", **_fields(backfill), code=code, error=message)
        self._drop(source)

    def _drop(self, source: Source) -> None:
        with self._lock:
            source.current = None
        self._stale = True

    def _begin(self, current: Current) -> None:
        with self._lock:
            self._tokens += 1
            current.start(self._tokens)

    def _choose(self, source: Source) -> None:
        """Take up what the store says of the source's backfills."""
        current = source.current
        claimed = self._backfills.claim(source.name)
        if current is not None:
            if claimed is not None and current.backfill.id == claimed.id:
                current.paused = False
                return
            self._stop(source, current)
        if claimed is None:
            return
        if (reason := unfit(self._config, claimed)) is not None:
            self._fail(source, claimed, "not_configured", reason)
            return
        log.info("backfill starts", **_fields(claimed), rows_done=claimed.rows_done)
        following = Current(claimed)
        self._begin(following)
        with self._lock:
            source.current = following

    def _stop(self, source: Source, current: Current) -> None:
        """Stop the current backfill, which the command line wants to run no more."""
        found = self._backfills.get(current.backfill.id)
        paused = found is not None and found.state == "paused"
        if paused != current.paused or not paused:
            event = "backfill paused" if paused else "backfill cancelled"
            log.info(event, **_fields(current.backfill))
        current.paused = paused
        if not paused:
            self._drop(source)

    def _steer(self, source: Source) -> None:
        """Tell the reader what to read, again and again: it may have lost its connection."""
        if source.reader is None:
            return
        current = source.current
        with self._lock:
            restarted, source.restarted = source.restarted, False
        if restarted and current is not None:
            self._begin(current)
        wanted = None if current is None else current.wanted
        now = time.monotonic()
        command = {"command": "backfill", "run": wanted}
        known = source.told is not None and _essence(source.told) == _essence(command)
        if known and not restarted and now - source.told_at < _POLL_SECONDS:
            return
        with self._steering:  # nothing that would undo it follows a command to drain
            if self._draining:
                return
            self._command(source.name, command)
        source.told, source.told_at = command, now


def tell_left_out(config: Config, store_url: str, sources: Sequence[str]) -> None:
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


def _fields(backfill: Backfill) -> dict[str, Any]:
    return {"number": backfill.id, "sink": backfill.sink, "table": backfill.table}


def _essence(command: Report) -> Any:
    """Return what tells commands apart: a start has its cursor for good."""
    wanted = command["run"]
    return None if wanted is None else (wanted["token"], wanted["paused"])
