"""The jobs of one lane: many at once, each in a thread; their requests wait for the driver's budget."""

from __future__ import annotations

import contextlib
import itertools
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import msgspec

from penstock.config.providers import ProviderSettings
from penstock.core.delivery import DeadLetter
from penstock.streams.connection import own_connection
from penstock.streams.store import Store
from penstock.syncs.connectors.contract import Connector
from penstock.syncs.connectors.make import connector_of, session_of
from penstock.syncs.credentials import SecretKey, StoredTokens
from penstock.syncs.entry import FIRST
from penstock.syncs.errors import SyncError
from penstock.syncs.job import SINK, Control, Yielded, run
from penstock.syncs.jobs import Ended, Job, JobFailure, Report
from penstock.syncs.rate_headers import rate_limit, retry_after
from penstock.syncs.records.sweep import Sweeps
from penstock.syncs.records.writer import RecordWriter
from penstock.syncs.session import ApiSession
from penstock.syncs.tokens import LazyTokens

_WRITERS: Final = 4
"""So many connections to the records table a lane has at most."""
_IDLE: Final = 64
"""So many sessions a lane keeps for jobs to come at most, however many credentials there are."""
_TOO_MANY: Final = 429


@dataclass(frozen=True)
class JobClient:
    """What a job's connector and session are made of; it has secrets.

    `key` opens the tokens that are kept for `tokens_of`, or is why there is none.
    """

    credential: str
    provider: str
    settings: ProviderSettings | None
    properties: Mapping[str, str] = field(repr=False)
    key: SecretKey | SyncError
    tokens_of: str = field(repr=False, default="")


class RemoteBudget:
    """The driver's budget of a credential, as one job at a time asks for it."""

    def __init__(self, credential: str, send: Callable[[list[Any]], None], number: int) -> None:
        self._credential = credential
        self._send = send
        self._number = number
        self._is_granted = False
        self.requests = 0
        self.control = Control()
        self.first = True

    def acquire(self) -> None:
        """Wait until a request may be made; raises `Yielded`."""
        control, self._is_granted = self.control, False
        self._send(["ask", self._credential, self._number, self.first])
        with control.changed:
            control.changed.wait_for(lambda: self._is_granted or control.is_stopped)
        if not self._is_granted:
            self._send(["cancel", self._credential, self._number])
            raise Yielded
        control.begun = True
        self.requests += 1

    def release(self, headers: Mapping[str, str], status: int) -> None:
        """Note that the request has ended."""
        now = datetime.now(UTC)
        left, after = rate_limit(headers, now), retry_after(headers, now)
        limited = status == _TOO_MANY or (status >= 500 and after is not None)
        answer = [limited, after if limited else None, left.remaining, left.reset]
        self._send(["answered", self._credential, self._number, *answer])

    def grant(self) -> None:
        """Let the request be made."""
        changed = self.control.changed
        with changed:
            self._is_granted = True
            changed.notify()


class _Tools:
    """A connector with its session, which one job at a time has."""

    def __init__(self, lane: JobLane, client: JobClient, number: int) -> None:
        self._lane = lane
        self.number = number
        self.budget = RemoteBudget(client.credential, lane.send, number)
        self.connector: Connector = connector_of(
            client.provider, client.settings, client.properties
        )
        keeper = LazyTokens(partial(_keeper, lane.store, client))
        self.session: ApiSession = session_of(
            self.connector.access, self.budget, keeper, sleep=self._sleep
        )

    @property
    def requests(self) -> int:
        return self.budget.requests

    def writing(self) -> contextlib.AbstractContextManager[tuple[RecordWriter, Sweeps]]:
        return self._lane.writing()

    def bury(self, letters: Sequence[DeadLetter]) -> int:
        return self._lane.bury(letters)

    def _sleep(self, seconds: float) -> None:
        self.budget.control.sleep(seconds)


def _keeper(store: Store, client: JobClient) -> StoredTokens:
    if isinstance(client.key, SyncError):
        raise client.key
    own = partial(own_connection, store.url)
    return StoredTokens(store.connection, own, client.key, client.credential, client.tokens_of)


