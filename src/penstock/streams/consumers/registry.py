"""The consumers of a store, as one process and event loop serves them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import psycopg

from penstock.config.bastion import Bastion
from penstock.config.consumers import settings_of
from penstock.core import queries
from penstock.streams.bastions import SQL as BASTIONS_SQL
from penstock.streams.bastions import filled
from penstock.streams.connection import Also
from penstock.streams.consumers.changes import Check, ConsumerChanges, accept, entity_of, unknown
from penstock.streams.consumers.consumer import Consumer
from penstock.streams.consumers.facts import ConsumerFacts
from penstock.streams.consumers.moved import Moved
from penstock.streams.consumers.notices import Notices
from penstock.streams.consumers.receive_limit import ReceiveLimit
from penstock.streams.consumers.search import StreamSearch
from penstock.streams.consumers.sessions import SQL, Sessions
from penstock.streams.consumers.state import State
from penstock.streams.consumers.status import Status
from penstock.streams.consumers.stream_list import streams
from penstock.streams.consumers.types import (
    ConsumerError,
    ConsumerInfo,
    ConsumerSpec,
    StreamInfo,
    UnknownConsumer,
    UnknownStream,
)
from penstock.streams.consumers.view import StreamRef

_WRITE_SQL: Final = queries.load("penstock.streams", "write.sql")


class Consumers:
    """All consumers of the store at `url`, with at most `pool_size` connections and one to listen."""

    def __init__(self, url: str, *, pool_size: int = 8) -> None:
        self._sessions = Sessions(url, pool_size)
        self._consumers: dict[int, Consumer] = {}
        self._names: dict[str, ConsumerInfo] = {}
        self._uuids: dict[str, ConsumerInfo] = {}
        self._streams: dict[str, str] = {}
        self._rows: dict[int, tuple[tuple[Any, ...], ConsumerInfo]] = {}
        self._stale = True
        self._loading = asyncio.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._notices = Notices(
            self._sessions, connected=self._listening, received=self._notified, lost=self._missed
        )

        self._changes = ConsumerChanges(self._sessions)
        self._moved = Moved()
        self._status = Status(self._sessions, self._newest, self._facts_of)
        self._limit = ReceiveLimit(self._sessions, self._notices.send)

    async def open(self) -> None:
        """Connect; where the store does not answer, every later call tries again."""
        await self._notices.open()

    async def close(self) -> None:
        """Answer what waits with nothing, and disconnect."""
        await self._notices.close()
        for consumer in self._consumers.values():
            await consumer.close()
        await self._limit.close()
        await self._sessions.close()

    async def get(self, name: str) -> Consumer:
        """Return a consumer by its name or its UUID; raises `UnknownConsumer`."""
        info = self._found(name)
        if info is None or self._stale:
            await self._load(name)
            info = self._found(name)
        if info is None:
            raise unknown(name)
        return self._consumers[info.id]

    def _found(self, name: str) -> ConsumerInfo | None:
        return self._names.get(name) or self._uuids.get(name)

    async def own(self, stream: str) -> Consumer:
        """Return the own consumer group of the stream with a name or UUID; raises `UnknownStream`."""
        if stream not in self._names and stream not in self._streams:
            await self._load(stream)
        try:
            consumer = await self.get(self._streams.get(stream, stream))
        except UnknownConsumer:
            consumer = None
        if consumer is None or not consumer.info.own:
            raise UnknownStream(f"There is no stream {stream!r}.")
        return consumer

    async def streams(self) -> list[StreamInfo]:
        """Return all streams by name."""
        return await streams(self._sessions)

    async def search(self, stream: str) -> StreamSearch:
        """Return what finds messages of a stream; raises `UnknownStream`."""
        name = (await self.own(stream)).info.stream
        rows = await self._sessions.rows(SQL["stream_ref"], (name,))
        if not rows:
            raise UnknownStream(f"There is no stream {stream!r}.")
        *ref, base = rows[0]
        return StreamSearch(self._sessions, StreamRef(*ref), base)

    async def base(self, consumer: Consumer) -> int:
        """Return what its stream's LSNs have over the `commit_lsn` of messages of today's source."""
        rows = await self._sessions.rows(_WRITE_SQL["base"], (consumer.stream.source_id,))
        return int(rows[0][0]) if rows else 0

    async def list(self) -> list[ConsumerInfo]:
        """Return all consumers by name."""
        await self._load()
        return sorted(self._names.values(), key=lambda info: info.name)

    async def known(self) -> Sequence[ConsumerInfo]:
        """Return all consumers; the store is read only where the list may have changed."""
        if self._stale:
            await self._load()
        return list(self._names.values())

    def moved(self) -> Callable[[ConsumerInfo], bool]:
        """Return a function that returns whether a consumer may have changed since the last call.

        One without messages that wait, are in flight or are dead changes only with a notice.
        """
        found = self._moved.take()
        return lambda info: (
            not self._notices.is_used
            or info.id not in self._consumers
            or found.has(info.id, self._consumers[info.id].stream.source_id)
        )

    async def refusals(self) -> Mapping[str, tuple[str, float]]:
        """Return why consumers can't be served as the desired state has them, and since when."""
        rows = await self._sessions.rows(SQL["refusals"])
        return {name: (reason, since) for name, reason, since in rows}

    async def page(self, after: str, limit: int) -> Sequence[ConsumerInfo]:
        """Return the first `limit` consumers whose names come behind `after`, by name.

        It costs what the page does, however many consumers there are.
        """
        rows = await self._sessions.rows(SQL["consumer_page"], (after, limit))
        return [_info(row) for row in rows]

    async def named(self, names: Sequence[str]) -> Sequence[ConsumerInfo]:
        """Return the consumers of these names, as far as there are such."""
        rows = await self._sessions.rows(SQL["consumers_named"], (list(names),))
        return [_info(row) for row in rows]

    async def facts(
        self, infos: Sequence[ConsumerInfo] | None = None
    ) -> Sequence[tuple[ConsumerInfo, ConsumerFacts | None]]:
        """Return all consumers by name, or those of `infos`, and how each is.

        None where the store gave no answer to that. What is gone is left out.
        """
        infos = await self.list() if infos is None else infos
        found = await self._status.facts(infos)
        return [
            (info, found[info.id])
            for info in infos
            if info.id in found and (found[info.id] is not None or info.name in self._names)
        ]

    async def _facts_of(self, name: str) -> ConsumerFacts:
        return await (await self.get(name)).facts()

    def _newest(self, consumer: int) -> tuple[int, State] | None:
        found = self._consumers.get(consumer)
        return None if found is None else found.newest

    async def create(self, spec: ConsumerSpec, *, by: str = "api") -> ConsumerInfo:
        """Make a consumer; raises `NameTaken`, `UnknownStream`, `pydantic.ValidationError`.

        Here and below the desired state has it in the same transaction, with `by` in its audit log.
        """
        await self._changes.create(spec, by)
        await self._load()
        consumer = await self.get(spec.name)
        await consumer.begin()
        return consumer.info

    async def version(self, name: str) -> int | None:
        """Return the version of what has a consumer's settings in the desired state, None if nothing."""
        info = (await self.get(name)).info
        rows = await self._sessions.rows(SQL["entity"], entity_of(info))
        return rows[0][1] if rows else None

    async def update(
        self,
        name: str,
        changes: Mapping[str, Any],
        *,
        by: str = "api",
        check: Check = accept,
        also: Also = (),
    ) -> ConsumerInfo:
        """Change settings, those given alone; None sets one to its default.

        `check` gets the version that is changed, and may raise. `also` is done with it where the desired
        state does not have the consumer. Raises `UnknownConsumer` and `pydantic.ValidationError`.
        """
        await self._changes.update(await self.get(name), changes, by, check, also)
        await self._load()
        return (await self.get(name)).info

    async def delete(self, name: str, *, by: str = "api", check: Check = accept) -> None:
        """Delete a consumer and its state; raises `UnknownConsumer`, `Refused` for a stream's own.

        `check` gets the version that is deleted, and may raise.
        """
        await self._changes.delete((await self.get(name)).info, by, check)
        await self._load()

    async def _save(
        self, info: ConsumerInfo, disabled: str | None, *, paused: bool, also: Also
    ) -> None:
        await self._changes.disable(info, disabled, paused=paused, also=also)
        await self._load()

    async def bastion(self, bastion: Bastion) -> Bastion:
        """Return a bastion with the keys that the store has of it; raises `StoreUnavailable`."""
        rows = await self._sessions.rows(BASTIONS_SQL["bastions"], ([bastion.owner],))
        return filled(bastion, *(rows[0][1:] if rows else (None, None)))

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback`, in the event loop, whenever the list or a consumer's settings changed."""
        self._callbacks.append(callback)

    # The list

    async def _load(self, name: str | None = None) -> None:
        """Read the list, unless another call has while this one waited and has found `name`."""
        async with self._loading:
            if name is not None and not self._stale and self._found(name) is not None:
                return
            self._stale = not self._notices.is_used
            try:
                rows = await self._sessions.rows(SQL["consumers"])
            except BaseException as error:
                self._stale = True
                if isinstance(error, psycopg.errors.UndefinedTable):
                    raise self._sessions.unavailable(error) from None
                raise
            self._names, self._uuids, self._streams = {}, {}, {}
            found: dict[int, tuple[tuple[Any, ...], ConsumerInfo]] = {}
            for row in rows:
                id_, (stream_id, kind, source, stream_uuid) = row[0], row[11:]
                old, was = self._rows.get(id_, (None, None))
                info = was if was is not None and old == row else _info(row)
                found[id_] = row, info
                self._names[info.name] = self._uuids[info.uuid] = info
                self._streams[stream_uuid] = info.stream
                consumer = self._consumers.get(id_)
                if consumer is None:
                    of = StreamRef(stream_id, kind, source)
                    self._consumers[id_] = Consumer(
                        self._sessions, info, of, self._save, self._freed,
                        self._limit.of(id_),
                    )  # fmt: skip
                elif consumer.info != info:
                    consumer.change(info)
            self._rows = found  # what has not changed is not validated again
            for id_ in self._consumers.keys() - found.keys():
                gone = self._consumers.pop(id_)
                self._limit.forget(id_)
                why = UnknownConsumer(f"There is no consumer {gone.info.name!r} any more.")
                await gone.close(why)

    # Other processes

    def _freed(self, consumer: int) -> None:
        self._moved.note(consumer)
        self._notices.send(f"c{consumer}")

    def _missed(self) -> None:
        self._stale = True
        self._moved.note_all()

    async def _listening(self) -> None:
        self._stale = True
        self._moved.note_all()
        for consumer in self._consumers.values():
            consumer.head_moved()
            consumer.log_moved()
        await self._changed()

    def _notified(self, payload: str) -> None:
        kind, number = payload[:1], payload[1:]
        if kind == "s":
            self._moved.note_source(number)
            for consumer in self._consumers.values():
                if str(consumer.stream.source_id) == number:
                    consumer.head_moved()
        elif kind == "c" and number.isdigit():
            self._moved.note(int(number))
            if (found := self._consumers.get(int(number))) is not None:
                found.log_moved()
        elif kind == "w" and number.isdigit():
            self._limit.asked(int(number))
        elif kind == "f" and number.isdigit():
            self._limit.freed(int(number))
        elif kind == "k":
            self._stale = True
            self._notices.run(self._changed())

    async def _changed(self) -> None:
        with contextlib.suppress(ConsumerError):  # the next request reads the list
            await self._load()
            for consumer in list(self._consumers.values()):
                if consumer.info.settings.deliver_policy != "all":
                    await consumer.begin()
        for callback in self._callbacks:
            callback()


def _info(row: tuple[Any, ...]) -> ConsumerInfo:
    id_, name, stream, type_, own, settings, *state, uuid = row[:11]
    checked = settings_of(type_, settings)
    return ConsumerInfo(id_, name, stream, type_, own, checked, *state, uuid=uuid)
