"""Numbers as texts that sort as they do, and days before and after the years that Python has."""

from __future__ import annotations

import datetime
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.expressions.keys import key_of
from penstock.expressions.times import FIRST_DAY, LAST_DAY, civil, days_of
from penstock.expressions.types import DATE, KEY, TIMESTAMP, TIMESTAMPTZ, Type
from penstock.expressions.values import arrow

NUMBERS = st.one_of(
    st.decimals(allow_nan=False, allow_infinity=False, min_value=-(10**60), max_value=10**60),
    st.decimals(allow_nan=False, allow_infinity=False, places=40),
    st.integers(-(10**50), 10**50).map(Decimal),
    st.builds(
        lambda n, e: Decimal(n).scaleb(e), st.integers(-999, 999), st.integers(-9_000, 9_000)
    ),
)


@given(NUMBERS, NUMBERS)
def test_keys_sort_as_the_numbers_do(one: Decimal, other: Decimal) -> None:
    a, b = key_of(f"{one:f}"), key_of(f"{other:f}")
    assert a is not None
    assert b is not None
    assert (a < b, a == b) == (one < other, one == other)
    assert key_of(f"  {one:e}\n") == a


@given(
    st.lists(st.none() | st.decimals(0, 10**30, places=6) | st.integers(0, 10**40)), st.booleans()
)
def test_keys_of_many_are_those_of_each(numbers: list[Any], odd: bool) -> None:
    texts = [None if n is None else f"{n:f}" for n in map(_decimal, numbers)]
    texts += ["-7.50", "NaN", None, "x"] if odd else ["0", "0.00", "00.50", "1"]
    texts = texts * (200 // len(texts) + 1)
    found, unfit = arrow(KEY, texts)
    assert found.to_pylist() == [None if text is None else key_of(text) for text in texts]
    assert unfit == [row for row, text in enumerate(texts) if text == "x"]


@pytest.mark.parametrize("count", [1, 200])
def test_keys_end_where_numbers_do_in_small_and_large_batches_alike(count: int) -> None:
    most = "9" * 131_072
    texts = [most, "0." + "0" * 16_382 + "1", "1" + most, "0." + "0" * 131_073 + "1"]
    found, unfit = arrow(KEY, texts * count)
    assert found.to_pylist()[:4] == [key_of(text) for text in texts]
    assert unfit[:2] == [2, 3]


@pytest.mark.parametrize("type_", [DATE, TIMESTAMP, TIMESTAMPTZ])
def test_days_that_no_date_can_be_are_no_error(type_: Type) -> None:
    days = ["9999999-01-01", "9999999-01-01 BC", "4714-11-23 BC", "4714-11-24 BC", "2024-10-28"]
    found, unfit = arrow(type_, days)
    assert unfit == [0, 1, 2]
    assert found.null_count == 3


def _decimal(number: Any) -> Decimal | None:
    return None if number is None else Decimal(number)


def test_words_and_zeros() -> None:
    words = [
        "-Infinity",
        "-1e131000",
        "-1",
        "-1e-9000",
        "0",
        "1e-9000",
        "1",
        "1e131000",
        "Infinity",
        "NaN",
    ]
    keys = [key_of(word) for word in words]
    assert sorted(keys, key=str) == keys
    assert len({key_of(zero) for zero in ("0", "-0.00", "000", ".0", "0e5")}) == 1
    assert key_of("+1.50") == key_of("01.5") == key_of("15e-1")
    assert key_of("-inf") == keys[0]


@pytest.mark.parametrize(
    "text", ["", ".", "-", "x", "1e", "1 2", "1e999999", "1_000", "0x10", "true", "\u0661"]
)
def test_what_is_no_number(text: str) -> None:
    assert key_of(text) is None


@given(st.dates())
def test_days_are_those_of_python(day: datetime.date) -> None:
    number = day.toordinal() - datetime.date(1970, 1, 1).toordinal()
    assert days_of(day.year, day.month, day.day) == number
    assert civil(number) == (day.year, day.month, day.day)


@given(st.integers(FIRST_DAY, LAST_DAY))
def test_days_and_years_far_away(number: int) -> None:
    year, month, day = civil(number)
    assert days_of(year, month, day) == number
    # The calendar repeats itself.
    assert civil(number + 146_097) == (year + 400, month, day)


@pytest.mark.parametrize(
    "day", [(2023, 2, 29), (1900, 2, 29), (-4, 2, 30), (5, 13, 1), (5, 1, 0), (0, 4, 31)]
)
def test_days_that_there_are_not(day: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match="no such day"):
        days_of(*day)
    assert days_of(0, 2, 29) == days_of(0, 3, 1) - 1
