"""A source's plan in a real Spark, and what a sink gets of a block: filter, transform, route."""

from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from typing import Any

import orjson
import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from tests.streams_help import Change, wire

from penstock.config.sinks import NatsSinkSettings, Sink, StreamSinkSettings
from penstock.core.blocks import Block, pack, unpack, with_fields
from penstock.core.message import DELETE, UPDATE
from penstock.expressions import Columns, ColumnType
from penstock.expressions.fields import Extractor
from penstock.spark import session
from penstock.spark.plan import PlanError, plan
from penstock.spark.routes import Route, regrouped
from penstock.spark.steps import Prepared, Steps


def column(name: str, typmod: int = -1) -> ColumnType:
    return ColumnType("pg_catalog", name, typmod=typmod)


COLUMNS: Columns = {
    ("public", "items"): {
        "id": column("int8"),
        "amount": column("numeric", (10 << 16 | 2) + 4),
        "name": column("text"),
        "region": column("text"),
        "data": column("jsonb"),
        "Odd Name": column("text"),
        "tags": ColumnType("pg_catalog", "_text", element=column("text")),
    },
    ("public", "others"): {"id": column("int8"), "note": column("text")},
}


@pytest.fixture(scope="module")
def spark() -> Iterator[SparkSession]:
    made = session.create("local[1]")
    yield made
    made.stop()


def nats(**settings: Any) -> NatsSinkSettings:
    fields = {"type": "nats", "source": "shop", "subject": "d.{table}", **settings}
    return NatsSinkSettings.model_validate(fields)


def stream(**settings: Any) -> StreamSinkSettings:
    return StreamSinkSettings.model_validate({"type": "stream", "source": "shop", **settings})


def prepared(spark: SparkSession, batch: pa.RecordBatch, **sinks: Sink) -> dict[str, Prepared]:
    """Return what each sink gets of a batch, as the pipeline does it."""
    made = plan(sinks, COLUMNS)
    assert made is not None
    found = unpack(iter([pack(batch)]))
    if made.fields:
        rows = with_fields(pack(batch), Extractor(made.fields))
        frame = spark.createDataFrame(pa.Table.from_batches([rows]))
        found = unpack(iter(made.results(frame).toArrow().to_batches()))
    block = next(found)
    assert isinstance(block, Block)
    sent = pickle.loads(pickle.dumps(made.sinks))
    assert sent == made.sinks
    return {
        name: Steps(Route(name, sink, 1), sent.get(name), "shop")(block)
        for name, sink in sinks.items()
    }


def ids(of: Prepared) -> list[Any]:
    return [json.loads(text)["id"] for text in of.messages.column("record").to_pylist()]


def subjects(of: Prepared) -> list[str | None]:
    found: list[str | None] = of.messages.column("subject").to_pylist()
    return found


def reasons(of: Prepared) -> list[tuple[str, str, Any]]:
    return [(d.code, d.reason, json.loads(d.body)["record"]["id"]) for d in of.dead]


def unreported(batch: pa.RecordBatch, row: int, *names: str) -> pa.RecordBatch:
    texts = batch.column("metadata").to_pylist()
    texts[row] = orjson.dumps(json.loads(texts[row]) | {"unavailable": list(names)}).decode()
    at = batch.schema.get_field_index("metadata")
    return batch.set_column(at, batch.schema.field(at), pa.array(texts, pa.string()))


def item(key: int, amount: str | None = None, **columns: Any) -> Change:
    return Change({"id": key, "amount": amount, **columns})


def test_filters_of_several_sinks(spark: SparkSession) -> None:
    batch = wire(
        [
            item(1, "150.00", name="a"),
            item(2, "100.00", name="b"),
            item(3, None),
            Change({"id": 4, "name": "x"}, UPDATE, {}),
            Change({"id": 5}, DELETE),
        ]
    )
    batch = unreported(unreported(batch, 3, "amount"), 4, "amount", "name")
    found = prepared(
        spark, batch,
        above=nats(filter="record.amount > 100"),
        careful=nats(filter="action = 'delete' or record.amount > 100"),
        inserts=nats(filter="record.amount > 100", actions=["insert"]),
        never=nats(filter="false"),
        plain=nats(),
        others=nats(tables=["public.others"], filter="record.note = 'x'"),
    )  # fmt: skip
    assert ids(found["above"]) == [1]
    assert [(code, key) for code, _, key in reasons(found["above"])] == [
        ("filter_failed", 4), ("filter_failed", 5)
    ]  # fmt: skip
    assert reasons(found["above"])[0][1] == (
        "the filter can't be evaluated: record.amount is not in the WAL"
        " (REPLICA IDENTITY FULL has it there)"
    )
    assert ids(found["careful"]) == [1, 5]
    assert [key for *_, key in reasons(found["careful"])] == [4]
    assert ids(found["inserts"]) == [1]
    assert not found["inserts"].dead
    assert ids(found["never"]) == []
    assert found["plain"].messages.equals(batch)
    assert found["others"] == Prepared(batch.slice(0, 0), [])


