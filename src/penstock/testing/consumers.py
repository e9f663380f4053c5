"""The streams and consumers of a Penstock in memory, by name."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any

from penstock.config.consumers import ConsumerSettings, settings_of
from penstock.streams.consumers.changes import Check, accept, check_settings
from penstock.streams.consumers.facts import ConsumerFacts
from penstock.streams.consumers.state import START
from penstock.streams.consumers.types import (
    ConsumerInfo,
    ConsumerSpec,
    NameTaken,
    Refused,
    StreamInfo,
    UnknownConsumer,
    UnknownStream,
    WrongSetting,
)
from penstock.streams.records import commit_position
from penstock.testing.clock import Clock
from penstock.testing.consumer import InMemoryConsumer
from penstock.testing.stream import InMemoryStream
from penstock.testing.uuids import uuid_of


class InMemoryConsumers:
    """Streams and their consumers, with the calls of Penstock's own registry: the HTTP API runs on it.

    Args:
        clock: The time.
    """

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._streams: dict[str, InMemoryStream] = {}
        self._consumers: dict[str, InMemoryConsumer] = {}
        self._made = 0
        self._callbacks: list[Callable[[], None]] = []

    def add_stream(
        self, name: str, kind: str = "changes", source: str = "", **group: Any
    ) -> InMemoryStream:
        """Make a stream and its own consumer group, which has the settings in `group`.

        Raises:
            NameTaken: A stream or a consumer has this name.
        """
        self._check_name(name)
        number = len(self._streams) + 1
        stream = InMemoryStream(number, name, kind, source, self.clock.now)
        self._streams[name] = stream
        self._add(ConsumerSpec(name, name, settings=group), own=True)
        return stream

    def stream(self, name: str) -> InMemoryStream:
        """Return a stream by its name or its UUID.

        Raises:
            UnknownStream: There is no stream of this name.
        """
        for stream in self._streams.values():
            if name in (stream.name, uuid_of("sink", stream.name)):
                return stream
        raise UnknownStream(f"There is no stream {name!r}.")

    def consumer(self, name: str) -> InMemoryConsumer:
        """Return a consumer by its name or its UUID; a stream's own group has the stream's name.

        Raises:
            UnknownConsumer: There is no consumer of this name.
        """
        if (found := self._consumers.get(name)) is not None:
            return found
        for consumer in self._consumers.values():
            if consumer.info.uuid == name:
                return consumer
        raise UnknownConsumer(f"There is no consumer {name!r}.")

    def add(self, spec: ConsumerSpec) -> InMemoryConsumer:
        """Make a consumer.

        Raises:
            NameTaken: A stream or a consumer has this name.
            UnknownStream: There is no stream of this name.
            pydantic.ValidationError: A setting is wrong.
        """
        self._check_name(spec.name)
        return self._add(spec, own=False)

    def _check_name(self, name: str) -> None:
        if name in self._streams or name in self._consumers:
            raise NameTaken(f"There is a stream or a consumer {name!r} already: take another name.")

    def _add(self, spec: ConsumerSpec, *, own: bool) -> InMemoryConsumer:
        if "target" in spec.settings:
            raise WrongSetting("there are none in memory: give the webhook's `url`.", "target")
        settings = settings_of(spec.type, spec.settings)
        stream = self.stream(spec.stream)
        check_settings(settings, stream.kind)
        _check_filter(settings)
        self._made += 1
        info = ConsumerInfo(
            self._made, spec.name, spec.stream, spec.type, own, settings, None, self.clock.now,
            uuid=uuid_of("consumer", spec.name),
        )  # fmt: skip
        cursor = _first_cursor(stream, settings.deliver_policy)
        consumer = self._consumers[spec.name] = InMemoryConsumer(info, stream, self.clock, cursor)
        self._changed()
        return consumer

    def _changed(self) -> None:
        for callback in self._callbacks:
            callback()

    # What the HTTP API and the pusher call

    async def get(self, name: str) -> InMemoryConsumer:
        """Return a consumer; raises `UnknownConsumer`."""
        return self.consumer(name)

    async def own(self, stream: str) -> InMemoryConsumer:
        """Return a stream's own consumer group; raises `UnknownStream`."""
        return self.consumer(self.stream(stream).name)

    async def streams(self) -> builtins.list[StreamInfo]:
        """Return all streams by name."""
        return [
            StreamInfo(
                id=stream.id,
                name=name,
                kind=stream.kind,
                source=stream.source,
                retention=None if stream.kind == "rows" else timedelta(days=7),
                segments=1,
                head=commit_position(*stream.head) if stream.rows else None,
                created_at=stream.created_at,
                uuid=uuid_of("sink", name),
            )
            for name, stream in sorted(self._streams.items())
        ]

    async def base(self, consumer: InMemoryConsumer) -> int:  # noqa: ARG002 - of the registry
        """Return 0: no source is ever replaced."""
        return 0

    async def list(self) -> builtins.list[ConsumerInfo]:
        """Return all consumers by name."""
        return [self._consumers[name].info for name in sorted(self._consumers)]

    async def page(self, after: str, limit: int) -> builtins.list[ConsumerInfo]:
        """Return the first `limit` consumers whose names come behind `after`."""
        return [info for info in await self.list() if info.name > after][:limit]

    async def facts(
        self, infos: Sequence[ConsumerInfo] | None = None
    ) -> Sequence[tuple[ConsumerInfo, ConsumerFacts | None]]:
        """Return all consumers by name, or those of `infos`, and the numbers of each."""
        infos = await self.list() if infos is None else infos
        found = [self._consumers[info.name] for info in infos]
        return [(consumer.info, await consumer.facts()) for consumer in found]

    async def create(self, spec: ConsumerSpec, *, by: str = "api") -> ConsumerInfo:  # noqa: ARG002 - of the registry
        """Make a consumer, as `add` does."""
        return self.add(spec).info

    async def update(
        self,
        name: str,
        changes: Mapping[str, Any],
        *,
        by: str = "api",  # noqa: ARG002 - of the registry
        check: Check = accept,
        also: object = (),  # noqa: ARG002 - of the registry
    ) -> ConsumerInfo:
        """Change settings, those given alone; None sets one to its default.

        Raises:
            UnknownConsumer: There is no consumer of this name.
            pydantic.ValidationError: A setting is wrong.
        """
        consumer = self.consumer(name)
        check(None)
        info = consumer.info
        values = {**info.settings.stored(), **changes}
        given = {key: value for key, value in values.items() if value is not None}
        settings = settings_of(info.type, given)
        check_settings(settings, consumer.stream.kind)
        _check_filter(settings)
        consumer.change(replace(info, settings=settings))
        self._changed()
        return consumer.info

    async def version(self, name: str) -> None:
        """Return None: there is no desired state."""
        self.consumer(name)

    async def delete(
        self,
        name: str,
        *,
        by: str = "api",  # noqa: ARG002 - of the registry
        check: Check = accept,
    ) -> None:
        """Drop a consumer.

        Raises:
            UnknownConsumer: There is no consumer of this name.
            Refused: It is its stream's own group.
        """
        consumer = self.consumer(name)
        if consumer.info.own:
            raise Refused(f"{name!r} is the stream's own consumer group: it goes with the stream.")
        check(None)
        del self._consumers[consumer.info.name]
        consumer.close(UnknownConsumer(f"There is no consumer {name!r} any more."))
        self._changed()

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback` whenever the list or a consumer's settings changed."""
        self._callbacks.append(callback)


def _first_cursor(stream: InMemoryStream, policy: str) -> tuple[int, int]:
    if policy == "last" and stream.rows:
        lsn, idx, *_ = stream.rows[-1]
        return lsn, idx - 1
    if policy not in ("all", "new", "last"):
        raise Refused("deliver_policy: in memory there is all, new and last, and no duration.")
    return START if policy == "all" else stream.head


def _check_filter(settings: ConsumerSettings) -> None:
    """Raise `Refused` for a filter that Postgres alone evaluates."""
    if settings.filters.sql is not None:
        raise Refused("filters.sql is evaluated by Postgres: there is none in memory.")
