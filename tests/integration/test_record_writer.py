"""The records table: what is written, what is not, and what follows for events."""

from __future__ import annotations

import functools
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.pipeline import PATIENCE
from tests.waits import at_once

from penstock.core.errors import StoreError
from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.syncs.connectors.contract import Record
from penstock.syncs.errors import SyncError
from penstock.syncs.records import schema
from penstock.syncs.records.purge import purge
from penstock.syncs.records.rows import Row, record_id
from penstock.syncs.records.sweep import SweepResult, Sweeps
from penstock.syncs.records.writer import RecordsWritten, RecordWriter

NOON = datetime(2026, 1, 31, 12, tzinfo=UTC)
COLLECTION = "stripe:customers"

LOG = """
CREATE TABLE public.log (n bigserial, action text, old jsonb, new jsonb);
CREATE FUNCTION public.note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO public.log (action, old, new) VALUES (TG_OP, to_jsonb(OLD), to_jsonb(NEW));
    RETURN NULL;
END $$;
CREATE TRIGGER note AFTER INSERT OR UPDATE OR DELETE ON penstock.records
FOR EACH ROW EXECUTE FUNCTION public.note();
"""


@pytest.fixture
def url(database: Database) -> str:
    """Return the URL of a records store."""
    schema.prepare(database.url)
    schema.prepare(database.url)  # again: nothing happens
    return database.url


@pytest.fixture
def writer(url: str) -> Iterator[RecordWriter]:
    writer = RecordWriter(url)
    yield writer
    writer.close()


def at(seconds: int | None) -> datetime | None:
    """Return a time by its seconds."""
    return None if seconds is None else NOON + timedelta(seconds=seconds)


def record(id_: str, value: Any = 1, seconds: int | None = 0, *, deleted: bool = False) -> Record:
    """Return a version of an object; a deleted one has no data."""
    data = b"" if deleted else json.dumps({"v": value, "at": seconds}).encode()
    return Record(id_, data, NOON, at(seconds), deleted)


def table(url: str, sync: UUID) -> dict[str, dict[str, Any]]:
    """Return a sync's rows by the ids of their objects."""
    with psycopg.connect(url) as connection:
        query = "SELECT to_jsonb(r) FROM penstock.records r WHERE sync_id = %s"
        return {row["upstream_id"]: row for (row,) in connection.execute(query, [sync])}


def written(writer: RecordWriter, sync: UUID, *records: Record) -> RecordsWritten:
    return writer.write(sync, "stripe", COLLECTION, records)


def test_new_changed_and_unchanged_are_distinguished(writer: RecordWriter, url: str) -> None:
    sync = uuid4()
    write = functools.partial(written, writer, sync)
    assert write(record("a"), record("b"), record("c")) == RecordsWritten(inserted=3)
    assert write(record("a"), record("b", 2), record("c")) == RecordsWritten(updated=1, unchanged=2)
    assert write(record("c", deleted=True)) == RecordsWritten(deleted=1)
    assert write(record("c", deleted=True)) == RecordsWritten(unchanged=1)
    assert write(record("c", 1, 1)) == RecordsWritten(inserted=1)
    rows = table(url, sync)
    assert rows["b"]["data"] == {"v": 2, "at": 0}
    assert rows["b"]["id"] == str(record_id(sync, COLLECTION, "b"))
    assert rows["b"]["updated_at"] > rows["b"]["inserted_at"]
    assert rows["c"]["updated_at"] == rows["c"]["inserted_at"] > rows["b"]["inserted_at"]
    assert not rows["c"]["deleted"]


