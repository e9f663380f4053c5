"""The consumers of a store, as one process and event loop serves them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from penstock.streams.consumer_types import ConsumerInfo, ConsumerSpec, StreamInfo
from penstock.streams.consuming import Consumer


class Consumers:
    """All consumers of the store at `url`, with at most `pool_size` connections and one to listen."""

    def __init__(self, url: str, *, pool_size: int = 8) -> None:
        self._url = url
        self._pool_size = pool_size

    async def open(self) -> None:
        """Connect; where the store does not answer, every later call tries again."""
        raise NotImplementedError

    async def close(self) -> None:
        """Answer what waits with nothing, and disconnect."""
        raise NotImplementedError

    async def get(self, name: str) -> Consumer:
        """Return a consumer; raises `UnknownConsumer`."""
        raise NotImplementedError

    async def own(self, stream: str) -> Consumer:
        """Return a stream's own consumer group; raises `UnknownStream`."""
        raise NotImplementedError

    async def streams(self) -> list[StreamInfo]:
        """Return all streams by name."""
        raise NotImplementedError

    async def list(self) -> list[ConsumerInfo]:
        """Return all consumers by name."""
        raise NotImplementedError

    async def create(self, spec: ConsumerSpec) -> ConsumerInfo:
        """Make a consumer; raises `NameTaken`, `UnknownStream`, `pydantic.ValidationError`."""
        raise NotImplementedError

    async def update(self, name: str, changes: Mapping[str, Any]) -> ConsumerInfo:
        """Change settings, those given alone; None sets one to its default.

        Raises `UnknownConsumer` and `pydantic.ValidationError`.
        """
        raise NotImplementedError

    async def delete(self, name: str) -> None:
        """Drop a consumer and all it knew; raises `UnknownConsumer`, `Refused` for a stream's own."""
        raise NotImplementedError

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call `callback`, in the event loop, whenever the list or a consumer's settings changed."""
        raise NotImplementedError
