"""The settings of sinks: what each takes from its source, and where it goes."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import timedelta
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from penstock.config.consumers import check_max_deliver
from penstock.config.deletes import check_deletes
from penstock.config.durations import Duration
from penstock.config.jetstream import JetStreamSettings
from penstock.config.nats import GroupBy, NatsSinkConfig
from penstock.config.nats_login import check_target
from penstock.config.sources import Table
from penstock.config.strict import Flag, StrictModel, Whole
from penstock.config.transforms import (
    NOT_IN_SUBJECT,
    Filter,
    RouteSettings,
    TransformSettings,
    check_route,
)
from penstock.core.message import DEFAULT_ACTIONS
from penstock.core.route_path import PathTemplate
from penstock.core.subject import SubjectTemplate, covers, overlaps
from penstock.core.tables import TablePattern

Action = Literal["insert", "update", "delete", "truncate"]

_NO_PATH: Final = re.compile(r"[\x00-\x20\x7f?#\\]")
RETENTION: Final = timedelta(days=7)


class SinkSettings(StrictModel):
    """What every sink takes from its source."""

    source: str
    tables: tuple[Table, ...] | None = Field(None, min_length=1)
    actions: tuple[Action, ...] = Field(DEFAULT_ACTIONS, min_length=1)
    group_by: GroupBy = None
    kind: Literal["changes", "rows"] = "changes"
    """Every change with its old values, or the newest version of each row alone."""
    deletes: Flag = False
    """Of kind rows: whether hard deletes are sent, or handed out by the stream's own group."""
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

    @property
    def has_expressions(self) -> bool:
        """Whether it has a filter, a transform or a route."""
        return any(key is not None for key in (self.filter, self.transform, self.route))

    @field_validator("kind")
    @classmethod
    def _check_kind(cls, kind: str, info: ValidationInfo) -> str:
        if kind == "rows" and "truncate" in info.data.get("actions", ()):
            raise ValueError(
                "a truncate has no row: remove it from `actions`, or set `kind: changes`"
            )
        return kind

    @field_validator("deletes")
    @classmethod
    def _check_deletes(cls, value: bool, info: ValidationInfo) -> bool:
        return check_deletes(value, info.data.get("kind"), info.data.get("actions", ()))

    @field_validator("sort_by")
    @classmethod
    def _check_sort_by(cls, column: str | None, info: ValidationInfo) -> str | None:
        if column is not None and info.data.get("kind") == "changes":
            raise ValueError("only kind rows has an order of its rows: add `kind: rows`")
        return column


def check_stream_config(
    wanted: JetStreamSettings, stream: tuple[str, str | None], subjects: Sequence[str]
) -> None:
    """Raise `ValueError` where `stream_config` goes neither with the stream nor with the subjects.

    `stream` is the key that names one, and its value; `subjects` is empty where they are not known.
    """
    key, name = stream
    if name and wanted.name and wanted.name != name:
        raise ValueError(
            f"`{key}` is {name} and stream_config.name {wanted.name}: remove one of them"
        )
    if not wanted.subjects or not subjects:
        return
    if not any(overlaps(pattern, subject) for pattern in wanted.subjects for subject in subjects):
        raise ValueError(
            f"stream_config.subjects ({', '.join(wanted.subjects)}) take nothing of what is published"
            f" to {', '.join(subjects)}: correct one of them"
        )


class NatsSinkSettings(NatsSinkConfig, SinkSettings):
    """A NATS sink as the file has it: what it takes from its source, and how it publishes."""

    type: Literal["nats"]
    target: str | None = None
    """The name of the target that has the servers and the login."""
    detach_after: Duration = timedelta(seconds=30)
    """How long it may be behind before it counts as detached."""
    stream_config: JetStreamSettings | None = None
    """What it wants of the JetStream stream that it publishes to."""
    create_stream: Flag = False
    """Whether a run makes the stream where none takes the subjects."""

    @field_validator("route")
    @classmethod
    def _check_route(cls, route: Any) -> Any:
        return check_route(route, SubjectTemplate.parse, NOT_IN_SUBJECT)

    @model_validator(mode="after")
    def _check_target(self) -> Self:
        check_target(self, self.target)
        return self

    @model_validator(mode="after")
    def _check_stream_config(self) -> Self:
        if self.stream_config is not None:
            # What an expression gives is not known.
            subjects = () if isinstance(self.route, str) else self.wildcards()
            check_stream_config(self.stream_config, ("stream", self.stream), subjects)
        return self

    @property
    def templates(self) -> tuple[str, ...]:
        """The templates of its subjects: those of the route's rules, and `subject` where it is used."""
        rules = [] if self.route is None or isinstance(self.route, str) else list(self.route)
        always = any(rule.when is None for rule in rules)
        texts = [rule.to for rule in rules] + ([] if always else [self.subject])
        return tuple(dict.fromkeys(texts))

    def wildcards(self) -> tuple[str, ...]:
        """Return the patterns of all that the templates can give, none of which covers another."""
        found = [self.subject_template(text).wildcard(self.source) for text in self.templates]
        return tuple(
            pattern
            for at, pattern in enumerate(found)
            if not any(
                covers(other, pattern) and (other != pattern or before < at)
                for before, other in enumerate(found)
                if before != at
            )
        )


GROUP_SETTINGS: Final = (
    "ack_wait_ms",
    "max_deliver",
    "max_ack_pending",
    "max_waiting",
    "deletes",
)
"""What a stream's own group has from its sink."""


class StreamSinkSettings(SinkSettings):
    """A stream of the store, called like the sink."""

    type: Literal["stream"]
    retention: Duration | None = Field(RETENTION, validate_default=True)
    """How long messages are kept; None for kind rows, which keeps the newest of each row."""
    ack_wait_ms: Annotated[Whole, Field(ge=1, le=86_400_000)] | None = None
    """This setting of the stream's own group, as are those below; without it, its default."""
    max_deliver: Annotated[Whole, Field(ge=-1, le=1_000_000)] | None = None
    max_ack_pending: Annotated[Whole, Field(ge=1, le=100_000)] | None = None
    max_waiting: Annotated[Whole, Field(ge=1, le=10_000)] | None = None

    @property
    def group(self) -> dict[str, Any]:
        """The settings of the stream's own group; one that is not there has its default."""
        given = {name: getattr(self, name) for name in GROUP_SETTINGS}
        return {name: value for name, value in given.items() if value is not None}

    @field_validator("max_deliver")
    @classmethod
    def _check_max_deliver(cls, value: int | None) -> int | None:
        return None if value is None else check_max_deliver(value)

    @field_validator("route")
    @classmethod
    def _check_route(cls, route: Any) -> Any:
        return check_route(route, PathTemplate.parse, _NO_PATH)

    @field_validator("retention", mode="before")
    @classmethod
    def _check_retention(cls, value: Any, info: ValidationInfo) -> Any:
        if info.data.get("kind") == "rows":
            if value is not None and value is not RETENTION:
                raise ValueError("kind rows keeps the newest of each row for ever: remove it")
            return None
        if value is None:
            raise ValueError("retention has an end: expected a number and its unit, as in 7d")
        return value


Sink = NatsSinkSettings | StreamSinkSettings