def test_a_dead_letter_is_the_message_as_it_was_captured(spark: SparkSession) -> None:
    batch = unreported(wire([Change({"id": 7, "name": 'a"b'}, UPDATE, {"name": "x"})]), 0, "amount")
    (letter,) = prepared(spark, batch, s=nats(filter="record.amount > 1"))["s"].dead
    row = batch.to_pylist()[0]
    assert letter.idempotency_key == row["idempotency_key"]
    assert letter.subject == ""
    assert letter.body == (
        f'{{"record":{row["record"]},"changes":{row["changes"]},"action":"update",'
        f'"metadata":{row["metadata"]}}}'
    )


def test_a_transform_in_sql(spark: SparkSession) -> None:
    batch = wire(
        [
            item(1, "1.50", name="ann", data={"a": [1.5, "x"]}, **{"Odd Name": "o"}),
            item(0, "2.00", name=None, data=None, **{"Odd Name": None}),
            item(3, None, name=None, data=None, **{"Odd Name": None}),
        ]
    )
    sink = nats(
        transform={
            "sql": 'record.id as id, upper(record.name) as "NAME", record.amount * 2 as twice,'
            " 10 / record.id as share, record.data.a as list, record.\"Odd Name\" || '!' as odd"
        }
    )
    found = prepared(spark, batch, s=sink)["s"]
    assert found.messages.column("record").to_pylist() == [
        '{"id":1,"NAME":"ANN","twice":"3.00","share":10,"list":[1.5,"x"],"odd":"o!"}',
        '{"id":3,"NAME":null,"twice":null,"share":3,"list":null,"odd":null}',
    ]
    ((code, reason, key),) = reasons(found)
    assert (code, key) == ("transform_failed", 0)
    assert reason == (
        "share can't be computed: an overflow, a division by zero or a cast that fails"
    )


def test_json_in_filters_and_transforms(spark: SparkSession) -> None:
    documents = [
        {"type": "order", "items": [1, {"n": 1.50}], "tags": ["vip"]},
        {"type": "order", "items": None},
        {"type": "note", "items": "none", "tags": {"vip": 0}},
        None,
    ]
    batch = wire([item(n, name=None, data=data) for n, data in enumerate(documents)])
    found = prepared(
        spark, batch,
        orders=nats(filter="record.data @> '{\"type\": \"order\"}'"),
        tagged=nats(filter="record.data -> 'tags' ? 'vip'"),
        long=nats(filter="jsonb_array_length(record.data -> 'items') > 1"),
        names=nats(filter="record.data ->> 'type' ~ '^[c-r]+$'"),
        made=nats(
            transform={
                "sql": "record.data -> 'items' as items, record.data ->> 'type' as type,"
                " record.data #>> '{items,1,n}' as n, concat_ws('-', record.id, record.name) as id"
            }
        ),
    )  # fmt: skip
    assert ids(found["orders"]) == [0, 1]
    assert ids(found["tagged"]) == [0, 2]
    assert ids(found["long"]) == [0]
    assert reasons(found["long"])[1] == (
        "filter_failed", "the filter can't be evaluated: record.data.items is no array", 2
    )  # fmt: skip
    assert ids(found["names"]) == [0, 1]
    assert found["made"].messages.column("record").to_pylist() == [
        '{"items":[1,{"n":1.5}],"type":"order","n":"1.5","id":"0"}',
        '{"items":null,"type":"order","n":null,"id":"1"}',
        '{"items":"none","type":"note","n":null,"id":"2"}',
        '{"items":null,"type":null,"n":null,"id":"3"}',
    ]


