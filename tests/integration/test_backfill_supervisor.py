"""The run's side of backfills over a real store: what it commands, keeps, and does after failures."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from structlog.testing import capture_logs
from tests.waits import await_true

from penstock.backfill import current, initial, source, supervisor, tables
from penstock.backfill.request import Backfill, BackfillRequest, Backfills
from penstock.backfill.supervisor import BackfillSupervisor, log_left_out
from penstock.config.settings import Config
from penstock.embedded.handles import Database
from penstock.streams.store import Store

ORDERS = BackfillRequest("shop", "events", "public", "orders", where="id > 5", rows_total=100)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(current, "_BACKOFF_SECONDS", (0.2, 0.2))


@pytest.fixture
def backfills(database: Database) -> Iterator[Backfills]:
    with Store.open(database.url) as store:
        yield Backfills(store)


MISSING = "A report of the reader's about a chunk is missing."


class Reader:
    """The capture's end, that a test plays: what it is commanded, and what it reports."""

    def __init__(self) -> None:
        self.commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.count = 0
        self.looks: list[int] = []
        self.shown: list[Backfill] = []
        self.behind: set[str] = set()
        self.run: BackfillSupervisor | None = None
        self._last: Any = "nothing yet"

    def command(self, source: str, report: dict[str, Any]) -> None:
        assert source == "shop"
        assert report["command"] == "backfill"
        self.count += 1
        if report["run"] != self._last:
            self._last = report["run"]
            self.commands.put(self._last)

    def show(self, shown: Any) -> None:
        self.shown = list(shown)
        self.looks.append(len(self.shown))

    def next(self) -> dict[str, Any] | None:
        return self.commands.get(timeout=60)

    def ready(self, name: str) -> None:
        assert self.run is not None
        self.run.handle({"capture": "shop", "backfill": {"event": "ready", "reader": name}})

    def started(self) -> dict[str, Any]:
        """Return the next command that reads something."""
        while (desired := self.next()) is None:
            pass
        return desired

    def report(self, token: int, event: str, **fields: Any) -> None:
        assert self.run is not None
        self.run.handle(
            {
                "capture": "shop",
                "backfill": {
                    "event": event,
                    "token": token,
                    "backfill": 1,
                    "attempt": token,
                    **fields,
                },
            }
        )

    def delivers(self, token: int, chunk: int) -> None:
        """Report a chunk of 20 rows."""
        self.report(token, "delivered", chunk=chunk, rows=20, cursor=[str(chunk)])


def config(database: Database, **sinks: Any) -> Config:
    events = {"type": "stream", "source": "shop"}
    return Config.model_validate(
        {
            "sources": {"shop": {"type": "postgres", "url": database.url}},
            "sinks": sinks or {"events": events},
            "store": database.url,
        }
    )


@contextmanager
def running(database: Database, **sinks: Any) -> Iterator[Reader]:
    reader = Reader()
    reader.run = BackfillSupervisor(
        config(database, **sinks), database.url, ["shop"], reader.command,
        reader.behind.__contains__, reader.show,
    )  # fmt: skip
    reader.run.start()
    reader.ready("first")
    try:
        yield reader
    finally:
        reader.run.close()


def state(backfills: Backfills, number: int) -> Backfill:
    found = backfills.get(number)
    assert found is not None
    return found


def becomes(backfills: Backfills, number: int, desired: str) -> Backfill:
    await_true(lambda: state(backfills, number).state == desired)
    return state(backfills, number)


def test_from_start_to_end(backfills: Backfills, database: Database) -> None:
    with running(database) as reader:
        assert reader.next() is None
        (number,) = backfills.create([ORDERS])
        desired = reader.started()
        assert desired["spec"] == {
            "id": number, "sink": "events", "schema": "public", "table": "orders",
            "where": "id > 5", "sort_by": None, "start": None,
        }  # fmt: skip
        assert (desired["cursor"], desired["paused"]) == (None, False)
        assert state(backfills, number).state == "running"
        token = desired["token"]
        reader.delivers(token, 0)
        await_true(lambda: state(backfills, number).cursor == ["0"])
        assert state(backfills, number).rows_done == 20
        await_true(lambda: [(b.id, b.rows_done) for b in reader.shown] == [(number, 20)])
        reader.delivers(token, 1)
        reader.report(token, "done", chunks=2)
        done = becomes(backfills, number, "done")
        assert (done.rows_done, done.rows_total, done.error) == (40, 40, None)
        assert reader.next() is None
        await_true(lambda: reader.shown == [])