class JobLane:
    """Runs the jobs that one lane is given, up to `slots` at a time; `send` takes its reports."""

    def __init__(
        self, store_url: str, records_url: str, slots: int, send: Callable[[list[Any]], None]
    ) -> None:
        self.store = Store(store_url)
        self.send = send
        self._records_url = records_url
        self._slots = slots
        self._clients: dict[int, JobClient] = {}
        self._idle: dict[int, list[_Tools]] = {}  # by client, the one used last at the end
        self._idle_count = 0
        self._running: dict[int, Control] = {}
        self._asking: dict[int, RemoteBudget] = {}
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._burying = threading.Lock()
        self._jobs: queue.SimpleQueue[tuple[int, Job] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._writers: queue.SimpleQueue[RecordWriter | None] = queue.SimpleQueue()
        for _ in range(_WRITERS):
            self._writers.put(RecordWriter(records_url))

    # -- what the driver sends, in one thread

    def define(self, number: int, client: JobClient) -> None:
        """Take what jobs are made with that name this number."""
        with self._lock:
            self._clients[number] = client

    def give(self, client: int, job: Job) -> None:
        """Take a job."""
        with self._lock:
            self._running[job.number] = Control()
            if len(self._threads) < min(self._slots, len(self._running)):
                thread = threading.Thread(target=self._work, name="sync job", daemon=True)
                self._threads.append(thread)
                thread.start()
        self._jobs.put((client, job))

    def stop(self, number: int, *, loses: bool = True) -> None:
        """Have a job end between two pages, or where it loses nothing."""
        with self._lock:
            control = self._running.get(number)
        if control is not None:
            control.stop(loses=loses)

    def grant(self, number: int) -> None:
        """Let a request be made."""
        if (budget := self._asking.get(number)) is not None:
            budget.grant()

    def close(self) -> None:
        """End all jobs, without waiting for their requests."""
        self._closed = True
        for number in list(self._running):
            self.stop(number)
        for _ in self._threads:
            self._jobs.put(None)
        self.store.close()
        with self._lock, contextlib.suppress(queue.Empty):
            for tools in itertools.chain.from_iterable(self._idle.values()):
                tools.session.close()
            while True:  # those in use are closed where they come back
                if (writer := self._writers.get_nowait()) is not None:
                    writer.close()
        self._writers.put(None)

    # -- in the jobs' threads

    @contextlib.contextmanager
    def writing(self) -> Iterator[tuple[RecordWriter, Sweeps]]:
        """Lend one of the connections to the records table.

        Raises `Yielded` once the lane has ended: what it has read is read again elsewhere.
        """
        writer = None if self._closed else self._writers.get()
        if writer is None or self._closed:
            self._writers.put(None)  # another thread may wait, too
            raise Yielded
        try:
            yield writer, Sweeps(writer, self._records_url)
        finally:
            if self._closed:
                writer.close()
            self._writers.put(None if self._closed else writer)

    def bury(self, letters: Sequence[DeadLetter]) -> int:
        """Store dead letters, those that are not there yet; return how many."""
        with self._burying:
            known = self.store.letters.known(SINK, [of.idempotency_key for of in letters])
            new = {of.idempotency_key: of for of in letters if of.idempotency_key not in known}
            if new:
                self.store.letters.add(SINK, list(new.values()))
            return len(new)

    def _work(self) -> None:
        while (given := self._jobs.get()) is not None:
            client, job = given
            try:
                self._run(client, job)
            finally:
                with self._lock:
                    self._running.pop(job.number, None)

    def _run(self, client: int, job: Job) -> None:
        try:
            tools = self._take(client)
        except SyncError as error:
            problem = JobFailure(error.code, error.message, error.remedy, error.transient)
            self.send(_fields(Ended(job.number, problem=problem)))
            return
        with self._lock:
            control = self._running[job.number]
        tools.budget.control, tools.budget.first = control, job.kind in FIRST
        run(job, tools, control, lambda report: self.send(_fields(report)))
        self._put_back(client, tools)

    def _take(self, client: int) -> _Tools:
        with self._lock:
            if idle := self._idle.get(client):
                self._idle_count -= 1
                return idle.pop()
            of, number = self._clients[client], next(self._numbers)
        tools = _Tools(self, of, number)
        self._asking[number] = tools.budget
        return tools

    def _put_back(self, client: int, tools: _Tools) -> None:
        """Keep a connector and its session for the next job; the one used longest ago gives way."""
        with self._lock:
            if self._closed:
                tools.session.close()
                return
            idle = self._idle.pop(client, [])
            self._idle[client] = [*idle, tools]
            self._idle_count += 1
            if self._idle_count <= _IDLE:
                return
            oldest = next(of for of, kept in self._idle.items() if kept)
            gone = self._idle[oldest].pop(0)
            self._idle_count -= 1
            self._idle = {of: kept for of, kept in self._idle.items() if kept}
            del self._asking[gone.number]
        gone.session.close()


def _fields(report: Report) -> list[Any]:
    fields: list[Any] = msgspec.to_builtins(report)
    return fields
