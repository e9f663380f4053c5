"""The settings' models: sources, sinks, consumers, Spark, and what may not stand beside what."""

from __future__ import annotations

import pathlib
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Annotated, Any, Final, Literal, Self

import psycopg
from psycopg.conninfo import conninfo_to_dict
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from penstock.config.consumers import ConsumerSettings, WebhookSettings
from penstock.config.nats import NatsSinkConfig, check_group_by
from penstock.config.strict import Flag
from penstock.config.transforms import Filter, RouteSettings, TransformSettings, check_route
from penstock.core.message import DEFAULT_ACTIONS
from penstock.core.route_path import PathTemplate
from penstock.core.subject import SubjectTemplate
from penstock.core.tables import TablePattern
from penstock.core.text import Path, dotted, nearest

Action = Literal["insert", "update", "delete", "truncate"]

CONFIG_FILE: Final = "penstock.yaml"
"""Where commands look for the configuration by themselves."""

_SLOT: Final = re.compile(r"[a-z0-9_]{1,63}\Z")
_GROUP_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,55}\Z")
_DURATION: Final = re.compile(r"(\d{1,9})([smhd])\Z")
_NO_SUBJECT: Final = re.compile(r"[\x00-\x20\x7f*>]")
_NO_PATH: Final = re.compile(r"[\x00-\x20\x7f?#\\]")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_LONGEST: Final = timedelta(days=36_500)
_RETENTION: Final = timedelta(days=7)


def _check_table(table: str) -> str:
    TablePattern.parse(table)
    return table


def _duration(value: Any) -> timedelta:
    if isinstance(value, timedelta):
        return value
    match = _DURATION.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected a number and its unit, as in 90s, 30m, 12h or 7d")
    seconds = int(match[1]) * _SECONDS[match[2]]
    if not 0 < seconds <= _LONGEST.total_seconds():
        raise ValueError(f"expected 1s to {_LONGEST.days}d")
    return timedelta(seconds=seconds)


_Table = Annotated[str, AfterValidator(_check_table)]
_Duration = Annotated[timedelta, BeforeValidator(_duration)]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, hide_input_in_errors=True)


class PostgresSource(_Model):
    """A Postgres database whose changes are captured by logical replication."""

    type: Literal["postgres"]
    url: SecretStr
    tables: tuple[_Table, ...] = Field(("public.*",), min_length=1)
    slot: str = "penstock"
    publication: str = Field("penstock", min_length=1)

    @property
    def patterns(self) -> tuple[TablePattern, ...]:
        """The tables, parsed."""
        return tuple(TablePattern.parse(table) for table in self.tables)

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: SecretStr) -> SecretStr:
        check_postgres_url(url.get_secret_value())
        return url

    @field_validator("slot")
    @classmethod
    def _check_slot(cls, slot: str) -> str:
        if not _SLOT.match(slot):
            raise ValueError(
                f"{slot!r} is not a slot name: Postgres takes lower-case letters, digits and `_`, "
                f"at most 63 of them; {slot_name(slot)!r} would do"
            )
        return slot

    @field_validator("publication")
    @classmethod
    def _check_publication(cls, publication: str) -> str:
        if len(publication.encode()) > 63:
            raise ValueError(f"{publication!r} is longer than the 63 bytes that Postgres keeps")
        return publication


class OutboxSource(_Model):
    """A database whose outboxes are relayed; its pipelines are set there, by `tide.relay_set_outbox`.

    `relay_group` names one group of pipelines; None means all that there are.
    """

    type: Literal["outbox"]
    url: SecretStr
    relay_group: str | None = None

    @field_validator("relay_group")
    @classmethod
    def _check_group(cls, name: str | None) -> str | None:
        if name is not None and not _GROUP_NAME.match(name):
            raise ValueError(
                f"{name!r} can't be a relay group: expected a letter or '_', then letters, digits, '_',"
                " '-' and '.', at most 56"
            )
        return name

    @field_validator("url")
    @classmethod
    def _check_url(cls, url: SecretStr) -> SecretStr:
        check_postgres_url(url.get_secret_value())
        return url


