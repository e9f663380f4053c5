"""The drainers of a run: one query finds those that have something to do, and only these work.

A run may have a hundred sinks, none of which is behind as a rule. So one thread asks the store for all
of them. A drainer has a thread, and takes its turn at one of a few connections, while it drains; the
others hold nothing. Whether their servers answer is checked once for each login: `ServerCheck`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import structlog

from penstock.core.backoff import Backoff
from penstock.core.delivery import Sink
from penstock.core.errors import StoreError
from penstock.core.message import Position
from penstock.core.monitor import Report
from penstock.sinks import reports
from penstock.sinks.backlog import store as backlog
from penstock.sinks.backlog.drainer import Drainer
from penstock.sinks.backlog.server_check import ServerCheck
from penstock.sinks.backlog.sink import SinkBacklog
from penstock.streams.pool import StorePool

CONNECTIONS: Final = 8
"""How many connections to the store the drainers of a run have at most; one while none drains."""
_POLL_SECONDS: Final = 2.0
"""How often the store is asked which sinks are behind."""
_PAUSE_SECONDS: Final = 0.05
"""How long at least it is not asked again."""
_STOP_SECONDS: Final = 4.0
_CLOSED_SECONDS: Final = 2.0
_BACKOFF_SECONDS: Final = (0.1, 2.0)

log = structlog.get_logger("penstock")


@dataclass
class _Member:
    drainer: Drainer
    wakes: int = 1
    read: int = 0
    """Which of its `wakes` was the last one before the store was asked."""


class Drainers:
    """Drains what is behind of the sinks that are added, from `start` to `stop`.

    Args:
        url: The store's.
        on_report: Called from several threads with reports for `/status` and `/metrics`.
    """

    def __init__(self, url: str, on_report: Callable[[Report], object]) -> None:
        self._pool = StorePool(url, CONNECTIONS)
        self._on_report = on_report
        self._members: dict[str, _Member] = {}
        self._checks: list[tuple[object, ServerCheck]] = []
        self._done: dict[int, Position] = {}
        self._stopping = threading.Event()
        self._woken = threading.Event()
        self._woken.set()
        self._lock = threading.Lock()
        self._store_failed = False
        self._thread = threading.Thread(target=self._run, name="drainers", daemon=True)

    def add(
        self,
        of: SinkBacklog,
        make: Callable[[], Sink],
        detach_after: timedelta,
        login: object = None,
    ) -> None:
        """Drain a sink or consumer, of which `of` waits, from now on.

        `make` makes the sink. Those with an equal `login` have one server, which is checked once;
        without one it is checked for this sink alone.
        """
        done = self._done
        drainer = Drainer(
            self._pool, make(), detach_after, self._on_report, of,
            lambda: done.get(of.source_id), self._woken.set,
        )  # fmt: skip
        with self._lock:
            self._members[of.name] = _Member(drainer)
            self._check(login, make).add(drainer)
        self._woken.set()

    def _check(self, login: object, make: Callable[[], Sink]) -> ServerCheck:
        for other, check in self._checks:
            if login is not None and other == login:
                return check
        check = ServerCheck(make(), self._on_report)
        self._checks.append((login, check))
        if self._thread.is_alive():
            check.start()
        return check

    def start(self) -> None:
        """Start to watch."""
        with self._lock:
            self._thread.start()
            for _, check in self._checks:
                check.start()

    def ask_to_end(self) -> None:
        """Have all threads end, without waiting for them."""
        self._stopping.set()
        self._woken.set()
        with self._lock:
            for _, check in self._checks:
                check.ask_to_end()
            for member in self._members.values():
                member.drainer.ask_to_end()

    def stop(self) -> None:
        """End all; what is about to be delivered stays in the backlogs."""
        self.ask_to_end()
        self._join(_STOP_SECONDS)
        self._pool.close()  # which ends what they wait for
        self._join(_CLOSED_SECONDS)
        self._pool.close()
        for member in self._members.values():
            member.drainer.close()

    def _join(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        if self._thread.ident is not None:
            self._thread.join(seconds)
        joins = [member.drainer.join for member in self._members.values()]
        for join in (*joins, *(check.join for _, check in self._checks)):
            join(max(0.0, deadline - time.monotonic()))

    # -- what the run reports

    def done(self, source_id: int, position: Position) -> None:
        """Note that all parts of all rounds up to `position`, of the stream, have ended."""
        # Two threads report it: what comes late may be older.
        self._done[source_id] = max(position, self._done.get(source_id, position))
        for member in list(self._members.values()):
            if member.drainer.source_id == source_id and member.drainer.is_busy:
                member.drainer.poke()

    def wake(self, sink: str) -> None:
        """Have it read whether a sink is behind, if it has one of that name."""
        if (member := self._members.get(sink)) is not None:
            member.wakes += 1
            member.drainer.poke()
            self._woken.set()

    def look(self) -> None:
        """Have it read which sinks are behind; `is_drained` is true when it has."""
        for name in list(self._members):
            self.wake(name)

    def is_attached(self, sink: str) -> bool:
        """Whether a sink has no backlog; False where that was not read since `wake`."""
        member = self._members[sink]
        return member.read == member.wakes and not member.drainer.is_busy

    def is_drained(self) -> bool:
        """Whether none has a backlog but those that are paused."""
        return all(
            self.is_attached(name) or member.drainer.is_paused
            for name, member in list(self._members.items())
        )

    # -- the thread

    def _run(self) -> None:
        backoff = Backoff(*_BACKOFF_SECONDS)
        while not self._stopping.is_set():
            self._woken.wait(_POLL_SECONDS)
            self._woken.clear()
            pause = _PAUSE_SECONDS
            try:
                self._begin_what_is_behind()
            except StoreError as error:
                if self._stopping.is_set():
                    return
                self._store_failed = True
                self._on_report(reports.store_failure(error))
                self._woken.set()
                pause = backoff.after_failure()
            except Exception:
                log.exception("whether sinks are behind can't be read")
            else:
                backoff.reset()
                if self._store_failed:
                    self._store_failed = False
                    self._on_report(reports.STORE_WORKS)
            self._stopping.wait(pause)

    def _begin_what_is_behind(self) -> None:
        with self._lock:
            members = [m for m in self._members.values() if not m.drainer.is_busy]
            idle = len(members) == len(self._members)
        if not members or self._stopping.is_set():
            return
        if idle:
            self._pool.shrink()
        wakes = [member.wakes for member in members]
        done = self._done.copy()
        with self._pool.lend() as connection:
            found = backlog.attention(connection)
        for member, of_member in zip(members, wakes, strict=True):
            drainer = member.drainer
            key, until = (drainer.source_id, drainer.sink), done.get(drainer.source_id)
            # What is asked for waits for the first round to end.
            if key in found.behind or (key in found.asked and until is not None):
                drainer.begin()
            else:
                drainer.note_attached(until)
                member.read = of_member
