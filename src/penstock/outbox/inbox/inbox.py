"""Pipelines into inboxes: each reads a JetStream stream into a table, and acks what is committed.

A message is there once, however often it comes: its `Nats-Msg-Id`, or its stream, number and time,
is unique in the inbox. Each pipeline has a thread with an event loop; what fails is tried again with
backoff, and said in the pipeline's place.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson
import psycopg
import structlog
from nats.aio.msg import Msg
from psycopg import errors, sql
from psycopg.rows import class_row

from penstock.core import queries
from penstock.core.backoff import Backoff
from penstock.core.errors import CaptureError, PipelineError, SinkError
from penstock.core.health import Failure
from penstock.outbox.inbox.nats import (
    InboxSettings,
    Puller,
    durable_name,
    open_puller,
    read_settings,
)
from penstock.outbox.relay.wanted import DISABLED
from penstock.outbox.sessions import connect_async, postgres_error

_SQL: Final = queries.load("penstock.outbox.inbox", "inbox.sql")
_SWEEP_SECONDS: Final = 60.0
_SWEEP_ROWS: Final = 100_000
"""A sweep that has deleted so many has more to do, behind the next batch."""
_BACKOFF_SECONDS: Final = (0.5, 15.0)
_ID_BYTES: Final = 1000
"""The longest message id that is kept as it is; an index takes no long ones."""

log = structlog.get_logger("penstock")


@dataclass(frozen=True)
class InboxPipeline:
    """A row of `tide.relays` of direction `in`; `system` is what Postgres calls the cluster."""

    pipeline: str
    inbox: str
    relay_group: str
    config: dict[str, Any]
    enabled: bool
    system: int


def find_inboxes(connection: psycopg.Connection[Any]) -> list[InboxPipeline]:
    """Return the pipelines into inboxes, of all groups."""
    with connection.cursor(row_factory=class_row(InboxPipeline)) as cursor:
        return cursor.execute(_SQL["pipelines"]).fetchall()


class Row(NamedTuple):
    """A message as an inbox keeps it; `payload` is JSON, and `body` is what is none."""

    message_id: str
    subject: str
    payload: str | None
    body: bytes | None
    headers: str

    @classmethod
    def of(cls, message: Msg) -> Row:
        """Return a message's row; Postgres may still have something against its JSON."""
        headers = {
            _text(name): _text(value) for name, value in (message.headers or {}).items()
        }  # fmt: skip
        given = headers.get("Nats-Msg-Id")
        meta = message.metadata
        # With the time it was stored: a stream that is made anew counts from 1 again.
        stored = round(meta.timestamp.timestamp() * 1_000_000)
        message_id = given or f"{meta.stream}:{meta.sequence.stream}:{stored}"
        if len(message_id.encode()) > _ID_BYTES:
            message_id = "sha256:" + hashlib.sha256(message_id.encode()).hexdigest()
        payload = _json(message.data)
        return cls(
            message_id, _text(message.subject), payload,
            message.data if payload is None else None, json.dumps(headers),
        )  # fmt: skip

    @property
    def as_body(self) -> Row:
        """The same with its payload taken for no JSON."""
        body = self.body if self.payload is None else self.payload.encode()
        return self._replace(payload=None, body=body)


def _text(given: object) -> str:
    """Return a text that Postgres holds."""
    return str(given).replace("\0", "�").encode(errors="replace").decode()


def _json(data: bytes) -> str | None:
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    try:
        orjson.loads(data)
    except orjson.JSONDecodeError:
        # It refuses some that Postgres takes: numbers beyond a double, and deep ones.
        try:
            json.loads(text, parse_constant=_refuse)
        except RecursionError:
            return text
        except ValueError:
            return None
    return text


def _refuse(constant: str) -> None:
    raise ValueError(constant)


