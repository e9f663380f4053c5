"""The tasks and the reader of a backfill: what they report to the run, whatever happens to them."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from queue import SimpleQueue
from typing import Any

import pyarrow as pa
import pytest
from tests.streams_help import Change, wire

from penstock.backfill import reader as readers
from penstock.backfill.events import Delivered, Done, Event, Failed
from penstock.backfill.read import task as tasks
from penstock.backfill.read.task import ReadRange
from penstock.backfill.reader import ReaderBackfills
from penstock.core.errors import BackfillError
from penstock.core.message import READ, Position, RoundPart
from penstock.core.monitor import Monitor, Report
from penstock.postgres.reads import BackfillSpec

SPEC = BackfillSpec(3, "events", "public", "orders")
ROWS = wire([Change({"id": n}, READ) for n in range(4)])


class Reads:
    """As much of the real one as a task reads."""

    chunk = 5
    attempt = 1
    sink = "events"
    ranges = ((), ())


class Run:
    """The run's end: what is reported to it."""

    def __init__(self) -> None:
        self.reports: SimpleQueue[Report] = SimpleQueue()
        self.monitor = Monitor(self.reports.put)

    def reported(self) -> Report:
        found: Report = self.reports.get(timeout=60)["backfill_range"]
        return found


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    yield run
    run.monitor.close()


def task(run: Run) -> ReadRange:
    part = RoundPart(Position(1, 0), Position(2, 0), 1, 2, 9, "events")
    return ReadRange(Reads(), 1, part, 77, run.monitor.address)  # type: ignore[arg-type]


def test_a_range_that_is_read(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "read_range", lambda *_: iter([ROWS, ROWS]))
    batches = list(task(run).batches())
    assert sum(batch.num_rows for batch in batches) == 8
    assert run.reported() == {"attempt": 1, "chunk": 5, "range": 1, "token": 77, "rows": 8}
    monkeypatch.setattr(tasks, "read_range", lambda *_: iter([]))
    assert list(task(run).batches()) == []
    assert run.reported()["rows"] == 0


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (
            BackfillError("snapshot_lost", "The snapshot is gone.", transient=True),
            {"error": "The snapshot is gone.", "code": "snapshot_lost", "transient": True},
        ),
        (
            ZeroDivisionError("of mine"),
            {"error": "ZeroDivisionError: of mine", "code": "internal", "transient": False},
        ),
    ],
)
def test_a_range_that_fails_ends_no_query(
    run: Run, monkeypatch: pytest.MonkeyPatch, error: Exception, expected: Report
) -> None:
    def fails(*_: Any) -> Iterator[pa.RecordBatch]:
        yield ROWS
        raise error

    monkeypatch.setattr(tasks, "read_range", fails)
    assert sum(batch.num_rows for batch in task(run).batches()) == 4
    found = run.reported()
    assert found == {"attempt": 1, "chunk": 5, "range": 1, "token": 77, "rows": 4, **expected}


def test_a_run_that_is_gone(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "read_range", lambda *_: iter([ROWS]))
    lost = task(run)
    lost.monitor = "127.0.0.1:9:secret"
    assert sum(batch.num_rows for batch in lost.batches()) == 4


def test_a_task_shows_no_secret(run: Run) -> None:
    made = task(run)
    assert run.monitor.address.rpartition(":")[2] not in repr(made)


class Backfiller:
    """Records its calls."""

    def __init__(self, _: Any, on_event: Any) -> None:
        self.calls: list[Any] = []
        self.on_event = on_event
        self._attempts = 0

    def start(self, spec: BackfillSpec, cursor: Any = None) -> int:
        self.calls.append(("start", spec, cursor))
        self._attempts += 1
        return self._attempts

    def __getattr__(self, name: str) -> Any:
        return lambda: self.calls.append(name)


