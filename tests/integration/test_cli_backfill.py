"""`penstock backfill` over real servers: what it refuses, with which words, and what it prints."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
from tests.waits import await_end
from typer.testing import CliRunner, Result

from penstock.api.health import Server, application
from penstock.backfill.pace import Pace
from penstock.backfill.request import Backfill, Backfills
from penstock.cli.backfill_watch import duration, line
from penstock.cli.main import app
from penstock.config.file import load
from penstock.embedded.handles import Database
from penstock.embedded.store import open_store
from penstock.postgres import setup
from penstock.runtime.state import RunState
from penstock.streams.store import Store
from penstock.syncs.records.schema import prepare

TABLES = """
CREATE TABLE orders (id bigint PRIMARY KEY, amount numeric, note text, made timestamptz);
CREATE INDEX ON orders (made);
INSERT INTO orders SELECT n, n, 'x', '2024-01-01'::timestamptz + n * interval '1 hour'
FROM generate_series(1, 1000) n;
CREATE TABLE lines (a text, b int, made timestamptz, shape point, PRIMARY KEY (a, b));
CREATE TABLE bare (id int);
CREATE VIEW seen AS SELECT * FROM orders;
CREATE SCHEMA other;
CREATE TABLE other.orders (id int PRIMARY KEY);
CREATE TABLE other."Odd One" (id int PRIMARY KEY);
ANALYZE;
"""


@pytest.fixture
def folder(tmp_path: Path, database: Database) -> Path:
    for statement in TABLES.split(";"):
        if statement.strip():
            database.execute(statement)
    base = {"type": "stream", "source": "shop"}
    rows = {**base, "kind": "rows"}
    config = {
        "store": database.url,
        "sources": {
            "shop": {"type": "postgres", "url": database.url, "tables": ["public.*", "other.*"]}
        },
        "sinks": {
            "all": base,
            "public": {**base, "tables": ["public.*"]},
            "gone": {**base, "tables": ["public.*"], "actions": ["insert", "delete"]},
            "sorted": {**rows, "tables": ["public.orders", "public.lines"], "sort_by": "made"},
            "shapes": {**rows, "tables": ["public.lines"], "sort_by": "shape"},
        },
    }
    (tmp_path / "penstock.yaml").write_text(json.dumps(config))
    return tmp_path


@pytest.fixture
def backfills(folder: Path, database: Database) -> Iterator[Backfills]:
    with Store.open(database.url) as store:
        yield Backfills(store)


def call(folder: Path, *arguments: str) -> Result:
    config = str(folder / "penstock.yaml")
    done = CliRunner().invoke(app, ["backfill", *arguments, "--config", config])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done


def run(folder: Path, *arguments: str) -> str:
    done = call(folder, *arguments)
    assert done.exit_code == 0, done.output
    return str(done.output)


def refusal(folder: Path, *arguments: str) -> str:
    done = call(folder, *arguments)
    assert done.exit_code == 1, done.output
    assert done.stdout == ""
    return str(done.stderr).strip()


def start(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    done = call(folder, "start", *arguments, "--json")
    assert done.exit_code == 0, done.output
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def test_one_table(folder: Path, backfills: Backfills) -> None:
    assert run(folder, "start", "--sink", "public", "--table", "orders").splitlines() == [
        "Started backfill 1 of public.orders to sink public: about 1,000 rows.",
        "Note: no pipeline runs for source shop now: start it with `penstock run`.",
    ]
    (found,) = backfills.find()
    assert (found.source, found.table_schema, found.table_name) == ("shop", "public", "orders")
    assert (found.condition, found.sort_by, found.start) == (None, None, None)
    assert refusal(folder, "start", "--sink", "public", "--table", "public.orders") == (
        "There is backfill 1 of public.orders to sink public already: it is waiting."
        " Let it end, or cancel it: `penstock backfill cancel 1`."
    )
    assert (
        start(folder, "--sink", "all", "--table", 'other."Odd One"')[0]["table_name"] == "Odd One"
    )


def test_a_sink_that_leaves_changes_out(folder: Path) -> None:
    done = call(folder, "start", "--sink", "gone", "--table", "orders")
    assert done.exit_code == 0
    assert done.stderr.splitlines()[0] == (
        "Note: sink gone takes no update: a row that changes while it is read comes as that change"
        " alone, and so not at all"
    )


def test_each_table_of_the_sink(folder: Path) -> None:
    done = call(folder, "start", "--sink", "public")
    assert done.exit_code == 0
    assert [row.partition(":")[0] for row in done.stdout.splitlines()] == [
        "Started backfill 1 of public.lines to sink public",
        "Started backfill 2 of public.orders to sink public",
    ]
    assert "public.bare is left out: public.bare has no primary key" in done.stderr


def test_a_table_that_is_in_no_order(folder: Path, database: Database) -> None:
    """It alone is left out: its column `made` is of a type that has none."""
    database.execute("ALTER TABLE lines ALTER made TYPE json USING NULL")
    done = call(folder, "start", "--sink", "sorted")
    assert done.exit_code == 0
    assert done.stdout.startswith("Started backfill 1 of public.orders to sink sorted")
    assert "public.lines is left out: public.lines can't be read in the order of made (json)" in (
        done.stderr
    )


def test_a_table_that_is_locked(folder: Path, database: Database) -> None:
    with database.connect() as session:
        session.execute("LOCK TABLE lines")
        done = call(folder, "start", "--sink", "public")
        assert done.exit_code == 0
        assert done.stdout.startswith("Started backfill 1 of public.orders to sink public")
        expected = "public.lines is locked by another session. Try again when that has ended"
        assert f"public.lines is left out: {expected}" in done.stderr
        assert expected in refusal(folder, "start", "--sink", "public", "--table", "lines")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("--sink", "publik"), "there is no sink 'publik': expected one of all, public, gone, sorted,"
         " shapes; did you mean public?"),
        (("--sink", "public", "--table", "ordres"), "Sink public has no table 'ordres': it has"
         " public.bare, public.lines, public.orders; did you mean orders? A backfill goes to"),
        (("--sink", "all", "--table", "orders"), "Table 'orders' may be other.orders or"
         " public.orders. Name one, with its schema."),
        (("--sink", "public", "--table", "other.orders"), "has no table 'other.orders'"),
        (("--sink", "public", "--table", "seen"), "public.seen is no table whose changes"),
        (("--sink", "public", "--table", "bare"), "public.bare has no primary key: a backfill needs"
         " one to know where it is, and which row a change is of. Give it one: ALTER TABLE"
         " public.bare ADD PRIMARY KEY"),
        (("--sink", "public", "--table", "orders", "--from", "2024-01-01"), "--from 2024-01-01: sink"
         " public has no `sort_by` for public.orders"),
        (("--sink", "sorted", "--table", "orders", "--from", "monday"), "--from monday: Postgres"
         " refuses it for made (timestamp with time zone): invalid input syntax"),
        (("--sink", "shapes"), "public.lines can't be read in the order of shape (point):"
         " could not identify an ordering operator for type point"),
        (("--sink", "public", "--table", "orders", "--where", "amuont > 5"),
         '--where: position 1: column "amuont" does not exist. Perhaps you meant to reference the column'
         ' "orders.amount".'),
        (("--sink", "public", "--table", "orders", "--where", "amount > 5;drop table orders"),
         "--where: position 11: syntax error at or near"),
        (("--sink", "public", "--table", "orders", "--where", "pg_sleep(5) is null"), "--where:"
         " position 1: pg_sleep is not allowed"),
        (("--sink", "public", "--table", "orders", "--where", "(select 1) = 1"), "--where:"
         " position 2: select is not allowed: no subqueries."),
    ],
)  # fmt: skip
def test_refused_before_anything_starts(
    folder: Path, backfills: Backfills, arguments: tuple[str, ...], expected: str
) -> None:
    assert expected in refusal(folder, "start", *arguments)
    assert backfills.find() == []


def test_a_table_that_may_not_be_read(folder: Path, database: Database) -> None:
    role = f"reader_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN PASSWORD 'hunter6'")
    path = folder / "penstock.yaml"
    config = json.loads(path.read_text())
    config["sources"]["shop"]["url"] = psycopg.conninfo.make_conninfo(
        database.url, user=role, password="hunter6"
    )
    path.write_text(json.dumps(config))
    printed = refusal(folder, "start", "--sink", "public", "--table", "orders")
    assert printed == (
        f'Role {role} may not read public.orders. GRANT SELECT ON "public"."orders" TO "{role}";'
    )


def test_where(folder: Path, backfills: Backfills) -> None:
    where = "amount <= 100 and note = 'x' or note like '%y%'"
    (found,) = start(folder, "--sink", "public", "--table", "orders", "--where", where)
    assert 50 <= found["rows_total"] <= 200
    assert found["condition"] == where
    # Each table has to fit: it is a row of one of them that the condition speaks of.
    assert "shape" in refusal(folder, "start", "--sink", "all", "--where", "shape is null")


def test_from(folder: Path, backfills: Backfills) -> None:
    (found,) = start(
        folder, "--sink", "sorted", "--table", "orders", "--from", "2024-02-01T00:00:00"
    )
    assert (found["sort_by"], found["start"]) == ("made", "2024-02-01 00:00:00+00")
    assert 200 <= found["rows_total"] <= 300
    done = call(folder, "start", "--sink", "sorted", "--table", "lines")
    assert done.exit_code == 0
    assert done.stderr.splitlines()[0] == (
        "Note: public.lines has no index on made: each chunk sorts all of the table;"
        ' CREATE INDEX CONCURRENTLY ON "public"."lines" ("made");'
    )


def test_list_pause_resume_cancel(folder: Path, backfills: Backfills) -> None:
    assert "number" in run(folder, "list")
    assert refusal(folder, "pause") == (
        "there is no backfill to pause; `penstock backfill list` lists them all"
    )
    start(folder, "--sink", "public", "--table", "orders")
    assert run(folder, "pause") == "Paused backfill 1 of public.orders to sink public.\n"
    start(folder, "--sink", "public", "--table", "lines")
    table = run(folder, "list")
    assert "paused" in table
    assert "1,000" in table
    assert [row["state"] for row in json.loads(run(folder, "list", "--json"))] == [
        "paused", "waiting"
    ]  # fmt: skip
    assert json.loads(run(folder, "list", "--json", "--sink", "all")) == []
    assert refusal(folder, "cancel") == (
        "which one? cancel takes the numbers of: 1 (public.orders to public),"
        " 2 (public.lines to public)"
    )
    assert refusal(folder, "pause", "1").endswith("is paused: it can't be paused.")
    assert run(folder, "resume", "1") == "Resumed backfill 1 of public.orders to sink public.\n"
    assert len(run(folder, "cancel", "1", "2").splitlines()) == 2
    assert refusal(folder, "pause", "7") == (
        "There is no backfill 7. `penstock backfill list` lists them."
    )


def test_watch(folder: Path, backfills: Backfills) -> None:
    assert "No backfill is under way" in run(folder, "watch")
    first, second = (found["id"] for found in start(folder, "--sink", "public"))

    def work() -> None:
        backfills.claim("shop")
        backfills.progress(first, ("a", "1"), 5)
        backfills.finish(first, 7)
        backfills.claim("shop")
        backfills.fail(second, "division by zero")

    timer = threading.Timer(1.0, work)
    timer.daemon = True
    timer.start()
    done = call(folder, "watch")
    await_end(timer)
    assert done.exit_code == 1
    assert "no pipeline runs for source shop" in done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("1 public.lines to public: waiting, 0 of about ")
    assert f"{first} public.lines to public: done, 7 of 7 rows" in lines
    assert lines[-1] == (
        "2 public.orders to public: failed, 0 of about 1,000 rows, division by zero"
    )
    assert run(folder, "watch", str(first)) == "1 public.lines to public: done, 7 of 7 rows\n"
    assert call(folder, "watch", str(second)).exit_code == 1
    assert refusal(folder, "watch", "9").startswith("there is no backfill 9")


def test_how_fast_and_how_long(folder: Path, backfills: Backfills) -> None:
    start(folder, "--sink", "public", "--table", "orders")
    backfills.claim("shop")
    pace = Pace()
    found = _with(backfills, 0)
    pace.add(0.0, 0)
    assert line(found, pace) == (
        "1 public.orders to public: running, 0 of about 1,000 rows, 0 rows/s"
    )
    for second in range(1, 5):
        pace.add(float(second), 100 * second)
    assert line(_with(backfills, 400), pace) == (
        "1 public.orders to public: running, 400 of about 1,000 rows, 100 rows/s, 0:06 left"
    )
    for second in range(5, 60):
        pace.add(float(second), 400)
    assert pace.rate == 0
    assert [duration(seconds) for seconds in (0, 59.6, 3599, 3600, 7325)] == [
        "0:00", "1:00", "59:59", "1:00:00", "2:02:05"
    ]  # fmt: skip


def _with(backfills: Backfills, rows: int) -> Backfill:
    backfills.progress(1, (str(rows),), rows)
    found = backfills.get(1)
    assert found is not None
    return found


def test_status(folder: Path, backfills: Backfills, database: Database) -> None:
    start(folder, "--sink", "public", "--table", "orders")
    state = RunState(["shop"], {"public": ("stream", "shop")})
    server = Server(application(state), "127.0.0.1:0")
    setup.ensure(load(folder / "penstock.yaml").sources["shop"])

    def status() -> Result:
        config = str(folder / "penstock.yaml")
        return CliRunner().invoke(app, ["status", "-c", config, "--listen", server.address])

    try:
        assert "backfill" not in status().output
        state.show_backfills(backfills.find())
        shown = status()
        assert shown.exit_code == 1  # its source has not streamed yet
        assert shown.output.rstrip().endswith("starting")
        (row,) = [line for line in shown.output.splitlines() if "orders" in line]
        assert [cell.strip() for cell in row.split("│")[1:-1]] == [
            "1", "public.orders", "public", "0", "1,000", "waiting"
        ]  # fmt: skip
        backfills.claim("shop")
        backfills.fail(1, "division by zero")
        state.show_backfills(backfills.find())
        shown = status()
        assert shown.exit_code == 1
        assert "! backfill 1: division by zero" in shown.output
    finally:
        server.close()


SYNC = """\
credentials: {live: {provider: stripe, properties: {api_key: none}}}
syncs: {billing: {provider: stripe, collections: [customers], credential: live, status: disabled}}
"""


def test_records_in_the_embedded_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address is known only while it runs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PENSTOCK_STORE_URL", raising=False)
    Path("penstock.yaml").write_text(SYNC)
    with open_store(load("penstock.yaml", {})) as url, Store.open(url) as store:
        prepare(url)
        result = CliRunner().invoke(app, ["backfill", "start", "--sink", "records"])
        assert result.exit_code == 0, result.output
        assert "Started backfill 1 of penstock.records to sink records" in result.output
        (made,) = Backfills(store).find()
    assert (made.source, made.table_schema, made.table_name) == ("syncs", "penstock", "records")
