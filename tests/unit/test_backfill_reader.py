"""The reader of a backfill: what it does as the run commands, and what it reports."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.backfill import reader as readers
from penstock.backfill.events import Delivered, Done, Event, Failed
from penstock.backfill.reader import ReaderBackfills
from penstock.core.monitor import Report
from penstock.postgres.reads import BackfillSpec

SPEC = BackfillSpec(3, "events", "public", "orders")


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
    made = ReaderBackfills(None, sent.append)  # type: ignore[arg-type]  # it needs no options
    return made, made._backfiller, sent  # type: ignore[return-value]  # one is made


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
                "rows": 2, "cursor": ("b", None),
            }
        }
    ]  # fmt: skip
    commands.command(desired(9))
    made.on_event(Done(3, 1, 4))
    assert len(sent) == 1
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
