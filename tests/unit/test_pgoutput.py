"""The pgoutput parser against an encoder of its own, and against bytes that are none."""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from penstock.postgres import pgoutput
from penstock.postgres.pgoutput import (
    UNCHANGED,
    Begin,
    Column,
    Commit,
    Delete,
    Event,
    Insert,
    Message,
    Origin,
    ProtocolError,
    Relation,
    Row,
    Truncate,
    Type,
    Update,
    Value,
)


def int16(n: int) -> bytes:
    return struct.pack("!H", n)


def int32(n: int) -> bytes:
    return struct.pack("!I", n)


def int64(n: int) -> bytes:
    return struct.pack("!Q", n)


def signed64(n: int) -> bytes:
    return struct.pack("!q", n)


def string(text: str) -> bytes:
    return text.encode() + b"\0"


def tuple_data(row: Row) -> bytes:
    def value(v: Value) -> bytes:
        if v is UNCHANGED:
            return b"u"
        return b"n" if not isinstance(v, bytes) else b"t" + int32(len(v)) + v

    return int16(len(row)) + b"".join(map(value, row))


def old_tuple(key: Row | None, old: Row | None) -> bytes:
    if key is not None:
        return b"K" + tuple_data(key)
    return b"" if old is None else b"O" + tuple_data(old)


def column(c: Column) -> bytes:
    return (
        bytes([c.is_key]) + string(c.name) + int32(c.type_oid) + struct.pack("!i", c.type_modifier)
    )


def qualified(schema: str) -> str:
    return "" if schema == "pg_catalog" else schema


ENCODERS: dict[type, Callable[[Any], bytes]] = {
    Begin: lambda e: b"B" + int64(e.final_lsn) + signed64(e.timestamp) + int32(e.xid),
    Commit: lambda e: (
        b"C\0" + int64(e.commit_lsn) + int64(e.end_lsn) + signed64(e.timestamp)
    ),
    Origin: lambda e: b"O" + int64(e.lsn) + string(e.name),
    Relation: lambda e: (
        b"R" + int32(e.oid) + string(qualified(e.schema)) + string(e.name)
        + e.replica_identity.encode() + int16(len(e.columns)) + b"".join(map(column, e.columns))
    ),
    Type: lambda e: b"Y" + int32(e.oid) + string(qualified(e.schema)) + string(e.name),
    Insert: lambda e: b"I" + int32(e.relation) + b"N" + tuple_data(e.new),
    Update: lambda e: (
        b"U" + int32(e.relation) + old_tuple(e.key, e.old) + b"N" + tuple_data(e.new)
    ),
    Delete: lambda e: b"D" + int32(e.relation) + old_tuple(e.key, e.old),
    Truncate: lambda e: (
        b"T" + int32(len(e.relations)) + bytes([e.cascade | e.restart_identity << 1])
        + b"".join(map(int32, e.relations))
    ),
    Message: lambda e: (
        b"M" + bytes([e.transactional]) + int64(e.lsn) + string(e.prefix) + int32(len(e.content))
        + e.content
    ),
}  # fmt: skip


def encode(event: Event) -> bytes:
    return ENCODERS[type(event)](event)


u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
i64 = st.integers(-(2**63), 2**63 - 1)
names = st.text(st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=12)
rows: SearchStrategy[Row] = st.lists(
    st.one_of(st.binary(max_size=30), st.none(), st.just(UNCHANGED)), max_size=6
)
columns = st.lists(st.builds(Column, names, u32, st.integers(-(2**31), 2**31 - 1), st.booleans()))
events: SearchStrategy[Event] = st.one_of(
    st.builds(Begin, u64, i64, u32),
    st.builds(Commit, u64, u64, i64),
    st.builds(Origin, u64, names),
    st.builds(Relation, u32, names, names, st.sampled_from("dnfi"), columns.map(tuple)),
    st.builds(Type, u32, names, names),
    st.builds(Insert, u32, rows),
    st.builds(Update, u32, rows, st.none(), rows),
    st.builds(Update, u32, st.none(), rows | st.none(), rows),
    st.builds(Delete, u32, rows, st.none()),
    st.builds(Delete, u32, st.none(), rows),
    st.builds(Truncate, st.lists(u32, max_size=5).map(tuple), st.booleans(), st.booleans()),
    st.builds(Message, st.booleans(), u64, names, st.binary(max_size=20)),
)


@given(events)
def test_round_trip(event: Event) -> None:
    parsed = pgoutput.parse(encode(event))
    assert parsed == event
    assert type(parsed) is type(event)


@given(events, st.data())
def test_truncated(event: Event, data: st.DataObject) -> None:
    encoded = encode(event)
    cut = data.draw(st.integers(0, len(encoded) - 1))
    with pytest.raises(ProtocolError):
        pgoutput.parse(encoded[:cut])
    with pytest.raises(ProtocolError):
        pgoutput.parse(encoded + b"\0")


@given(events, st.data())
def test_garbled(event: Event, data: st.DataObject) -> None:
    """Whatever the bytes: an event or a ProtocolError, never another exception."""
    encoded = bytearray(encode(event))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    parse_or_refuse(bytes(encoded))


@given(st.sampled_from(b"BCORYIUDTM"), st.binary(max_size=60))
def test_noise(kind: int, rest: bytes) -> None:
    parse_or_refuse(bytes([kind]) + rest)


def parse_or_refuse(data: bytes) -> None:
    with contextlib.suppress(ProtocolError):
        pgoutput.parse(data)


@pytest.mark.parametrize("data", [b"", b"Z", b"\xff\xff", b"S\0\0\0\1"])
def test_unknown_kinds(data: bytes) -> None:
    with pytest.raises(ProtocolError, match="unknown pgoutput message"):
        pgoutput.parse(data)


def test_tuples_of_the_wrong_kind() -> None:
    for data in (b"I\0\0\0\1K\0\0", b"U\0\0\0\1X\0\0", b"U\0\0\0\1K\0\0K\0\0", b"D\0\0\0\1N\0\0"):
        with pytest.raises(ProtocolError, match="was expected"):
            pgoutput.parse(data)
    with pytest.raises(ProtocolError, match="column format 0x62"):
        pgoutput.parse(b"I\0\0\0\1N\0\1b\0\0\0\1x")


def test_schema_of_the_catalog_is_named() -> None:
    event = pgoutput.parse(b"Y\0\0\0\1\0name\0")
    assert event == Type(1, "pg_catalog", "name")
