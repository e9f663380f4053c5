"""Wire rows of one table: what the record holds, and by which hashes it keeps its order."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from penstock.postgres.changed_row import changed_row
from penstock.postgres.pgoutput import UNCHANGED, Column, Delete, Insert, Relation, Row, Update
from penstock.postgres.table import Shape, Table, WireRow
from penstock.postgres.transaction import Transaction
from penstock.postgres.types import Types

TRANSACTION = Transaction(0x16B3748, 783_000_000_123_456, 77, b"tag")
OID = 5


def table(
    columns: str = "id! a b",
    identity: str = "d",
    key: tuple[str, ...] = ("id",),
    identity_columns: tuple[str, ...] | None = None,
    deferrable: bool = False,
    **options: Any,
) -> Table:
    """Make a table of text columns; `!` marks those of the replica identity."""
    relation = Relation(
        OID, "public", "t", identity,
        tuple(Column(c.rstrip("!"), 25, -1, c.endswith("!")) for c in columns.split()),
    )  # fmt: skip
    return Table(
        relation, shape=Shape(key, identity_columns, deferrable), converter=Types().converter,
        database="d", tag="tag", **options,
    )  # fmt: skip


def row(*values: str | None) -> Row:
    """`?` is an unchanged TOAST value."""
    return [None if v is None else UNCHANGED if v == "?" else v.encode() for v in values]


def insert(t: Table, *values: str | None) -> WireRow:
    return t.insert(Insert(OID, row(*values)), TRANSACTION, 0)


def update(t: Table, new: Row, key: Row | None = None, old: Row | None = None) -> WireRow:
    return t.update(Update(OID, key, old, new), TRANSACTION, 0)


def delete(t: Table, key: Row | None = None, old: Row | None = None) -> WireRow:
    return t.delete(Delete(OID, key, old), TRANSACTION, 0)


def record(wire: WireRow) -> Any:
    return orjson.loads(wire[0])


def changes(wire: WireRow) -> Any:
    return None if wire[1] is None else orjson.loads(wire[1])


def metadata(wire: WireRow) -> Any:
    return orjson.loads(wire[5])


def groups(wire: WireRow) -> set[int]:
    return {g for g in wire[9:11] if g is not None}


def old_key(wire: WireRow) -> tuple[Any, Any] | None:
    """Return the record and the metadata of the delete of the key that an update left."""
    found = wire[11]
    return (orjson.loads(found["record"]), orjson.loads(found["metadata"])) if found else None


def splits(wire: WireRow) -> set[int]:
    return set(wire[12:])


def test_a_wire_row() -> None:
    wire = table("id! ä%b c").insert(Insert(OID, row("1", 'x"', None)), TRANSACTION, 3)
    assert wire[:5] == (
        b'{"id":"1","\xc3\xa4%b":"x\\"","c":null}',
        None,
        b"insert",
        b"public",
        b"t",
    )
    assert wire[6:9] == (b"tag-23803720-3", 23803720, 3)
    assert metadata(wire) == {
        "table_schema": "public", "table_name": "t", "database": "d",
        "commit_timestamp": "2024-10-23T12:00:00.123456Z", "commit_lsn": 23803720,
        "transaction_id": 77, "idempotency_key": "tag-23803720-3", "commit_idx": 3,
        "record_pks": ["1"], "unavailable": [],
    }  # fmt: skip


def test_transactions_do_not_mix() -> None:
    t = table()
    insert(t, "1", "x", "y")
    other = t.insert(Insert(OID, row("1", "x", "y")), Transaction(9, 0, 78, b"tag"), 0)
    assert metadata(other)["transaction_id"] == 78
    assert other[6] == b"tag-9-0"


def test_an_update_has_what_the_wal_has() -> None:
    t = table()
    assert changes(update(t, row("1", "x", "y"))) == {}
    moved = update(t, row("2", "x", "y"), key=row("1", None, None))
    assert changes(moved) == {"id": "1"}
    assert metadata(moved)["record_pks"] == ["2"]
    full = table(identity="f", columns="id! a! b!")
    wire = update(full, row("1", None, "z"), old=row("1", "x", None))
    assert changes(wire) == {"a": "x", "b": None}


@pytest.mark.parametrize(
    ("identity", "columns", "known"),
    [
        ("d", "id! a b", {"key": row("1", None, None)}),
        ("f", "id! a! b!", {"old": row("1", "x", "y")}),
    ],
)
def test_a_key_that_is_left_has_a_delete(
    identity: str, columns: str, known: dict[str, Row]
) -> None:
    t = table(columns, identity)
    wire = update(t, row("2", "?", "z"), **known)
    left = old_key(wire)
    deletion = delete(t, **known)
    assert left == (
        record(deletion),
        {**metadata(deletion), "idempotency_key": "tag-23803720-0-old"},
    )
    assert left[1]["record_pks"] == ["1"]
    assert wire[11] is not None
    assert wire[11]["key"] == b'{"id":"1"}', "whatever else the old tuple has"
    assert left[1]["idempotency_key"] != metadata(wire)["idempotency_key"]
    assert old_key(update(t, row("1", "x", "z"), **known)) is None
    assert old_key(update(t, row("1", "x", "z"))) is None
    assert old_key(deletion) is old_key(insert(t, "1", "x", "y")) is None


def test_a_part_of_a_key_that_is_left() -> None:
    t = table("a! id b!", key=("b", "a"))
    left = old_key(update(t, row("1", "x", "3"), key=row("1", None, "2")))
    assert left is not None
    assert left[0] == {"a": "1", "b": "2"}
    assert left[1]["record_pks"] == ["2", "1"]


def test_a_key_that_old_tuples_lack_is_left_unseen() -> None:
    t = table("id a! b", identity="i")
    assert old_key(update(t, row("2", "y", "z"), key=row(None, "x", None))) is None
    # A deferrable key may be another row's by now, as where two rows exchange theirs.
    t = table("id! a! b!", identity="f", deferrable=True)
    assert old_key(update(t, row("2", "y", "z"), old=row("1", "y", "z"))) is None
    # Without any primary key there is none to leave.
    t = table("id! a! b!", identity="f", key=())
    assert old_key(update(t, row("2", "y", "z"), old=row("1", "x", "z"))) is None
    # A replica identity may take its place.
    t = table("id a! b", identity="i", key=())
    left = old_key(update(t, row("1", "y", "z"), key=row(None, "x", None)))
    assert left is not None
    assert left[1]["record_pks"] == ["x"]


def test_unchanged_toast_is_filled_from_the_old_tuple_or_named() -> None:
    wire = update(table(), row("1", "?", "y"))
    assert record(wire) == {"id": "1", "b": "y"}
    assert metadata(wire)["unavailable"] == ["a"]
    # A key tuple's NULLs are no values.
    wire = update(table(), row("2", "?", "y"), key=row("1", None, None))
    assert record(wire) == {"id": "2", "b": "y"}
    full = table(identity="f", columns="id! a! b!")
    wire = update(full, row("1", "?", "y"), old=row("1", "big", "z"))
    assert record(wire) == {"id": "1", "a": "big", "b": "y"}
    assert changes(wire) == {"b": "z"}
    assert metadata(wire)["unavailable"] == []
    # The key itself: Postgres sends the old one along.
    t = table()
    wire = update(t, row("?", "x", "y"), key=row("1", None, None))
    assert record(wire) == {"id": "1", "a": "x", "b": "y"}
    assert groups(wire) == groups(insert(t, "1", "x", "y"))


@pytest.mark.parametrize("oid", [25, 17, 114, 1700, 1009, 1007, 3802])
def test_an_insert_that_was_an_update_names_what_it_lacks(oid: int) -> None:
    """As a publication's row filter makes of one that the row enters it by."""
    relation = Relation(
        OID, "public", "t", "d",
        (Column("id", 25, -1, True), Column("a", oid, -1, False), Column("b", 25, -1, False)),
    )  # fmt: skip
    t = Table(
        relation, shape=Shape(("id",)), converter=Types().converter, database="d", tag="tag",
        group_by=["a"],
    )  # fmt: skip
    wire = insert(t, "1", "?", "y")
    assert (wire[2], record(wire), changes(wire)) == (b"insert", {"id": "1", "b": "y"}, None)
    assert metadata(wire)["unavailable"] == ["a"]
    assert metadata(wire)["record_pks"] == ["1"]
    # Its group is not known, but its key holds it in order.
    assert groups(wire) <= groups(insert(t, "1", "7", "y"))
    assert changed_row(t, Insert(OID, row("1", "?", "y"))) == (
        changed_row(t, Insert(OID, row("1", "7", "y")))[0],
        ("1",),
        True,
    )
    assert changed_row(t, Insert(OID, row("?", "x", "y"))).hashes is None


