"""Delivers dead letters again: a sink's are published once more, a consumer's go back into it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Self

from penstock.config import Config, NatsSinkSettings, load
from penstock.sinks.base import SinkError
from penstock.sinks.nats_publish import Publisher
from penstock.streams.engine import Consumers
from penstock.streams.store import Store, StoredLetter


class Replay:
    """One round of replays; a context manager. `config` is read when a sink's letter needs it."""

    def __init__(self, store: Store, config: Path) -> None:
        self._store = store
        self._path = config
        self._config: Config | None = None
        self._publishers: dict[str, Publisher] = {}
        self._open = contextlib.ExitStack()

    def send(self, letter: StoredLetter) -> None:
        """Deliver a dead letter and note that it was.

        Raises `ConfigError`, `SinkError`, `ConsumerError` or `StoreError`; the letter then stays as it
        was.
        """
        if letter.sink is None:
            asyncio.run(self._give_back(letter))
            return
        if letter.code in ("subject_too_long", "bad_subject"):
            raise SinkError(
                letter.code,
                f"Dead letter {letter.id} has no subject that it could be sent to: {letter.reason}.",
                remedy="Publish its message by hand, and purge it: `penstock dead-letters show"
                f" {letter.id}`.",
                transient=False,
            )
        subject, key = letter.subject or "", letter.idempotency_key or ""
        self._publisher(letter.sink).publish(subject, key, letter.message.encode())
        self._store.mark_replayed(letter.id)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    async def _give_back(self, letter: StoredLetter) -> None:
        consumers = Consumers(self._store.url, pool_size=1)
        await consumers.open()
        try:
            consumer = await consumers.get(letter.consumer or "")
            await consumer.replay(letter.id)
        finally:
            await consumers.close()

    def _publisher(self, name: str) -> Publisher:
        if name not in self._publishers:
            self._config = self._config or load(self._path)
            sink = self._config.sinks.get(name)
            if not isinstance(sink, NatsSinkSettings):
                raise SinkError(
                    "no_sink",
                    f"{self._path} has no NATS sink {name!r} any more.",
                    remedy="Put it back, or purge its dead letters.",
                    transient=False,
                )
            publisher = Publisher(sink, name=name, source=sink.source)
            self._publishers[name] = self._open.enter_context(publisher)
        return self._publishers[name]
