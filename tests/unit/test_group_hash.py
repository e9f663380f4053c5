"""The hash of a group: its pinned values, and that all who compute it agree."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import orjson
import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tests.streams_help import Change, wire
from xxhash import xxh3_64_intdigest

from penstock.core.group_hash import GroupKey, group_hash
from penstock.core.message import Position
from penstock.postgres.changed_row import changed_row
from penstock.postgres.chunk import ChunkBuilder
from penstock.postgres.kernels import kernel
from penstock.postgres.pgoutput import Column, Delete, Insert, Relation
from penstock.postgres.table import Shape, Table, WireRow
from penstock.postgres.transaction import Transaction
from penstock.postgres.types import Types
from penstock.postgres.values import text
from penstock.spark.message_schema import to_messages, to_wire
from penstock.spark.routes import regrouped

INT8, TEXT, BOOL, FLOAT8, BYTEA, JSONB, TIMESTAMPTZ = 20, 25, 16, 701, 17, 3802, 1184


TRANSACTION = Transaction(9, 0, 1, b"tag")


def table(
    *types: int,
    schema: str = "public",
    name: str = "orders",
    key: int = 1,
    identity: str = "f",
    **options: Any,
) -> Table:
    """Make a table with columns `a`, `b`, … of these types, of which the first `key` are its key."""
    columns = [Column(chr(97 + i), oid, -1, i < key) for i, oid in enumerate(types)]
    relation = Relation(5, schema, name, identity, tuple(columns))
    names = tuple(c.name for c in columns[:key])
    return Table(
        relation,
        shape=Shape(names),
        converter=Types().converter,
        database="d",
        tag="tag",
        **options,
    )


def captured(of: Table, *rows: list[bytes | None]) -> pa.RecordBatch:
    return batch_of(
        of.insert(Insert(5, list(row)), TRANSACTION, idx) for idx, row in enumerate(rows)
    )


def deleted(of: Table, key: list[bytes | None]) -> pa.RecordBatch:
    return batch_of([of.delete(Delete(5, list(key), None), TRANSACTION, 0)])


def batch_of(rows: Iterable[WireRow]) -> pa.RecordBatch:
    builder = ChunkBuilder(Position(0, 0), 1)
    for row in rows:
        builder.add(row, 1)
    ((_, batch, _),) = builder.take(Position(9, 9)).pieces
    assert batch is not None
    return batch


def hashes(batch: pa.RecordBatch) -> list[int]:
    found: list[int] = batch.column("group_hash").to_pylist()
    return found


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 3244421341483603138),
        ('["public","orders",[42]]', 578181270879523013),
        ('["public","orders",[]]', -7065767165134995419),
        ('["public","orders",[null]]', 3534956496397927428),
        ('["public","orders",["null"]]', -304803584375910984),
        ('["public","orders",[""]]', -798574344755715557),
        ('["public","orders",["Zoë 😀"]]', 1844890011213050717),
        ('["public","orders",[7,"eu-1"]]', -452655343349088396),
        ('["Größe","100% \\"x\\"",[1]]', -6109466484640090872),
        ('["public","orders",["customer_id"],[7]]', -5074577865804920077),
    ],
)  # fmt: skip
def test_values_are_pinned(text: str, expected: int) -> None:
    """Streams store them: with other ones new messages do not wait for those of their group."""
    assert group_hash(text.encode()) == expected
    assert group_hash(text.encode()) % 2**64 == xxh3_64_intdigest(text.encode(), seed=0)


@pytest.mark.parametrize(
    ("of", "row", "expected"),
    [
        (table(INT8), [b"42"], '["public","orders",[42]]'),
        (table(TEXT), [b""], '["public","orders",[""]]'),
        (table(TEXT), ["Zoë 😀".encode()], '["public","orders",["Zoë 😀"]]'),
        (table(INT8, TEXT, key=2), [b"7", b"eu-1"], '["public","orders",[7,"eu-1"]]'),
        (table(INT8, key=0), [b"7"], '["public","orders",[7]]'),
        (table(INT8, schema="Größe", name='100% "x"'), [b"1"], '["Größe","100% \\"x\\"",[1]]'),
        (table(INT8, TEXT, group_by=["b"]), [b"1", None], '["public","orders",["b"],[null]]'),
        (table(INT8, TEXT, group_by=["b"]), [b"1", b"null"], '["public","orders",["b"],["null"]]'),
        (table(INT8, TEXT, group_by=["b", "a"]), [b"1", b"x"], '["public","orders",["b","a"],["x",1]]'),
        (table(INT8, TEXT, group_by=["a"]), [b"1", b"x"], '["public","orders",[1]]'),
        (table(INT8, TEXT, group_by=["gone"]), [b"1", b"x"], '["public","orders",[1]]'),
        (table(INT8, TEXT, group_by=[]), [b"1", b"x"], '["public","orders",[]]'),
    ],
)  # fmt: skip
def test_the_key_of_a_captured_row(of: Table, row: list[bytes | None], expected: str) -> None:
    assert hashes(captured(of, row)) == [group_hash(expected.encode())]


def test_a_truncate_is_in_no_rows_group() -> None:
    row = table(INT8).truncate(TRANSACTION, 0)
    assert row[9] == group_hash(b'["public","orders",[]]')


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)
VALUES: dict[int, st.SearchStrategy[bytes]] = {
    INT8: st.integers(-(2**63), 2**63 - 1).map(lambda n: b"%d" % n),
    TEXT: texts.map(str.encode),
    BOOL: st.sampled_from([b"t", b"f"]),
    FLOAT8: st.sampled_from([b"1e-05", b"-0", b"NaN", b"0.1", b"1e+20"]),
    BYTEA: st.binary(max_size=4).map(lambda b: b"\\x" + b.hex().encode()),
    JSONB: st.sampled_from([b'{"a": 1.10}', b"[1, null]", b'"x"', b"1" + b"0" * 400]),
    TIMESTAMPTZ: st.sampled_from([b"2024-10-28 21:37:01.5+00", b"infinity"]),
}


@st.composite
def tables(draw: st.DrawFn) -> tuple[Table, list[list[bytes | None]]]:
    types = draw(st.lists(st.sampled_from([*VALUES]), min_size=1, max_size=3))
    key = draw(st.integers(1, len(types)))
    columns = [VALUES[t] if i < key else st.none() | VALUES[t] for i, t in enumerate(types)]
    rows: list[list[bytes | None]] = draw(
        st.lists(st.tuples(*columns).map(list), min_size=1, max_size=4)
    )
    group_by = draw(st.none() | st.lists(st.sampled_from("abc"[: len(types)]), unique=True))
    names = texts.filter(bool)
    made = table(
        *types, schema=draw(names), name=draw(names), key=key, group_by=group_by
    )  # fmt: skip
    return made, rows


@given(tables())
def test_all_who_compute_a_hash_agree(drawn: tuple[Table, list[list[bytes | None]]]) -> None:
    of, rows = drawn
    batch = captured(of, *rows)

    converters = [Types().converter(c.type_oid) for c in of.relation.columns]
    columns = [pa.array(column, pa.binary()) for column in zip(*rows, strict=True)]
    values = [kernel(c, utf8=True)(v) for c, v in zip(converters, columns, strict=True)]
    read = of.groups.hashes(values, len(rows))
    assert read.group.to_pylist() == hashes(batch)

    changed = [changed_row(of, Insert(5, list(row))).hashes for row in rows]
    assert changed == [(h,) for h in read.own.to_pylist()]
    # A frame without the column, and so whoever reads a message, finds the rows' own keys.
    frame = to_messages(batch).drop_columns(["group_hash", "old_group_hash"])
    assert hashes(to_wire(frame)) == read.own.to_pylist()


@given(tables())
def test_a_sinks_groups_are_those_of_a_source_that_groups_alike(
    drawn: tuple[Table, list[list[bytes | None]]],
) -> None:
    of, rows = drawn
    assume(len(of.columns) > 1)
    types = [c.type_oid for c in of.relation.columns]
    names = [of.columns[-1]]
    alike = table(*types, schema=of.schema, name=of.name, group_by=names)
    assert hashes(regrouped(captured(of, *rows), names)) == hashes(captured(alike, *rows))


def test_a_streams_groups_keep_the_order_of_rows_whose_deletes_lack_the_group() -> None:
    of = table(INT8, TEXT, identity="d", group_by=["b"])
    made, gone = captured(of, [b"1", b"x"]), deleted(of, [b"1", None])
    first, last = (regrouped(batch, ["b"]).to_pylist()[0] for batch in (made, gone))
    assert first["group_hash"] == group_hash(b'["public","orders",["b"],["x"]]')
    assert first["old_group_hash"] == last["group_hash"] == group_hash(b'["public","orders",[1]]')


clashing = st.text('a",[]\\%', max_size=3)
parts = st.tuples(clashing, clashing, st.lists(st.tuples(clashing, st.none() | clashing)))


@given(st.lists(st.tuples(parts, st.booleans()), max_size=12))
def test_other_keys_have_other_hashes(
    drawn: list[tuple[tuple[str, str, list[tuple[str, str | None]]], bool]],
) -> None:
    keys, found = set(), set()
    for (schema, name, columns), named in drawn:
        names = tuple(c for c, _ in columns) if named else ()
        values = tuple(v for _, v in columns)
        keys.add((schema, name, names, values))
        key = GroupKey(schema, name, range(len(values)), names)
        found.add(key.hash([b"null" if v is None else text(v.encode()) for v in values]))
    assert len(found) == len(keys)


@given(texts, texts, st.lists(st.tuples(texts, st.none() | texts), max_size=3), st.booleans())
def test_a_key_is_json(
    schema: str, name: str, columns: list[tuple[str, str | None]], named: bool
) -> None:
    names, values = [c for c, _ in columns], [v for _, v in columns]
    key = GroupKey(schema, name, range(len(columns)), names if named else ())
    parts = [schema, name, names, values] if named and names else [schema, name, values]
    expected = group_hash(orjson.dumps(parts))
    assert key.hash([orjson.dumps(v) for v in values]) == expected
    columns_ = [(b"", pa.array([orjson.dumps(v)] * 2, pa.binary()), b"") for v in values]
    assert key.hashes(columns_, 2).to_pylist() == [expected] * 2


def test_a_group_by_of_a_sink_is_pinned() -> None:
    batch = wire([Change({"id": 1, "customer": 7})])
    own = hashes(batch)[0]
    grouped = regrouped(batch, ["customer"])
    (schema,), (name,) = (
        batch.column("table_schema").to_pylist(),
        batch.column("table_name").to_pylist(),
    )
    assert hashes(grouped) == [group_hash(f'["{schema}","{name}",["customer"],[7]]'.encode())]
    assert grouped.column("old_group_hash").to_pylist() == [own]
