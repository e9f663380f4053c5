"""What a run reports of its sinks: counts, backlogs, rates, errors."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.backfill.request import Backfill
from penstock.core.health import Failure, Health, Level, Part, run_part
from penstock.runtime.process_state import ProcessState
from penstock.runtime.sink_state import Rate
from penstock.runtime.state import RunState

DELIVERED = {"sink": "jetstream", "delivered": 5, "duplicates": 1, "bytes": 100, "dead": []}
ERROR = {"sink": "jetstream", "error": "Nothing listens.", "code": "connection_refused"}


@pytest.fixture
def state() -> RunState:
    return RunState(["shop"], {"jetstream": ("nats", "shop"), "events": ("stream", "shop")})


def behind(state: str, messages: int) -> dict[str, Any]:
    return {
        "sink": "jetstream", "state": state, "backlog": messages, "backlog_bytes": 10 * messages,
        "since": None if state == "attached" else 1_800_000_000.0,
    }  # fmt: skip


def metric(state: RunState, name: str, /, **labels: str) -> float | None:
    registry = CollectorRegistry()
    registry.register(state)
    return registry.get_sample_value(f"penstock_{name}", labels)


def test_a_sink_that_falls_behind_and_comes_back(state: RunState) -> None:
    state.update(DELIVERED)
    state.update({**ERROR, "behind": True})
    state.update(behind("behind", 7))
    found = state.as_json()["sinks"]["jetstream"]
    assert (found["state"], found["backlog"], found["backlog_bytes"]) == ("behind", 7, 70)
    assert found["since"] == "2027-01-15T08:00:00+00:00"
    assert found["error"] == ERROR["error"]
    assert metric(state, "sink_behind", sink="jetstream") == 1
    assert metric(state, "sink_detached", sink="jetstream") == 0
    assert metric(state, "sink_up", sink="jetstream") == 0
    state.update(behind("detached", 9))
    assert metric(state, "sink_behind", sink="jetstream") == 1
    assert metric(state, "sink_detached", sink="jetstream") == 1
    assert metric(state, "backlog_messages", sink="jetstream") == 9
    state.update(behind("attached", 0))
    found = state.as_json()["sinks"]["jetstream"]
    assert (found["state"], found["backlog"], found["error"]) == ("attached", 0, None)
    assert found["since"] is None
    assert found["delivered"] == 5
    assert metric(state, "sink_up", sink="jetstream") == 1


def test_the_lag_of_a_sink_is_the_age_of_its_oldest_message(
    state: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1_800_000_000.0
    monkeypatch.setattr(time, "time", lambda: now)

    def lag() -> dict[str, float]:
        return {name: sink["lag_seconds"] for name, sink in state.as_json()["sinks"].items()}

    state.update({"capture": "shop", "waiting": 3, "waited": 2.0})
    assert lag() == {"jetstream": 2.0, "events": 2.0}  # both take what the source has
    state.update(behind("behind", 7))
    now += 30
    assert lag()["jetstream"] == 30  # since it fell behind: none of them was read yet
    state.update({**behind("behind", 7), "oldest": now - 12.5})
    assert lag()["jetstream"] == 12.5
    state.update({**behind("behind", 0), "oldest": now - 12.5})
    assert lag()["jetstream"] == 0
    state.update(behind("attached", 0))
    assert lag()["jetstream"] == 32.0


def test_the_latency_of_what_a_source_has_delivered(state: RunState) -> None:
    def shown() -> tuple[int, float]:
        source = state.as_json()["sources"]["shop"]
        return source["deliveries"], source["delivery_seconds"]

    state.update({"capture": "shop", "life": "a", "deliveries": 4, "delivery_us": 10_000})
    assert shown() == (4, 0.01)
    state.update({"capture": "shop", "life": "b", "deliveries": 1, "delivery_us": 5_000})
    assert shown() == (5, 0.015)  # goes on where a query is started again


def test_a_stream_has_a_head_and_no_backlog(state: RunState) -> None:
    assert state.as_json()["sinks"]["events"]["head"] is None
    state.update({"capture": "shop", "done": [0x16B3748, 3]})
    found = state.as_json()["sinks"]["events"]
    assert found["head"] == "0/16B3748"
    assert "backlog" not in found
    assert metric(state, "backlog_messages", sink="events") is None


def test_the_store(state: RunState) -> None:
    assert metric(state, "store_up") == 1
    state.update({"store": "The store is gone.", "code": "connection_lost"})
    assert state.as_json()["store"] == {"error": "The store is gone."}
    assert metric(state, "store_up") == 0
    state.update({"store": None})
    assert metric(state, "store_up") == 1


def test_backfills(state: RunState) -> None:
    now = datetime.now(UTC)
    backfill = Backfill(
        7, "shop", "events", "public", "Odd One", None, None, None, False, "running", ["5"], 5, 10,
        None, now, now, None, True,
    )  # fmt: skip
    unknown = replace(backfill, id=8, state="failed", rows_total=None, error="No such column.")
    state.show_backfills([backfill, unknown])
    assert state.as_json()["backfills"] == [
        {
            "number": 7, "source": "shop", "sink": "events", "table": 'public."Odd One"',
            "state": "running", "rows_done": 5, "rows_total": 10, "error": None,
        },
        {
            "number": 8, "source": "shop", "sink": "events", "table": 'public."Odd One"',
            "state": "failed", "rows_done": 5, "rows_total": None, "error": "No such column.",
        },
    ]  # fmt: skip
    labels = {"sink": "events", "table": 'public."Odd One"'}
    running = {**labels, "number": "7", "state": "running"}
    assert metric(state, "backfill_rows_done", **running) == 5
    assert metric(state, "backfill_rows_estimated", **running) == 10
    failed = {**labels, "number": "8", "state": "failed"}
    assert metric(state, "backfill_rows_done", **failed) == 5
    assert metric(state, "backfill_rows_estimated", **failed) is None


def test_the_rate_is_that_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    rate = Rate()
    assert rate.per_second(0) == 0
    for count in range(100, 3100, 100):
        now += 1
        rate.note(count)
    assert rate.per_second(3000) == pytest.approx(100)
    now += 60  # nothing came since
    assert rate.per_second(3000) < 10


CAPTURE = {
    "capture": "shop", "state": "streaming", "error": None, "code": None, "remedy": None,
    "captured": 0, "confirmed": 0, "waiting": 0, "waited": None, "warm": True,
}  # fmt: skip
LOST = {**CAPTURE, "state": "error", "error": "Postgres is gone.", "code": "connection_lost"}
ENDED = Failure("worker_failed", "CancelledError", "It starts again.")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "time", lambda: clock.now)
    return clock


class Clock:
    def __init__(self) -> None:
        self.now = 1_800_000_000.0

    def __iadd__(self, seconds: float) -> Clock:
        self.now += seconds
        return self


def test_a_source_is_starting_until_it_has_run_a_batch(state: RunState) -> None:
    assert state.health().level is Level.STARTING
    state.update({**CAPTURE, "warm": False})
    assert state.health().level is Level.STARTING
    state.update(CAPTURE)
    assert state.health().level is Level.READY
    assert metric(state, "health", part="source shop") == 3


def test_a_capture_that_reconnects(state: RunState, clock: Clock) -> None:
    state.update(CAPTURE)
    state.update(LOST)
    assert state.health().level is Level.DEGRADED
    clock += 2
    state.update({**LOST, "state": "connecting", "error": None, "code": None})
    clock += 2
    state.update(LOST)
    assert state.health().level is Level.FAILED  # 4 s without a stream
    found = state.as_json()["sources"]["shop"]
    assert (found["level"], found["error"]) == ("failed", "Postgres is gone.")
    state.update(CAPTURE)
    assert state.health().level is Level.READY


def test_the_reason_of_a_query_that_ends_stands_until_there_is_progress(
    state: RunState, clock: Clock
) -> None:
    state.update({**CAPTURE, "captured": 3, "confirmed": 3})
    for _ in range(3):
        state.query_failed("shop", ENDED)
        for report in (
            {**CAPTURE, "state": "connecting", "warm": False},
            {**CAPTURE, "warm": False},
            {**CAPTURE, "waiting": 2, "waited": 1.0},
        ):
            clock += 1
            state.update(report)
            assert state.as_json()["sources"]["shop"]["error"] == "CancelledError It starts again."
    assert state.health().level is Level.FAILED
    state.update({**CAPTURE, "confirmed": 1})
    assert state.health().level is Level.READY
    assert state.as_json()["sources"]["shop"]["error"] is None


def test_a_query_that_had_failed_and_has_nothing_to_do_is_well_after_a_while(
    state: RunState, clock: Clock
) -> None:
    state.update(CAPTURE)
    state.query_failed("shop", ENDED)
    for _ in range(5):
        clock += 1
        state.update(CAPTURE)
        assert state.as_json()["sources"]["shop"]["error"]
    clock += 2
    state.update(CAPTURE)
    assert state.health().level is Level.READY


@pytest.mark.usefixtures("clock")
def test_an_error_is_never_without_its_text(state: RunState) -> None:
    state.query_failed("shop", Failure("query", "", ""))
    (problem,) = state.as_json()["problems"]
    assert problem["cause"]
    assert problem["remedy"]


def test_messages_that_wait(state: RunState, clock: Clock) -> None:
    state.update({**CAPTURE, "waiting": 3, "waited": 2.0})
    assert metric(state, "waiting_messages", source="shop") == 3
    assert metric(state, "oldest_waiting_seconds", source="shop") == 2
    assert state.health().level is Level.READY
    clock += 9
    state.update({**CAPTURE, "waiting": 3, "waited": 11.0})
    assert state.health().problems[0].code == "stalled"
    assert state.as_json()["sources"]["shop"]["oldest_waiting_seconds"] == 11
    state.update(DELIVERED)  # of a long batch
    assert state.health().level is Level.READY


def test_a_capture_that_reports_no_more(state: RunState, clock: Clock) -> None:
    state.update(CAPTURE)
    clock += 60
    assert state.health().problems[0].code == "silent"


def test_a_sink_that_tries_again_is_not_called_attached(state: RunState, clock: Clock) -> None:
    state.update(CAPTURE)
    state.update(ERROR)
    found = state.as_json()["sinks"]["jetstream"]
    assert (found["state"], found["error"]) == ("retrying", ERROR["error"])
    assert state.health().level is Level.DEGRADED
    clock += 60
    state.update({**CAPTURE, "waiting": 0})
    assert state.health().level is Level.DEGRADED  # the stream takes messages
    state.update(DELIVERED)
    assert state.as_json()["sinks"]["jetstream"]["state"] == "attached"


def test_a_process_is_what_its_runs_and_its_other_parts_are(state: RunState) -> None:
    other = RunState(["stock"], {})
    other.update({**CAPTURE, "capture": "stock"})
    state.update(CAPTURE)
    extra: list[Part] = []
    states = ProcessState(lambda: [state, other], dict, lambda: extra)
    assert states.health().level is Level.READY
    other.update({"store": "It is gone.", "code": "connection_lost"})
    assert states.health().level is Level.DEGRADED
    extra.append(run_part(Failure("spark", "The JVM ended.")))
    assert states.health().level is Level.FAILED
    reported = states.as_json()
    assert reported["level"] == "failed"
    assert [problem["subject"] for problem in reported["problems"]] == ["run", "store"]
    assert list(reported["parts"]) == [
        "store", "source shop", "sink jetstream", "sink events", "source stock", "run"
    ]  # fmt: skip
    registry = CollectorRegistry()
    registry.register(states)
    gauges = {
        sample.labels["part"]: sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "penstock_health"
    }
    assert gauges["run"] == 0
    assert gauges["store"] == 2
    assert len(gauges) == len(reported["parts"])
    assert Health.from_json(reported).as_json() == {
        k: reported[k] for k in ("level", "parts", "problems")
    }


def part(query: str, start: int, end: int, **counts: list[int]) -> dict[str, Any]:
    """The report of the only part of a batch."""
    return {
        "source": "shop", "query": query, "part": [[start, 0], [end, 0], 0, 1, end],
        "counts": counts,
    }  # fmt: skip


def test_a_report_that_comes_late_takes_nothing_back(state: RunState) -> None:
    """What follows begins where this is done: else it sends again what is delivered."""
    state.update({"capture": "shop", "done": [200, 3]})
    state.update({"capture": "shop", "done": [200, 1]})
    state.update({"capture": "shop", "done": None})
    assert state.sources["shop"].done == [200, 3]
    state.update({"capture": "shop", "done": [201, -1]})
    assert state.sources["shop"].done == [201, -1]


def test_what_is_done_again_counts_once(state: RunState) -> None:
    assert state.begin_query({"source": "shop", "query": "one"}) == {"floors": {}}
    state.update(part("one", 0, 10, jetstream=[7, 70, 1, 2]))
    sink = state.as_json()["sinks"]["jetstream"]
    assert (sink["delivered"], sink["dead_lettered"], sink["filtered"]) == (7, 1, 2)
    assert metric(state, "delivered_messages_total", sink="jetstream") == 7
    assert metric(state, "filtered_messages_total", sink="jetstream") == 2
    state.update({**DELIVERED, "counted": False, "duplicates": 5})  # of a part that is not done
    assert metric(state, "delivered_messages_total", sink="jetstream") == 7
    assert metric(state, "duplicate_messages_total", sink="jetstream") == 5
    found = state.begin_query({"source": "shop", "query": "two"})
    assert found == {"floors": {"jetstream": [10, 0]}}
    state.update(part("one", 10, 20, jetstream=[9, 90, 0, 0]))
    state.update(part("two", 5, 20, jetstream=[3, 30, 0, 0]))
    assert state.as_json()["sinks"]["jetstream"]["delivered"] == 10


def test_a_capture_that_counts_anew_is_added(state: RunState) -> None:
    for life, captured in ("a", 5), ("a", 7), ("b", 9), ("c", 2), ("c", 3):
        state.update({"capture": "shop", "life": life, "captured": captured})
    assert metric(state, "captured_messages_total", source="shop") == 7 + 9 + 3


def test_another_run_counts_on(state: RunState) -> None:
    state.begin_query({"source": "shop", "query": "one"})
    state.update(part("one", 0, 10, jetstream=[7, 70, 1, 2], events=[4, 40, 0, 0]))
    state.update({"capture": "shop", "life": "a", "captured": 9})
    sinks = {"jetstream": ("nats", "shop"), "late": ("nats", "shop"), "events": ("nats", "shop")}
    after = RunState(["shop"], sinks)
    after.continue_from(state)
    after.update({"capture": "shop", "life": "b", "captured": 2})
    # A sink of another type is another; one that is new gets what the others have.
    floors = after.begin_query({"source": "shop", "query": "two"})["floors"]
    assert floors == {"jetstream": [10, 0]}
    after.update(part("two", 0, 12, jetstream=[1, 10, 0, 0], late=[8, 80, 0, 0]))
    counts = {name: sink["delivered"] for name, sink in after.as_json()["sinks"].items()}
    assert counts == {"jetstream": 8, "late": 8, "events": 0}
    assert metric(after, "captured_messages_total", source="shop") == 11


def test_a_change_does_not_report_a_source_as_starting(state: RunState) -> None:
    """Another run of it begins, whose capture is not heard of yet."""

    def word(now: float, reported: dict[str, Any], patch: pytest.MonkeyPatch) -> str:
        before, after = (RunState(["shop"], {"jetstream": ("nats", "shop")}) for _ in range(2))
        before.update({"capture": "shop", "life": "a", "warm": True, **reported})
        patch.setattr(time, "time", lambda: now)
        after.continue_from(before)
        return after.readiness

    began = time.time()
    for later, reported, expected in (
        (1.0, {}, "ready"),
        (60.0, {}, "starting"),  # long ago: a standby that takes the source over
        (1.0, {"error": "It is away.", "code": "away"}, "starting"),
        (1.0, {"warm": False}, "starting"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            assert word(began + later, reported, patch) == expected, (later, reported)


def test_a_run_that_follows_another_and_does_not_stream_fails(
    state: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    state.update({"capture": "shop", "life": "a", "warm": True})
    after = RunState(["shop"], {"jetstream": ("nats", "shop")})
    after.continue_from(state)
    began = time.time()
    monkeypatch.setattr(time, "time", lambda: began + 20)
    assert after.readiness == "failed"
