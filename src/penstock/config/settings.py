"""A whole configuration: sources, sinks, consumers, the store and Spark."""

from __future__ import annotations

import pathlib
import shlex
from typing import Any, Final, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from penstock.config import contradictions
from penstock.config.consumers import Consumer
from penstock.config.nats_consumers import NatsConsumer, sinks_of
from penstock.config.sinks import NatsSinkSettings, Sink, StreamSinkSettings
from penstock.config.sources import OutboxSource, PostgresSource, PostgresUrl
from penstock.config.strict import StrictModel
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
    """Where streams are kept; `store` is None for the embedded Postgres."""

    store: PostgresUrl | None = None


class Config(StoreSettings):
    """A whole configuration: sources, sinks and consumers by name, the store, and Spark.

    The sources of type outbox are `outboxes`: what takes from them is set in their databases. The
    consumers of type nats are `nats_consumers`: the run publishes for them.
    """

    sources: dict[str, PostgresSource]
    sinks: dict[str, Sink]
    outboxes: dict[str, OutboxSource] = Field(default_factory=dict)
    consumers: dict[str, Consumer] = Field(default_factory=dict)
    nats_consumers: dict[str, NatsConsumer] = Field(default_factory=dict)
    spark: SparkSettings = Field(default_factory=SparkSettings)
    _file: str | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _check_references(self) -> Self:
        found = [
            *contradictions.of_sinks(self.sources, self.sinks, self.sources),
            *contradictions.of_consumers(self.consumers, self.sinks, self.streams),
            *contradictions.of_nats_consumers(self.nats_consumers, self.sinks, self.streams),
            *contradictions.of_store(has_url=self.store is not None, master=self.spark.master),
        ]
        if found:
            raise ValueError("; ".join(f"{dotted(path)}: {message}" for path, message in found))
        return self

    @property
    def streams(self) -> dict[str, StreamSinkSettings]:
        """The sinks that are streams, by name."""
        return {n: sink for n, sink in self.sinks.items() if isinstance(sink, StreamSinkSettings)}

    def checkpoint_folder(self, source: str) -> pathlib.Path:
        """Return the local folder of a source's checkpoints; it is there once the source has run."""
        return pathlib.Path(self.spark.checkpoint).absolute() / source

    def read_from(self, file: str) -> Self:
        """Record which file has this configuration, for the commands that errors print."""
        self._file = file
        return self

    def command(self, *words: str) -> str:
        """Return a command of `penstock` on this configuration, as a user would type it."""
        file = () if self._file in (None, CONFIG_FILE) else ("-c", self._file)
        return shlex.join(("penstock", *words, *file))

    def recover_command(self, source: str) -> str | None:
        """Return the command that recovers a source, None where no file has the configuration."""
        return None if self._file is None else self.command("recover", source)

    def sinks_of(self, source: str) -> dict[str, Sink]:
        """Return the sinks that take from a source, by name."""
        return {name: sink for name, sink in self.sinks.items() if sink.source == source}

    def nats_consumers_of(self, source: str) -> dict[str, NatsSinkSettings]:
        """Return the sinks that publish for the NATS consumers of a source's streams, by name."""
        return sinks_of(self.nats_consumers, self.streams, source)