def test_one_after_the_other(backfills: Backfills, database: Database) -> None:
    numbers = backfills.create([ORDERS, BackfillRequest("shop", "events", "public", "lines")])
    with running(database) as reader:
        for number in numbers:
            desired = reader.started()
            assert desired["spec"]["id"] == number
            reader.report(desired["token"], "done", chunks=0)
            becomes(backfills, number, "done")


def test_a_chunk_that_is_not_reported_is_read_again(
    backfills: Backfills, database: Database
) -> None:
    (number,) = backfills.create([ORDERS])
    with running(database) as reader, capture_logs() as logs:
        first = reader.started()["token"]
        reader.delivers(first, 0)
        reader.delivers(first, 2)
        assert reader.next() is None, "it stops"
        again = reader.started()
        assert again["cursor"] == ("0",)
        assert again["token"] != first
        assert state(backfills, number).error == MISSING
        reader.delivers(first, 3)  # late
        reader.report(first, "done", chunks=4)
        reader.delivers(again["token"], 0)
        await_true(lambda: state(backfills, number).error is None)
        assert state(backfills, number).rows_done == 40
    logged = [entry for entry in logs if entry["event"] == "backfill interrupted"]
    assert [entry["error"] for entry in logged] == [MISSING]


def test_what_cannot_be_mended_fails(backfills: Backfills, database: Database) -> None:
    (number,) = backfills.create([ORDERS])
    with running(database) as reader:
        token = reader.started()["token"]
        reader.delivers(token, 0)
        reader.report(token, "failed", code="x", message="Invalid input syntax.", remedy="Mend it.")
        failed = becomes(backfills, number, "failed")
        assert (failed.error, failed.cursor, failed.rows_done) == (
            "Invalid input syntax. Mend it.",
            ["0"],
            20,
        )
        assert reader.next() is None
        await_true(lambda: [b.state for b in reader.shown] == ["failed"])
        backfills.command(number, "resume")
        assert reader.started()["cursor"] == ("0",)
        assert becomes(backfills, number, "running").error is None


def test_pause_resume_cancel(backfills: Backfills, database: Database) -> None:
    (number,) = backfills.create([ORDERS])
    with running(database) as reader:
        token = reader.started()["token"]
        backfills.command(number, "pause")
        desired = reader.next()
        assert desired is not None
        assert (desired["token"], desired["paused"]) == (token, True)
        reader.delivers(token, 0)  # was under way
        await_true(lambda: state(backfills, number).cursor == ["0"])
        assert state(backfills, number).state == "paused"
        backfills.command(number, "resume")
        desired = reader.next()
        assert desired is not None
        assert (desired["token"], desired["paused"]) == (token, False)
        backfills.command(number, "cancel")
        assert reader.next() is None
        reader.delivers(token, 1)
        assert state(backfills, number).cursor == ["0"]


def test_a_sink_with_a_backlog_gets_no_more(backfills: Backfills, database: Database) -> None:
    (number,) = backfills.create([ORDERS])
    with running(database) as reader:
        assert reader.run is not None
        assert not reader.started()["paused"]
        reader.behind.add("events")
        reader.run.handle({"sink": "events", "behind": True, "error": "Away.", "code": "x"})
        desired = reader.next()
        assert desired is not None
        assert desired["paused"]
        assert state(backfills, number).error == "Sink events is behind: its backlog goes first."
        assert state(backfills, number).state == "running"
        reader.behind.clear()
        reader.run.handle({"sink": "events", "state": "attached", "since": None})
        desired = reader.next()
        assert desired is not None
        assert not desired["paused"]
        assert state(backfills, number).error is None


