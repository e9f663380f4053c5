"""Fills an inbox: reads a JetStream stream into a table, and acks messages once they are committed.

A message is stored once, however often it is delivered: its `Nats-Msg-Id`, or its stream, number and
time, is unique in the inbox. Each pipeline has a thread with an event loop. It retries after failures,
with backoff, and reports them in the pipeline's checkpoint.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Sequence
from typing import Any, Final

import psycopg
import structlog
from nats.aio.msg import Msg
from psycopg import errors, sql

from penstock.core import queries
from penstock.core.backoff import Backoff
from penstock.core.errors import CaptureError, SinkError
from penstock.core.health import Failure
from penstock.outbox.inbox.puller import Puller, open_puller
from penstock.outbox.inbox.row import InboxRow
from penstock.outbox.inbox.settings import InboxSettings
from penstock.outbox.pipelines import DISABLED, InboxPipeline
from penstock.outbox.sessions import connect_async, postgres_error

_SQL: Final = queries.load("penstock.outbox.inbox", "inbox.sql")
_SWEEP_SECONDS: Final = 60.0
_SWEEP_ROWS: Final = 100_000
"""A sweep that deleted this many rows has more to do, after the next batch."""
_BACKOFF_SECONDS: Final = (0.5, 15.0)

log = structlog.get_logger("penstock")


class InboxReader:
    """Runs one pipeline in a thread, from `start` until `stop`.

    Args:
        url: The inboxes' database.
        pipeline: The pipeline.
        settings: What it reads, or the failure that keeps it from reading.
        after: The pipeline's reader before this one, whose end it waits for.
    """

    def __init__(
        self,
        url: str,
        pipeline: InboxPipeline,
        settings: InboxSettings | Failure,
        after: InboxReader | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.settings = settings
        self.state: str = "starting"
        self.failure: Failure | None = None
        self._url = url
        self._after = after
        self._table = sql.Identifier("tide", f"inbox_{pipeline.inbox}")
        self._key = {
            "group": pipeline.relay_group, "pipeline": pipeline.pipeline, "inbox": pipeline.inbox,
        }  # fmt: skip
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._reported: tuple[str | None, ...] | None = None
        self._logged: str | None = None
        self._backoff = Backoff(*_BACKOFF_SECONDS)
        self._swept_at = time.monotonic()
        self._ended = False
        self._changing = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping = asyncio.Event()
        self._puller: Puller | None = None
        self._thread = threading.Thread(
            target=self._main, name=f"inbox {pipeline.pipeline}", daemon=True
        )

    @property
    def alive(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Begin an orderly end, from any thread: the batch under way is committed and acked."""
        with self._changing:
            self._ended = True
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._stop)

    def join(self) -> None:
        """Wait for the end."""
        if self._thread.ident is not None:
            self._thread.join()

    def _stop(self) -> None:
        self._stopping.set()
        if self._puller is not None:
            self._puller.over.set()

    def _main(self) -> None:
        if self._after is not None:
            self._after.join()
            self._after = None
        asyncio.run(self._work())

    async def _work(self) -> None:
        with self._changing:
            self._loop = asyncio.get_running_loop()
            if self._ended:
                self._stopping.set()
        try:
            while not self._stopping.is_set():
                failure = await self._try()
                if failure is not None:
                    await self._fail(failure)
                    await self._pause()
        finally:
            with self._changing:
                self._loop = None
            await self._disconnect()

    async def _try(self) -> Failure | None:
        """Read until stopped; return the failure that ended it."""
        if isinstance(self.settings, Failure):
            return self.settings
        try:
            await self._read(self.settings)
        except (SinkError, CaptureError) as error:
            return Failure.by(error)
        except psycopg.Error as error:
            known = postgres_error(error, self._url)
            return Failure.by(known)
        except Exception as error:
            log.exception("the inbox's pipeline failed", pipeline=self.pipeline.pipeline)
            return Failure("internal", f"{type(error).__name__}: {error}")
        return None

    async def _pause(self) -> None:
        # Where only other settings help, the failure is reported and nothing is tried again.
        final = isinstance(self.settings, Failure) and self._reported is not None
        delay = None if final else self._backoff.after_failure()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), delay)

    # -- reading

    async def _read(self, settings: InboxSettings) -> None:
        await self._connect()
        puller = await open_puller(settings, f"penstock {self.pipeline.pipeline}")
        self._puller = puller
        messages: list[Msg] = []
        try:
            await self._report("running", None)
            log.info("filling the inbox", pipeline=self.pipeline.pipeline,
                     inbox=self.pipeline.inbox, stream=puller.stream)  # fmt: skip
            while not self._stopping.is_set():
                due = self._swept_at + _SWEEP_SECONDS - time.monotonic()
                messages = await puller.pull(max(due, 0.01))
                if messages:
                    await self._write(messages)
                    written, messages = messages, []
                    await puller.ack(written)
                elif puller.over.is_set() and not self._stopping.is_set():
                    raise SinkError("connection_lost", "The connection to NATS is lost.")
                self._backoff.reset()
                self._logged = None
                if self._swept_at + _SWEEP_SECONDS <= time.monotonic():
                    await self._sweep()
        finally:
            self._puller = None
            await puller.close(unwritten=messages)

    async def _write(self, messages: list[Msg]) -> None:
        """Add messages to the inbox and count them, in one transaction."""
        connection = await self._connect()
        rows = [InboxRow.of(message) for message in messages]
        last = max(message.metadata.sequence.stream for message in messages)
        async with connection.transaction():
            added = await self._fill(connection, rows)
            values = {**self._key, "added": added, "last": last}
            await connection.execute(_SQL["count"], values)

    async def _fill(
        self, connection: psycopg.AsyncConnection[Any], rows: Sequence[InboxRow]
    ) -> int:
        """Add rows, and return how many are new; JSON that Postgres can't hold becomes a body."""
        names = ("message_ids", "subjects", "payloads", "bodies", "headers")
        values = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
        try:
            async with connection.transaction():
                query = sql.SQL(_SQL["fill"]).format(table=self._table)
                return (await connection.execute(query, values)).rowcount
        # Nested too deep, or too large.
        except (psycopg.DataError, errors.StatementTooComplex, errors.ProgramLimitExceeded):
            if len(rows) > 1:
                half = len(rows) // 2
                first = await self._fill(connection, rows[:half])
                return first + await self._fill(connection, rows[half:])
            if rows[0].payload is None:
                raise
            return await self._fill(connection, [rows[0].as_body])

    async def _sweep(self) -> None:
        self._swept_at = time.monotonic()
        connection = await self._connect()
        cursor = await connection.execute(_SQL["sweep"], [self.pipeline.inbox])
        row = await cursor.fetchone()
        if row is not None and row[0]:
            log.info("inbox swept", inbox=self.pipeline.inbox, deleted=row[0])
            if row[0] >= _SWEEP_ROWS:
                self._swept_at -= _SWEEP_SECONDS

    # -- reports, and the session

    async def _fail(self, failure: Failure) -> None:
        if failure.code == DISABLED:
            await self._try_to_report(DISABLED, None)
            return
        if failure.code != self._logged:
            self._logged = failure.code
            log.error("the inbox is not filled; trying again", pipeline=self.pipeline.pipeline,
                      code=failure.code, error=failure.cause, remedy=failure.remedy)  # fmt: skip
        await self._try_to_report("error", failure)

    async def _try_to_report(self, state: str, failure: Failure | None) -> None:
        try:
            await self._report(state, failure)
        except (psycopg.Error, CaptureError):
            self.state, self.failure, self._reported = state, failure, None
            await self._disconnect()

    async def _report(self, state: str, failure: Failure | None) -> None:
        code, error, remedy = (
            (None, None, None)
            if failure is None
            else (failure.code, failure.cause, failure.remedy or None)
        )
        report = (state, code, error, remedy)
        self.state, self.failure = state, failure
        if report == self._reported:
            return
        connection = await self._connect()
        values = {**self._key, "state": state, "code": code, "error": error, "remedy": remedy}
        await connection.execute(_SQL["put_state"], values)
        self._reported = report

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = await connect_async(self._url)
        return self._connection

    async def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                await self._connection.close()
            self._connection = None
