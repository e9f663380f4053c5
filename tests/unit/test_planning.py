"""What a plan rests on of its tables, and what becomes of it when these are altered."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter
from structlog.testing import capture_logs

from penstock.config.sinks import Sink
from penstock.config.sources import PostgresSource
from penstock.expressions import ColumnType
from penstock.expressions.planned import Planned
from penstock.spark import planning
from penstock.spark.plan import PlanError, plan
from penstock.spark.planning import _withheld

SINK: TypeAdapter[Any] = TypeAdapter(Sink)


def sink(**settings: Any) -> Any:
    return SINK.validate_python({"type": "stream", "source": "shop"} | settings)


def column(name: str, oid: int, **more: Any) -> ColumnType:
    return ColumnType("pg_catalog", name, oid=oid, **more)


T, OTHER = ("public", "t"), ("public", "other")
SINKS = {
    "a": sink(tables=["public.t"], filter="record.n > 1"),
    "b": sink(transform={"sql": "record.id, record.name as x"}),
    "c": sink(),
}
COLUMNS = {
    T: {
        "id": column("int8", 20),
        "n": column("int4", 23),
        "name": column("varchar", 1043, modifier=24),
    },
    OTHER: {"id": column("int8", 20), "name": column("text", 25)},
}


def test_the_tables_of_a_plan() -> None:
    made = plan(SINKS, COLUMNS)
    assert made is not None
    assert made.tables == {
        T: {"n": (23, -1), "id": (20, -1), "name": (1043, 24)},
        OTHER: {"id": (20, -1), "name": (25, -1)},
    }
    assert made.refused == {}


@pytest.mark.parametrize(
    ("lsn", "table", "columns", "altered"),
    [
        (100, T, [("id", 20, -1), ("n", 23, -1), ("name", 1043, 24), ("more", 25, -1)], False),
        (100, T, [("id", 20, -1), ("n", 20, -1), ("name", 1043, 24)], True),
        (100, T, [("id", 20, -1), ("name", 1043, 24)], True),
        (100, T, [("id", 20, -1), ("n", 23, -1), ("name", 1043, -1)], True),
        (99, T, [("id", 20, -1)], False),
        (100, OTHER, [("id", 20, -1), ("name", 25, -1), ("n", 23, -1)], False),
        (100, ("public", "new"), [("id", 20, -1)], True),
        (99, ("public", "new"), [("id", 20, -1)], False),
    ],
)
def test_which_rows_ask_for_another_plan(
    lsn: int, table: tuple[str, str], columns: list[tuple[str, int, int]], altered: bool
) -> None:
    made = plan(SINKS, COLUMNS)
    assert made is not None
    assert Planned(made.tables, 100).is_altered(lsn, table, columns) is altered
    assert not Planned().is_altered(lsn, table, columns)


def test_a_sink_that_its_tables_refuse_keeps_its_plan_and_holds_up_no_other() -> None:
    first = plan(SINKS, COLUMNS)
    dropped = {T: {n: c for n, c in COLUMNS[T].items() if n != "n"}, OTHER: COLUMNS[OTHER]}
    with pytest.raises(PlanError, match=r"sinks\.a\.filter: position 1: unknown column record\.n"):
        plan(SINKS, dropped)
    second = plan(SINKS, dropped, first)
    assert first is not None
    assert second is not None
    assert list(second.refused) == ["a"]
    assert second.parts["a"] is first.parts["a"]
    assert second.parts["b"] is not first.parts["b"]
    assert second.tables[T]["n"] is None
    assert second.fields == first.fields
    third = plan(SINKS, COLUMNS | {T: COLUMNS[T] | {"n": column("numeric", 1700)}}, second)
    assert third is not None
    assert third.refused == {}
    assert third.tables[T]["n"] == (1700, -1)


def test_the_log_names_the_tables_that_lack_a_column_after_they_were_altered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Their rows are neither delivered nor dead letters then: null is what the filter gets."""
    every = {"a": sink(filter="record.n > 1")}
    columns = {T: COLUMNS[T], OTHER: COLUMNS[OTHER] | {"n": column("int4", 23)}}
    monkeypatch.setattr(
        planning, "of_source", lambda _, sinks, before: plan(sinks, columns, before)
    )
    planner = planning.Planner(PostgresSource(type="postgres", url="postgresql://x"), every)
    with capture_logs() as logged:
        planner.plan()
        assert logged == []  # `penstock check` has these
        columns[T] = {name: of for name, of in COLUMNS[T].items() if name != "n"}
        planner.altered = T
        planner.plan()
        planner.plan()
    assert logged == [
        {
            "event": "a column is null in tables that lack it", "log_level": "warning", "sink": "a",
            "column": "record.n", "tables": ["public.t"],
        }
    ]  # fmt: skip


def test_a_table_whose_rows_never_match_the_catalog_does_not_restart_the_query_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        planning, "of_source", lambda _, sinks, before: plan(sinks, COLUMNS, before)
    )
    monkeypatch.setattr(planning, "_PAUSES", (0.0,))
    planner = planning.Planner(PostgresSource(type="postgres", url="postgresql://x"), SINKS)
    planner.plan()
    asked = []
    for _ in range(4):
        planner.altered = T
        made = planner.plan()
        assert made is not None
        asked.append(Planned(made.tables, 0).is_altered(1, T, [("id", 20, -1)]))
    assert asked == [True, True, True, False]


def test_a_column_that_messages_never_have_is_refused() -> None:
    lost = column("int4", 23, withheld="it is made of others")
    with pytest.raises(PlanError) as refused:
        plan(SINKS, {T: COLUMNS[T] | {"n": lost}})
    assert refused.value.reason == "messages of public.t never have record.n: it is made of others"


@pytest.mark.parametrize(
    ("version", "generated", "published", "why"),
    [
        (17, "s", None, "it is a generated column, which Postgres 17 does not put into the WAL;"
         " write what it is made of instead: (n * 2)"),
        (17, "s", ["id", "n", "total"], "which Postgres 17 does not put into the WAL"),
        (18, "s", ["id", "n"], "publication does not have these; write what it is made of instead:"
         " (n * 2), or ALTER PUBLICATION"),
        (18, "v", None, "it is a virtual generated column, which is not in the WAL"),
        (18, "s", ["id", "n", "total"], None),
        (17, "", None, None),
        (17, "", ["id", "n"], "it is not in the list of columns of publication p"),
    ],
)  # fmt: skip
def test_columns_that_no_message_has(
    version: int, generated: str, published: list[str] | None, why: str | None
) -> None:
    """Also of servers before 18, which the other tests do not have."""
    source = SimpleNamespace(publication="p")
    catalog: Any = SimpleNamespace(
        source=source, server=SimpleNamespace(major=version), text=lambda _: "ALTER PUBLICATION …"
    )
    total = column("int4", 23, generated=generated, definition="(n * 2)")
    found = _withheld(catalog, "total", total, False, published)
    assert found == "" if why is None else why in found