def test_another_goes_on_while_one_is_paused(backfills: Backfills, database: Database) -> None:
    first, second = backfills.create([ORDERS, BackfillRequest("shop", "events", "public", "lines")])
    with running(database) as reader:
        reader.delivers(reader.started()["token"], 0)
        await_true(lambda: state(backfills, first).cursor == ["0"])
        backfills.command(first, "pause")
        while (desired := reader.started())["spec"]["id"] != second:
            pass
        backfills.command(first, "resume")
        reader.report(desired["token"], "done", chunks=0)
        becomes(backfills, second, "done")
        desired = reader.started()
        assert (desired["spec"]["id"], desired["cursor"]) == (first, ("0",))


def test_a_run_that_begins_again(backfills: Backfills, database: Database) -> None:
    (number,) = backfills.create([ORDERS])
    with running(database) as reader:
        reader.delivers(reader.started()["token"], 0)
        await_true(lambda: state(backfills, number).cursor == ["0"])
    assert state(backfills, number).state == "running"
    with running(database) as reader:
        desired = reader.started()
        assert desired["cursor"] == ("0",)
        # And a query that begins again, in the same run.
        reader.delivers(desired["token"], 0)
        reader.ready("second")
        again = reader.started()
        assert again["token"] != desired["token"]
        await_true(lambda: state(backfills, number).rows_done == 40)


def test_a_reader_that_is_ready_again(backfills: Backfills, database: Database) -> None:
    """It has had no command yet, and goes on with the one that it gets."""
    (number,) = backfills.create([ORDERS])
    with running(database) as reader:
        token = reader.started()["token"]
        reader.ready("first")
        reader.delivers(token, 0)
        backfills.command(number, "pause")
        desired = reader.next()
        assert desired is not None
        assert (desired["token"], desired["paused"]) == (token, True)


