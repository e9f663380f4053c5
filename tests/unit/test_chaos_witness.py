"""The fault test's witness finds reports that are better, or worse, than what really moved."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ..chaos.witness import Evidence, Report, Sample

RATE = 100


def evidence(*, still: tuple[int, int] | None = None, seconds: int = 60) -> Evidence:
    """Return a minute at 100 messages a second, with nothing delivered in the span `still`."""
    found, delivered = Evidence(), 0
    for second in range(seconds):
        if still is None or not still[0] <= second < still[1]:
            delivered = second * RATE
        found.samples.append(Sample(float(second), second * RATE, delivered))
    return found


def lies(found: Evidence, at: float, *, good: bool) -> list[str]:
    found.reports = [Report("/readyz", at, at + 0.5, good)]
    return [kind for kind, _ in found.lies()]


@pytest.mark.parametrize("at", [14.0, 30.0, 50.0])
def test_where_all_moves_good_is_true_and_bad_is_not(at: float) -> None:
    assert lies(evidence(), at, good=True) == []
    assert lies(evidence(), at, good=False) == ["reported worse than it was"]


def test_where_nothing_moves_for_long_good_is_not_true() -> None:
    assert lies(evidence(still=(10, 50)), 40.0, good=True) == ["reported better than it was"]
    assert lies(evidence(still=(10, 50)), 40.0, good=False) == []


def test_where_another_sink_gets_messages_good_is_true() -> None:
    found = evidence(still=(10, 50))
    found.samples = [replace(of, elsewhere=int(of.at)) for of in found.samples]
    assert lies(found, 40.0, good=True) == []


@pytest.mark.parametrize(("bad", "expected"), [(25.0, ["reported better than it was"]), (30.0, [])])
def test_what_has_just_begun_to_move_may_need_a_while(bad: float, expected: list[str]) -> None:
    found = evidence(still=(10, 50))
    found.reports = [
        Report("/readyz", bad, bad, good=False),
        Report("/readyz", 40.0, 40.5, good=True),
    ]
    assert [kind for kind, _ in found.lies()] == expected
    found.reports[0] = replace(found.reports[0], by="penstock status")
    assert [kind for kind, _ in found.lies()] == ["reported better than it was"]


def test_a_short_pause_may_be_reported_either_way() -> None:
    for good in (True, False):
        assert lies(evidence(still=(20, 32)), 31.0, good=good) == []


def test_what_is_idle_is_ready() -> None:
    idle = evidence()
    idle.samples = [
        Sample(s.at, min(s.committed, 1000), min(s.delivered, 1000)) for s in idle.samples
    ]
    assert lies(idle, 50.0, good=True) == []
    assert lies(idle, 50.0, good=False) == ["reported worse than it was"]


def test_a_fault_excuses_a_bad_report_only_while_it_lasts() -> None:
    found = evidence()
    found.faults = [(20.0, 30.0)]
    assert lies(found, 35.0, good=False) == []
    assert lies(found, 45.0, good=False) == ["reported worse than it was"]


def test_what_was_not_watched_is_not_judged() -> None:
    found = evidence(still=(0, 60))
    for at in (3.0, 59.5):
        assert lies(found, at, good=True) == lies(found, at, good=False) == []


def test_a_consumer_that_reads_its_stream_is_behind_though_all_is_delivered() -> None:
    behind = (
        "! consumer events/copy: It is behind. 9 messages wait in its stream.\n    It catches up."
    )
    for text, expected in (
        (behind, []),
        (f"{behind}\n! sink plain: It is behind.", ["reported worse than it was"]),
        ("! consumer events/copy: No server answers.", ["reported worse than it was"]),
    ):
        found = evidence()
        found.reports = [Report("penstock status", 30.0, 30.5, good=False, text=text)]
        assert [kind for kind, _ in found.lies()] == expected
