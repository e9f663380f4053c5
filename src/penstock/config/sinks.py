"""The settings of sinks: what each takes from its source, and where it goes."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any, Final, Literal

from pydantic import Field, ValidationInfo, field_validator

from penstock.config.durations import Duration
from penstock.config.nats import GroupBy, NatsSinkConfig
from penstock.config.sources import Table
from penstock.config.strict import Flag, StrictModel
from penstock.config.transforms import (
    NOT_IN_SUBJECT,
    Filter,
    RouteSettings,
    TransformSettings,
    check_route,
)
from penstock.core.message import DEFAULT_ACTIONS
from penstock.core.route_path import PathTemplate
from penstock.core.subject import SubjectTemplate
from penstock.core.tables import TablePattern

Action = Literal["insert", "update", "delete", "truncate"]

_NO_PATH: Final = re.compile(r"[\x00-\x20\x7f?#\\]")
_RETENTION: Final = timedelta(days=7)


class SinkSettings(StrictModel):
    """What every sink takes from its source."""

    source: str
    tables: tuple[Table, ...] | None = Field(None, min_length=1)
    actions: tuple[Action, ...] = Field(DEFAULT_ACTIONS, min_length=1)
    group_by: GroupBy = None
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
    detach_after: Duration = timedelta(seconds=30)
    """How long it may be behind before it counts as detached."""

    @field_validator("route")
    @classmethod
    def _check_route(cls, route: Any) -> Any:
        return check_route(route, SubjectTemplate.parse, NOT_IN_SUBJECT)


class StreamSinkSettings(SinkSettings):
    """A stream of the store, called like the sink."""

    type: Literal["stream"]
    retention: Duration | None = Field(_RETENTION, validate_default=True)
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


Sink = NatsSinkSettings | StreamSinkSettings
