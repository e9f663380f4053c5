"""A consumer of type nats, as penstock.yaml has it: what it takes of a stream, and how it publishes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Literal, Self

from pydantic import ValidationInfo, field_validator, model_validator

from penstock.config.consumers import ANY, Filters
from penstock.config.durations import Duration, shown
from penstock.config.jetstream import JetStreamSettings
from penstock.config.nats import NatsSinkConfig
from penstock.config.nats_login import check_target
from penstock.config.sinks import NatsSinkSettings, StreamSinkSettings, check_stream_config
from penstock.config.strict import Flag
from penstock.core.message import Position, parse_lsn
from penstock.core.subject import DEFAULT_SUBJECT, ROWS_SUBJECT

_PLACE: Final = re.compile(r"([0-9A-Fa-f]{1,8}/[0-9A-Fa-f]{1,8})(?::(\d{1,15}))?\Z")
_OF_STREAM: Final = ("kind", "group_by")
_SECRETS: Final = ("password", "token", "nkey_seed", "credentials_file", "user")
_NOT_ITS_OWN: Final = frozenset(
    {
        "type", "stream", "source", "tables", "actions", "group_by", "kind", "filter", "transform",
        "route", "sort_by", "initial_backfill", "deletes", "target",
        "stream_config",
    }
)  # fmt: skip

Start = Position | datetime
"""Where to begin: with the message at a position (as its source has it), or at a commit time."""


def parse_start(text: str) -> Start:
    """Read a position (`0/16B3748`, `0/16B3748:3`) or a time with its offset; raises `ValueError`."""
    if (match := _PLACE.match(text)) is not None:
        return Position(parse_lsn(match[1]), int(match[2] or 0))
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        at = None
    if at is None or at.tzinfo is None or text[4:5] != "-":
        raise ValueError(
            f"{text!r} is no place in a stream: expected a position as in 0/16B3748:0, or a time"
            " with its offset as in 2026-01-31T12:00:00Z"
        )
    return at.astimezone(UTC)


OWN_FILTERS: Final = "true"
"""The `filter` of a consumer's sink that stands for filters of the consumer's own."""


def names_all(filters: Filters) -> bool:
    """Return whether filters name every table and action; what their `sql` lets through is open."""
    names = (
        filters.table, filters.collection_id, filters.resource_id, filters.sync_id,
        filters.provider, filters.action,
    )  # fmt: skip
    return all(ANY in of for of in names)


class NatsConsumer(NatsSinkConfig):
    """Publishes what a stream holds to NATS; `url`, login and `subject` are those of a NATS sink."""

    type: Literal["nats"]
    stream: str
    """The stream of the store, by the name of its sink."""
    target: str | None = None
    """The name of the target that has the servers and the login."""
    jetstream: str | None = None
    """Refuse to publish to another JetStream stream than this one."""
    deliver_policy: Literal["all", "new"] = "all"
    start_at: str | None = None
    """A position, or a commit time, at which it begins; in the place of `deliver_policy`."""
    filters: Filters = Filters()
    detach_after: Duration = timedelta(seconds=30)
    """How long it may be behind before its messages are left in the stream alone."""
    stream_config: JetStreamSettings | None = None
    """What it wants of the JetStream stream that it publishes to."""
    create_stream: Flag = False
    """Whether a run makes that stream where none takes the subjects."""

    @model_validator(mode="before")
    @classmethod
    def _refuse(cls, given: Any) -> Any:
        for key in _OF_STREAM if isinstance(given, dict) else ():
            if key in given:
                raise ValueError(f"`{key}` is that of the stream: remove it")
        return given

    @field_validator("jetstream")
    @classmethod
    def _check_jetstream(cls, value: str | None) -> str | None:
        return NatsSinkConfig._check_stream(value)

    @field_validator("start_at")
    @classmethod
    def _check_start_at(cls, value: str | None) -> str | None:
        if value is not None:
            parse_start(value)
        return value

    @field_validator("deletes")
    @classmethod
    def _check_deletes(cls, value: bool, info: ValidationInfo) -> bool:
        del info
        return value  # its kind is the stream's, which is elsewhere

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        check_target(self, self.target)
        return self

    @model_validator(mode="after")
    def _check_start(self) -> Self:
        if self.start_at is not None and "deliver_policy" in self.model_fields_set:
            raise ValueError("`deliver_policy` and `start_at` both say where it starts: remove one")
        return self

    @model_validator(mode="after")
    def _check_stream_config(self) -> Self:
        if self.stream_config is None:
            return self
        # The template that it has by default is that of the stream's kind.
        templates = (
            [self.subject]
            if "subject" in self.model_fields_set
            else [DEFAULT_SUBJECT, ROWS_SUBJECT]
        )
        subjects = [self.subject_template(text).wildcard() for text in templates]
        check_stream_config(self.stream_config, ("jetstream", self.jetstream), subjects)
        return self

    @property
    def start(self) -> Start | Literal["all", "new"]:
        """Where it begins when it is first run."""
        return self.deliver_policy if self.start_at is None else parse_start(self.start_at)

    @property
    def takes_all(self) -> bool:
        """Whether it takes every message of the stream."""
        return names_all(self.filters) and self.filters.sql is None

    def sink(self, stream: StreamSinkSettings) -> NatsSinkSettings:
        """Return the settings of the NATS sink that publishes what it takes of `stream`.

        They have the stream's tables and actions. The messages come in the stream's groups, changed and
        filtered already, so no expression of the stream is in them. Where the consumer or the stream
        filters, `filter` is set: it shows that others may take what this one does not. It is the
        stream's, or `OWN_FILTERS`.
        """
        given = {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name in NatsSinkSettings.model_fields
            and name not in _NOT_ITS_OWN
            and name in self.model_fields_set
        }
        sink = NatsSinkSettings.model_validate(
            {
                **given, "type": "nats", "source": stream.source, "stream": self.jetstream,
                "kind": stream.kind, "tables": stream.tables, "actions": stream.actions,
                "deletes": self.deletes and stream.kind == "rows" and "delete" in stream.actions,
                "filter": stream.filter if self.takes_all else OWN_FILTERS,
            }
        )  # fmt: skip
        # It was checked with the consumer.
        sink = sink.model_copy(update={"stream_config": self.stream_config})
        return sink.behind(self.reached)

    def shown(self) -> dict[str, Any]:
        """Return what may be shown, as JSON: neither login nor secrets."""
        body = self.model_dump(mode="json", exclude={*_SECRETS, *_OF_STREAM, "type", "stream"})
        return body | {"url": self.safe_url, "detach_after": shown(self.detach_after)}


def sinks_of(
    consumers: Mapping[str, NatsConsumer], streams: Mapping[str, StreamSinkSettings], source: str
) -> dict[str, NatsSinkSettings]:
    """Return the sinks that publish for the consumers of a source's streams, by the consumers' names."""
    return {
        name: consumer.sink(streams[consumer.stream])
        for name, consumer in consumers.items()
        if streams[consumer.stream].source == source
    }
