"""A whole configuration: sources, sinks, consumers, syncs, the store and Spark."""

from __future__ import annotations

import pathlib
import shlex
from collections.abc import Mapping
from typing import Any, Final, Self
from uuid import UUID

from pydantic import Field, PrivateAttr, SecretStr, field_validator, model_validator

from penstock.config import contradictions, reserved
from penstock.config.bastion import Bastion
from penstock.config.consumers import HttpConsumer, WebhookConsumer
from penstock.config.nats_consumers import NatsConsumer, sinks_of
from penstock.config.providers import ProviderSettings
from penstock.config.sinks import NatsSinkSettings, Sink, StreamSinkSettings
from penstock.config.sources import OutboxSource, PostgresSource, PostgresUrl
from penstock.config.strict import StrictModel
from penstock.config.syncs import Credential, RecordsSettings, Sync
from penstock.config.targets import (
    HttpTarget,
    NatsTarget,
    Target,
    bastion_of,
    joined_sink,
    joined_webhook,
)
from penstock.core.record_forms import SYNCS
from penstock.core.text import dotted

CONFIG_FILE: Final = "penstock.yaml"
"""Where commands look for the configuration by themselves."""


class SparkSettings(StrictModel):
    """Where the pipelines run."""

    master: str = Field("local[*]", min_length=1)
    checkpoint: str = Field(".penstock/checkpoints", min_length=1)
    conf: dict[str, str] = Field(default_factory=dict, repr=False)

    @field_validator("conf", mode="before")
    @classmethod
    def _as_strings(cls, conf: Any) -> Any:
        # Spark takes strings alone, and users do not quote `true` or `4` in YAML.
        if not isinstance(conf, dict):
            return {} if conf is None else conf
        return {key: _spark_value(value) for key, value in conf.items()}