class SinkSettings(_Model):
    """What every sink takes from its source."""

    source: str
    tables: tuple[_Table, ...] | None = Field(None, min_length=1)
    actions: tuple[Action, ...] = Field(DEFAULT_ACTIONS, min_length=1)
    group_by: list[str] | None = None
    kind: Literal["changes", "rows"] = "changes"
    """Every change with its old values, or the newest version of each row alone."""
    filter: Filter | None = None
    """A condition; what it does not hold for is not sent."""
    transform: TransformSettings | None = None
    route: RouteSettings | None = None
    """The NATS subject, or the path of a webhook, by an expression or by rules."""
    sort_by: Annotated[str, Field(min_length=1, max_length=63)] | None = None
    """Of kind rows: the column in whose order a backfill goes."""
    initial_backfill: Flag = False
    """Whether the tables' rows are read when the sink first runs."""

    @property
    def patterns(self) -> tuple[TablePattern, ...] | None:
        """The tables, parsed; None means all of the source."""
        return None if self.tables is None else tuple(map(TablePattern.parse, self.tables))

    @field_validator("group_by")
    @classmethod
    def _check_group_by(cls, value: list[str] | None) -> list[str] | None:
        return check_group_by(value)

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str, info: ValidationInfo) -> str:
        if kind == "rows" and "truncate" in info.data.get("actions", ()):
            raise ValueError(
                "a truncate has no row: remove it from `actions`, or set `kind: changes`"
            )
        return kind

    @field_validator("sort_by")
    @classmethod
    def _check_sort_by(cls, column: str | None, info: ValidationInfo) -> str | None:
        if column is not None and info.data.get("kind") == "changes":
            raise ValueError("only kind rows has an order of its rows: add `kind: rows`")
        return column


class NatsSinkSettings(NatsSinkConfig, SinkSettings):
    """A NATS sink as the file has it: what it takes from its source, and how it publishes."""

    type: Literal["nats"]
    detach_after: _Duration = timedelta(seconds=30)
    """How long it may be behind before it counts as detached."""

    @field_validator("route")
    @classmethod
    def _check_route(cls, route: Any) -> Any:
        return check_route(route, SubjectTemplate.parse, _NO_SUBJECT)


