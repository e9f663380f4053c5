"""Rows that wait until their chunk is sealed make the messages that they make one by one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tests.unit.test_decoder import Fed
from tests.unit.test_pgoutput import encode

from penstock.core.errors import CaptureError
from penstock.core.message import Position
from penstock.postgres import raw_rows
from penstock.postgres.capture import Capture, CaptureOptions
from penstock.postgres.chunk import joined
from penstock.postgres.pgoutput import (
    UNCHANGED,
    Begin,
    Column,
    Commit,
    Delete,
    Event,
    Insert,
    ProtocolError,
    Relation,
    Update,
    Value,
)
from penstock.postgres.raw_rows import RawRows
from penstock.postgres.table import Shape, Table
from penstock.postgres.types import TypeInfo, Types

TYPES: dict[int, SearchStrategy[Any]] = {
    23: st.integers(-(2**31), 2**31 - 1).map(lambda n: b"%d" % n),
    25: st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=6).map(str.encode),
    1184: st.sampled_from([b"2024-10-28 21:37:01.12+00", b"infinity", b"2024-10-28 21:37:01+00"]),
    3802: st.sampled_from([b'{"a": [1, "\\n"]}', b"null", b'"\xc3\xa9"']),
    1007: st.sampled_from([b"{}", b"{1,NULL}"]),
}
TABLES = [
    Relation(1, "public", "a", "d", tuple(
        Column(name, oid, -1, oid == 23)
        for name, oid in zip(("id", 'n"%', "at", "doc", "l"), TYPES, strict=True)
    )),
    Relation(2, "s", "b", "f", (Column("k", 25, -1, True), Column("v", 25, -1, True))),
    Relation(3, "s", "no_key", "n", (Column("v", 25, -1, False),)),
    Relation(4, "s", "tied", "d", (Column("k", 25, -1, True), Column("v", 25, -1, False))),
]  # fmt: skip


@st.composite
def values(draw: st.DrawFn, table: Relation, missing: bool) -> list[Value]:
    """Make a row; its key is never null."""
    row: list[Value] = []
    for column in table.columns:
        value = TYPES[column.type_oid]
        if not column.is_key:
            value = value | st.none()
            value = value | st.just(UNCHANGED) if missing else value
        row.append(draw(value))
    return row


@st.composite
def change(draw: st.DrawFn) -> Event:
    table = draw(st.sampled_from(TABLES))
    kind = draw(st.sampled_from("iiiuuUd"))
    old = draw(values(table, missing=False))
    whole = table.replica_identity == "f"
    key = (
        None
        if whole
        else [v if c.is_key else None for v, c in zip(old, table.columns, strict=True)]
    )
    if kind == "i":
        return Insert(table.oid, draw(values(table, missing=draw(st.integers(0, 9)) == 0)))
    if table.oid == 3:
        return Insert(table.oid, old)
    if kind == "d":
        return Delete(table.oid, key, old if whole else None)
    new = draw(values(table, missing=draw(st.booleans())))
    if kind == "u":  # the key stayed as it was
        return Update(table.oid, None, old if whole else None, new)
    return Update(table.oid, key, old if whole else None, new)


transactions = st.lists(
    st.tuples(
        st.lists(change(), max_size=12),
        st.integers(-(2**55), 2**55) | st.just(800_000_000_000_001),
        st.integers(0, 2**32 - 1),
    ),
    min_size=1, max_size=5,
)  # fmt: skip


def messages(program: Any, few: int, splits: int, cut: int) -> list[Any]:
    """Return what a decoder makes of transactions whose rows are made at once where there are `few`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw_rows, "FEW", few)
        fed = Fed(splits=splits, grouping=lambda _, name: (["v"] if name == "tied" else None, None))
        described = False
        for n, (changes, microseconds, xid) in enumerate(program):
            lsn = 100 * (n + 1)
            fed.handle(encode(Begin(lsn, microseconds, xid)))
            if not described:
                described = True
                for relation in TABLES:
                    fed.handle(encode(relation))
                    key = tuple(c.name for c in relation.columns if c.is_key)
                    fed.learn(
                        relation,
                        Shape(key, absent=("made",) if key == ("k",) else ()),
                        Types().converter,
                    )
            for event in changes:
                fed.handle(encode(event))
            fed.handle(encode(Commit(lsn, lsn + 8, microseconds)))
            if n == cut:
                fed.seal()
        fed.seal()
        assert [raw.data for raw in fed._raw.values()] == [[]] * 3
        # Within the patch: messages are made when they are asked for.
        return [
            (
                chunk.start,
                chunk.end,
                chunk.rows,
                chunk.bytes,
                chunk.links,
                chunk.splits,
                split,
                rows,
            )
            for chunk in fed.chunks
            for split in sorted(chunk.splits)
            if (rows := joined([chunk], [split]).to_pylist())
        ]


