"""What a plan rests on of its tables, and what becomes of it when these are altered."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from penstock.expressions import ColumnType
from penstock.expressions.shapes import Watch
from penstock.settings import Sink
from penstock.spark.plan import PlanError, plan

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


def test_the_shapes_of_a_plan() -> None:
    made = plan(SINKS, COLUMNS)
    assert made is not None
    assert made.shapes == {
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
    assert Watch(made.shapes, 100).is_altered(lsn, table, columns) is altered
    assert not Watch().is_altered(lsn, table, columns)


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
    assert second.shapes[T]["n"] is None
    assert second.fields == first.fields
    third = plan(SINKS, COLUMNS | {T: COLUMNS[T] | {"n": column("numeric", 1700)}}, second)
    assert third is not None
    assert third.refused == {}
    assert third.shapes[T]["n"] == (1700, -1)


def test_a_column_that_messages_never_have_is_refused() -> None:
    lost = column("int4", 23, withheld="it is made of others")
    with pytest.raises(PlanError) as refused:
        plan(SINKS, {T: COLUMNS[T] | {"n": lost}})
    assert refused.value.reason == "messages of public.t never have record.n: it is made of others"
