"""Waits grow while nothing progresses, and begin anew where something has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.backoff import Backoff


def test_waits_double_up_to_the_longest() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.after_failure() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert backoff.after_failure() == 0.5


def test_faults_with_progress_between_them_never_wait_for_long() -> None:
    backoff = Backoff(0.5, 30.0)
    assert [backoff.after_failure(confirmed) for confirmed in (0, 0, 7, 7, 7, 9)] == [
        0.5, 1.0, 0.5, 1.0, 2.0, 0.5
    ]  # fmt: skip


@given(st.lists(st.integers(0, 2), min_size=1))
def test_a_wait_is_the_first_one_just_where_there_was_progress(steps: list[int]) -> None:
    backoff, done, waits = Backoff(1.0, 8.0), 0, []
    for step in steps:
        done += step
        waits.append(backoff.after_failure(done))
    for number, (step, wait) in enumerate(zip(steps, waits, strict=True)):
        assert 1.0 <= wait <= 8.0
        assert (wait == 1.0) == (number == 0 or step > 0)


def test_waits_with_jitter_are_shorter_by_up_to_its_share() -> None:
    waits = []
    for _ in range(200):
        backoff = Backoff(1.0, 2.0, jitter=0.3)
        waits.append(backoff.after_failure())
        assert 1.4 <= backoff.after_failure() <= 2.0, (
            "the next one is not shorter by the one before"
        )
    assert 0.7 <= min(waits) < 0.8
    assert 0.9 < max(waits) <= 1.0
