"""What a source's database has: tables, columns and slots, for pickers; and whether it answers."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Annotated, Any, Final, Literal, TypeVar

from fastapi import Query, Request
from fastapi.responses import Response
from psycopg import sql
from psycopg.rows import class_row, dict_row
from pydantic import BaseModel, ConfigDict, Field

from penstock.api.manage.endpoints import AppContext, new_router
from penstock.api.manage.pages import Paged, after, following, paged
from penstock.api.manage.settings import source_of
from penstock.api.problems import Problem, documented
from penstock.api.requests import body_of, json_answer, read_object
from penstock.api.schemas import Page
from penstock.config.sources import PostgresSource, PostgresUrl
from penstock.core import queries
from penstock.core.connect import address
from penstock.core.tables import TablePattern, matches_any
from penstock.postgres.admin import Catalog, ReplicaIdentity, Slot, open_catalog

_SQL: Final = queries.load("penstock.api.manage", "manage.sql")
_SETUP: Final = queries.load("penstock.postgres", "setup.sql")
_SOURCE: Final = "/v1/sources/{source}"
_CONNECT_SECONDS: Final = 4
_IDENTITIES: Final = {"d": "default", "f": "full", "i": "index", "n": "nothing"}
_FULL: Final = sql.SQL("ALTER TABLE {} REPLICA IDENTITY FULL")
_AWAY: Final = documented(409, 424)

T = TypeVar("T")

api = new_router()


class _Table(BaseModel):
    name: str = Field(description="As `tables` of a source or a sink takes it: schema.table.")
    table_schema: str
    table_name: str
    partitioned: bool
    rows: int | None = Field(description="The server's estimate.")
    has_key: bool = Field(description="Whether it has a primary key.")
    readable: bool = Field(description="Whether the source's role may read it, as a backfill does.")
    published: bool = Field(description="Whether the source's publication has it.")
    selected: bool = Field(description="Whether the source's `tables` have it.")
    replica_identity: Literal["default", "full", "index", "nothing", "mixed"] | None = Field(
        description="`mixed`: its partitions differ. Null: it is partitioned and has none yet."
    )
    old_values: list[str] | None = Field(
        description="The columns whose old values are in the WAL, so in `changes` and in the `record` "
        "of a delete; null: all of them. With none Postgres refuses its UPDATE and DELETE."
    )
    identity_sql: str = Field(
        description="What puts every old value into the WAL; empty: they are."
    )


class _Tables(Page):
    """The tables of a source's database, by schema and name."""

    data: list[_Table]


class _Column(BaseModel):
    name: str
    type: str
    nullable: bool
    generated: bool
    key: int | None = Field(description="Its place in the primary key, from 1.")


class _Columns(BaseModel):
    """The columns of a table, in its order."""

    data: list[_Column]


class _Slot(BaseModel):
    name: str
    own: bool = Field(description="Whether it is the source's.")
    plugin: str | None
    slot_type: str
    database: str | None
    active: bool
    wal_status: str | None
    invalidation_reason: str | None
    restart_lsn: str | None
    confirmed_flush_lsn: str | None
    current_lsn: str | None
    retained_bytes: int | None = Field(description="WAL that the server keeps for it.")
    lag_bytes: int | None = Field(description="WAL that was not confirmed yet.")
    lag_seconds: float | None


class _Slots(Page):
    """The replication slots of a source's server, by name."""

    data: list[_Slot]


class _NewSource(BaseModel):
    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    url: PostgresUrl


class _Tested(BaseModel):
    """A server that answered, and the role's rights there."""

    address: str
    version: str
    database: str
    role: str
    wal_level: str
    is_standby: bool
    may_replicate: bool
    may_create: bool
    milliseconds: float


@api.get(
    f"{_SOURCE}/tables",
    response_model=_Tables,
    summary="List a source's tables",
    responses=_AWAY,
)
async def list_tables(
    context: AppContext, source: str, query: Annotated[Paged, Query()]
) -> Response:
    settings = await source_of(context, source)
    schema, name = after(query.cursor, str, str) or ("", "")

    def read(catalog: Catalog) -> list[dict[str, Any]]:
        values = {
            "publication": settings.publication, "schema": schema, "name": name,
            "limit": query.limit + 1,
        }  # fmt: skip
        return _with_identities(catalog, _rows(catalog, "tables", values))

    found = await context.run_at_source(_asked, settings, read)
    page, last = following(found, query.limit, lambda row: (row["schema"], row["name"]))
    return json_answer({"data": [_table(settings, row) for row in page], "next": last})


