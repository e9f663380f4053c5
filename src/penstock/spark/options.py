"""The options of the `postgres-changes` source, from the strings that Spark hands over."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, SecretStr, ValidationError, field_validator
from pydantic import Field as Default

from penstock.config.bastion import Bastion
from penstock.config.sources import SourceUrl, check_postgres_url
from penstock.core.tables import TablePattern, matches_any
from penstock.expressions.planned import PlannedColumns, Table
from penstock.expressions.types import Field

Waits = Literal["", "process", "lanes"]
"""What of a query is there while it waits for its slot; see `penstock.spark.slot_wait`."""


class Grouping(BaseModel):
    """One sink's unit of order: for these tables, these columns (None: the primary key)."""

    tables: list[str]
    group_by: list[str] | None = None

    @cached_property
    def patterns(self) -> list[TablePattern]:
        """Its tables, parsed once: a stream that begins asks for each of its tables."""
        return [TablePattern.parse(table) for table in self.tables]


class SourceOptions(BaseModel):
    """What may stand in `.options(…)`; Spark gives names in any case and values as strings."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    url: SecretStr
    """libpq connection string or URI of the database."""
    tables: list[str] = Default(["public.*"])
    """Patterns `schema.table` or `schema.*`, separated by commas."""
    slot: str = "penstock_spark"
    """Replication slot; made if it is missing."""
    publication: str = ""
    """Publication; made if it is missing. Named as the slot unless set."""
    maxrowsperbatch: int = Default(40_000, ge=1)
    """The most messages in one batch (a barrier or a single chunk may exceed it slightly)."""
    latency: Literal["batch", "realtime"] = "batch"
    """`realtime`: a batch lasts, and its tasks hand messages on as they come. See
    docs/how-to/spark.md for what it means for the checkpoint, `foreachBatch` and stateful operators."""
    batchseconds: float = Default(60.0, gt=0)
    """How long a batch lasts with `realtime`, about."""
    splits: int = Default(default_factory=lambda: os.cpu_count() or 1, ge=1, le=1024)
    """The most tasks that one micro-batch is split into."""
    host: str = "127.0.0.1"
    """Address under which executors reach the driver; the loopback for `local[…]` masters."""
    # What follows is set by `penstock run` alone.
    bastion_secret: Bastion | None = None
    """The bastion that the database lies behind. Spark masks options of such a name."""
    blocks: bool = False
    truncates: bool = True
    groupings: list[Grouping] = Default(default_factory=list)
    monitor: str | None = None
    name: str = ""
    recover: str | None = None
    waits: Waits = ""
    query: str = ""
    """What the tasks of the query call it in their reports."""
    in_step: bool = False
    """Whether a round is whole in the store before a newer one begins (see `Rounds`)."""
    fields: tuple[Field, ...] = ()
    planned_tables: dict[Table, PlannedColumns] = Default(default_factory=dict)
    """With `planned_lsn`: `Planned`."""
    planned_lsn: int = 0
    after: tuple[int, int] = (0, -1)
    """The position up to which an earlier query of the same run has delivered all."""

    @field_validator("tables", mode="before")
    @classmethod
    def _tables(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        if value.startswith("["):
            return orjson.loads(value)
        return [part.strip() for part in value.split(",") if part.strip()]

    @field_validator("url")
    @classmethod
    def _url(cls, value: SecretStr) -> SecretStr:
        check_postgres_url(value.get_secret_value())
        return value

    @field_validator("bastion_secret", mode="before")
    @classmethod
    def _bastion(cls, value: Any) -> Any:
        return Bastion(**orjson.loads(value)) if isinstance(value, str) else value

    @field_validator("groupings", "after", mode="before")
    @classmethod
    def _from_json(cls, value: Any) -> Any:
        return orjson.loads(value) if isinstance(value, str) else value

    @field_validator("fields", mode="before")
    @classmethod
    def _fields(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return tuple(Field.from_json(field) for field in orjson.loads(value))

    @field_validator("planned_tables", mode="before")
    @classmethod
    def _planned_tables(cls, value: Any) -> Any:
        if not isinstance(value, str):
            return value
        return {(schema, table): of for schema, table, of in orjson.loads(value)}

    @field_validator("tables")
    @classmethod
    def _patterns(cls, value: list[str]) -> list[str]:
        for pattern in value:
            TablePattern.parse(pattern)
        return value

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Read Spark's options; raises `ValueError` naming each option at fault, with no value."""
        given = {name.lower(): value for name, value in options.items() if name.lower() != "path"}
        try:
            parsed = cls.model_validate(given)
        except ValidationError as error:
            faults = "; ".join(
                f"option {'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()
            )
            known = [n for n in cls.model_fields if n not in _INTERNAL]
            raise ValueError(f"{faults} (postgres-changes takes {', '.join(known)})") from None
        if not parsed.publication:
            parsed.publication = parsed.slot
        return parsed

    @property
    def address(self) -> SourceUrl:
        """The URL to connect to, with what leads there."""
        return SourceUrl.of(self.url, self.bastion_secret)

    @cached_property
    def patterns(self) -> list[TablePattern]:
        """Its tables, parsed once."""
        return [TablePattern.parse(table) for table in self.tables]

    def includes(self, schema: str, table: str) -> bool:
        """Return whether a table is captured."""
        return matches_any(self.patterns, schema, table)

    def grouping(self, schema: str, table: str) -> tuple[list[str] | None, list[str] | None]:
        """Return a table's `group_by` and `split_by` (see `penstock.postgres.table.Table`).

        Sinks that agree share the groups. Where they do not, messages are split by the columns that
        all of them group by, so that every sink's groups stay whole in one split.
        """
        found = [g.group_by for g in self.groupings if matches_any(g.patterns, schema, table)]
        if not found or all(g == found[0] for g in found):
            return (found[0] if found else None), None
        explicit = [set(g) for g in found if g is not None]
        shared = set.intersection(*explicit) if len(explicit) == len(found) else set()
        return None, sorted(shared)


_INTERNAL = {
    "bastion_secret", "blocks", "truncates", "groupings", "monitor", "name", "recover", "waits",
    "query", "in_step", "fields",
    "planned_tables", "planned_lsn", "after",
}  # fmt: skip