@pytest.fixture
def reader(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[ReaderBackfills, Backfiller, list[Report]]:
    monkeypatch.setattr(readers, "Backfiller", Backfiller)
    sent: list[Report] = []
    made = ReaderBackfills(None, sent.append)  # type: ignore[arg-type]
    return made, made._backfiller, sent  # type: ignore[return-value]


def desired(token: int, *, paused: bool = False) -> dict[str, Any]:
    return {"token": token, "spec": SPEC.to_json(), "cursor": ["a", None], "paused": paused}


def test_the_desired_state_is_brought_about_once(
    reader: tuple[ReaderBackfills, Backfiller, list[Report]],
) -> None:
    commands, made, _ = reader
    started = ("start", SPEC, ("a", None))
    commands.command(None)
    assert made.calls == []
    for _ in range(2):
        commands.command(desired(1))
    assert made.calls == [started, "resume", "resume"]
    made.calls.clear()
    for paused in (True, False):
        commands.command(desired(1, paused=paused))
    assert made.calls == ["pause", "resume"]
    made.calls.clear()
    commands.command(desired(2, paused=True))
    assert made.calls == [started, "pause"]
    made.calls.clear()
    commands.command(None)
    commands.command(None)
    assert made.calls == ["cancel"]
    commands.command(desired(2))
    assert made.calls == ["cancel", started, "resume"]


def test_events_of_an_earlier_start_are_not_reported(
    reader: tuple[ReaderBackfills, Backfiller, list[Report]],
) -> None:
    commands, made, sent = reader
    commands.command(desired(8))
    made.on_event(Delivered(3, 1, 0, 2, ("b", None)))
    assert sent == [
        {
            "backfill": {
                "event": "delivered", "token": 8, "backfill": 3, "attempt": 1, "chunk": 0,
                "ranges": 2, "cursor": ("b", None),
            }
        }
    ]  # fmt: skip
    assert commands.token(Reads()) == 8  # type: ignore[arg-type]
    commands.command(desired(9))
    made.on_event(Done(3, 1, 4))
    assert len(sent) == 1
    assert commands.token(Reads()) == 0  # type: ignore[arg-type]
    made.on_event(Done(3, 2, 4))
    assert sent[1]["backfill"]["token"] == 9
    made.on_event(Done(3, 5, 4))
    assert sent[2]["backfill"]["token"] == 9, "it has gone back by itself"


@pytest.mark.parametrize(
    "event", [Done(3, 1, 4), Failed(3, 1, "no_table", "It is gone.", "Make it.")]
)
def test_an_end_is_reported_until_the_run_knows(
    reader: tuple[ReaderBackfills, Backfiller, list[Report]], event: Event
) -> None:
    commands, made, sent = reader
    commands.command(desired(8))
    made.on_event(Delivered(3, 1, 3, 2, ("b", None)))
    commands.command(desired(8))
    assert len(sent) == 1
    made.on_event(event)
    sent.clear()
    commands.command(desired(8))
    commands.command(desired(8, paused=True))
    name = type(event).__name__.lower()
    assert [(r["backfill"]["event"], r["backfill"]["token"]) for r in sent] == [(name, 8)] * 2
    sent.clear()
    commands.command(desired(9))
    commands.command(desired(9))
    commands.command(None)
    assert sent == []


def test_a_reader_reports_that_it_is_ready_until_it_is_commanded(
    reader: tuple[ReaderBackfills, Backfiller, list[Report]],
) -> None:
    commands, _, sent = reader
    commands.report_ready()
    commands.report_ready()
    assert len(sent) == 2
    assert sent[0] == sent[1], "the same reader"
    assert sent[0]["backfill"]["event"] == "ready"
    assert sent[0]["backfill"]["reader"]
    commands.command(None)
    commands.report_ready()
    assert len(sent) == 2


def test_a_task_travels() -> None:
    part = RoundPart(Position(1, 0), Position(2, 0), 1, 2, 9, "events")
    made = ReadRange(None, 1, part, 77, None)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(made)) == made