def test_what_drains_is_not_commanded(
    backfills: Backfills, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_POLL_SECONDS", 0.2)
    monkeypatch.setattr(source, "_REPEAT_SECONDS", 0.2)
    (first, second) = backfills.create(
        [ORDERS, BackfillRequest("shop", "events", "public", "lines")]
    )
    with running(database) as reader:
        assert reader.run is not None
        token = reader.started()["token"]
        before = reader.count
        await_true(lambda: reader.count > before)  # it is repeated
        reader.run.drain()
        count = reader.count
        reader.delivers(token, 0)
        reader.report(token, "done", chunks=1)
        assert becomes(backfills, first, "done").rows_done == 20, "kept all the same"
        seen = len(reader.looks)
        await_true(lambda: len(reader.looks) > seen + 2)
        assert reader.count == count
        assert state(backfills, second).state == "waiting"


@pytest.mark.parametrize(
    ("sink", "expected"),
    [
        (None, "The configuration has no sink events any more."),
        ({"tables": ["public.lines"]}, "Sink events does not take public.orders any more."),
    ],
)
def test_a_sink_that_is_not_there_any_more(
    backfills: Backfills, database: Database, sink: dict[str, Any] | None, expected: str
) -> None:
    (number,) = backfills.create([ORDERS])
    base = {"type": "stream", "source": "shop"}
    sinks = {"other": base} if sink is None else {"events": base | sink}
    with running(database, **sinks) as reader:
        assert becomes(backfills, number, "failed").error == expected
        assert reader.next() is None


def test_initial_backfills(backfills: Backfills, database: Database) -> None:
    database.execute("CREATE TABLE keyed (id int PRIMARY KEY)")
    database.execute("CREATE TABLE bare (id int)")
    sinks = {
        "events": {"type": "stream", "source": "shop", "initial_backfill": True},
        "quiet": {"type": "stream", "source": "shop"},
    }

    def made() -> list[tuple[str, str, bool]]:
        return [(b.sink, b.table_name, b.initial) for b in backfills.find()]

    with running(database, **sinks) as reader, capture_logs() as logs:
        desired = reader.started()
        assert made() == [("events", "keyed", True)]
        reader.report(desired["token"], "done", chunks=0)
        becomes(backfills, desired["spec"]["id"], "done")
    notes = [entry["note"] for entry in logs if entry["event"] == "initial backfill"]
    assert len(notes) == 1
    assert "public.bare is left out: public.bare has no primary key" in notes[0]
    database.execute("CREATE TABLE later (id int PRIMARY KEY)")
    with running(database, **sinks) as reader:
        assert reader.started()["spec"]["table"] == "later"
        assert made() == [("events", "keyed", True), ("events", "later", True)]


def test_initial_backfills_of_a_table_that_is_locked(
    backfills: Backfills, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has its own when the lock is gone; the others, and all commands, do not wait for it."""
    monkeypatch.setattr(initial, "_BACKOFF_SECONDS", (0.2, 0.2))
    for table in ("free", "held", "orders"):
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")
    sinks = {
        "events": {"type": "stream", "source": "shop"},
        "latest": {"type": "stream", "source": "shop", "tables": ["public.free", "public.held"],
                   "initial_backfill": True},
    }  # fmt: skip
    (number,) = backfills.create([ORDERS])
    with database.connect() as session, capture_logs() as logs:
        session.execute("LOCK TABLE held")
        with running(database, **sinks) as reader:
            desired = reader.started()
            assert desired["spec"]["id"] == number
            reader.report(desired["token"], "done", chunks=0)
            desired = reader.started()
            assert desired["spec"]["table"] == "free"
            assert [b.table_name for b in backfills.find(sink="latest")] == ["free"]
            # And again, while it is locked still.
            reader.report(desired["token"], "done", chunks=0)
            becomes(backfills, desired["spec"]["id"], "done")
            session.rollback()
            assert reader.started()["spec"]["table"] == "held"
    notes = [entry["note"] for entry in logs if entry["event"] == "initial backfill"]
    assert len(notes) == 1, "logged once"
    assert "public.held is left out: public.held is locked by another session." in notes[0]


def test_while_the_tables_are_selected(
    backfills: Backfills, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A source whose server does not answer delays no other."""
    answers = threading.Event()

    def select(*_: Any) -> tables.SelectedTables:
        assert answers.wait(60)
        return tables.SelectedTables([], [], is_partial=False)

    monkeypatch.setattr(tables, "select", select)
    sinks = {"events": {"type": "stream", "source": "shop", "initial_backfill": True}}
    (number,) = backfills.create([ORDERS])
    with running(database, **sinks) as reader:
        assert reader.started()["spec"]["id"] == number
        backfills.command(number, "cancel")
        assert reader.next() is None
        answers.set()


def test_what_a_run_with_once_leaves_out(backfills: Backfills, database: Database) -> None:
    base = {"type": "stream", "source": "shop"}
    settings = config(database, events=base)

    def logged() -> list[tuple[Any, Any]]:
        with capture_logs() as logs:
            log_left_out(settings, database.url, ["shop"])
        return [(entry["waiting"], entry["initial"]) for entry in logs]

    assert logged() == []
    (number,) = backfills.create([ORDERS])
    assert logged() == [([number], [])]
    settings = config(database, events=base, latest=base | {"initial_backfill": True})
    assert logged() == [([number], ["latest"])]
    backfills.command(number, "cancel")
    backfills.create_initial([BackfillRequest("shop", "latest", "public", "orders", initial=True)])
    backfills.command(number + 1, "cancel")
    assert logged() == []


def test_a_store_that_is_gone_for_a_while(backfills: Backfills, database: Database) -> None:
    (number,) = backfills.create([ORDERS])
    with running(database) as reader:
        token = reader.started()["token"]
        database.execute("ALTER TABLE penstock.backfills RENAME TO hidden")
        reader.delivers(token, 0)
        reader.report(token, "done", chunks=1)
        database.execute("ALTER TABLE penstock.hidden RENAME TO backfills")
        assert becomes(backfills, number, "done").rows_done == 20