class Reader:
    """Runs one pipeline in a thread, from `start` until `stop`.

    Args:
        url: The inboxes' database.
        pipeline: Which one.
        settings: What it reads, or why it does not.
        after: The one that ran it before, whose end is waited for.
    """

    def __init__(
        self,
        url: str,
        pipeline: InboxPipeline,
        settings: InboxSettings | Failure,
        after: Reader | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.settings = settings
        self.state: str = "starting"
        self.failure: Failure | None = None
        self._url = url
        self._after = after
        self._table = sql.Identifier("tide", f"inbox_{pipeline.inbox}")
        self._place = {
            "group": pipeline.relay_group, "pipeline": pipeline.pipeline, "inbox": pipeline.inbox,
        }  # fmt: skip
        self._connection: psycopg.AsyncConnection[Any] | None = None
        self._told: tuple[str | None, ...] | None = None
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
        """Ask for the end, from any thread; what is being written is committed and acked."""
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
        """Read until stopped; return what is in the way of it."""
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
        # Where only other settings help there is nothing to try again, but to say so.
        final = isinstance(self.settings, Failure) and self._told is not None
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
            await self._tell("running", None)
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
        """Add messages to the inbox, and count them, in one transaction."""
        connection = await self._connect()
        rows = [Row.of(message) for message in messages]
        last = max(message.metadata.sequence.stream for message in messages)
        async with connection.transaction():
            added = await self._fill(connection, rows)
            values = {**self._place, "added": added, "last": last}
            await connection.execute(_SQL["count"], values)

    async def _fill(self, connection: psycopg.AsyncConnection[Any], rows: Sequence[Row]) -> int:
        """Add rows, and return how many are new; JSON that Postgres can't hold becomes a body."""
        names = ("message_ids", "subjects", "payloads", "bodies", "headers")
        values = dict(zip(names, map(list, zip(*rows, strict=True)), strict=True))
        try:
            async with connection.transaction():
                query = sql.SQL(_SQL["fill"]).format(table=self._table)
                return (await connection.execute(query, values)).rowcount
        # Too deep, or too large: the latter is no class of its own in psycopg.
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

    # -- what is told, and the session

    async def _fail(self, failure: Failure) -> None:
        if failure.code == DISABLED:
            await self._try_to_tell(DISABLED, None)
            return
        if failure.code != self._logged:
            self._logged = failure.code
            log.error("the inbox is not filled; trying again", pipeline=self.pipeline.pipeline,
                      code=failure.code, error=failure.cause, remedy=failure.remedy)  # fmt: skip
        await self._try_to_tell("error", failure)

    async def _try_to_tell(self, state: str, failure: Failure | None) -> None:
        try:
            await self._tell(state, failure)
        except (psycopg.Error, CaptureError):
            self.state, self.failure, self._told = state, failure, None
            await self._disconnect()

    async def _tell(self, state: str, failure: Failure | None) -> None:
        code, error, remedy = (
            (None, None, None)
            if failure is None
            else (failure.code, failure.cause, failure.remedy or None)
        )
        told = (state, code, error, remedy)
        self.state, self.failure = state, failure
        if told == self._told:
            return
        connection = await self._connect()
        values = {**self._place, "state": state, "code": code, "error": error, "remedy": remedy}
        await connection.execute(_SQL["put_state"], values)
        self._told = told

    async def _connect(self) -> psycopg.AsyncConnection[Any]:
        if self._connection is None or self._connection.closed:
            self._connection = await connect_async(self._url)
        return self._connection

    async def _disconnect(self) -> None:
        if self._connection is not None:
            with contextlib.suppress(psycopg.Error):
                await self._connection.close()
            self._connection = None


class Inboxes:
    """The readers of one group: those that are wanted run while `active`. Its methods do not wait.

    Args:
        url: The inboxes' database.
        database: Its name.
    """

    def __init__(self, url: str, database: str) -> None:
        self._url = url
        self._database = database
        self._changing = threading.Lock()
        self._wanted: dict[str, tuple[InboxPipeline, InboxSettings | Failure]] = {}
        self._readers: dict[str, Reader] = {}
        self._stopped: list[Reader] = []
        self._active = False

    def as_json(self) -> dict[str, Any]:
        """Return what `/status` says of the pipelines."""
        return {
            name: {"enabled": reader.pipeline.enabled, "state": reader.state}
            for name, reader in list(self._readers.items())
        }

    def failures(self) -> dict[str, Failure]:
        """Return why pipelines are not read that should be."""
        return {
            name: failure
            for name, reader in list(self._readers.items())
            if (failure := reader.failure) is not None
        }

    def want(
        self, pipelines: Sequence[InboxPipeline], environ: Mapping[str, str] = os.environ
    ) -> None:
        """Take what shall run from now on; only what has changed is started anew."""
        with self._changing:
            self._wanted = {p.pipeline: (p, self._settings(p, environ)) for p in pipelines}
            self._apply()

    def activate(self, active: bool) -> None:
        """Run them, or let them end."""
        with self._changing:
            if active != self._active:
                self._active = active
                self._apply()

    def join(self) -> None:
        """Wait for the end of those that were ended."""
        with self._changing:
            stopped, self._stopped = self._stopped, []
        for reader in stopped:
            reader.join()

    def _settings(
        self, pipeline: InboxPipeline, environ: Mapping[str, str]
    ) -> InboxSettings | Failure:
        if not pipeline.enabled:
            return Failure(DISABLED, "The pipeline is disabled.")
        try:
            durable = durable_name(pipeline.system, self._database, pipeline.pipeline)
            return read_settings(pipeline.config, durable, environ)
        except PipelineError as error:
            return Failure.by(error)

    def _apply(self) -> None:
        wanted = self._wanted if self._active else {}
        for name, reader in list(self._readers.items()):
            if wanted.get(name) != (reader.pipeline, reader.settings):
                reader.stop()
                self._stopped.append(self._readers.pop(name))
        self._stopped = [reader for reader in self._stopped if reader.alive]
        for name in wanted.keys() - self._readers.keys():
            last = [reader for reader in self._stopped if reader.pipeline.pipeline == name]
            reader = Reader(self._url, *wanted[name], after=last[-1] if last else None)
            self._readers[name] = reader
            reader.start()