def test_what_is_expected_to_be_new_is_inserted_without_a_look(
    writer: RecordWriter, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync = uuid4()
    looks: list[int] = []
    original = RecordWriter._write

    def look(self: RecordWriter, rows: Sequence[Row], of: Any) -> RecordsWritten:
        looks.append(len(rows))
        return original(self, rows, of)

    monkeypatch.setattr(RecordWriter, "_write", look)

    def write(*records: Record) -> RecordsWritten:
        return writer.write(sync, "stripe", COLLECTION, records, expects_new=True)

    assert write(record("a"), record("b"), Record("nul", b'{"a":"\\u0000"}')).inserted == 2
    assert looks == []
    rows = table(url, sync)
    assert written(writer, sync, record("c")) == RecordsWritten(inserted=1)
    looked_at = table(url, sync)["c"]
    own = ("id", "upstream_id", "inserted_at", "updated_at")
    assert {**rows["a"], **{k: looked_at[k] for k in own}} == looked_at
    assert rows["a"]["inserted_at"] == rows["a"]["updated_at"]
    looks.clear()
    # One is there, or deleted: all are written as ever.
    assert write(record("a", 2), record("d")) == RecordsWritten(inserted=1, updated=1)
    assert write(record("e", deleted=True), record("f")) == RecordsWritten(inserted=1, unchanged=1)
    assert looks == [2, 2]
    assert table(url, sync)["a"]["data"] == {"v": 2, "at": 0}


def test_a_text_that_changes_without_its_value_changes_nothing(
    writer: RecordWriter, url: str
) -> None:
    sync = uuid4()

    def write(data: bytes) -> RecordsWritten:
        return writer.write(sync, "stripe", COLLECTION, [Record("a", data)])

    assert write(b'{"n":100.0,"b":[1,2]}') == RecordsWritten(inserted=1)
    for data in (b'{ "b": [1, 2], "n": 100.0 }', b'{"n":100.00,"b":[1,2]}', b'{"n":1e2,"b":[1,2]}'):
        assert write(data) == RecordsWritten(unchanged=1)
    for data in (b'{"n":100.0,"b":[2,1]}', b'{"n":"100.0","b":[2,1]}', b'{"n":null}', b"{}"):
        assert write(data) == RecordsWritten(updated=1)


def test_an_older_version_that_comes_late_changes_nothing(writer: RecordWriter, url: str) -> None:
    sync = uuid4()
    writer.write(sync, "stripe", COLLECTION, [record("a", 2, 20)])
    assert written(writer, sync, record("a", 1, 10)) == RecordsWritten(unchanged=1)
    late = record("a", seconds=10, deleted=True)
    assert written(writer, sync, late) == RecordsWritten(unchanged=1)
    # No time at all: the version counts, and the time stays.
    assert written(writer, sync, record("a", 3, None)) == RecordsWritten(updated=1)
    assert table(url, sync)["a"]["upstream_updated_at"] == "2026-01-31T12:00:20+00:00"


def test_a_tombstone_keeps_the_last_data_and_is_known_before_its_object(
    writer: RecordWriter, url: str
) -> None:
    sync = uuid4()
    writer.write(sync, "stripe", COLLECTION, [record("a")])
    writer.write(sync, "stripe", COLLECTION, [record("a", seconds=5, deleted=True)])
    assert (
        table(url, sync)["a"] | {"data": {"v": 1, "at": 0}, "deleted": True}
        == table(url, sync)["a"]
    )
    early = [record("b", seconds=5, deleted=True), record("c", seconds=None, deleted=True)]
    assert writer.write(sync, "stripe", COLLECTION, early) == RecordsWritten(unchanged=2)
    assert written(writer, sync, record("b", 1, 4)) == RecordsWritten(unchanged=1)
    assert written(writer, sync, record("b", 1, 6)) == RecordsWritten(inserted=1)


def test_what_postgres_can_not_hold_is_refused_and_the_rest_written(
    writer: RecordWriter, url: str
) -> None:
    sync = uuid4()
    bad = [
        Record("nul", b'{"a":"\\u0000"}'),
        Record("list", b"[]"),
        Record("half", b'{"a":"\\ud800"}'),
        Record("deep", b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"),
        Record("number", b'{"a":1e4000}'),
    ]
    written = writer.write(sync, "stripe", COLLECTION, [record("a"), *bad, record("b")])
    there = table(url, sync)
    assert {"a", "b"} <= set(there)
    assert {of.upstream_id for of in written.refused} | set(there) == {
        "a", "b", *(of.upstream_id for of in bad),
    }  # fmt: skip
    assert {"nul", "list", "half"} <= {of.upstream_id for of in written.refused}
    assert written.inserted == len(there)


def test_syncs_that_share_ids_do_not_meet(writer: RecordWriter, url: str) -> None:
    one, other = uuid4(), uuid4()
    writer.write(one, "stripe", COLLECTION, [record("a", 1)])
    assert writer.write(other, "stripe", COLLECTION, [record("a", 2)]) == RecordsWritten(inserted=1)
    assert writer.write(one, "stripe", "stripe:x", [record("a", 3)]) == RecordsWritten(inserted=1)
    assert purge(url, one, COLLECTION) == 1
    assert len(table(url, one)) == len(table(url, other)) == 1


def test_two_writers_of_the_same_records_do_not_wait_for_each_other(url: str) -> None:
    sync, start = uuid4(), threading.Barrier(4, timeout=PATIENCE)

    def work(number: int) -> RecordsWritten:
        writer = RecordWriter(url)
        start.wait()
        total = RecordsWritten()
        for round_ in range(5):
            records = [record(f"r{n}", round_, round_) for n in range(300)]
            if number % 2:
                records.reverse()
            written = writer.write(
                sync, "stripe", COLLECTION, records, expects_new=number < 2 or round_ == 0
            )
            total = total.plus(written)
        writer.close()
        return total

    done = at_once(*[partial(work, number) for number in range(4)])
    assert sum(of.inserted for of in done) == 300
    assert {row["data"]["v"] for row in table(url, sync).values()} == {4}


def test_a_sweep_deletes_what_it_has_not_seen_but_no_large_share(
    writer: RecordWriter, url: str
) -> None:
    sync, sweeps = uuid4(), Sweeps(writer, url)
    ids = [f"r{n}" for n in range(10)]
    writer.write(sync, "stripe", COLLECTION, [record(id_) for id_ in ids])
    sweep = sweeps.begin(sync, COLLECTION)
    writer.write(sync, "stripe", COLLECTION, [record("new")])  # behind the place where it is
    sweeps.add(sweep, sync, COLLECTION, ids[:6])
    sweeps.add(sweep, sync, COLLECTION, iter(ids[:6]))
    held = sweeps.complete(sweep)
    assert held == SweepResult(10, 4, 0)
    assert held.is_held
    assert held.share == 0.4
    assert not any(row["deleted"] for row in table(url, sync).values())
    assert sweeps.complete(sweep, 0.4) == SweepResult(10, 4, 0, 4)
    assert not any(row["deleted"] for row in table(url, sync).values())
    sweep = sweeps.begin(sync, COLLECTION)
    sweeps.add(sweep, sync, COLLECTION, [*ids[:6], "new"])
    assert sweeps.complete(sweep, 0.4) == SweepResult(11, 4, 4)
    assert {i for i, row in table(url, sync).items() if row["deleted"]} == set(ids[6:])
    with pytest.raises(SyncError, match="are not in the records store") as caught:
        sweeps.complete(sweep, 1)
    assert caught.value.code == "sweep_lost"
    assert writer.write(sync, "stripe", COLLECTION, [record("r9")]) == RecordsWritten(inserted=1)


def test_what_two_sweeps_in_a_row_miss_is_deleted(writer: RecordWriter, url: str) -> None:
    sync, sweeps = uuid4(), Sweeps(writer, url)
    writer.write(sync, "stripe", COLLECTION, [record(id_) for id_ in "abcd"])

    def begun(seen: str) -> UUID:
        found = sweeps.begin(sync, COLLECTION)
        sweeps.add(found, sync, COLLECTION, seen)
        return found

    def sweep(seen: str) -> SweepResult:
        return sweeps.complete(begun(seen), 1)

    assert sweep("acd") == SweepResult(4, 1, 0, 1)
    assert sweep("abd") == SweepResult(4, 1, 0, 1)  # b had shifted to another page, and c has now
    writer.write(sync, "stripe", COLLECTION, [record("c", 2)])  # it is there: the poll has seen it
    assert sweep("abd") == SweepResult(4, 1, 0, 1)
    sweeps.hold(begun(""))
    assert sweep("ad") == SweepResult(4, 2, 2)
    assert sweep("ad") == SweepResult(2, 0, 0)
    assert {i for i, row in table(url, sync).items() if row["deleted"]} == {"b", "c"}


def test_a_dropped_sweep_deletes_nothing(writer: RecordWriter, url: str) -> None:
    sync, sweeps = uuid4(), Sweeps(writer, url)
    writer.write(sync, "stripe", COLLECTION, [record("a")])
    sweep = sweeps.begin(sync, COLLECTION)
    sweeps.drop(sweep)
    with pytest.raises(SyncError):
        sweeps.complete(sweep, 1)
    assert not table(url, sync)["a"]["deleted"]


def test_a_store_that_is_away_is_an_error_of_the_store() -> None:
    with pytest.raises(StoreError):
        RecordWriter("postgresql://u@127.0.0.1:1/x").write(uuid4(), "p", "p:c", [record("a")])


@dataclass
class Model:
    """What an API's objects come to, version by version."""

    live: dict[str, tuple[Any, int]] = field(default_factory=dict)
    newest: dict[str, int] = field(default_factory=dict)

    def apply(self, records: Sequence[Record]) -> None:
        """Take the newest version of each object, the last of equal ones."""
        best: dict[str, Record] = {}
        for one in records:
            known = best.get(one.upstream_id)
            if known is None or _seconds(one) >= _seconds(known):
                best[one.upstream_id] = one
        for id_, one in best.items():
            if _seconds(one) < self.newest.get(id_, -1):
                continue
            if one.deleted:
                if id_ in self.live or id_ not in self.newest:
                    self.newest[id_] = _seconds(one)
                self.live.pop(id_, None)
            else:
                known_at = self.live.get(id_, (None, -1))
                value = json.loads(one.data), _seconds(one)
                if known_at != value:
                    self.newest[id_] = _seconds(one)
                self.live[id_] = value


def _seconds(one: Record) -> int:
    assert one.updated_at is not None
    return int((one.updated_at - NOON).total_seconds())


VERSIONS = st.builds(
    lambda id_, value, seconds, deleted: record(id_, value, seconds, deleted=deleted),
    st.sampled_from("abcd"),
    st.integers(0, 2),
    st.integers(0, 6),
    st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(
    batches=st.lists(
        st.tuples(st.lists(VERSIONS, min_size=1, max_size=6), st.booleans()), min_size=1, max_size=8
    )
)
def test_the_fold_of_events_is_the_newest_records_is_the_model(
    postgres_url: str, batches: list[tuple[list[Record], bool]]
) -> None:
    sync, model, writer = uuid4(), Model(), RecordWriter(postgres_url)
    totals = RecordsWritten()
    for batch, expects_new in batches:
        written = writer.write(sync, "stripe", COLLECTION, batch, expects_new=expects_new)
        totals = totals.plus(written)
        model.apply(batch)
    writer.close()
    rows = table(postgres_url, sync)
    assert {i: r["data"] for i, r in rows.items() if not r["deleted"]} == {
        i: value for i, (value, _) in model.live.items()
    }
    live: dict[str, Any] = {}
    at_: dict[str, str] = {}
    counts = dict.fromkeys(("inserted", "updated", "deleted"), 0)
    with psycopg.connect(postgres_url) as connection:
        query = "SELECT action, old, new FROM public.log WHERE new ->> 'sync_id' = %s ORDER BY n"
        for action, old, new in connection.execute(query, [str(sync)]):
            id_ = new["upstream_id"]
            assert new["upstream_updated_at"] >= at_.get(id_, "")
            at_[id_] = new["upstream_updated_at"]
            was_live = action == "UPDATE" and not old["deleted"]
            if not new["deleted"]:
                kind = "updated" if was_live else "inserted"
                assert (id_ in live) == was_live, "inserted twice without a deleted between"
                live[id_] = new["data"]
            elif was_live:
                kind = "deleted"
                del live[id_]
            else:
                continue
            counts[kind] += 1
    assert live == {i: r["data"] for i, r in rows.items() if not r["deleted"]}
    assert counts == {
        "inserted": totals.inserted, "updated": totals.updated, "deleted": totals.deleted,
    }  # fmt: skip
    assert totals.inserted + totals.updated + totals.deleted + totals.unchanged == sum(
        len(batch) for batch, _ in batches
    )


@pytest.fixture(scope="module")
def postgres_url(postgres: EmbeddedPostgres) -> str:
    """Return the URL of a records store whose changes are logged, for all examples."""
    url = postgres.create_database("records_model")
    schema.prepare(url)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(LOG)
    return url
