"""One source's backfills, as the run sees them: stores how far the current one is, and what follows."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import structlog

from penstock.backfill.current import CurrentBackfill, unfit
from penstock.backfill.events import Event
from penstock.backfill.request import Backfill, Backfills
from penstock.config.settings import Config
from penstock.core.health import Failure
from penstock.core.monitor import Report

_REPEAT_SECONDS: Final = 3.0

log = structlog.get_logger("penstock")


class SourceBackfills:
    """The backfills of source `name`; one thread calls all methods but `take_ready` and `take_report`.

    `tokens` are numbers for starts. `send` commands the source's reader; it returns False where no
    command may follow any more. `is_behind(sink)` returns whether a sink has a backlog. `on_end` is
    called when the current backfill ends. All methods that use the store raise `StoreError`.
    """

    def __init__(
        self,
        name: str,
        config: Config,
        backfills: Backfills,
        tokens: Iterator[int],
        send: Callable[[Report], bool],
        is_behind: Callable[[str], bool],
        on_end: Callable[[], None],
    ) -> None:
        self.current: CurrentBackfill | None = None
        self.failed: set[int] = set()
        """The backfills that failed in this run."""
        self._name = name
        self._config = config
        self._backfills = backfills
        self._tokens = tokens
        self._send = send
        self._is_behind = is_behind
        self._on_end = on_end
        self._lock = threading.Lock()  # of what the processes report, in many threads
        self._reader: str | None = None
        self._restarted = False
        self._command: Report | None = None
        self._commanded_at = 0.0

    # -- what the processes of the run report, in their threads

    def take_ready(self, reader: str) -> None:
        """Take that a reader is there, which reports it until a command came."""
        with self._lock:
            self._restarted |= self._reader != reader
            self._reader = reader

    def take_report(self, report: Report) -> bool:
        """Take a report of a reader; return False if it is not of the current start."""
        with self._lock:
            current = self.current
            found = report["backfill"]
            if current is None or current.token != found["token"]:
                return False
            current.progress.take_event(Event.from_json(found))
            return True

    # -- how far the current one is

    def save(self) -> None:
        """Store how far the current backfill is; drop it where it has ended."""
        current = self.current
        if current is None:
            return
        backfill = current.backfill
        with self._lock:
            progress = current.progress
            state = progress.cursor, progress.rows
            finished, failure, delayed = progress.finished, progress.failure, progress.delayed
            transient = progress.transient
            moved, progress.moved = progress.moved, False
        if moved:
            current.progressed()
        if finished:
            if self._backfills.finish(backfill.id, state[1]):
                log.info("backfill done", **_fields(backfill), rows=state[1])
            self._drop()
            return
        if state != current.saved:
            self._backfills.progress(backfill.id, *state)
            current.saved = state
        if failure is not None:
            self._take_failure(current, failure, transient)
            return
        current.held = self._is_behind(backfill.sink)
        held = f"Sink {backfill.sink} is behind: its backlog goes first." if current.held else None
        self._save_error(current, delayed or current.interrupted or held)

    def _save_error(self, current: CurrentBackfill, error: str | None) -> None:
        if error != current.saved_error:
            self._backfills.set_error(current.backfill.id, error)
            current.saved_error = error

    def _take_failure(self, current: CurrentBackfill, failure: Failure, transient: bool) -> None:
        """Start again later, or end the backfill."""
        backfill = current.backfill
        if not transient:
            self._fail(backfill, failure)
        elif current.retry_at is None:
            delay = current.put_off(failure.text)
            log.warning("backfill interrupted", **_fields(backfill), code=failure.code,
                        error=failure.text, retry_in=delay)  # fmt: skip
            self._save_error(current, failure.text)
        elif time.monotonic() >= current.retry_at and not current.paused:
            self._begin(current)

    def _fail(self, backfill: Backfill, failure: Failure) -> None:
        if self._backfills.fail(backfill.id, failure.text):
            self.failed.add(backfill.id)
            log.error("backfill failed", **_fields(backfill), code=failure.code, error=failure.text)
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            self.current = None
        self._on_end()

    def _begin(self, current: CurrentBackfill) -> None:
        with self._lock:
            current.start(next(self._tokens))

    # -- which one is the current one

    def choose(self) -> None:
        """Take up the source's backfill that the store has as the next."""
        current = self.current
        claimed = self._backfills.claim(self._name)
        if current is not None:
            if claimed is not None and current.backfill.id == claimed.id:
                current.paused = False
                return
            self._stop(current)
        if claimed is None:
            return
        if (reason := unfit(self._config, claimed)) is not None:
            self._fail(claimed, Failure("not_configured", reason))
            return
        log.info("backfill starts", **_fields(claimed), rows_done=claimed.rows_done)
        following = CurrentBackfill(claimed)
        self._begin(following)
        with self._lock:
            self.current = following

    def _stop(self, current: CurrentBackfill) -> None:
        """Stop the current backfill, which was paused or cancelled."""
        found = self._backfills.get(current.backfill.id)
        paused = found is not None and found.state == "paused"
        if paused != current.paused or not paused:
            event = "backfill paused" if paused else "backfill cancelled"
            log.info(event, **_fields(current.backfill))
        current.paused = paused
        if not paused:
            self._drop()

    def command(self) -> None:
        """Send the reader its desired state, repeatedly: it may have lost its connection."""
        if self._reader is None:
            return
        current = self.current
        with self._lock:
            restarted, self._restarted = self._restarted, False
        if restarted and current is not None:
            self._begin(current)
        now = time.monotonic()
        command = {"command": "backfill", "run": None if current is None else current.desired}
        known = self._command is not None and _essence(self._command) == _essence(command)
        if known and not restarted and now - self._commanded_at < _REPEAT_SECONDS:
            return
        if self._send(command):
            self._command, self._commanded_at = command, now


def _fields(backfill: Backfill) -> dict[str, Any]:
    return {"number": backfill.id, "sink": backfill.sink, "table": backfill.table}


def _essence(command: Report) -> Any:
    """Return what differs between two commands: the cursor of a start does not change."""
    desired = command["run"]
    return None if desired is None else (desired["token"], desired["paused"])
