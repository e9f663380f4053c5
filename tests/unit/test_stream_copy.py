"""The binary COPY of a stream's messages, read back by a plain decoder."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.streams_help import Change, deleted, inserted, moved, updated, wire

from penstock.core.message import DELETE, UPDATE, WIRE_SCHEMA, Position
from penstock.streams import copy
from penstock.streams.records import commit_position, stream_end, stream_idx


def decoded(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the rows of binary COPY data without its header and trailer."""
    at = 0
    while at < len(data):
        (count,) = struct.unpack_from(">h", data, at)
        assert count == len(copy.COLUMNS)
        at += 2
        row: dict[str, Any] = {}
        for name in copy.COLUMNS:
            (size,) = struct.unpack_from(">i", data, at)
            at += 4
            if size < 0:
                row[name] = None
                continue
            value = data[at : at + size]
            assert len(value) == size
            at += size
            number = name in ("lsn", "idx", "group_hash", "old_group_hash")
            row[name] = struct.unpack(">q", value)[0] if number else value.decode()
        yield row


def rows(batch: pa.RecordBatch, kind: str = "changes", base: int = 0) -> list[dict[str, Any]]:
    placed = copy.placed(batch, kind, base)
    return list(decoded(b"".join(map(bytes, copy.rows(placed, kind)))))


int64 = st.integers(-(2**63), 2**63 - 1)
text = st.text(st.characters(blacklist_categories=["Cs"]), max_size=20)
changes = st.builds(
    Change,
    record=st.fixed_dictionaries({"id": text | st.integers(-(2**63), 2**63 - 1), "name": text}),
    action=st.sampled_from(["insert", "update", "delete", "read"]),
    changes=st.none() | st.dictionaries(text, text, max_size=2),
    group=int64,
    old_group=st.none() | int64,
    schema=text.filter(bool),
    table=text.filter(bool),
    position=st.builds(Position, st.integers(0, 2**62), st.integers(0, 2**52 - 1)),
    part=st.integers(0, 999),
)


@given(st.lists(changes, min_size=1, max_size=20), st.integers(0, 2**62 - 1), st.integers(0, 5))
def test_every_column_comes_out_as_it_went_in(listed: list[Change], base: int, cut: int) -> None:
    batch = wire(listed).slice(cut)
    for row, message in zip(rows(batch, base=base), batch.to_pylist(), strict=True):
        assert row["lsn"] == message["commit_lsn"] + base
        assert row["idx"] == stream_idx(message["commit_idx"], message["part"])
        assert commit_position(row["lsn"], row["idx"]).idx == message["commit_idx"]
        assert row["key"] is None
        same = ("group_hash", "old_group_hash", "table_schema", "table_name", "action")
        assert {name: row[name] for name in same} == {name: message[name] for name in same}
        changed = "null" if message["changes"] is None else message["changes"]
        assert row["message"] == (
            f'{{"record":{message["record"]},"changes":{changed},'
            f'"action":"{message["action"]}","metadata":{message["metadata"]}}}'
        )


@given(st.lists(changes, min_size=1, max_size=20))
def test_rows_have_a_key_and_mark_deletes_alone(listed: list[Change]) -> None:
    batch = wire(listed)
    for row, message, change in zip(rows(batch, "rows"), batch.to_pylist(), listed, strict=True):
        pks = orjson.dumps([change.record["id"]]).decode()
        assert row["key"] == f"{change.schema}.{change.table}:{pks}"
        deletion = '"action":"delete",' if change.action == DELETE else ""
        assert row["message"] == (
            f'{{"record":{message["record"]},{deletion}"metadata":{message["metadata"]}}}'
        )


def test_a_batch_of_many_blocks_keeps_its_order() -> None:
    count = 20_001
    found = rows(wire([inserted(1) for _ in range(count)]))
    assert [row["idx"] for row in found] == [stream_idx(n) for n in range(count)]


@pytest.mark.parametrize(
    ("metadata", "pks"),
    [
        ('{"record_pks":[1,"a"],"unavailable":[]}', '[1,"a"]'),
        (r'{"x":"\"record_pks\":[9]","record_pks":["]"],"unavailable":["b"]}', '["]"]'),
        (r'{"record_pks":["],\"unavailable\":["],"unavailable":[]}', r'["],\"unavailable\":["]'),
        ('{"unavailable":[],"record_pks":[3]}', "[3]"),
        ('{"record_pks":[],"unavailable":[]}', None),
        ("{}", None),
    ],
)
def test_the_key_is_found_in_any_metadata(metadata: str, pks: str | None) -> None:
    batch = wire([updated(1), updated(2)])
    index = WIRE_SCHEMA.get_field_index("metadata")
    values = pa.array([metadata, '{"record_pks":[7],"unavailable":[]}'])
    keys = [row["key"] for row in rows(batch.set_column(index, "metadata", values), "rows")]
    assert keys == [None if pks is None else f"public.items:{pks}", "public.items:[7]"]