class StreamSinkSettings(SinkSettings):
    """A stream of the store, called like the sink."""

    type: Literal["stream"]
    retention: _Duration | None = Field(_RETENTION, validate_default=True)
    """How long messages are kept; None for kind rows, which keeps the newest of each row."""

    @field_validator("route")
    @classmethod
    def _check_route(cls, route: Any) -> Any:
        return check_route(route, PathTemplate.parse, _NO_PATH)

    @field_validator("retention", mode="before")
    @classmethod
    def _check_retention(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("kind") == "rows":
            if value is not None and value is not _RETENTION:
                raise ValueError("kind rows keeps the newest of each row for ever: remove it")
            return None
        if value is None:
            raise ValueError("retention has an end: expected a number and its unit, as in 7d")
        return value


class _Consumer(ConsumerSettings):
    stream: str

    def stored(self) -> dict[str, Any]:
        """Return the settings that the store keeps: what the API would be given, secrets too."""
        return {k: v for k, v in super().stored().items() if k not in ("type", "stream")}


class PullConsumer(_Consumer):
    """A consumer that workers read over HTTP."""

    type: Literal["pull"] = "pull"


class WebhookConsumer(_Consumer, WebhookSettings):
    """A consumer whose messages are sent to a URL."""

    type: Literal["webhook"]


Sink = NatsSinkSettings | StreamSinkSettings
Consumer = PullConsumer | WebhookConsumer


class SparkSettings(_Model):
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


class StoreSettings(_Model):
    """Where streams are kept; `store` is None for the embedded Postgres."""

    store: SecretStr | None = None

    @field_validator("store")
    @classmethod
    def _check_store(cls, store: SecretStr | None) -> SecretStr | None:
        if store is not None:
            check_postgres_url(store.get_secret_value())
        return store


class Config(StoreSettings):
    """A whole configuration: sources, sinks and consumers by name, the store, and Spark.

    The sources of type outbox are `outboxes`: what takes from them is set in their databases.
    """

    sources: dict[str, PostgresSource]
    sinks: dict[str, Sink]
    outboxes: dict[str, OutboxSource] = Field(default_factory=dict)
    consumers: dict[str, Consumer] = Field(default_factory=dict)
    spark: SparkSettings = Field(default_factory=SparkSettings)
    _file: str | None = PrivateAttr(None)

    @model_validator(mode="after")
    def _check_references(self) -> Self:
        found = [
            *contradictions(self.sources, self.sinks, self.sources),
            *consumer_contradictions(self.consumers, self.sinks, self.streams),
            *store_contradictions(self.store, self.spark),
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


def slot_name(source: str) -> str:
    """Return what Postgres takes as a slot's name, made from any text."""
    return re.sub(r"[^a-z0-9_]", "_", source.lower())[:63] or "penstock"


def check_postgres_url(url: str) -> None:
    """Raise `ValueError`, without the URL in it, if libpq would not understand the URL."""
    expected = "expected postgresql://user:password@host:port/database"
    if not url.strip():
        raise ValueError(f"empty: {expected}")
    try:
        parts = conninfo_to_dict(url)
    except psycopg.Error:
        raise ValueError(f"not a Postgres URL: {expected}") from None
    named = [str(parts.get(key) or "") for key in ("host", "dbname")]
    ports = str(parts.get("port") or "").split(",")
    # libpq ends the password at its first `@` or `/`; the rest would be looked up as a host name.
    if any("@" in name for name in named) or not all(p.isdigit() or not p for p in ports):
        raise ValueError(
            "the URL's parts don't fit: in a password write @ as %40, / as %2F, : as %3A and # as "
            f"%23; {expected}"
        )


def contradictions(
    sources: Mapping[str, PostgresSource],
    sinks: Mapping[str, SinkSettings],
    names: Iterable[str],
) -> Iterator[tuple[Path, str]]:
    """Give what is wrong between parts; `names` are all sources, wrong ones included."""
    slots: dict[tuple[str, str], str] = {}
    for name, source in sources.items():
        other = slots.setdefault((source.url.get_secret_value(), source.slot), name)
        if other != name:
            message = f"{source.slot!r} is the slot of source {other!r} too: give each its own"
            yield ("sources", name, "slot"), message
    for name, sink in sinks.items():
        if sink.source not in names:
            message = f"there is no source {sink.source!r}: expected one of {', '.join(names)}"
            yield ("sinks", name, "source"), message + nearest(sink.source, names)
        elif sink.source in sources:
            patterns = sources[sink.source].patterns
            for i, pattern in enumerate(sink.patterns or ()):
                if not any(own.covers(pattern) for own in patterns):
                    captured = ", ".join(map(str, patterns))
                    yield (
                        ("sinks", name, "tables", i),
                        f"source {sink.source!r} does not capture {pattern}: it has {captured}; "
                        "add the table to the source's `tables`",
                    )


def consumer_contradictions(
    consumers: Mapping[str, Consumer], sinks: Iterable[str], streams: Iterable[str]
) -> Iterator[tuple[Path, str]]:
    """Give what is wrong between consumers and streams; both are given by their names."""
    streams = list(streams)
    for name, consumer in consumers.items():
        if name in streams:
            message = f"stream {name!r} has a consumer of that name, its own: choose another"
            yield ("consumers", name), message
        if consumer.stream not in streams:
            path: Path = ("consumers", name, "stream")
            if consumer.stream in sinks:
                yield path, f"sink {consumer.stream!r} is not of type stream"
            else:
                known = f"expected one of {', '.join(streams)}" if streams else "add a sink of it"
                message = f"there is no stream {consumer.stream!r}: {known}"
                yield path, message + nearest(consumer.stream, streams)


def store_contradictions(
    store: SecretStr | None, spark: SparkSettings
) -> Iterator[tuple[Path, str]]:
    """Give what is wrong between Spark and the store."""
    if store is None and not spark.master.startswith("local"):
        yield (
            ("spark", "master"),
            f"executors of {spark.master} can't reach the embedded store, which is this machine's "
            "own: give a Postgres of yours, `store: ${PENSTOCK_STORE_URL}`",
        )


def _spark_value(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int | float) else value