def test_a_value_that_cannot_be_written_is_no_missing_one() -> None:
    with pytest.raises(AttributeError):
        table().insert(Insert(OID, ["1", b"x", b"y"]), TRANSACTION, 0)  # type: ignore[list-item]  # wrong on purpose


def test_a_delete_has_the_identity_or_all() -> None:
    wire = delete(table(), key=row("1", None, None))
    assert (record(wire), changes(wire)) == ({"id": "1"}, None)
    assert metadata(wire)["unavailable"] == ["a", "b"]
    wire = delete(table(identity="f", columns="id! a! b!"), old=row("1", None, "y"))
    assert record(wire) == {"id": "1", "a": None, "b": "y"}
    assert metadata(wire)["unavailable"] == []


def test_old_tuples_of_partitions_that_have_less_than_their_root() -> None:
    t = table(identity="f", columns="id! a! b!", identity_columns=("id",))
    wire = delete(t, old=row("1", None, None))
    assert record(wire) == {"id": "1"}
    assert groups(wire) == groups(insert(t, "1", "x", "y"))
    assert changes(update(t, row("2", "x", "?"), old=row("1", None, None))) == {"id": "1"}
    # Without a key in common, only the table itself keeps the order.
    t = table(identity="d", columns="id a b", key=(), identity_columns=())
    assert groups(insert(t, "1", "x", "y")) == groups(delete(t, key=row("1", None, None)))


