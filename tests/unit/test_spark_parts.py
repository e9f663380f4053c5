"""The parts of the Spark side that need no Spark: blocks, messages as columns, options, masters."""

from __future__ import annotations

import json
import os
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any, cast
from zoneinfo import ZoneInfo

import pyarrow as pa
import pytest
from pyspark.sql import SparkSession
from structlog.testing import capture_logs

from penstock.core.blocks import Block, pack, unpack
from penstock.core.message import WIRE_SCHEMA, Position, RoundPart
from penstock.spark.message_schema import MESSAGE_SCHEMA, to_messages, to_wire
from penstock.spark.options import SourceOptions
from penstock.spark.settings import lanes, local_master, warn_of_few_slots


def wire(rows: int) -> pa.RecordBatch:
    metadata = {
        "table_schema": "public", "table_name": "t", "database": "d",
        "commit_timestamp": "2026-07-01T12:00:00.000001Z", "commit_lsn": 9, "transaction_id": 7,
        "record_pks": [1, "a"], "unavailable": ["big"],
    }  # fmt: skip
    return pa.RecordBatch.from_pylist(
        [
            {
                "record": json.dumps({"id": i}), "changes": None, "action": "insert",
                "table_schema": "public", "table_name": "t", "commit_lsn": 9, "commit_idx": i,
                "metadata": json.dumps(
                    {**metadata, "commit_idx": i, "idempotency_key": f"x-9-{i}"},
                    separators=(",", ":"),
                ),
                "idempotency_key": f"x-9-{i}", "group_hash": i, "old_group_hash": None,
                "part": 0,
            }
            for i in range(rows)
        ],
        schema=WIRE_SCHEMA,
    )  # fmt: skip


@pytest.mark.parametrize("rows", [0, 1, 2000, 4001])
@pytest.mark.parametrize("part", [None, RoundPart(Position(8, 3), Position(1 << 62, 5), 1, 2)])
def test_blocks_hold_every_message_in_order(rows: int, part: RoundPart | None) -> None:
    found = [b for b in unpack(iter([pack(wire(rows), part)])) if isinstance(b, Block)]
    assert [block.last for block in found] == [*[False] * (len(found) - 1), True]
    batches = [block.messages for block in found]
    assert max((b.num_rows for b in batches), default=0) <= 2000
    assert pa.Table.from_batches(batches, WIRE_SCHEMA).equals(pa.Table.from_batches([wire(rows)]))
    assert {block.part for block in found} == {part}
    assert all(isinstance(b.part.end, Position) for b in found if b.part is not None)
    assert all(block.results is None for block in found)


def test_messages_go_to_columns_and_back() -> None:
    messages = to_messages(wire(3))
    assert messages.schema.equals(MESSAGE_SCHEMA)
    first = messages.to_pylist()[0]["metadata"]
    assert first["commit_timestamp"] == datetime(2026, 7, 1, 12, 0, 0, 1, UTC)
    assert first["record_pks"] == '[1,"a"]'
    back, before = to_wire(messages).to_pylist(), wire(3).to_pylist()
    assert [_parsed(row) for row in back] == [_parsed(row) for row in before]


def test_a_commit_timestamp_is_utc_whatever_the_sessions_zone() -> None:
    messages = to_messages(wire(1))
    zone = pa.timestamp("us", tz="Europe/Berlin")
    metadata = messages.column("metadata").to_pylist()[0]
    metadata["commit_timestamp"] = metadata["commit_timestamp"].astimezone(
        ZoneInfo("Europe/Berlin")
    )
    fields = [
        f.with_type(zone) if f.name == "commit_timestamp" else f for f in MESSAGE_SCHEMA[3].type
    ]
    column = pa.array([metadata], pa.struct(fields))
    local = pa.RecordBatch.from_arrays(
        [column if n == "metadata" else messages.column(n) for n in messages.schema.names],
        names=messages.schema.names,
    )
    assert _parsed(to_wire(local).to_pylist()[0]) == _parsed(wire(1).to_pylist()[0])


def _parsed(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "metadata": json.loads(row["metadata"])}


def test_source_options() -> None:
    options = SourceOptions.parse({"url": "postgresql://h/d", "tables": "a.b, c.*", "slot": "s"})
    assert options.tables == ["a.b", "c.*"]
    assert options.publication == "s"
    assert options.includes("c", "x")
    assert not options.includes("a", "x")


@pytest.mark.parametrize(
    ("given", "reported"),
    [
        ({}, "url"),
        ({"url": "postgresql://h/d", "tabels": "x.y"}, "tabels"),
        ({"url": "postgresql://h/d", "tables": "orders"}, "public.orders"),
        ({"url": "postgresql://h/d", "splits": "none"}, "splits"),
        ({"url": "postgres//u:s3cret@h/d"}, "not a Postgres URL"),
    ],
)
def test_wrong_source_options_are_reported_without_their_secrets(
    given: dict[str, str], reported: str
) -> None:
    with pytest.raises(ValueError, match=reported) as raised:
        SourceOptions.parse(given)
    assert "s3cret" not in str(raised.value)


def test_groupings_that_agree_are_the_sources_and_others_share_what_they_can() -> None:
    groupings = (
        '[{"tables": ["a.*"], "group_by": ["x", "y"]}, {"tables": ["a.t"], "group_by": ["y", "z"]},'
        ' {"tables": ["a.u"], "group_by": null}]'
    )
    options = SourceOptions.parse({"url": "postgresql://h/d", "groupings": groupings})
    assert options.grouping("a", "other") == (["x", "y"], None)
    assert options.grouping("a", "t") == (None, ["y"])
    assert options.grouping("a", "u") == (None, [])
    assert options.grouping("b", "t") == (None, None)


def test_a_local_master_has_slots_for_every_source_and_lanes_for_its_cores() -> None:
    context = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=5))
    for master, cores in ("local[2]", 2), ("local", 1), ("local[*]", os.cpu_count()):
        assert local_master(master) == "local[512]"
        assert lanes(cast(SparkSession, context), master, 3) == cores
    assert local_master("spark://h:7077") == "spark://h:7077"
    for sources, each in (1, 5), (2, 2), (5, 1), (9, 1):
        assert lanes(cast(SparkSession, context), "spark://h:7077", sources) == each


def test_a_master_with_fewer_slots_than_sources_is_named() -> None:
    context = SimpleNamespace(sparkContext=SimpleNamespace(defaultParallelism=2))
    with capture_logs() as logs:
        for sources in 1, 2, 3:
            warn_of_few_slots(cast(SparkSession, context), sources)
    (entry,) = logs
    assert (entry["slots"], entry["needed"], entry["log_level"]) == (2, 3, "warning")
