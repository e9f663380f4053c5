"""When a request is made again: backoff, jitter, Retry-After."""

from __future__ import annotations

from datetime import UTC, datetime
from email.utils import format_datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.push.retry import delay, seconds_of


@pytest.mark.parametrize(("attempt", "middle"), [(2, 2), (3, 4), (5, 16), (9, 256)])
def test_twice_as_long_each_time_with_jitter(attempt: int, middle: float) -> None:
    delays = [delay(attempt) for _ in range(500)]
    assert all(middle * 0.8 <= d <= middle * 1.2 for d in delays)
    assert min(delays) < middle * 0.9
    assert max(delays) > middle * 1.1


@given(st.integers(1, 10**9))
def test_between_a_second_and_ten_minutes(attempt: int) -> None:
    assert 1.0 <= delay(attempt) <= 600.0


@pytest.mark.parametrize(
    ("asked", "seconds"), [(0.0, 1.0), (7.0, 7.0), (600.0, 600.0), (86_400.0, 600.0)]
)
def test_the_endpoint_s_retry_after_counts(asked: float, seconds: float) -> None:
    assert delay(1, asked) == delay(12, asked) == seconds


NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        (None, None),
        ("120", 120.0),
        (" 5 ", 5.0),
        ("9" * 400, 999_999_999.0),
        (format_datetime(NOW.replace(minute=2), usegmt=True), 120.0),
        ("Saturday, 21-Nov-26 12:00:30 GMT", 30.0),
        (format_datetime(NOW.replace(hour=11), usegmt=True), 0.0),
        ("soon", None),
        ("-3", None),
        ("1.5", None),
        ("", None),
        ("²", None),
        ("Sat, 99 Nov 2026 12:00:00 GMT", None),
    ],
)
def test_retry_after(header: str | None, seconds: float | None) -> None:
    assert seconds_of(header, NOW.timestamp()) == seconds
