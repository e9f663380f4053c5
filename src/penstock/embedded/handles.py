"""Small synchronous handles on the embedded servers, for tests and the demo.

`Database` runs SQL in one database; `JetStream` makes streams and reads them back, with an event
loop of its own in a thread, so that no caller needs to be asynchronous.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, Self, TypeVar

import nats
import nats.errors
import psycopg
from nats.aio.client import Client
from nats.aio.msg import Msg as NatsMsg
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, StreamConfig, StreamInfo
from nats.js.errors import NotFoundError, ServerError
from psycopg import sql

from penstock.core.connect import connect

T = TypeVar("T")
_TIMEOUT = 30.0  # of one request, on a machine that is busy
_CALL_TIMEOUT = 60.0
_STORE_TRIES = 20
_NO_STORE = 10049  # "error creating store for stream"


class Database:
    """One database of a server, by its URL."""

    def __init__(self, name: str, url: str) -> None:
        self.name = name
        self.url = url
        self._connection: psycopg.Connection[Any] | None = None

    def connect(self, *, autocommit: bool = False, **options: Any) -> psycopg.Connection[Any]:
        """Return a new connection; the caller closes it."""
        connection = connect(self.url, **options)
        connection.autocommit = autocommit
        return connection

    def execute(
        self, query: str, params: Sequence[Any] | Mapping[str, Any] | None = None
    ) -> list[tuple[Any, ...]]:
        """Run one statement in a transaction of its own and return its rows, if it has any.

        Without `params` the text may hold several statements; the rows are then the last one's.
        """
        if self._connection is None or self._connection.closed:
            self._connection = self.connect(autocommit=True)
        cursor = self._connection.execute(query.encode(), params)
        while cursor.nextset():
            pass
        return cursor.fetchall() if cursor.description is not None else []

    def close(self) -> None:
        """Close the connection that `execute` keeps."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def drop(self, admin_url: str) -> None:
        """Drop the database with everything that hangs on it: sessions and replication slots."""
        self.close()
        with connect(admin_url) as admin:
            slots = "SELECT slot_name, active_pid FROM pg_replication_slots WHERE database = %s"
            for slot, pid in admin.execute(slots, [self.name]).fetchall():
                if pid is not None:
                    admin.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
                with contextlib.suppress(psycopg.errors.UndefinedObject):
                    admin.execute("SELECT pg_drop_replication_slot(%s)", [slot])
            drop = sql.SQL("DROP DATABASE IF EXISTS {} WITH (FORCE)")
            admin.execute(drop.format(sql.Identifier(self.name)))


class Msg(NamedTuple):
    """One message as a stream keeps it."""

    subject: str
    data: bytes
    headers: dict[str, str]
    seq: int
    at: datetime = datetime.fromtimestamp(0, UTC)


