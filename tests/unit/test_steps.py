"""A sink's steps without Spark: paths, what they keep from batch to batch, when they are made anew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.streams_help import Change, moved, wire

from penstock import expressions
from penstock.config.sinks import StreamSinkSettings
from penstock.core.blocks import Block
from penstock.core.message import OLD_KEY
from penstock.core.route_path import PathTemplate, escape, is_path
from penstock.expressions import Expression, Field, Kind, Reference, Type, parse_value
from penstock.expressions.fields import Extractor
from penstock.expressions.route import MARK, literals, marked
from penstock.expressions.syntax import Expr
from penstock.expressions.types import INT, TEXT
from penstock.push.paths import path_of
from penstock.spark import router, steps, writer
from penstock.spark.routes import Route
from penstock.spark.select import Item
from penstock.spark.sink_plan import BAD, DROP, KEEP, SinkPlan
from penstock.spark.steps import Steps
from penstock.spark.store_writer import StoreTarget
from penstock.spark.writer import FanOut
from penstock.streams import copy
from penstock.streams.records import stream_idx


def stream(**settings: Any) -> Route:
    fields = {"type": "stream", "source": "shop", **settings}
    return Route("events", StreamSinkSettings.model_validate(fields), 1)


# Paths


@pytest.mark.parametrize(
    ("value", "escaped"),
    [
        ("plain-Text_1.2~", "plain-Text_1.2~"), ("a/b", "a%2Fb"), ("a b", "a%20b"), ("50%", "50%25"),
        ("?#\\;", "%3F%23%5C%3B"), ("\n\x7f", "%0A%7F"), ("..", "%2E%2E"), (".", "%2E"), ("..a", "..a"),
        ("", "%empty"), (None, "%null"), ("ü", "ü"),
    ],
)  # fmt: skip
def test_values_in_paths(value: str | None, escaped: str) -> None:
    assert escape(value) == escaped


@given(st.text(), st.text())
def test_a_value_is_always_one_segment_and_differs_from_any_other(one: str, other: str) -> None:
    for text in (one, other):
        path = f"a/{escape(text)}/b"
        assert path.count("/") == 2
        assert is_path(pa.array([path.encode(errors="ignore").decode()]))[0].as_py()
    assert (escape(one) == escape(other)) == (one == other)


@pytest.mark.parametrize(
    ("path", "valid"),
    [("a", True), ("/a/b", True), ("a//b", False), ("a/", False), ("", False), ("/", False),
     ("a/./b", False), ("..", False), ("a/..", False), ("...", True), ("a b", False), ("a?b", False),
     ("a#b", False), ("a\\b", False), ("a\nb", False), ("ü/é", True)],
)  # fmt: skip
def test_what_is_a_path(path: str, valid: bool) -> None:
    assert is_path(pa.array([path]))[0].as_py() is valid


def test_a_template_of_a_path() -> None:
    template = PathTemplate.parse("{source}/{table}/v1.0/{record.a.b}/100%/{database}-{action}")
    assert template.record_columns == ("a.b",)
    batch = wire([Change({"a.b": "x/y"}), Change({"a.b": 1.5}), Change({"a.b": None}), Change({})])
    assert template.render(batch, source="s p", database=None) == [
        f"s%20p/items/v1.0/{value}/100%/%null-insert"
        for value in ("x%2Fy", "1.5", "%null", "%null")
    ]
    assert PathTemplate.parse("all").render(batch, source="s", database="d") == ["all"] * 4


@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_a_routed_value_stays_in_its_segment_of_the_url(value: str) -> None:
    """What webhooks append has as many segments as the template."""
    batch = wire([Change({"v": value})])
    (route,) = PathTemplate.parse("a/{record.v}/b").render(batch, source="s", database=None)
    sent = router.with_route(batch, pa.array([route]))
    body = b'{"record":{},"metadata":%b}' % sent.column("metadata")[0].as_py().encode()
    path = path_of(body)
    assert path.startswith("/a/")
    assert path.endswith("/b")
    assert path.count("/") == 3
    assert not any(c in path for c in "?# \\")


# Routes by an expression


def parts(text: str) -> Any:
    def shown(expr: Expr) -> Any:
        if expr.op in ("string", "null", "reference"):
            return expr.value if expr.op != "reference" else str(expr.value)
        return [expr.op, *map(shown, expr.args)]

    expression: Expression = marked(parse_value(text))
    assert expression.text == text
    return shown(expression.root)


def around(inner: Any) -> list[Any]:
    return ["||", MARK, inner, MARK]


def test_what_is_no_literal_is_marked() -> None:
    assert parts("'a.' || record.b") == ["||", "a.", around("record.b")]
    assert parts("record.b") == around("record.b")
    assert parts("'a'") == "a"
    assert parts("upper('a.b')") == around(["upper", "a.b"])
    assert parts("coalesce(record.b, 'x')") == ["coalesce", around("record.b"), "x"]
    cases = "case when record.b = 'l' then 'x' when true then record.c else 'y' || record.d end"
    assert parts(cases) == [
        "case", ["=", "record.b", "l"], "x", ["bool"], around("record.c"),
        ["||", "y", around("record.d")],
    ]  # fmt: skip
    assert parts("case when record.b = 'l' then 'x' end")[-1] is None


def test_the_literals_of_a_route() -> None:
    text = "case when record.b = 'l' then 'x' else 'y' || coalesce(record.d, 'z') || upper('u') end"
    assert sorted(found for _, found in literals(parse_value(text))) == ["x", "y", "z"]


# Steps


def results(**columns: list[Any]) -> pa.StructArray:
    types = {"keep0": pa.int32(), "failed0": pa.int32(), "to0": pa.int32()}
    arrays = [pa.array(values, types.get(name)) for name, values in columns.items()]
    return pa.StructArray.from_arrays(arrays, list(columns))


def test_reasons_name_what_could_not_be_read() -> None:
    fields = (Field(Reference("record", "n"), INT), Field(Reference("record", "t"), TEXT))
    batch = wire([Change({"id": 1, "n": "x", "t": ""}), Change({"id": 2, "n": 1, "t": ""}),
                  Change({"id": 3})])  # fmt: skip
    found = Steps(stream(filter="true"), SinkPlan(0, filter=fields), "shop")(
        Block(None, batch, results(keep0=[BAD, BAD, DROP]))
    )
    assert found.messages.num_rows == 0
    assert [letter.reason for letter in found.dead] == [
        "the filter can't be evaluated: record.n is not an integer in this message: the column had"
        " another type when the row was written",
        "the filter can't be evaluated: an overflow, a division by zero or a cast that fails",
    ]


def test_many_messages_that_fail_share_what_finds_out_why(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    class Counted(Extractor):
        def __init__(self, fields: Sequence[Field]) -> None:
            super().__init__(fields)
            made.append(fields)

    monkeypatch.setattr(expressions.fields, "Extractor", Counted)
    fields = (Field(Reference("record", "many"), INT),)
    batch = wire([Change({"id": n, "many": "x"}) for n in range(50)])
    found = Steps(stream(filter="true"), SinkPlan(0, filter=fields), "shop")(
        Block(None, batch, results(keep0=[BAD] * 50))
    )
    assert len(found.dead) == 50
    assert made == [fields]


def test_metadata_that_parsers_refuse_has_its_route() -> None:
    """A numeric key may be beyond a double."""
    batch = wire([Change({"id": 1})])
    at = batch.schema.get_field_index("metadata")
    metadata = batch.column(at)[0].as_py().replace('"record_pks":[1]', '"record_pks":[1e999]')
    batch = batch.set_column(at, batch.schema.field(at), pa.array([metadata]))
    plan = SinkPlan(0, route=(), templates=("{database}",), always=True)
    found = Steps(stream(route="'x'"), plan, "shop")(Block(None, batch))
    assert '"record_pks":[1e999]' in found.messages.column("metadata")[0].as_py()
    assert '"route":"shop"' in found.messages.column("metadata")[0].as_py()


def test_what_a_sink_does_not_select_is_no_dead_letter() -> None:
    batch = wire([Change({"id": 1}), Change({"id": 2}, table="others")])
    route = stream(filter="true", tables=["public.others"])
    block = Block(None, batch, results(keep0=[BAD, KEEP]))
    found = Steps(route, SinkPlan(0, filter=()), "shop")(block)
    assert found.messages.num_rows == 1
    assert found.dead == []


def left(found: pa.RecordBatch) -> list[Any]:
    """Return record and metadata of the old keys."""
    return [
        old and (orjson.loads(old["record"]), orjson.loads(old["metadata"]))
        for old in found.column("old_key").to_pylist()
    ]


def moves() -> pa.RecordBatch:
    """Return updates of keys whose old tuples have more, as with REPLICA IDENTITY FULL."""
    batch = wire([Change({"id": 1}), moved(1, 2), moved(2, 3, region="b")])
    old = batch.column("old_key").to_pylist()
    for value in old[1:]:
        metadata = orjson.loads(value["metadata"]) | {"unavailable": ["ssn", "id"]}
        value["record"] = '{"id":7,"ssn":"123-45-6789","region":"b"}'
        value["metadata"] = orjson.dumps(metadata).decode()
    at = batch.schema.get_field_index("old_key")
    return batch.set_column(at, batch.schema.field(at), pa.array(old, OLD_KEY))


def test_a_select_list_keeps_of_an_old_key_what_passes_through() -> None:
    items = (Item("key", Reference("record", "id")), Item("at", Reference("record", "region")))
    route = stream(kind="rows", transform={"sql": "record.id as key, record.region as at"})
    # Nothing is computed, so that Spark has no results.
    found = Steps(route, SinkPlan(0, items=items), "shop")(Block(None, moves()))
    assert found.dead == []
    none, *olds = left(found.messages)
    assert none is None
    for (record, metadata), pk in zip(olds, (1, 2), strict=True):
        assert record == {"key": 7, "at": "b"}
        assert metadata["record_pks"] == [pk]
        assert metadata["unavailable"] == ["key"]
        assert metadata["idempotency_key"].endswith("-old")


def test_code_leaves_of_an_old_key_only_the_key() -> None:
    route = stream(kind="rows", transform={"lua": "function transform(m) return {m, m} end"})
    stages = Steps(route, SinkPlan(0), "shop")
    found = stages(Block(None, moves()))
    stages.close()
    assert found.dead == []
    olds = [old for old in left(found.messages) if old is not None]
    assert [(record, metadata["unavailable"]) for record, metadata in olds] == [({}, [])] * 2
    assert [metadata["record_pks"] for _, metadata in olds] == [[1], [2]]


def test_an_old_key_goes_where_its_update_goes() -> None:
    route = stream(kind="rows", route=[{"when": "record.region = 'b'", "to": "in/{record.region}"}])
    plan = SinkPlan(0, route=(), templates=("in/{record.region}",))
    block = Block(None, moves(), results(to0=[None, None, 0]))
    _, one, two = left(Steps(route, plan, "shop")(block).messages)
    assert "route" not in one[1]
    assert two[1]["route"] == "in/b"
    assert two[0]["ssn"], "nothing takes it away"


def sent(found: pa.RecordBatch) -> list[tuple[str, Any]]:
    return [
        (action, orjson.loads(record))
        for action, record in zip(
            found.column("action").to_pylist(), found.column("record").to_pylist(), strict=True
        )
    ]


@pytest.mark.parametrize("verdict", [DROP, BAD])
def test_a_key_is_deleted_though_its_update_is_filtered_out(verdict: int) -> None:
    """Whatever else the old row had is not what the filter has let through."""
    block = Block(None, moves(), results(keep0=[KEEP, verdict, KEEP]))
    found = Steps(stream(kind="rows", filter="true"), SinkPlan(0, filter=()), "shop")(block)
    assert sent(found.messages) == [
        ("insert", {"id": 1}), ("delete", {"id": 1}), ("update", {"id": 3, "region": "b"}),
    ]  # fmt: skip
    _, gone, _ = found.messages.to_pylist()
    assert gone["idempotency_key"] == orjson.loads(gone["metadata"])["idempotency_key"]
    assert gone["idempotency_key"].endswith("-1-old")
    assert (gone["commit_idx"], gone["old_key"]) == (1, None)
    placed = copy.placed(found.messages, "rows", 0)
    assert placed.column("action").to_pylist() == ["insert", "delete", "delete", "update"]
    assert placed.column("commit_idx")[1].as_py() == stream_idx(1) - 1, "where it always stands"
    assert len(found.dead) == (verdict == BAD)


def test_a_key_is_deleted_though_nothing_is_made_of_its_update() -> None:
    code = "function transform(m) if m.record.id == 2 then return nil end error('no') end"
    stages = Steps(stream(kind="rows", transform={"lua": code}), SinkPlan(0), "shop")
    found = stages(Block(None, moves()))
    stages.close()
    assert sent(found.messages) == [("delete", {})] * 2
    items = (Item("key", Reference("record", "id")), Item("n", type=INT, column="value0_1"))
    plan = SinkPlan(0, items=items, used={"n": ()})
    block = Block(None, moves(), results(value0_1=[None] * 3, failed0=[None, 0, 0]))
    route = stream(kind="rows", transform={"sql": "record.id as key, 1 / record.n as n"})
    found = Steps(route, plan, "shop")(block)
    assert sent(found.messages) == [
        ("insert", {"key": 1, "n": None}), ("delete", {"key": 1}), ("delete", {"key": 2}),
    ]  # fmt: skip


@pytest.mark.parametrize(
    "settings", [{"kind": "changes"}, {"kind": "rows", "tables": ["public.no"]}]
)
def test_only_a_stream_of_rows_hears_of_keys_of_unsent_updates(settings: dict[str, Any]) -> None:
    block = Block(None, moves(), results(keep0=[DROP] * 3))
    found = Steps(stream(filter="true", **settings), SinkPlan(0, filter=()), "shop")(block)
    assert found.messages.num_rows == 0


@pytest.mark.parametrize("fails", [[0], [6], [2, 3], [1, 5], list(range(7))])
def test_only_messages_that_fail_unexpectedly_are_lost_to_the_sink(
    fails: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = wire([Change({"id": n}) for n in range(7)])
    grouped = Steps._grouped

    def failing(self: Steps, messages: pa.RecordBatch) -> pa.RecordBatch:
        if {orjson.loads(r)["id"] for r in messages.column("record").to_pylist()} & {*fails}:
            raise KeyError("surprise")
        return grouped(self, messages)

    monkeypatch.setattr(Steps, "_grouped", failing)
    block = Block(None, batch, results(keep0=[KEEP] * 6 + [DROP]))
    found = Steps(stream(filter="true"), SinkPlan(0, filter=()), "shop")(block)
    ids = [orjson.loads(record)["id"] for record in found.messages.column("record").to_pylist()]
    assert ids == [n for n in range(6) if n not in fails]
    assert [orjson.loads(letter.body)["record"]["id"] for letter in found.dead] == [
        n for n in range(6) if n in fails
    ]
    for letter in found.dead:
        assert letter.code == "steps_failed"
        assert "an unexpected KeyError: 'surprise'" in letter.reason


class Code:
    """Stands in for the operator's Lua."""

    made: ClassVar[list[Code]] = []

    def __init__(self) -> None:
        self.closed = False
        Code.made.append(self)

    def close(self) -> None:
        self.closed = True


def test_a_query_with_another_plan_has_another_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "make", lambda _: Code())
    monkeypatch.setattr(Code, "made", [])
    route = stream(transform={"lua": "function transform(m) return m end"})
    target = StoreTarget("postgresql://nobody@127.0.0.1:1/none", 1, 0)

    def worker(plan: SinkPlan) -> writer.Worker:
        fan_out = FanOut("test-steps", [route], target, None, {"events": plan})
        return writer._worker(fan_out)

    first = worker(SinkPlan(0))
    assert worker(SinkPlan(0)) is first
    first.streams[0].start()
    other = SinkPlan(0, filter=(Field(Reference("record", "a"), Type(Kind.INT)),))
    second = worker(other)
    assert second is not first
    (code,) = Code.made
    assert code.closed
    second.close()  # nothing was made yet, and nothing is
    assert len(Code.made) == 1
