"""A whole Penstock in memory: a configuration's sources, sinks, streams and consumers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any, Final, Self, TypeVar

import httpx
import pyarrow as pa

from penstock.api.auth import Role
from penstock.config.file import load
from penstock.config.settings import Config
from penstock.core.text import nearest
from penstock.streams.consumers.types import ConsumerSpec
from penstock.testing.client import BASE_URL, InMemoryTokens, Transport, make_app
from penstock.testing.clock import Clock
from penstock.testing.consumer import InMemoryConsumer
from penstock.testing.consumers import InMemoryConsumers
from penstock.testing.sink import InMemorySink
from penstock.testing.source import InMemorySource
from penstock.testing.stream import InMemoryStream

T = TypeVar("T")


class InMemoryPenstock:
    """Penstock without servers. A change made to a table is in streams and sinks when the call returns.

    Args:
        config: A configuration, or what penstock.yaml holds as a dict.
        clock: The time; a clock of its own that stands still, unless one is given.

    Attributes:
        clock: The time.
        consumers: The streams and consumers.
        app: The HTTP API, an ASGI application.

    Raises:
        pydantic.ValidationError: The configuration is wrong.
        UnsupportedError: A sink has a filter, a transform or a route in SQL.
        TransformError: A sink's Lua or Python code can't be loaded.
    """

    def __init__(self, config: Config | Mapping[str, Any], *, clock: Clock | None = None) -> None:
        if not isinstance(config, Config):
            config = Config.model_validate(dict(config))
        self.config: Final = config
        self.clock: Final = Clock() if clock is None else clock
        self.consumers: Final = InMemoryConsumers(self.clock)
        self._tokens = InMemoryTokens()
        self.app: Final = make_app(self.consumers, self._tokens)
        self._sinks: dict[str, InMemorySink] = {}
        try:
            for name, sink in config.sinks.items():
                stream = None
                if sink.type == "stream":
                    stream = self.consumers.add_stream(name, sink.kind, sink.source, **sink.group)
                self._sinks[name] = InMemorySink(name, sink, stream)
        except BaseException:
            self.close()
            raise
        for name, consumer in config.consumers.items():
            spec = ConsumerSpec(name, consumer.stream, consumer.type, consumer.stored())
            self.consumers.add(spec)
        self._sources = {name: self._source(name) for name in config.sources}

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        environ: Mapping[str, str] = os.environ,
        *,
        clock: Clock | None = None,
    ) -> Self:
        """Read a configuration file; raises `ConfigError` with all that is wrong in it."""
        return cls(load(path, environ), clock=clock)

    def source(self, name: str | None = None) -> InMemorySource:
        """Return a source, the only one where no name is given; raises `KeyError`."""
        if name is None and len(self._sources) == 1:
            return next(iter(self._sources.values()))
        return _named("source", name or "", self._sources)

    def sink(self, name: str) -> InMemorySink:
        """Return a sink; raises `KeyError`."""
        return _named("sink", name, self._sinks)

    def stream(self, name: str) -> InMemoryStream:
        """Return a stream; raises `UnknownStream`."""
        return self.consumers.stream(name)

    def consumer(self, name: str) -> InMemoryConsumer:
        """Return a consumer, a stream's own by the stream's name; raises `UnknownConsumer`."""
        return self.consumers.consumer(name)

    def token(self, role: Role = "admin", consumers: Iterable[str] | None = None) -> str:
        """Return a new token of the API; a worker's is for these consumers, None stands for all."""
        return self._tokens.create(role, consumers)

    def transport(self) -> Transport:
        """Return a transport for an `httpx.Client` or `httpx.AsyncClient` that the test makes."""
        return Transport(self.app, self.consumers)

    def client(self, path: str = "", token: str | None = None) -> httpx.Client:
        """Return a blocking client of the API; `path` is added to its base URL."""
        headers = self._headers(token)
        return httpx.Client(base_url=BASE_URL + path, headers=headers, transport=self.transport())

    def async_client(self, path: str = "", token: str | None = None) -> httpx.AsyncClient:
        """Return an async client of the API; `path` is added to its base URL."""
        return httpx.AsyncClient(
            base_url=BASE_URL + path,
            headers=self._headers(token),
            transport=self.transport(),
            timeout=None,  # noqa: S113 - nothing is slow but a receive that waits for the test
        )

    def _headers(self, token: str | None) -> dict[str, str]:
        return {"Authorization": f"Bearer {token or self.token()}"}

    def close(self) -> None:
        """End the processes of Lua transforms."""
        for sink in self._sinks.values():
            sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _source(self, name: str) -> InMemorySource:
        sinks = [sink for sink in self._sinks.values() if sink.settings.source == name]

        def emit(batch: pa.RecordBatch) -> None:
            for sink in sinks:
                sink.write(batch)

        return InMemorySource(name, self.config.sources[name], self.clock, emit)


def _named(what: str, name: str, found: Mapping[str, T]) -> T:
    try:
        return found[name]
    except KeyError:
        message = f"there is no {what} {name!r}: expected one of {', '.join(found)}"
        raise KeyError(message + nearest(name, found)) from None
