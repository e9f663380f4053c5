"""Delivers dead letters again: a sink's are published once more, a consumer's go back into it."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Final, Self

from penstock.config import Config, NatsSinkSettings, StreamSinkSettings, load
from penstock.expressions.errors import ExpressionError
from penstock.json_members import members, text_of
from penstock.postgres.errors import CaptureError
from penstock.sinks.base import SinkError
from penstock.sinks.nats_publish import Publisher
from penstock.streams.engine import Consumers
from penstock.streams.store import Store, StoredLetter
from penstock.transforms.base import TransformError

if TYPE_CHECKING:
    from penstock.trial.trial import Trial

_OF_STEPS: Final = ("filter_failed", "transform_failed", "route_failed", "steps_failed")
"""Codes of messages that never got as far as the sink."""


class Replay:
    """One round of replays; a context manager. `config` is read when a sink's letter needs it."""

    def __init__(self, store: Store, config: Path) -> None:
        self._store = store
        self._path = config
        self._config: Config | None = None
        self._publishers: dict[str, Publisher] = {}
        self._trials: dict[str, Trial] = {}
        self._open = contextlib.ExitStack()

    def send(self, letter: StoredLetter) -> None:
        """Deliver a dead letter and note that it was.

        Raises `ConfigError`, `SinkError`, `ConsumerError` or `StoreError`; the letter then stays as it
        was.
        """
        if letter.sink is None:
            asyncio.run(self._give_back(letter))
            return
        if letter.code in _OF_STEPS:
            self._through_steps(letter, letter.sink)
            self._store.mark_replayed(letter.id)
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

    def _through_steps(self, letter: StoredLetter, name: str) -> None:
        """Send what the sink's filter, transform and route make of a message by now, if anything."""
        config = self._read()
        if isinstance(config.sinks.get(name), StreamSinkSettings):
            raise SinkError(
                letter.code,
                f"Dead letter {letter.id} has no place in stream {name} any more: what came after it"
                " is there.",
                remedy="Send its row anew by `penstock backfill start --sink"
                f" {name} --table … --where …`, and purge it.",
                transient=False,
            )
        sink = self._sink(name)
        from penstock.trial.messages import MessageError, read  # noqa: PLC0415 - with Spark's modules

        try:
            message = read(letter.message.encode(), config.sources[sink.source], sink)
            outcomes = list(self._trial(config, name)(message))
        except (CaptureError, ExpressionError, MessageError, TransformError) as error:
            raise SinkError(
                letter.code, f"Dead letter {letter.id}: {error}", transient=False
            ) from None
        for outcome in outcomes:
            if outcome.result == "failed":
                raise SinkError(
                    outcome.code,
                    f"Dead letter {letter.id} fails again: {outcome.why}.",
                    remedy="Correct the sink's filter, transform or route, or purge it.",
                    transient=False,
                )
            for sent in outcome.out:
                metadata = members("metadata")(sent.body)["metadata"]
                key = text_of(members("idempotency_key")(metadata)["idempotency_key"])
                self._publisher(name).publish(sent.to or "", key or "", sent.body.encode())

    def _trial(self, config: Config, name: str) -> Trial:
        if name not in self._trials:
            from penstock.trial.trial import Trial  # noqa: PLC0415 - with Spark's modules

            trial = self._trials[name] = Trial(config, name, lambda _: None)
            self._open.callback(trial.close)
        return self._trials[name]

    def _read(self) -> Config:
        self._config = self._config or load(self._path)
        return self._config

    def _sink(self, name: str) -> NatsSinkSettings:
        sink = self._read().sinks.get(name)
        if not isinstance(sink, NatsSinkSettings):
            raise SinkError(
                "no_sink",
                f"{self._path} has no NATS sink {name!r} any more.",
                remedy="Put it back, or purge its dead letters.",
                transient=False,
            )
        return sink

    def _publisher(self, name: str) -> Publisher:
        if name not in self._publishers:
            sink = self._sink(name)
            publisher = Publisher(sink, name=name, source=sink.source)
            self._publishers[name] = self._open.enter_context(publisher)
        return self._publishers[name]
