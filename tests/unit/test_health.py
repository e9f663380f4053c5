"""Ready, starting, degraded, failed: what follows from plain facts, and what may never follow."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.core.health import (
    GRACE_SECONDS,
    Failure,
    Health,
    HealthProblem,
    Level,
    Part,
    run_part,
    worker_part,
)
from penstock.core.source_health import (
    SILENCE_SECONDS,
    STALL_SECONDS,
    START_SECONDS,
    SinkFacts,
    SourceFacts,
    sink_part,
    source_part,
    sources_parts,
)

NOW = 1_800_000_000.0
REFUSED = Failure("connection_refused", "Nothing listens.", "Start nats-server.", NOW - 60)
SHOP = SourceFacts(
    "shop", started=True, progress_at=NOW - 1, reported_at=NOW,
    sinks=(SinkFacts("orders"), SinkFacts("mail")),
)  # fmt: skip

times = st.none() | st.floats(0, 3600).map(lambda ago: NOW - ago)
texts = st.sampled_from(["", " ", "It broke.", "Line one.\nLine two."])
failures = st.builds(Failure, st.sampled_from(["query", "x"]), texts, texts, times)
sinks = st.builds(
    SinkFacts,
    name=st.sampled_from(["orders", "mail"]),
    state=st.sampled_from(["attached", "behind", "detached", "paused"]),
    failure=st.none() | failures,
    reason=st.none() | failures,
    since=times,
    backlog=st.integers(0, 9),
)
sources = st.builds(
    SourceFacts,
    name=st.just("shop"),
    started=st.booleans(),
    failure=st.none() | failures,
    waiting=st.integers(0, 5),
    waiting_since=times,
    progress_at=times,
    reported_at=times,
    sinks=st.lists(sinks, max_size=3).map(tuple),
)
stores = st.none() | failures


@given(sources, stores)
def test_it_is_never_ready_while_messages_wait_and_nothing_progresses(
    source: SourceFacts, store: Failure | None
) -> None:
    health = Health(tuple(sources_parts([source], store, NOW)))
    last = max(source.waiting_since or 0, source.progress_at or 0)
    if source.waiting and NOW - last >= STALL_SECONDS:
        started = source.started or NOW - last >= START_SECONDS
        assert health.part("source shop").level >= (Level.FAILED if started else Level.STARTING)
        assert not health.level.serves


@given(st.lists(sources, max_size=3), stores)
def test_a_whole_is_what_its_parts_make_it_and_each_problem_has_its_cause_and_remedy(
    found: list[SourceFacts], store: Failure | None
) -> None:
    health = Health(tuple(sources_parts(found, store, NOW)))
    assert health.level == max(part.level for part in health.parts)
    for part in health.parts:
        worst = max((p.level for p in part.problems), default=Level.READY)
        assert part.level in (worst, max(worst, Level.STARTING))
        if part.level in (Level.DEGRADED, Level.FAILED):
            assert part.problems
    for problem in health.problems:
        assert problem.cause.strip()
        assert problem.remedy.strip()
        assert problem.code
    levels = [problem.level for problem in health.problems]
    assert levels == sorted(levels, reverse=True)
    reported = health.as_json()
    assert reported["level"] == health.level.word
    assert len(reported["problems"]) == len(health.problems)
    assert health.problems or health.level in (Level.READY, Level.STARTING)


@given(sources, st.floats(0, 60))
def test_no_failure_goes_away_by_waiting(source: SourceFacts, later: float) -> None:
    before, after = source_part(source, NOW).level, source_part(source, NOW + later).level
    assert after >= before


@given(sources, sinks)
def test_one_more_sink_that_is_well_never_fails_a_source(
    source: SourceFacts, sink: SinkFacts
) -> None:
    well = replace(sink, state="attached", failure=None)
    alone, together = source, replace(source, sinks=(*source.sinks, well))
    assert source_part(together, NOW).level <= source_part(alone, NOW).level


def test_what_streams_is_ready_and_what_has_never_run_a_batch_is_starting() -> None:
    assert source_part(SHOP, NOW) == Part("source shop")
    assert source_part(replace(SHOP, started=False), NOW).level is Level.STARTING
    assert not Level.STARTING.serves
    assert Level.DEGRADED.serves


def test_messages_that_wait_for_spark_to_start_are_no_stall_at_first() -> None:
    cold = replace(SHOP, started=False, waiting=5, waiting_since=NOW - 30, progress_at=None)
    assert source_part(cold, NOW) == Part("source shop", Level.STARTING)
    assert source_part(cold, NOW + 31).level is Level.FAILED


def test_a_moment_of_failure_degrades_and_more_of_it_fails() -> None:
    for since, level in ((0.5, Level.DEGRADED), (GRACE_SECONDS, Level.FAILED)):
        failure = Failure("connection_lost", "Postgres is gone.", "", NOW - since)
        assert source_part(replace(SHOP, failure=failure), NOW).level is level
        assert worker_part("store", failure, NOW).level is level
    unknown = Failure("slot_missing", "The slot is gone.")
    assert source_part(replace(SHOP, failure=unknown), NOW).level is Level.FAILED


def test_one_sink_of_several_degrades_and_all_of_them_fail_the_source() -> None:
    orders, mail = SinkFacts("orders", "behind", REFUSED, backlog=7), SinkFacts("mail")
    one = Health(tuple(sources_parts([replace(SHOP, sinks=(orders, mail))], None, NOW)))
    assert one.level is Level.DEGRADED
    (problem,) = one.problems
    assert problem.subject == "sink orders"
    assert problem.cause == "Nothing listens. 7 messages wait in the store."
    assert problem.remedy == "Start nats-server."
    both = replace(SHOP, sinks=(orders, replace(orders, name="mail", state="attached")))
    part = source_part(both, NOW)
    assert part.level is Level.FAILED
    (problem,) = part.problems
    assert problem.code == "sinks_held_up"
    assert problem.cause == "None of its sinks (orders, mail) takes messages: Nothing listens."
    assert problem.remedy == "Start nats-server."
    alone = source_part(replace(SHOP, sinks=(orders,)), NOW)
    assert alone.problems[0].cause == "Its sink orders takes no messages: Nothing listens."


def test_sinks_that_shall_wait_are_no_problem() -> None:
    disabled = SinkFacts("orders", "paused")
    assert source_part(replace(SHOP, sinks=(disabled,)), NOW).level is Level.READY
    assert sink_part(disabled) == Part("sink orders")
    held = replace(SHOP, sinks=(disabled, SinkFacts("mail", "paused", REFUSED)))
    assert source_part(held, NOW).level is Level.FAILED


def test_a_sink_that_catches_up_is_degraded_and_its_source_ready() -> None:
    sink = SinkFacts("orders", "detached", None, REFUSED, NOW - 50, 12)
    part = sink_part(sink)
    assert part.level is Level.DEGRADED
    assert part.problems[0].cause == (
        "It fell behind: Nothing listens. 12 messages wait in the store."
    )
    assert part.problems[0].remedy == "It catches up by itself."
    assert part.problems[0].since == NOW - 50
    assert source_part(replace(SHOP, sinks=(sink,)), NOW).level is Level.READY


def test_messages_that_wait_for_the_store_name_it() -> None:
    away = Failure("connection_refused", "Store: nothing answers.", "Start Postgres.", NOW - 20)
    waiting = replace(SHOP, waiting=3, waiting_since=NOW - 20, progress_at=NOW - 30)
    parts = sources_parts([waiting], away, NOW)
    (problem,) = Health(tuple(parts)).part("source shop").problems
    assert problem.code == "stalled"
    assert "3 messages wait, the oldest for 20 s" in problem.cause
    assert "Store: nothing answers." in problem.cause
    assert problem.remedy == "Start Postgres."


def test_a_capture_that_is_silent() -> None:
    silent = source_part(replace(SHOP, reported_at=NOW - SILENCE_SECONDS), NOW)
    assert silent.level is Level.FAILED
    assert silent.problems[0].code == "silent"


@pytest.mark.parametrize(
    ("text", "remedy", "cause"),
    [
        ("It broke. Mend it.", "Mend it.", "It broke."),
        ("It broke.", "", "It broke."),
        ("It broke.", None, "It broke."),
        ("Mend it.", "Mend it.", "Mend it."),
    ],
)
def test_a_failure_of_a_whole_text(text: str, remedy: str | None, cause: str) -> None:
    failure = Failure.of("broken", text, remedy, NOW)
    assert failure.cause == cause
    problem = HealthProblem("store", Level.FAILED, failure.code, failure.cause, failure.remedy)
    assert problem.remedy


def test_only_a_run_that_can_not_go_on_fails_healthz() -> None:
    failure = Failure("spark", "The JVM ended.")
    assert Health((worker_part("store", failure, NOW),)).goes_on
    assert not Health((Part("store"), run_part(failure))).goes_on


def test_a_consumer_that_waits_reports_what_to_do() -> None:
    paused = Failure("paused", "It is paused.")
    mail = SinkFacts("mail", "paused", None, paused, NOW - 50, 12, stream="orders")
    part = sink_part(mail)
    assert (part.subject, part.level) == ("consumer orders/mail", Level.DEGRADED)
    assert part.problems[0].cause == "It is paused. 12 messages wait in its stream."
    assert part.problems[0].remedy == "Let it go on: penstock consumer resume mail"
    behind = sink_part(replace(mail, state="behind"))
    assert behind.problems[0].cause == "It is behind. 12 messages wait in its stream."
    failing = sink_part(replace(mail, state="detached", failure=REFUSED))
    assert failing.problems[0].remedy == "Start nats-server."
    assert sink_part(replace(mail, state="attached", reason=None)) == Part("consumer orders/mail")