@api.get(
    f"{_SOURCE}/tables/{{table}}/columns",
    response_model=_Columns,
    summary="List the columns of a table",
    responses=_AWAY,
)
async def list_columns(context: AppContext, source: str, table: str) -> Response:
    settings = await source_of(context, source)
    pattern = None
    with contextlib.suppress(ValueError):
        pattern = TablePattern.parse(table)
    missing = Problem(404, f"The source has no table {table!r}; expected schema.table.")
    if pattern is None or pattern.table is None or "\0" in table:
        raise missing
    values = {"schema": pattern.schema, "name": pattern.table}

    def read(catalog: Catalog) -> list[dict[str, Any]]:
        return _rows(catalog, "columns", values)

    found = await context.run_at_source(_asked, settings, read)
    if not found:
        raise missing
    return json_answer({"data": found})


@api.get(
    f"{_SOURCE}/slots",
    response_model=_Slots,
    summary="List the replication slots of a source's server",
    responses=_AWAY,
)
async def list_slots(
    context: AppContext, source: str, query: Annotated[Paged, Query()]
) -> Response:
    settings = await source_of(context, source)

    found = await context.run_at_source(_asked, settings, Catalog.slots)
    page, last = paged(found, query, lambda slot: slot.name)
    data = [_shown(slot) | {"own": slot.name == settings.slot} for slot in page]
    return json_answer({"data": data, "next": last})


@api.post(
    f"{_SOURCE}/test",
    response_model=_Tested,
    summary="Test the connection of a source",
    description="The `code` of a problem begins with `bastion_` where the bastion is at fault.",
    responses=_AWAY,
)
async def test_source(context: AppContext, source: str) -> Response:
    settings = await source_of(context, source)
    return json_answer(await context.run_test(_tested, settings))


@api.post(
    "/v1/test-source",
    response_model=_Tested,
    summary="Test a connection that is not stored",
    responses=documented(413, 424),
    openapi_extra=body_of(_NewSource),
)
async def test_new_source(context: AppContext, request: Request) -> Response:
    new = _NewSource.model_validate(await read_object(request))
    settings = PostgresSource(type="postgres", url=new.url)
    return json_answer(await context.run_test(_tested, settings))


@contextlib.contextmanager
def _opened(source: PostgresSource) -> Iterator[Catalog]:
    with open_catalog(source, connect_timeout=_CONNECT_SECONDS) as catalog:
        catalog.connection.execute(_SQL["session"])
        yield catalog


def _asked(source: PostgresSource, read: Callable[[Catalog], T]) -> T:
    with _opened(source) as catalog:
        return read(catalog)


def _rows(catalog: Catalog, query: str, values: dict[str, Any]) -> list[dict[str, Any]]:
    with catalog.connection.cursor(row_factory=dict_row) as cursor:
        return cursor.execute(_SQL[query], values).fetchall()


def _shown(slot: Slot) -> dict[str, Any]:
    return {key: value for key, value in asdict(slot).items() if key != "active_pid"}


def _with_identities(catalog: Catalog, tables: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return tables with their replica identities, of a partitioned one that of its partitions."""
    with catalog.connection.cursor(row_factory=class_row(ReplicaIdentity)) as cursor:
        of: dict[int, list[ReplicaIdentity]] = {table.pop("oid"): [] for table in tables}
        for each in cursor.execute(_SETUP["identities"], {"oids": list(of)}):
            of[each.oid].append(each)
    for table, identities in zip(tables, of.values(), strict=True):
        kinds = {each.identity for each in identities}
        less = [each for each in identities if each.identity != "f"]
        table["replica_identity"] = (
            None if not kinds else _IDENTITIES[kinds.pop()] if len(kinds) == 1 else "mixed"
        )
        common = set.intersection(*(set(each.columns) for each in less)) if less else set()
        table["old_values"] = [c for c in less[0].columns if c in common] if less else None
        table["identity_sql"] = "\n".join(
            catalog.text(_FULL.format(sql.Identifier(each.schema, each.name))) for each in less
        )
    return tables


def _table(source: PostgresSource, row: dict[str, Any]) -> dict[str, Any]:
    schema, name = row.pop("schema"), row.pop("name")
    return {
        "name": str(TablePattern(schema, name)),
        "table_schema": schema,
        "table_name": name,
        **row,
        "selected": matches_any(source.patterns, schema, name),
    }


def _tested(source: PostgresSource) -> dict[str, Any]:
    began = time.monotonic()
    with _opened(source) as catalog:
        server = catalog.server
    return {
        "address": address(source.url.get_secret_value()),
        "version": server.version,
        "database": server.database,
        "role": server.role,
        "wal_level": server.wal_level,
        "is_standby": server.is_standby,
        "may_replicate": server.may_replicate,
        "may_create": server.may_create,
        "milliseconds": round((time.monotonic() - began) * 1000, 1),
    }