def test_arrays_in_filters_transforms_and_routes(spark: SparkSession) -> None:
    arrays: list[Any] = [["vip", "new"], [], None, ["old", None], [["vip"], ["x"]], "vip"]
    batch = wire([item(n, tags=tags) for n, tags in enumerate(arrays)])
    found = prepared(
        spark, batch,
        vip=nats(filter="'vip' = any(record.tags)"),
        never=nats(filter="'vip' <> all(record.tags) or record.tags is null"),
        unknown=nats(filter="('vip' = any(record.tags)) is null"),
        both=nats(filter="record.tags @> array['vip', 'new'] or record.tags && '{old}'"),
        some=nats(
            transform={
                "sql": "cardinality(record.tags) as n, 'vip' = any(record.tags) as vip,"
                " record.id = any(array[1, 2]) as low, record.id as id, record.tags as tags"
            }
        ),
        routed=nats(route="case when record.tags @> '{vip}' then 'vip' else 'all' end"),
    )  # fmt: skip
    reason = (
        "record.tags is no array of its column's type in this message, or has a value out of range"
    )
    for name, passed in {"vip": [0, 4], "never": [1, 2], "unknown": [2, 3], "both": [0, 3]}.items():
        assert ids(found[name]) == passed, name
        assert reasons(found[name]) == [
            ("filter_failed", f"the filter can't be evaluated: {reason}", 5)
        ]
    assert found["some"].messages.column("record").to_pylist() == [
        '{"n":2,"vip":true,"low":false,"id":0,"tags":["vip","new"]}',
        '{"n":0,"vip":false,"low":true,"id":1,"tags":[]}',
        '{"n":null,"vip":null,"low":true,"id":2,"tags":null}',
        '{"n":2,"vip":null,"low":false,"id":3,"tags":["old",null]}',
        '{"n":2,"vip":true,"low":false,"id":4,"tags":[["vip"],["x"]]}',
    ]
    assert subjects(found["routed"]) == ["vip", "all", "all", "all", "vip"]


def test_routes_by_an_expression(spark: SparkSession) -> None:
    regions = ["eu", None, "", "a.b *>%", "$SYS", "ü/x", ".."]
    batch = wire([item(n, "1.00", region=region) for n, region in enumerate(regions)])
    found = prepared(
        spark, batch,
        one=nats(route="'r.' || record.region"),
        first=nats(route="record.region"),
        cases=nats(
            route="case when record.id > 3 then 'high' when record.id > 1 then 'a..b' end"
        ),
        path=stream(route="'r/' || record.region || '/end'"),
    )  # fmt: skip
    escaped = ["eu", None, "%empty", "a%2Eb%20%2A%3E%25", "%24SYS", "ü/x", "%2E%2E"]
    assert subjects(found["one"]) == [None if e is None else f"r.{e}" for e in escaped]
    assert subjects(found["first"]) == escaped
    assert subjects(found["cases"]) == [None, None, "high", "high", "high"]
    assert [(code, key) for code, _, key in reasons(found["cases"])] == [
        ("route_failed", 2), ("route_failed", 3)
    ]  # fmt: skip
    assert (
        "the route 'a..b' is no subject to publish to: no token may be empty"
        in (reasons(found["cases"])[0][1])
    )
    paths = [
        json.loads(m).get("route") for m in found["path"].messages.column("metadata").to_pylist()
    ]
    assert paths == [
        "r/eu/end", None, "r/%empty/end", "r/a.b%20*>%25/end", "r/$SYS/end", "r/ü%2Fx/end",
        "r/%2E%2E/end",
    ]  # fmt: skip


def test_routes_by_rules(spark: SparkSession) -> None:
    """The first that matches wins; one that can't be evaluated may have been the first."""
    batch = wire(
        [
            item(1, "2000.00", region="eu"),
            item(2, "2000.00", region="us"),
            item(3, "1.00", region="us"),
            Change({"id": 4, "region": "us"}, UPDATE, {}),
            Change({"id": 5, "region": "eu"}, UPDATE, {}),
        ]
    )
    batch = unreported(unreported(batch, 3, "amount"), 4, "amount")
    rules = [
        {"when": "record.region = 'eu'", "to": "eu.{record.id}"},
        {"when": "record.amount > 1000", "to": "big.{source}.{record.region}"},
    ]
    found = prepared(
        spark, batch,
        open=nats(route=rules), closed=nats(route=[*rules, {"to": "rest"}]),
        always=stream(route=[{"to": "all/{record.id}/{record.region}"}]),
    )  # fmt: skip
    assert subjects(found["open"]) == ["eu.1", "big.shop.us", None, "eu.5"]
    assert subjects(found["closed"]) == ["eu.1", "big.shop.us", "rest", "eu.5"]
    for name in ("open", "closed"):
        ((code, reason, key),) = reasons(found[name])
        assert (code, key) == ("route_failed", 4)
        assert "record.amount is not in the WAL" in reason
    metadata = found["always"].messages.column("metadata").to_pylist()
    assert [json.loads(m)["route"] for m in metadata] == [
        "all/1/eu", "all/2/us", "all/3/us", "all/4/us", "all/5/eu"
    ]  # fmt: skip


