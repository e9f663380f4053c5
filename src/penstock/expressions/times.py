"""Days of Postgres' calendar, which is the Gregorian one before 1582 too, from 4714 BC on.

Python's dates end with the years 1 and 9999. A year here is 0 for 1 BC, -1 for 2 BC.
"""

from __future__ import annotations

import calendar
from typing import Final

from penstock.expressions.types import DAY, TIMESTAMP_INFINITY

_EPOCH: Final = 719_468
"""From 0000-03-01, with which years of 400 begin below, to 1970-01-01."""
_ERA: Final = 146_097


def days_of(year: int, month: int, day: int) -> int:
    """Return the days from 1970-01-01 to a day; raises `ValueError` for one that there is not."""
    if not 1 <= month <= 12 or not 1 <= day <= _length(year, month):
        raise ValueError("there is no such day")
    # Years begin with March, so that the leap day is the last.
    year -= month < 3
    era, of_era = divmod(year, 400)
    of_year = (153 * ((month + 9) % 12) + 2) // 5 + day - 1
    return era * _ERA + of_era * 365 + of_era // 4 - of_era // 100 + of_year - _EPOCH


def _length(year: int, month: int) -> int:
    # The calendar repeats itself, and Python's has no year 0.
    return calendar.monthrange(2000 + year % 400, month)[1]


def civil(days: int) -> tuple[int, int, int]:
    """Return the year, month and day that is so many days from 1970-01-01."""
    era, of_era = divmod(days + _EPOCH, _ERA)
    year = (of_era - of_era // 1_460 + of_era // 36_524 - of_era // 146_096) // 365
    of_year = of_era - (365 * year + year // 4 - year // 100)
    month = (5 * of_year + 2) // 153
    day = of_year - (153 * month + 2) // 5 + 1
    month = month + 3 if month < 10 else month - 9
    return year + era * 400 + (month < 3), month, day


FIRST_DAY: Final = days_of(-4713, 11, 24)
"""The first day that Postgres has, in days since 1970."""
LAST_DAY: Final = days_of(5_874_897, 12, 31)
"""The last one."""
FIRST_MOMENT: Final = FIRST_DAY * DAY
"""The first moment that Postgres has, in microseconds since 1970."""
LAST_MOMENT: Final = TIMESTAMP_INFINITY - 1
"""The last one that there is here, early in 294247; Postgres has 30 years more."""
DAY_ONE: Final = days_of(1, 1, 1)
DAY_10000: Final = days_of(10_000, 1, 1)
"""The bounds of the years that have four digits, and are not before Christ."""