def test_groups_follow_the_key() -> None:
    t = table()
    one, two = groups(insert(t, "1", "x", "y")), groups(insert(t, "2", "x", "y"))
    assert one != two
    assert groups(update(t, row("1", "z", "z"))) == one
    assert groups(delete(t, key=row("1", None, None))) == one
    assert groups(update(t, row("2", "x", "y"), key=row("1", None, None))) == one | two
    assert groups(insert(table(), "1", "p", "q")) == one, "a table that was made again"


def test_null_and_text_are_different_groups() -> None:
    t = table(identity="f", columns="id! a! b!", group_by=["a"])
    found = [groups(insert(t, "1", a, "y")) for a in (None, "", "null", "NULL")]
    assert len({frozenset(g) for g in found}) == 4


def test_identity_that_lacks_the_primary_key() -> None:
    t = table("id code! a", identity="i")
    made = insert(t, "1", "c", "x")
    assert metadata(made)["record_pks"] == ["1"]
    assert groups(made) == groups(delete(t, key=row(None, "c", None)))


def test_group_by_columns_that_old_tuples_have() -> None:
    t = table(identity="f", columns="id! a! b!", group_by=["a"])
    one = groups(insert(t, "1", "x", "y"))
    assert groups(insert(t, "2", "x", "y")) == one
    assert groups(delete(t, old=row("1", "x", "y"))) == one
    other = groups(insert(t, "1", "z", "y"))
    moved = update(t, row("1", "z", "y"), old=row("1", "x", "y"))
    assert groups(moved) == one | other
    assert splits(moved) == one | other


def test_group_by_columns_that_deletes_lack() -> None:
    t = table(group_by=["a"])
    made, changed = insert(t, "1", "x", "y"), update(t, row("1", "z", "y"))
    gone, again = delete(t, key=row("1", None, None)), insert(t, "1", "q", "y")
    assert groups(insert(t, "2", "x", "y")) & groups(made), "a group's rows stay in order"
    for before, after in [(made, changed), (changed, gone), (gone, again)]:
        assert groups(before) & groups(after), "and so do the changes of one row"
    assert len(splits(made) | splits(changed) | splits(gone) | splits(again)) == 1


def test_a_key_that_changes_where_deletes_lack_the_group() -> None:
    t = table(group_by=["a"])
    made = insert(t, "1", "x", "y")
    moved = update(t, row("2", "z", "y"), key=row("1", None, None))
    twice = update(t, row("3", "w", "y"), key=row("2", None, None))
    gone = delete(t, key=row("3", None, None))
    for before, after in [(made, moved), (moved, twice), (twice, gone)]:
        assert groups(before) & groups(after)
    assert groups(moved) & groups(insert(t, "9", "z", "y"))


def test_an_unchanged_group_column_stays_with_its_row() -> None:
    t = table(group_by=["a"])
    made, same = insert(t, "1", "big", "y"), update(t, row("1", "?", "z"))
    assert groups(made) & groups(same)
    assert not groups(same) & groups(update(t, row("2", "?", "z"))), "not all in one group"


@pytest.mark.parametrize(
    ("identity", "columns", "one"), [("f", "id! a! b!", False), ("d", "id! a b", True)]
)
def test_splits_of_several_groupings(identity: str, columns: str, one: bool) -> None:
    """Messages are split by what all sinks group by, if every message has it."""
    t = table(columns, identity=identity, split_by=["a"])
    old = {"old": row("1", "x", "y")} if identity == "f" else {"key": row("1", None, None)}
    made, gone = insert(t, "1", "x", "y"), delete(t, **old)
    assert splits(made) == splits(gone)
    assert groups(made) == groups(gone)
    assert (splits(made) == splits(insert(t, "2", "z", "y"))) is one
    together = table(split_by=[])
    assert splits(insert(together, "1", "x", "y")) == splits(insert(together, "2", "z", "y"))


def test_columns_that_an_older_shape_lacks() -> None:
    t = table(group_by=["later", "a"], split_by=["later"])
    assert t.groups.missing == ["later"]
    assert groups(insert(t, "1", "x", "y")) == groups(delete(t, key=row("1", None, None)))
    assert table(group_by=["a"]).groups.missing == []


def test_shapes_whose_hashes_compare() -> None:
    assert table().same_grouping(table("id! a b c"))
    assert table().same_grouping(table("a id!"))
    assert not table().same_grouping(table("key! a b", key=("key",)))
    assert not table().same_grouping(table("id! a! b", key=("id", "a")))
    assert not table(group_by=["a"]).same_grouping(table(group_by=["b"]))


def test_a_row_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="argument"):
        insert(table(), "1")