class JetStream:
    """A synchronous client: makes streams, publishes, reads streams back from the beginning.

    A context manager; leaving it deletes the streams that it made and closes the connection.
    `options` are those of `nats.connect` (user, password, ...).
    """

    def __init__(self, url: str, **options: Any) -> None:
        self.url = url
        self._options = options
        self._made: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._client: Client | None = None

    def _call(self, work: Coroutine[Any, Any, T], timeout: float | None = _CALL_TIMEOUT) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout)

    async def _context(self) -> JetStreamContext:
        if self._client is None or self._client.is_closed:
            options = {"max_reconnect_attempts": -1, "reconnect_time_wait": 0.1, **self._options}
            self._client = await nats.connect(self.url, **options)
        return self._client.jetstream(timeout=_TIMEOUT)

    def add_stream(self, name: str, subjects: Sequence[str] | str, **config: Any) -> StreamInfo:
        """Make a stream; `config` are fields of nats-py's `StreamConfig`, durations in seconds."""
        listed = [subjects] if isinstance(subjects, str) else list(subjects)

        async def add() -> StreamInfo:
            context = await self._context()
            made = StreamConfig(name=name, subjects=listed, **config)
            for _ in range(_STORE_TRIES):
                # The server deletes a stream's folder in the background: one of its name may be early.
                try:
                    return await context.add_stream(made)
                except ServerError as error:
                    if error.err_code != _NO_STORE:
                        raise
                await asyncio.sleep(0.1)
            return await context.add_stream(made)

        info = self._call(add())
        self._made.append(name)
        return info

    def delete_stream(self, name: str) -> None:
        """Delete a stream; nothing happens if there is none."""

        async def delete() -> None:
            with contextlib.suppress(NotFoundError):
                await (await self._context()).delete_stream(name)

        self._call(delete())

    def info(self, name: str) -> StreamInfo:
        """Return the stream's configuration and state (`info.state.messages`, `.last_seq`)."""

        async def info() -> StreamInfo:
            return await (await self._context()).stream_info(name)

        return self._call(info())

    def api(self, call: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Return the answer of a call of JetStream's API, for what nats-py has no method or field."""

        async def request() -> bytes:
            await self._context()
            assert self._client is not None  # noqa: S101 - for the type checker
            data = json.dumps(payload).encode()
            return (await self._client.request(f"$JS.API.{call}", data, timeout=_TIMEOUT)).data

        answer: dict[str, Any] = json.loads(self._call(request()))
        return answer

    def publish(
        self, subject: str, data: bytes, headers: dict[str, str] | None = None
    ) -> tuple[int, bool]:
        """Publish and return the message's sequence and whether it was a duplicate."""

        async def publish() -> tuple[int, bool]:
            ack = await (await self._context()).publish(subject, data, headers=headers)
            return ack.seq, bool(ack.duplicate)

        return self._call(publish())

    def follow(self, name: str, subject: str, on_message: Callable[[Msg], None]) -> None:
        """Call `on_message` for each message of the stream, from its first one on, in its order.

        An ordered consumer, without acks; it is called in this handle's own thread.
        """

        async def take(message: NatsMsg) -> None:
            on_message(_msg(message))

        async def follow() -> None:
            context = await self._context()
            await context.subscribe(subject, stream=name, ordered_consumer=True, cb=take)

        self._call(follow())

    def messages(self, name: str) -> list[Msg]:
        """Return all that is in the stream now, in its order."""
        return self._call(self._messages(name), timeout=None)  # each of its fetches has one

    async def _messages(self, name: str) -> list[Msg]:
        context = await self._context()
        found: list[Msg] = []
        if (await context.stream_info(name)).state.messages == 0:
            return found
        last: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        async def take(message: NatsMsg) -> None:
            found.append(_msg(message))
            if not message.metadata.num_pending and not last.done():
                last.set_result(None)

        # Pushed, 30,000 messages take a second of CPU; fetched, two and a half.
        reader = await context.subscribe(
            "", stream=name, cb=take, manual_ack=True, flow_control=True, idle_heartbeat=_TIMEOUT,
            config=ConsumerConfig(ack_policy=AckPolicy.NONE, inactive_threshold=30),
            pending_msgs_limit=-1, pending_bytes_limit=-1,
        )  # fmt: skip
        try:
            while not last.done():
                count = len(found)
                await asyncio.wait([last], timeout=_TIMEOUT)
                if len(found) == count:
                    raise nats.errors.TimeoutError
        finally:
            await reader.unsubscribe()
        return found

    def close(self) -> None:
        """Delete the streams that this handle made, as far as the server answers, and close."""
        if self._loop.is_closed():
            return
        try:
            if self._client is not None and self._client.is_connected:
                for name in self._made:
                    with contextlib.suppress(nats.errors.Error):  # a cluster without a leader
                        self.delete_stream(name)
            self._call(self._end())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    async def _end(self) -> None:
        if self._client is not None:
            await self._client.close()
        # nats-py leaves an ordered consumer's two helper tasks running.
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _msg(message: NatsMsg) -> Msg:
    headers = dict(message.headers or {})
    of = message.metadata
    return Msg(message.subject, message.data, headers, of.sequence.stream, of.timestamp)
