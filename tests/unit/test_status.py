"""What `penstock status` makes of what a run reports and of what it sees itself."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.cli.status import assess, is_ready
from penstock.core.health import Failure, Health, Level, Part, worker_part
from penstock.core.source_health import SinkFacts, sink_part

SLOT: dict[str, Any] = {
    "slot": "penstock_shop", "error": None, "wal_status": "reserved", "active": True,
    "confirmed_flush_lsn": "0/1", "retained_bytes": 1024,
}  # fmt: skip
PIPELINE: dict[str, Any] = {
    "pipeline": "mail", "relay_group": "g", "enabled": True, "state": "running", "code": None,
    "error": None, "remedy": None, "pending": 0, "at": None,
}  # fmt: skip

DEAD: dict[str, Any] = {
    "state": "dead", "code": "relay_dead", "error": "The relay of group g is dead.",
    "remedy": "Start it again: penstock relay --url … --group g",
}  # fmt: skip


LOST: dict[str, Any] = {
    "wal_status": "lost", "error": "The slot is lost. Run: penstock recover shop",
    "code": "slot_invalidated", "remedy": "Run: penstock recover shop",
}  # fmt: skip


def running(*parts: Part) -> dict[str, Any]:
    sources = {"shop": {"state": "streaming"}}
    return {"sources": sources, **Health((Part("store"), Part("source shop"), *parts)).as_json()}


def seen(
    slot: dict[str, Any] | None = None,
    run: dict[str, Any] | None = None,
    pipeline: dict[str, Any] | None = None,
    *,
    expected: bool = True,
) -> Health:
    slots = {} if slot is None else {"shop": {**SLOT, **slot}}
    pipelines = [] if pipeline is None else [{**PIPELINE, **pipeline}]
    outboxes = {"box": {"error": None, "pipelines": pipelines}}
    problem = "No pipeline runs there." if run is None else None
    return assess(slots, outboxes, run, problem, expected=expected)


def codes(health: Health) -> list[tuple[str, str, str]]:
    return [(p.subject, p.level.word, p.code) for p in health.problems]


def test_all_is_well() -> None:
    health = seen({}, running(), {})
    assert codes(health) == []
    assert is_ready(health.as_json())


def test_what_still_starts_is_not_ready() -> None:
    assert not is_ready(seen({}, running(Part("source stock", Level.STARTING))).as_json())


@pytest.mark.parametrize(
    ("slot", "expected"),
    [
        (LOST, ("slot penstock_shop", "failed", "slot_invalidated")),
        ({"wal_status": "unreserved"}, ("slot penstock_shop", "degraded", "slot_unreserved")),
        ({"active": False}, ("slot penstock_shop", "failed", "slot_inactive")),
        (
            {"error": "There is no slot. Make it.", "code": "slot_missing", "remedy": "Make it."},
            ("slot penstock_shop", "failed", "slot_missing"),
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_slot(slot: dict[str, Any], expected: tuple[str, str, str]) -> None:
    health = seen(slot, running())
    assert codes(health) == [expected]
    assert not is_ready(health.as_json())


def test_a_lost_slot_names_the_command_that_mends_it() -> None:
    (problem,) = seen(LOST, running()).problems
    assert (problem.cause, problem.remedy) == ("The slot is lost.", "Run: penstock recover shop")


def test_what_the_run_reports_counts_once() -> None:
    lost = Failure("slot_invalidated", "It is lost.", "penstock recover shop")
    run = running(worker_part("source shop", lost, 0.0))
    run["parts"] = {"store": "ready", "source shop": "failed"}
    assert codes(seen(LOST, run)) == [("source shop", "failed", "slot_invalidated")]
    sink = sink_part(SinkFacts("orders", failure=Failure("no_stream", "None captures it.")))
    assert codes(seen({}, running(sink))) == [("sink orders", "degraded", "no_stream")]


def test_what_a_relay_reports_counts_once() -> None:
    error = {"state": "error", "code": "no_stream", "error": "None captures it."}
    sink = sink_part(SinkFacts("mail", failure=Failure("no_stream", "None captures it.")))
    assert codes(seen(None, running(sink), error)) == [("sink mail", "degraded", "no_stream")]
    away = {**DEAD, "pending": 4}
    found = seen(None, running(sink), away)
    assert codes(found) == [
        ("pipeline mail", "failed", "relay_dead"), ("sink mail", "degraded", "no_stream")
    ]  # fmt: skip


def test_a_slot_that_is_not_read_for_a_moment_is_no_failure() -> None:
    run = running() | {"sources": {"shop": {"state": "connecting"}}}
    assert codes(seen({"active": False}, run)) == []


def test_a_run_of_another_file() -> None:
    other = {"sources": {}, **Health((Part("store"), Part("source stock"))).as_json()}
    assert codes(seen({}, other)) == [("slot penstock_shop", "failed", "not_running")]


def test_no_run_is_a_problem_where_one_is_expected() -> None:
    assert codes(seen({"active": False})) == [("run", "failed", "not_running")]
    assert codes(seen(expected=False)) == []  # its relays may run anywhere


def test_a_run_that_reports_no_health() -> None:
    assert codes(seen({}, {"sources": {}})) == [("run", "failed", "no_health")]


@pytest.mark.parametrize(("pending", "level"), [(4, "failed"), (0, "degraded")])
def test_a_relay_that_has_died(pending: int, level: str) -> None:
    (found,) = codes(seen(pipeline={**DEAD, "pending": pending}, expected=False))
    assert found == ("pipeline mail", level, "relay_dead")
    assert codes(seen(pipeline={**DEAD, "pending": pending, "enabled": False})) == [
        ("run", "failed", "not_running")
    ]


def test_messages_that_wait_for_a_first_relay() -> None:
    none = {
        "state": "no relay yet", "code": "no_relay", "error": "No relay runs the group g.",
        "remedy": "Start one: penstock relay --url … --group g",
    }  # fmt: skip
    assert codes(seen(pipeline={**none, "pending": 4}, expected=False)) == [
        ("pipeline mail", "failed", "no_relay")
    ]
    assert codes(seen(pipeline=none, expected=False)) == []


def test_a_pipeline_in_error() -> None:
    error = {"state": "error", "code": "no_stream", "error": "None captures it.", "pending": 4}
    (problem,) = seen(pipeline=error, expected=False).problems
    assert (problem.level.word, problem.code, problem.cause) == (
        "degraded", "no_stream", "None captures it."
    )  # fmt: skip
    assert problem.remedy