@given(transactions, st.integers(1, 3), st.integers(0, 4))
def test_rows_made_at_once_are_those_made_one_by_one(program: Any, splits: int, cut: int) -> None:
    assert messages(program, 1, splits, cut) == messages(program, 1 << 30, splits, cut)


@given(
    st.lists(st.lists(values(TABLES[0], missing=False), min_size=1, max_size=8), min_size=1),
    st.data(),
)
def test_bytes_that_are_no_row_are_refused(rows: Any, data: st.DataObject) -> None:
    """Of many rows one is cut, or longer than it says, or has other columns: nothing is made of any."""
    sent = [encode(Insert(1, row)) for some in rows for row in some]
    at = data.draw(st.integers(0, len(sent) - 1))
    how = data.draw(st.sampled_from(["cut", "longer", "width", "kind", "size"]))
    broken = bytearray(sent[at])
    if how == "cut":
        broken = broken[: data.draw(st.integers(8, len(broken) - 1))]
    elif how == "longer":
        broken += b"t"
    elif how == "width":
        broken[7] ^= 1
    elif how == "kind":
        broken[8] = ord("b")
    else:
        broken[9] = 0xFF
    sent[at] = bytes(broken)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw_rows, "FEW", 1)
        fed = Fed()
        fed.feed(Begin(100, 0, 1), TABLES[0])

        def made() -> None:
            for message in sent:
                fed.handle(message)
            fed.found()

        with pytest.raises(ProtocolError):
            made()
        if fed.chunks:
            with pytest.raises(ProtocolError):  # as all is kept
                fed.chunks[0].pieces  # noqa: B018 - it raises


def kept(oid: int, types: Types, **options: Any) -> RawRows | None:
    relation = Relation(1, "s", "t", "d", (Column("id", 23, -1, True), Column("a", oid, -1, False)))
    table = Table(
        relation,
        shape=Shape(("id",)),
        converter=types.converter,
        database="d",
        tag="tag",
        **options,
    )
    return raw_rows.raw_rows(table, utf8=True)


def test_rows_that_depend_on_what_came_before_do_not_wait() -> None:
    types = Types(
        [
            TypeInfo(9000, "s", "mood", "e"),
            TypeInfo(9001, "s", "pair", "c", attributes=(("x", 23),)),
            TypeInfo(9002, "s", "pairs", "b", element=9001),
        ]
    )
    for oid in (25, 1007, 9000):
        assert kept(oid, types) is not None
    for oid in (9001, 9002):
        assert kept(oid, types) is None
    # Deletes lack the column that groups them: the first key orders the rows.
    assert kept(25, types, group_by=["a"]) is None


def test_a_row_that_was_read_before_is_passed_by() -> None:
    fed = Fed(Position(100, 1))
    fed.feed(Begin(100, 0, 1), TABLES[2], *[Insert(3, [b"%d" % n]) for n in range(4)])
    assert [record for _, record in fed.found()] == ['{"v":"2"}', '{"v":"3"}']


@pytest.mark.parametrize("taken", [False, True])
def test_bytes_that_are_no_row_end_the_capture(taken: bool) -> None:
    """The thread that hands rows out meets them, and reports them as the capture's own would."""
    options = CaptureOptions(
        "postgresql://127.0.0.1:1/d", "slot", "p", 1, lambda *_: True, lambda *_: (None, None)
    )
    start = Position(0, -1)
    capture = Capture(options, start)
    try:
        with capture.decoder() as decoder:
            decoder.connected("d", "tag")
            decoder.handle(encode(Begin(100, 0, 1)))
            decoder.handle(encode(TABLES[2]))
            decoder.learn(TABLES[2], Shape(()), Types().converter)
            decoder.handle(encode(Insert(3, [b"1", b"2"])))
        with pytest.raises(CaptureError, match="a row that does not fit no_key") as error:
            capture.take(start, Position(100, 0)) if taken else capture.hand_out(start, 100)
        assert error.value.code == "protocol"
        # Nothing more comes, or what follows would be confirmed without it.
        with pytest.raises(CaptureError, match="a row that does not fit no_key"):
            capture.available(start, 100, 0) if taken else capture.hand_out(start, 100)
    finally:
        capture.close()
