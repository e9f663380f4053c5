"""Which messages a sink gets, and a stream's own groups where sinks disagree on these."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.streams_help import Change, wire

from penstock.config.sinks import NatsSinkSettings, StreamSinkSettings
from penstock.core.blocks import Block
from penstock.core.message import ACTIONS, DELETE, READ, UPDATE, WIRE_SCHEMA
from penstock.spark import routes
from penstock.spark.routes import Route, regrouped, size
from penstock.spark.steps import Steps


def route(**settings: Any) -> Route:
    fields = {"type": "stream", "source": "shop", **settings}
    return Route("events", StreamSinkSettings.model_validate(fields), 1)


BATCH = wire(
    [
        Change({"id": 1, "customer": 7}),
        Change({"id": 2, "customer": 7}, UPDATE, {}),
        Change({"id": 1, "customer": 8}, UPDATE, {"customer": 7}),
        Change({"id": 1}, DELETE),
        Change({"id": 3, "customer": 7}, table="orders"),
    ]
)


def chosen(of: Route, batch: pa.RecordBatch = BATCH) -> pa.RecordBatch:
    return Steps(of, None, "shop")(Block(None, batch)).messages


def test_tables_and_actions() -> None:
    assert chosen(route()).num_rows == 5
    assert chosen(route(actions=["delete"])).column("action").to_pylist() == ["delete"]
    assert chosen(route(tables=["public.orders"])).num_rows == 1
    assert chosen(route(tables=["public.orders"], actions=["delete"])).num_rows == 0


@given(
    messages=st.lists(
        st.tuples(
            st.sampled_from(["public", "shop", ""]),
            st.sampled_from(["orders", "items", "x"]),
            st.sampled_from(ACTIONS),
        )
    ),
    actions=st.sets(st.sampled_from(["insert", "update", "delete"]), min_size=1),
    tables=st.none()
    | st.sampled_from([["public.orders"], ["public.*"], ["public.items", "shop.*"]]),
)
def test_a_few_messages_are_chosen_as_many_are(
    messages: list[tuple[str, str, str]], actions: set[str], tables: list[str] | None
) -> None:
    of = route(actions=sorted(actions), **({} if tables is None else {"tables": tables}))
    names = ("table_schema", "table_name", "action")
    rows = [dict(zip(names, message, strict=True)) for message in messages]
    batch = pa.RecordBatch.from_pylist(rows, schema=WIRE_SCHEMA)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(routes, "_FEW", -1)
        by_kernels = of.mask(batch)
    assert of.mask(batch) == by_kernels


def test_a_nats_sink_of_kind_rows_gets_no_delete_and_so_fails_on_none() -> None:
    settings = {"type": "nats", "source": "shop", "kind": "rows"}
    rows = Route("out", NatsSinkSettings.model_validate(settings))
    assert DELETE not in chosen(rows).column("action").to_pylist()
    assert chosen(rows).num_rows == chosen(route(kind="rows")).num_rows - 1
    all_of = Route("out", NatsSinkSettings.model_validate({**settings, "deletes": True}))
    assert DELETE in chosen(all_of).column("action").to_pylist()


def test_a_stream_without_group_by_has_the_sources_groups() -> None:
    assert chosen(route()).equals(BATCH)


def test_groups_of_a_streams_own() -> None:
    batch = chosen(route(group_by=["customer"]))
    groups = batch.column("group_hash").to_pylist()
    old = batch.column("old_group_hash").to_pylist()
    source = BATCH.column("group_hash").to_pylist()
    seven, same, eight, gone, order = groups
    assert seven == same
    assert len({seven, eight, order, *source}) == 3 + len(set(source))
    # A row that moved is of both groups; others keep the row's own group as well, so that a delete
    # that has no more than the primary key stays behind them.
    assert old == [source[0], source[1], seven, None, source[4]]
    assert gone == source[3] == source[0]
    assert batch.drop_columns(["group_hash", "old_group_hash"]).equals(
        BATCH.drop_columns(["group_hash", "old_group_hash"])
    )


def test_groups_are_the_same_in_every_process_and_batch() -> None:
    first = regrouped(BATCH, ["customer"]).column("group_hash").to_pylist()
    again = regrouped(BATCH.slice(1, 2), ["customer"]).column("group_hash").to_pylist()
    assert first[1:3] == again
    assert first[0] == -2897834794791453655


def test_size() -> None:
    texts = [BATCH.column(name).to_pylist() for name in ("record", "changes", "metadata")]
    assert size(BATCH) == sum(len(text or "") for column in texts for text in column)
    assert size(BATCH.slice(0, 0)) == 0


def test_reads_are_not_left_out_by_actions() -> None:
    reads = wire([Change({"id": 1}, READ), Change({"id": 2})])
    assert chosen(route(actions=["delete"]), reads).column("action").to_pylist() == [READ]
