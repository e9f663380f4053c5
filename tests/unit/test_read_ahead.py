"""Relations of a stream, looked up together."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import cast

import pytest

from penstock.core.errors import CaptureError
from penstock.postgres import pgoutput
from penstock.postgres.catalog import CaptureCatalog
from penstock.postgres.pgoutput import Relation
from penstock.postgres.read_ahead import ReadAhead
from penstock.postgres.replication import Keepalive, ReplicationStream
from penstock.postgres.table import Shape

LOST = CaptureError("connection_lost", "Lost.", transient=True)


class Stream:
    """A stream whose messages arrive when `arrive` is called."""

    def __init__(self) -> None:
        self.arrived: deque[bytes | Keepalive | CaptureError] = deque()

    def receive(self) -> None:
        pass

    def read(self) -> bytes | Keepalive | None:
        if not self.arrived:
            return None
        found = self.arrived.popleft()
        if isinstance(found, CaptureError):
            raise found
        return found


class Catalog:
    """A catalog that notes what it is asked; the key is the number of the query."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def shapes(self, relations: Sequence[Relation]) -> list[Shape]:
        self.asked.append([relation.name for relation in relations])
        return [Shape((f"key{len(self.asked)}",), None, False, ()) for _ in relations]


def described(oid: int, name: str) -> bytes:
    column = b"\x01id\0" + (20).to_bytes(4, "big") + b"\xff\xff\xff\xff"
    return b"R" + oid.to_bytes(4, "big") + b"public\0" + name.encode() + b"\0d\0\x01" + column


class Reading:
    """A `ReadAhead` of a stream and a catalog, and a reader of it that looks relations up."""

    def __init__(self) -> None:
        self.stream, self.catalog = Stream(), Catalog()
        self.ahead = ReadAhead(
            cast(ReplicationStream, self.stream),
            cast(CaptureCatalog, self.catalog),
            lambda _, name: name != "other",
        )

    def read_all(self) -> list[object]:
        """Return what is read, relations by name and key, until there is no more."""
        found: list[object] = []
        while (data := self.ahead.reader()()) is not None:
            if not isinstance(data, bytes) or data[:1] != b"R":
                found.append(data)
                continue
            relation = pgoutput.parse(data)
            assert isinstance(relation, Relation)
            if relation.name == "other":
                continue
            found.append((relation.name, *self.ahead.shape(relation).primary_key))
        return found


def test_relations_that_have_arrived_are_looked_up_in_one_query() -> None:
    of = Reading()
    keepalive = Keepalive(7, reply_requested=False)
    of.stream.arrived += [described(1, "a"), b"I1", described(2, "b"), keepalive]
    of.stream.arrived += [described(3, "other"), described(4, "d"), b"I4"]

    read = of.read_all()

    assert of.catalog.asked == [["a", "b", "d"]]
    assert read[:4] == [("a", "key1"), b"I1", ("b", "key1"), keepalive]
    assert read[-2:] == [("d", "key1"), b"I4"]


def test_a_relation_that_comes_again_later_is_looked_up_again() -> None:
    """Its table may have been altered since."""
    of = Reading()
    of.stream.arrived += [described(1, "a"), b"I1"]
    assert of.read_all() == [("a", "key1"), b"I1"]

    of.stream.arrived += [described(1, "a"), b"I2"]

    assert of.read_all() == [("a", "key2"), b"I2"]


def test_the_same_relation_twice_among_those_that_have_arrived_is_looked_up_twice() -> None:
    of = Reading()
    of.stream.arrived += [described(1, "a"), described(2, "b"), described(2, "b")]

    assert of.read_all() == [("a", "key1"), ("b", "key1"), ("b", "key2")]


def test_what_came_before_an_error_is_read_before_it() -> None:
    of = Reading()
    of.stream.arrived += [described(1, "a"), b"I1", LOST]
    assert of.ahead.read() == described(1, "a")
    relation = pgoutput.parse(described(1, "a"))
    assert isinstance(relation, Relation)
    of.ahead.shape(relation)

    assert of.ahead.read() == b"I1"
    with pytest.raises(CaptureError) as raised:
        of.ahead.read()
    assert raised.value is LOST


def test_a_message_that_is_none_is_an_error_when_its_turn_comes() -> None:
    of = Reading()
    of.stream.arrived += [described(1, "a"), b"I1", b"R"]

    with pytest.raises(pgoutput.ProtocolError):
        of.read_all()

    assert of.catalog.asked == [["a"]]
