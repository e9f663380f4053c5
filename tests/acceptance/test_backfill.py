"""Backfills through `penstock run`, while writers write: into NATS, into streams of both kinds.

The tests share one running pipeline, as Spark takes a while to start.
"""

from __future__ import annotations

import functools
import json
import uuid
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.backfill.request import Backfills, Command
from penstock.core.errors import StoreError
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.streams.store import Store

from ..backfill_help import (
    KINDS,
    Got,
    TableKind,
    await_steady,
    fold,
    from_nats,
    from_stream,
    writing,
)
from ..pipeline import CAPTURE, PATIENCE, Penstock, penstock, runs

NUMBERS, UUIDS, TEXTS, PAIRS = KINDS
ROWS = 2_000
MANY = 120_000
"""Rows whose backfill takes some seconds."""
CONFIG = """\
store: {store}
sources:
  shop:
    type: postgres
    url: {source}
    tables: ["public.*"]
sinks:
  out:
    type: nats
    source: shop
    url: {nats}
    subject: "{prefix}.{{table}}"
    actions: [insert, update, delete]
  events:
    type: stream
    source: shop
  latest:
    type: stream
    source: shop
    kind: rows
    deletes: true
    sort_by: version
  first:
    type: stream
    source: shop
    tables: [public.pairs, public.bare]
    initial_backfill: true
  even:
    type: stream
    source: shop
    tables: [public.numbers]
    filter: "record.version % 2 = 0"
    transform: {{sql: "record.id as id, record.version as version"}}
spark:
  master: local[2]
"""


@dataclass
class Shop:
    """A pipeline of one source and four sinks."""

    folder: Path
    source: Database
    store: Database
    streams: JetStream
    stream: str
    pipeline: Penstock
    backfills: Backfills

    def command(self, *arguments: str, code: int = 0) -> str:
        done = penstock("backfill", *arguments, cwd=self.folder)
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout

    def start(self, *arguments: str) -> list[int]:
        found = json.loads(self.command("start", *arguments, "--json"))
        return [row["id"] for row in found]

    def start_each(self, sink: str, tables: Iterable[TableKind]) -> list[int]:
        return [n for kind in tables for n in self.start("--sink", sink, "--table", kind.name)]

    def state(self, number: int) -> dict[str, Any]:
        found = {row["id"]: row for row in json.loads(self.command("list", "--json"))}
        state: dict[str, Any] = found[number]
        return state

    def in_store(self, number: int) -> tuple[str, int]:
        (row,) = self.store.execute(
            "SELECT state, rows_done FROM penstock.backfills WHERE id = %s", [number]
        )
        return row[0], row[1]

    def began(self, number: int) -> bool:
        return self.in_store(number)[1] > 0

    def ends(self, number: int, state: str = "done") -> dict[str, Any]:
        try:
            self.pipeline.wait_for(
                lambda: self.in_store(number)[0] in ("done", "failed", "cancelled"),
                PATIENCE,
                f"at the end of backfill {number}",
            )
        except AssertionError as error:
            sources = self.pipeline.status().get("sources")
            raise AssertionError(f"{self.state(number)}, {sources}: {error}") from None
        found = self.state(number)
        assert found["state"] == state, found
        return found

    def nats(self) -> list[Got]:
        return from_nats(self.streams, self.stream)

    def events(self) -> list[Got]:
        return from_stream(self.store.url, "events")


pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def shop(
    postgres: EmbeddedPostgres, nats_server: EmbeddedNats, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("backfill")
    prefix = f"b{uuid.uuid4().hex[:8]}"
    with ExitStack() as stack:
        source, store = (
            Database(name, postgres.create_database(name))
            for name in (f"{prefix}_source", f"{prefix}_store")
        )
        for database in (source, store):
            stack.callback(database.drop, postgres.url)
        source.execute("CREATE TABLE bare (id int, version int)")
        for kind in KINDS:
            kind.create(source.url, ROWS)
        streams = stack.enter_context(JetStream(nats_server.url))
        streams.add_stream(prefix, f"{prefix}.>")
        (folder / "penstock.yaml").write_text(
            CONFIG.format(store=store.url, source=source.url, nats=nats_server.url, prefix=prefix)
        )
        pipeline = stack.enter_context(Penstock(folder)).start().wait_ready()
        backfills = Backfills(stack.enter_context(Store.open(store.url)))
        yield Shop(folder, source, store, streams, prefix, pipeline, backfills)
        assert pipeline.stop() == 0
        assert pipeline.stray() == []


def test_an_initial_backfill(shop: Shop) -> None:
    """What was there before the first run is delivered without being asked for."""
    shop.pipeline.wait_for(
        lambda: shop.in_store(1)[0] == "done", PATIENCE, "done with the initial backfill"
    )
    found = shop.state(1)
    assert (found["sink"], found["table_name"], found["initial"]) == ("first", "pairs", True)
    assert (found["rows_done"], found["rows_total"]) == (ROWS, ROWS)
    got = from_stream(shop.store.url, "first")
    assert fold(PAIRS, got).rows == PAIRS.rows(shop.source.url)
    assert len(got) == ROWS
    assert {message.action for message in got} == {"read"}
    assert all(message.changes is None for message in got)
    notes = [e for e in shop.pipeline.events() if e["event"] == "initial backfill"]
    assert ["public.bare has no primary key" in note["note"] for note in notes] == [True]
    for other in ("events", "latest"):
        assert from_stream(shop.store.url, other) == []
    assert shop.nats() == []


def test_into_nats_while_writers_write(shop: Shop) -> None:
    tables = (TEXTS, PAIRS)  # the others are in the test of kills
    with writing(shop.source.url, tables) as writers:
        numbers = shop.start_each("out", tables)
        shop.command("watch", *map(str, numbers))
        at_end = sum(writer.count for writer in writers)
        shop.pipeline.wait_for(
            lambda: sum(writer.count for writer in writers) > at_end + 50, PATIENCE, "writing on"
        )
    await_steady(shop.pipeline, shop.source)
    got = shop.nats()
    for kind in tables:
        folded = fold(kind, got)
        assert folded.faults == []
        assert folded.rows == kind.rows(shop.source.url)
        assert folded.reads > ROWS // 2
    keys = [message.metadata["idempotency_key"] for message in got]
    assert len(keys) == len(set(keys))
    assert not any(message.action == "read" for message in shop.events())


@pytest.mark.parametrize(("sink", "tables"), [("events", (NUMBERS, UUIDS)), ("latest", (PAIRS,))])
def test_into_a_stream_while_writers_write(
    shop: Shop, sink: str, tables: tuple[TableKind, ...]
) -> None:
    with writing(shop.source.url, tables):
        for number in shop.start_each(sink, tables):
            shop.ends(number)
    await_steady(shop.pipeline, shop.source)
    got = from_stream(shop.store.url, sink)
    for kind in tables:
        folded = fold(kind, got, whole=sink == "events")
        assert folded.faults == []
        assert folded.rows == kind.rows(shop.source.url)
        assert folded.reads > ROWS // 2


def test_where_and_from(shop: Shop) -> None:
    before = len(from_stream(shop.store.url, "latest"))
    (middle,) = shop.source.execute(
        "SELECT percentile_disc(0.5) WITHIN GROUP (ORDER BY version) FROM numbers"
    )[0]
    where = "pad like 'xx%' and id < 0"
    (number,) = shop.start(
        "--sink", "latest", "--table", "numbers", "--where", where, "--from", str(middle)
    )
    shop.ends(number)
    got = from_stream(shop.store.url, "latest")[before:]
    expected = shop.source.execute(
        "SELECT version FROM numbers WHERE pad LIKE 'xx%%' AND id < 0 AND version >= %s"
        " ORDER BY version",
        [middle],
    )
    versions = [message.record["version"] for message in got if message.action == "read"]
    assert sorted(versions) == [v for (v,) in expected]
    assert versions, "it would show nothing"


def make_many(shop: Shop) -> None:
    """Make a table whose backfill takes some seconds."""
    shop.source.execute("CREATE TABLE IF NOT EXISTS many (id int PRIMARY KEY, version int)")
    shop.source.execute(
        "INSERT INTO many SELECT n, n FROM generate_series(1, %s) n ON CONFLICT DO NOTHING", [MANY]
    )


def interrupt(shop: Shop, command: Command) -> int:
    """Give a command to a backfill of many rows that is under way, and return its number.

    The command line takes a second, too long for that. On a busy machine this process may come too late:
    a backfill that is done is no proof, and the next one is taken.
    """
    make_many(shop)
    for left in reversed(range(5)):
        (number,) = shop.start("--sink", "events", "--table", "many")
        shop.pipeline.wait_for(functools.partial(shop.began, number), PATIENCE, "under way")
        try:
            shop.backfills.command(number, command)
            break
        except StoreError:
            if not left:
                raise
            assert shop.in_store(number) == ("done", MANY)
    return number


def reads_of_many(got: list[Got]) -> set[int]:
    found = [m for m in got if m.metadata["table_name"] == "many" and m.action == "read"]
    return {message.record["id"] for message in found}


def test_pause_and_resume(shop: Shop) -> None:
    for _ in range(5):
        number = interrupt(shop, "pause")
        # Others are not kept waiting by one that is paused.
        (other,) = shop.start("--sink", "events", "--table", "uuids")
        shop.ends(other)
        state, rows = shop.in_store(number)
        # What was planned before the pause is delivered, which may be all: then the next one is taken.
        if state != "done":
            break
    assert state == "paused"
    assert 0 < rows < MANY
    shop.pipeline.wait_for(
        lambda: [(b["number"], b["state"]) for b in shop.pipeline.status().get("backfills", [])]
        == [(number, "paused")],
        PATIENCE, "showing that it is paused",
    )  # fmt: skip
    shop.command("resume", str(number))
    shop.ends(number)
    assert reads_of_many(shop.events()) == set(range(1, MANY + 1))


def test_cancel(shop: Shop) -> None:
    number = interrupt(shop, "cancel")
    assert shop.state(number)["state"] == "cancelled"
    (other,) = shop.start("--sink", "events", "--table", "pairs")
    shop.ends(other)
    assert shop.in_store(number)[1] < MANY


def test_a_row_that_cannot_be_looked_at(shop: Shop) -> None:
    """The error is the backfill's own; all else goes on, and it can go on when that is mended."""
    shop.source.execute("CREATE TABLE odd (id int PRIMARY KEY, amount text, version int)")
    shop.source.execute("INSERT INTO odd SELECT n, n::text, n FROM generate_series(1, 5000) n")
    shop.source.execute("UPDATE odd SET amount = 'many' WHERE id = 4000")
    (number,) = shop.start("--sink", "events", "--table", "odd", "--where", "amount::int > 10")
    failed = shop.ends(number, "failed")
    assert "invalid input syntax for type integer" in failed["error"]
    assert "failed" in shop.command("watch", str(number), code=1)
    done = penstock("status", "--listen", shop.pipeline.listen, cwd=shop.folder)
    assert done.returncode == 1
    assert f"backfill {number}: " in done.stdout
    await_steady(shop.pipeline, shop.source)
    assert shop.pipeline.status()["sources"]["shop"]["restarts"] == 0
    shop.source.execute("UPDATE odd SET amount = '20' WHERE id = 4000")
    shop.command("resume", str(number))
    shop.ends(number)
    got = [m for m in shop.events() if m.metadata["table_name"] == "odd" and m.action == "read"]
    assert {message.record["id"] for message in got} == set(range(11, 5001))


def test_through_filter_and_transform(shop: Shop) -> None:
    (number,) = shop.start("--sink", "even", "--table", "numbers")
    shop.ends(number)
    got = [m for m in from_stream(shop.store.url, "even") if m.action == "read"]
    expected = {
        (row[0], row[1])
        for row in shop.source.execute("SELECT id, version FROM numbers WHERE version % 2 = 0")
    }
    assert {(m.record["id"], m.record["version"]) for m in got} == expected
    assert all(set(message.record) == {"id", "version"} for message in got)


def test_metrics(shop: Shop) -> None:
    make_many(shop)

    def paused() -> int:
        while True:
            (number,) = shop.start("--sink", "events", "--table", "many")
            with suppress(StoreError):  # it was done before it could be paused
                shop.backfills.command(number, "pause")
                return number

    def shown(number: int) -> bool:
        _, text = shop.pipeline.get("/metrics")
        families = {family.name: family for family in text_string_to_metric_families(text)}
        return any(
            (sample.labels["number"], sample.labels["state"]) == (str(number), "paused")
            for sample in families["penstock_backfill_rows_estimated"].samples
        )

    for _ in range(5):
        number = paused()
        # What was planned before the pause is delivered, which may be all: then the next one is taken.
        shop.pipeline.wait_for(
            lambda number=number: shown(number) or shop.in_store(number)[0] == "done",  # type: ignore[misc]  # mypy infers no lambda with a default
            PATIENCE, "shown by /metrics",
        )  # fmt: skip
        if found := shown(number):
            break
    assert found
    penstock("backfill", "cancel", str(number), cwd=shop.folder)


def test_a_query_that_ends_in_the_middle(shop: Shop) -> None:
    """The run starts it again, and the backfill goes on at its cursor."""
    make_many(shop)
    (number,) = shop.start("--sink", "latest", "--table", "many")
    shop.pipeline.wait_for(lambda: shop.in_store(number)[1] > 0, PATIENCE, "under way")
    (reader,) = [process for process in shop.pipeline.tree() if runs(process, CAPTURE)]
    reader.kill()
    shop.ends(number)
    assert shop.pipeline.status()["sources"]["shop"]["restarts"] >= 1
    assert reads_of_many(from_stream(shop.store.url, "latest")) == set(range(1, MANY + 1))