def _spark_value(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value


class StoreSettings(StrictModel):
    """Where streams and records are kept; `store` is None for the embedded Postgres."""

    store: PostgresUrl | None = None
    records: RecordsSettings = Field(default_factory=RecordsSettings)


class Config(StoreSettings):
    """A whole configuration: sources, sinks and consumers by name, the store, and Spark.

    The sources of type outbox are `outboxes`: what takes from them is set in their databases. The
    consumers of type nats are `nats_consumers`: the run publishes for them. Providers of Penstock's own
    stand in no configuration.
    """

    sources: dict[str, PostgresSource]
    sinks: dict[str, Sink]
    outboxes: dict[str, OutboxSource] = Field(default_factory=dict)
    consumers: dict[str, HttpConsumer] = Field(default_factory=dict)
    nats_consumers: dict[str, NatsConsumer] = Field(default_factory=dict)
    targets: dict[str, Target] = Field(default_factory=dict)
    providers: dict[str, ProviderSettings] = Field(default_factory=dict)
    credentials: dict[str, Credential] = Field(default_factory=dict)
    syncs: dict[str, Sync] = Field(default_factory=dict)
    spark: SparkSettings = Field(default_factory=SparkSettings)
    _ids: Mapping[str, UUID] = PrivateAttr(default_factory=dict)
    _file: str | None = PrivateAttr(None)
    _sharing: int | None = PrivateAttr(None)
    _version: int = PrivateAttr(0)
    _at: SecretStr | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _check_references(self) -> Self:
        streams: dict[str, str] = {n: sink.kind for n, sink in self.streams.items()}
        names = list(self.sources)
        if self.syncs:
            streams |= reserved.KINDS
            names.append(SYNCS)
        found = [
            *reserved.of_names(self.sources, self.sinks, self.syncs),
            *reserved.of_variables(
                self.sinks, self.nats_consumers, {n: s.source for n, s in self.streams.items()}
            ),
            *contradictions.of_sinks(self.sources, self.sinks, names),
            *contradictions.of_consumers(self.consumers, self.sinks, streams),
            *contradictions.of_nats_consumers(self.nats_consumers, self.sinks, streams),
            *contradictions.of_targets(
                self.targets,
                {**self.sources, **self.outboxes},
                self.sinks,
                {**self.consumers, **self.nats_consumers},
            ),
            *contradictions.of_syncs(self.providers, self.credentials, self.syncs),
            *contradictions.of_store(
                has_url=self.store is not None, master=self.spark.master, outboxes=self.outboxes
            ),
        ]
        if found:
            raise ValueError("; ".join(f"{dotted(path)}: {message}" for path, message in found))
        self.join()
        return self

    def join(self) -> None:
        """Give sinks, webhooks and sources what their targets and bastions have, and syncs theirs."""
        if self.syncs:
            self.sources[SYNCS] = reserved.source(self.records.store or self.store or self._at)
            self.sinks.update(reserved.streams(self.records))
        for name, sink in self.sinks.items():
            self.sinks[name] = reserved.with_subjects(sink, self.records)
        for name, nats in self.nats_consumers.items():
            stream = self.sinks.get(nats.stream)
            named = reserved.consumer_with_subjects(nats, stream, self.records)
            self.nats_consumers[name] = named
        for name, source in self.sources.items():
            if source.bastion is not None:
                self.sources[name] = source.behind(source.bastion.of(name))
        for name, outbox in self.outboxes.items():
            if outbox.bastion is not None:
                self.outboxes[name] = outbox.behind(outbox.bastion.of(name))
        for name, sink in self.sinks.items():
            target = self._target(sink)
            if isinstance(sink, NatsSinkSettings) and isinstance(target, NatsTarget):
                self.sinks[name] = joined_sink(sink, str(sink.target), target)
        for name, nats in self.nats_consumers.items():
            target = self._target(nats)
            if isinstance(target, NatsTarget):
                self.nats_consumers[name] = joined_sink(nats, str(nats.target), target)
        for name, consumer in self.consumers.items():
            target = self._target(consumer)
            if isinstance(consumer, WebhookConsumer) and isinstance(target, HttpTarget):
                self.consumers[name] = joined_webhook(consumer, str(consumer.target), target)

    def _target(self, user: Sink | HttpConsumer | NatsConsumer) -> Target | None:
        name = getattr(user, "target", None)
        return None if name is None else self.targets.get(name)

    def bastions(self) -> dict[str, Bastion]:
        """Return the bastions of targets and sources, by the names of these.

        Raises `ValueError` for a private key's file that can't be read.
        """
        found = {name: bastion_of(name, target) for name, target in self.targets.items()}
        databases = {**self.sources, **self.outboxes}
        found |= {n: s.bastion.of(n) for n, s in databases.items() if s.bastion is not None}
        return {name: bastion for name, bastion in found.items() if bastion is not None}

    def reached_by(self, bastions: Mapping[str, Bastion]) -> Self:
        """Return the configuration with the bastions as the store completes them, by owner."""
        sources = {
            name: source if source.reached is None else source.behind(bastions[name])
            for name, source in self.sources.items()
        }
        outboxes = {
            name: outbox if outbox.reached is None else outbox.behind(bastions[name])
            for name, outbox in self.outboxes.items()
        }
        sinks = {
            name: sink.behind(bastions[sink.reached.owner])
            if isinstance(sink, NatsSinkSettings) and sink.reached is not None
            else sink
            for name, sink in self.sinks.items()
        }
        consumers = {
            name: of if of.reached is None else of.behind(bastions[of.reached.owner])
            for name, of in self.nats_consumers.items()
        }
        return self.model_copy(
            update={
                "sources": sources,
                "outboxes": outboxes,
                "sinks": sinks,
                "nats_consumers": consumers,
            }
        )

    @property
    def streams(self) -> dict[str, StreamSinkSettings]:
        """The sinks that are streams, by name."""
        return {n: sink for n, sink in self.sinks.items() if isinstance(sink, StreamSinkSettings)}

    def checkpoint_folder(self, source: str) -> pathlib.Path:
        """Return the local folder of a source's checkpoints; it is there once the source has run."""
        return pathlib.Path(self.spark.checkpoint).absolute() / source

    def stored_at(self, url: str) -> Self:
        """Return the configuration whose store is there: the embedded one's URL, while it runs."""
        found = self.model_copy()
        found._at = SecretStr(url)
        return found

    def read_from(self, file: str) -> Self:
        """Record which file has this configuration, for the commands that errors print."""
        self._file = file
        return self

    def read_at(self, version: int) -> Self:
        """Record the version of the desired state that this configuration is."""
        self._version = version
        return self

    def identified(self, ids: Mapping[str, UUID]) -> Self:
        """Record the ids of syncs, by name, as the store has them."""
        self._ids = ids
        return self

    def sync_id(self, name: str) -> UUID:
        """Return the id of a sync; raises `KeyError` where the configuration is not the store's."""
        return self._ids[name]

    @property
    def version(self) -> int:
        """The version of the desired state that this configuration is, 0 where it is of none."""
        return self._version

    @property
    def file(self) -> str | None:
        """The file that has this configuration, None where none has it."""
        return self._file

    def command(self, *words: str) -> str:
        """Return a command of `penstock` on this configuration, as a user would type it."""
        file = () if self._file in (None, CONFIG_FILE) else ("-c", self._file)
        return shlex.join(("penstock", *words, *file))

    def recover_command(self, source: str) -> str | None:
        """Return the command that recovers a source, None where no file and no store has it."""
        known = self._file is not None or self.store is not None
        return self.command("recover", source) if known else None

    @property
    def running_sources(self) -> list[str]:
        """The names of the sources that a sink takes from: only these are run."""
        return [name for name in self.sources if self.sinks_of(name)]

    @property
    def sharing(self) -> int:
        """How many queries share Spark's slots: those of all sources, and that of all syncs."""
        syncs = any(sync.status == "active" for sync in self.syncs.values())
        return self._sharing or max(1, len(self.running_sources) + syncs)

    def only(self, source: str) -> Config:
        """Return the configuration of one source: its sinks, and the consumers of its streams."""
        sinks = self.sinks_of(source)
        found = self.model_copy(
            update={
                "sources": {source: self.sources[source]},
                "sinks": sinks,
                "outboxes": {},
                "providers": {},
                "credentials": {},
                "syncs": {},
                "consumers": {n: c for n, c in self.consumers.items() if c.stream in sinks},
                "nats_consumers": {
                    n: c for n, c in self.nats_consumers.items() if c.stream in sinks
                },
            }
        )
        found._sharing = self.sharing  # a copy's own
        return found

    def sinks_of(self, source: str) -> dict[str, Sink]:
        """Return the sinks that take from a source, by name."""
        return {name: sink for name, sink in self.sinks.items() if sink.source == source}

    def nats_consumers_of(self, source: str) -> dict[str, NatsSinkSettings]:
        """Return the sinks that publish for the NATS consumers of a source's streams, by name."""
        return sinks_of(self.nats_consumers, self.streams, source)