def test_a_long_key_fits_an_index_and_stays_apart() -> None:
    long = ["x" * 5000, "x" * 5000, "x" * 4999 + "y", "short"]
    keys = [row["key"] for row in rows(wire([deleted(key) for key in long]), "rows")]
    assert keys[0] == keys[1] != keys[2]
    assert max(len(key) for key in keys) < 100
    assert keys[3] == 'public.items:["short"]'


def test_an_update_that_moves_a_row_has_both_groups() -> None:
    batch = wire([Change({"id": 1}, UPDATE, {}, 5, -6), Change({"id": 2}, group=7)])
    assert [(row["group_hash"], row["old_group_hash"]) for row in rows(batch)] == [
        (5, -6),
        (7, None),
    ]


def test_a_row_that_leaves_its_key_is_deleted_there_first() -> None:
    batch = wire([inserted(9), moved("a", "b", n=1), updated("c"), moved("b", "a", n=2)])
    found = rows(batch.slice(1), "rows", base=1000)
    assert [(row["lsn"], row["idx"], row["key"], row["action"]) for row in found] == [
        (1101, stream_idx(1) - 1, 'public.items:["a"]', "delete"),
        (1101, stream_idx(1), 'public.items:["b"]', "update"),
        (1101, stream_idx(2), 'public.items:["c"]', "update"),
        (1101, stream_idx(3) - 1, 'public.items:["b"]', "delete"),
        (1101, stream_idx(3), 'public.items:["a"]', "update"),
    ]
    gone, there = (orjson.loads(row["message"]) for row in found[:2])
    assert (list(gone), gone["record"], gone["action"]) == (
        ["record", "action", "metadata"], {"id": "a"}, "delete",
    )  # fmt: skip
    assert gone["metadata"]["record_pks"] == ["a"]
    assert gone["metadata"]["idempotency_key"] != there["metadata"]["idempotency_key"]
    assert there == {"record": {"id": "b", "n": 1}, "metadata": there["metadata"]}
    # Both stay in order with what either key had.
    groups = [(row["group_hash"], row["old_group_hash"]) for row in found]
    assert groups[0] == groups[1]
    assert groups[0] == groups[3][::-1]


def test_a_key_that_changed_comes_in_one_message() -> None:
    (row,) = rows(wire([moved("a", "b")]))
    message = orjson.loads(row["message"])
    assert (message["action"], message["changes"]) == ("update", {"id": "a"})
    assert row["idx"] == stream_idx(0)


@given(st.integers(-1, 2**52), st.integers(0, 999))
def test_positions_of_a_message_lie_behind_the_ones_before_and_before_its_end(
    commit_idx: int, part: int
) -> None:
    delete, last = stream_idx(commit_idx) - 1, stream_end(commit_idx)
    assert stream_end(commit_idx - 1) < delete < stream_idx(commit_idx, part) < last
    assert stream_idx(commit_idx, part) < stream_idx(commit_idx, part + 1) < last
    for idx in (delete, stream_idx(commit_idx, part), last):
        assert commit_position(7, idx) == Position(7, commit_idx)


def test_parts_of_an_update_that_moved_a_row_delete_its_old_key_once() -> None:
    parts = [replace(moved("a", "b", n=n), position=Position(9, 4), part=n) for n in range(3)]
    other = replace(moved("b", "c"), position=Position(9, 5))
    found = rows(wire([*parts, other]), "rows")
    assert [(row["idx"], row["action"]) for row in found] == [
        (stream_idx(4) - 1, "delete"),
        *((stream_idx(4, n), "update") for n in range(3)),
        (stream_idx(5) - 1, "delete"),
        (stream_idx(5), "update"),
    ]
    without_first = rows(wire([*parts, other]).slice(1), "rows")
    assert [row["idx"] for row in without_first] == [row["idx"] for row in [found[0], *found[2:]]]
    found = found[:4]
    assert len({row["key"] for row in found[1:]}) == 1
    keys = [orjson.loads(row["message"])["metadata"]["idempotency_key"] for row in found]
    assert keys == ["tag-9-4-old", "tag-9-4", "tag-9-4-1", "tag-9-4-2"]
