"""Delivers dead letters again: those of sinks and NATS consumers are published, others put back.

What was to be sent is sent as it was. A message that is stored as it was captured goes through the
filter, transform, route and form that its sink or consumer, or its pipeline from an outbox, has by now.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Self

import pyarrow as pa

from penstock.config.settings import Config
from penstock.config.sinks import NatsSinkSettings, StreamSinkSettings
from penstock.core.errors import CaptureError, SinkError
from penstock.expressions.errors import ExpressionError
from penstock.sinks.nats.publish import Publisher
from penstock.streams.connection import Also
from penstock.streams.consumers.registry import Consumers
from penstock.streams.nats_consumers import NatsConsumers
from penstock.streams.records import StoredLetter
from penstock.streams.store import Store
from penstock.transforms.base import TransformError
from penstock.trial.messages import MessageError, read

if TYPE_CHECKING:
    from penstock.trial.trial import Trial


class Replay:
    """One round of replays; a context manager.

    `configuration` is asked when a sink's letter needs its settings: these are in what it gives, or in
    the databases that this names as outboxes.
    """

    def __init__(self, store: Store, configuration: Callable[[], Config]) -> None:
        self._store = store
        self._configuration = configuration
        self._whole: Config | None = None
        self._configs: dict[str, Config] = {}
        self._publishers: dict[str, Publisher] = {}
        self._trials: dict[str, Trial] = {}
        self._open = contextlib.ExitStack()

    def send(self, letter: StoredLetter, also: Also = ()) -> None:
        """Deliver a dead letter, and record that it was, with `also` in one transaction.

        Raises `ConfigError`, `SinkError`, `CaptureError`, `ConsumerError` or `StoreError`; the letter
        then stays as it was.
        """
        name = letter.publisher
        if name is None:
            asyncio.run(self._give_back(letter, also))
            return
        if letter.subject and letter.code in ("subject_too_long", "bad_subject"):
            raise SinkError(
                letter.code,
                f"Dead letter {letter.id} has no subject that it could be sent to: {letter.reason}.",
                remedy="Publish its message by hand, and purge it: `penstock dead-letters show"
                f" {letter.id}`.",
                transient=False,
            )
        self._check_kind(letter, name)
        if letter.subject:
            key = letter.idempotency_key or ""
            self._publisher(name).publish(letter.subject, key, letter.message.encode())
        else:
            self._anew(letter, name)
        self._store.letters.mark_replayed(letter.id, also)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _check_kind(self, letter: StoredLetter, name: str) -> None:
        """Raise `SinkError` where a sink's name is a consumer's of type nats by now, or the reverse."""
        if (name in self._all().nats_consumers) != (letter.consumer is not None):
            kind = "NATS sink" if letter.consumer is None else "consumer of type nats"
            raise self._no_sink(f"The configuration has no {kind} {name!r}")

    async def _give_back(self, letter: StoredLetter, also: Also) -> None:
        consumers = Consumers(self._store.url, pool_size=1)
        await consumers.open()
        try:
            consumer = await consumers.get(letter.consumer or "")
            await consumer.replay(letter.id, also)
        finally:
            await consumers.close()

    def _anew(self, letter: StoredLetter, name: str) -> None:
        """Send what the sink makes of a message by now, if anything."""
        config = self._config(name)
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
        try:
            message = read(letter.message.encode(), config.sources[sink.source], sink)
            if name in config.nats_consumers:
                self._refuse_filtered(letter, name, message)
                # What its stream filters is done with.
                sinks = {name: sink.model_copy(update={"filter": None})}
                config = config.model_copy(update={"sinks": sinks})
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
            if outcome.result == "passed by":
                raise SinkError(
                    "passed_by",
                    f"Dead letter {letter.id} is not for {name} any more: {outcome.why}.",
                    remedy="Correct the sink, or purge it.",
                    transient=False,
                )
            for sent in outcome.out:
                self._publisher(name).publish(
                    sent.to or "", sent.key, sent.body.encode(), headers=sent.headers
                )

    def _refuse_filtered(self, letter: StoredLetter, name: str, message: pa.RecordBatch) -> None:
        """Raise `SinkError` where a NATS consumer's filter does not let a message through by now."""
        consumer = NatsConsumers(self._store).get(name)
        with self._store.connection() as connection:
            verdict = consumer.verdict(connection, message)
        if verdict is None:
            raise SinkError(
                "passed_by",
                f"Dead letter {letter.id} is not for {name} any more: its `filters.sql` leaves it out.",
                remedy="Correct the consumer, or purge it.",
                transient=False,
            )
        if verdict:
            raise SinkError(
                letter.code,
                f"Dead letter {letter.id} fails again: {verdict.removeprefix('!')}.",
                remedy="Correct the consumer's `filters.sql`, or purge it.",
                transient=False,
            )

    def _trial(self, config: Config, name: str) -> Trial:
        if name not in self._trials:
            from penstock.trial.trial import Trial  # noqa: PLC0415 - with Spark's modules

            trial = self._trials[name] = Trial(config, name, lambda _: None)
            self._open.callback(trial.close)
        return self._trials[name]

    def _config(self, name: str) -> Config:
        """Return the configuration that has a sink, or the pipeline of that name; found once."""
        if name not in self._configs:
            self._configs[name] = self._found(name)
        return self._configs[name]

    def _all(self) -> Config:
        if self._whole is None:
            self._whole = self._configuration()
        return self._whole

    def _found(self, name: str) -> Config:
        whole = self._all()
        if name in whole.sinks or name in whole.nats_consumers:
            return whole
        if not whole.outboxes:
            raise self._no_sink(f"The configuration has no NATS sink {name!r}")
        from penstock.outbox import configured  # noqa: PLC0415 - with Spark's modules

        found = [
            (source, pipeline)
            for source in whole.outboxes.values()
            if (pipeline := configured.pipelines(source).get(name)) is not None
        ]
        if not found:
            what = "NATS sink and no pipeline" if whole.sources else "pipeline"
            raise self._no_sink(f"There is no {what} {name!r}")
        if len(found) > 1:
            raise SinkError(
                "several_sinks",
                f"{len(found)} of the outboxes' databases have a pipeline {name!r}.",
                remedy="Name the one that the dead letter is from by --url.",
                transient=False,
            )
        return configured.configuration(*found[0])

    @staticmethod
    def _no_sink(what: str) -> SinkError:
        remedy = "Put it back, or purge its dead letters."
        return SinkError("no_sink", f"{what} any more.", remedy=remedy, transient=False)

    def _sink(self, name: str) -> NatsSinkSettings:
        config = self._config(name)
        if (consumer := config.nats_consumers.get(name)) is not None:
            return consumer.sink(config.streams[consumer.stream])
        sink = config.sinks[name]
        if not isinstance(sink, NatsSinkSettings):
            raise self._no_sink(f"The configuration has no NATS sink {name!r}")
        return sink

    def _publisher(self, name: str) -> Publisher:
        if name not in self._publishers:
            sink = self._sink(name)
            publisher = Publisher(sink, name=name, source=sink.source)
            self._publishers[name] = self._open.enter_context(publisher)
        return self._publishers[name]