def test_the_first_failure_is_reported(spark: SparkSession) -> None:
    batch = unreported(wire([item(0, "1.00")]), 0, "region")
    sink = nats(transform={"sql": "1 / record.id as share"}, route="'r.' || record.region")
    found = prepared(spark, batch, s=sink)["s"]
    assert [letter.code for letter in found.dead] == ["transform_failed"]
    assert found.messages.num_rows == 0


def test_rules_templates_see_the_transformed_record_and_conditions_the_captured_one(
    spark: SparkSession,
) -> None:
    batch = wire([item(1, "5.00", name="Ann"), item(2, "5.00", name="Bob")])
    sink = nats(
        transform={"sql": "upper(record.name) as name, record.id"},
        route=[{"when": "record.name = 'Ann'", "to": "x.{record.name}"}, {"to": "y.{record.amount}"}],
    )  # fmt: skip
    assert subjects(prepared(spark, batch, s=sink)["s"]) == ["x.ANN", "y.%null"]


def test_groups_are_those_of_the_captured_record(spark: SparkSession) -> None:
    batch = wire([item(1, "5.00", region="eu"), item(2, "5.00", region="eu")])
    expected = regrouped(batch, ["region"]).column("group_hash").to_pylist()
    assert expected[0] == expected[1]
    transform = {"sql": "record.id"}
    found = prepared(
        spark, batch,
        stream=stream(group_by=["region"], transform=transform),
        nats=nats(group_by=["region"], transform=transform),
        plain=nats(group_by=["region"], filter="record.id > 0"),
    )  # fmt: skip
    for name in ("stream", "nats"):
        assert found[name].messages.column("group_hash").to_pylist() == expected
    # A NATS sink whose records stay as they are makes its groups itself.
    assert found["plain"].messages.equals(batch)


LUA = """
function transform(message)
  local r = message.record
  if r.id == 1 then return nil end
  if r.id == 2 then error("two") end
  if r.id == 3 then return {message, message, message} end
  return message
end
"""


def test_several_messages_of_one_and_their_routes(spark: SparkSession) -> None:
    batch = wire([item(n, "1.00", region=f"r{n}") for n in range(1, 6)])
    sink = nats(
        filter="record.id < 5", transform={"lua": LUA},
        route="case when record.id = 4 then '.' else 'x.' || record.region end",
    )  # fmt: skip
    made = prepared(spark, batch, s=sink)["s"]
    assert ids(made) == [3, 3, 3]
    assert subjects(made) == ["x.r3"] * 3
    assert made.messages.column("part").to_pylist() == [0, 1, 2]
    key = batch.column("idempotency_key")[2].as_py()
    assert made.messages.column("idempotency_key").to_pylist() == [key, f"{key}-1", f"{key}-2"]
    assert [(code, number) for code, _, number in reasons(made)] == [
        ("transform_failed", 2), ("route_failed", 4)
    ]  # fmt: skip


def refused(**sink: Any) -> str:
    with pytest.raises(PlanError) as caught:
        plan({"out": nats(**sink)}, COLUMNS)
    return str(caught.value)


def test_what_the_catalog_refuses() -> None:
    items = {"tables": ["public.items"]}
    assert refused(filter="record.id > 0 and record.amonut > 1") == (
        "sinks.out.filter: position 19: unknown column record.amonut: none of the 2 tables has it;"
        " did you mean record.amount?"
    )
    assert refused(transform={"sql": "record.nme"}, **items).startswith(
        "sinks.out.transform.sql: position 1: unknown column record.nme of public.items"
    )
    assert refused(route=[{"when": "record.x = 1", "to": "a"}], **items).startswith(
        "sinks.out.route[0].when: position 1: unknown column record.x"
    )
    assert refused(route="record.amount", **items) == (
        "sinks.out.route: position 1: a route is a text, and this is a numeric; cast it by ::text"
    )
    assert refused(filter="record.amount").startswith("sinks.out.filter: position 1: a condition")


def test_an_expression_that_is_too_large_for_spark_names_its_sink(
    spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = plan({"out": nats(filter="record.amount > 100 and record.id > 5")}, COLUMNS)
    assert made is not None
    rows = with_fields(pack(wire([item(1)])), Extractor(made.fields))
    frame = spark.createDataFrame(pa.Table.from_batches([rows]))
    monkeypatch.setattr("penstock.expressions.spark.columns.MAX_SIZE", 5)
    with pytest.raises(PlanError, match=r"sinks\.out\.filter: position 1: "):
        made.results(frame)


def test_sinks_without_expressions_need_no_plan() -> None:
    assert plan({"a": nats(), "b": stream()}, COLUMNS) is None
    made = plan({"a": nats(transform={"lua": LUA}), "b": stream()}, {})
    assert made is not None
    assert made.fields == ()
    assert set(made.sinks) == {"a"}
