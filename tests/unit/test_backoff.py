"""Waits grow while nothing progresses, and begin anew where something has."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.core.backoff import Backoff, wait_after


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


@given(st.integers(1, 10**6), st.floats(0.0, 1.0))
def test_jitter_shortens_a_wait_by_its_part_at_most(failures: int, jitter: float) -> None:
    whole = wait_after(failures, 0.5, 30.0)
    assert whole * (1.0 - jitter) <= wait_after(failures, 0.5, 30.0, jitter) <= whole


def test_jitter_spreads_the_waits_and_never_adds_up() -> None:
    backoff = Backoff(1.0, 64.0, jitter=0.5)
    waits = [backoff.after_failure() for _ in range(200)]
    assert all(
        wait_after(number, 0.5, 32.0) <= wait <= wait_after(number, 1.0, 64.0)
        for number, wait in enumerate(waits, 1)
    )
    assert max(waits) - min(waits[10:]) > 16.0
