"""When a request that failed is made again."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from typing import Final

from penstock.core.backoff import wait_after

LEAST: Final = 1.0
MOST: Final = 600.0
_FIRST: Final = 1.2
_JITTER: Final = 1 / 3


def delay(attempt: int, retry_after: float | None = None) -> float:
    """Return the seconds to wait after attempt number `attempt`, from 1.

    Twice as long each time, 1 s, 2 s, 4 s and so on, up to a fifth less or more, and at most 10 min. The
    endpoint's own Retry-After replaces it, within the same bounds.
    """
    if retry_after is None:
        retry_after = wait_after(attempt, _FIRST, MOST, _JITTER)
    return min(max(retry_after, LEAST), MOST)


def seconds_of(retry_after: str | None, now: float | None = None) -> float | None:
    """Return the seconds of a Retry-After header, given as a number or a date; None for any other text.

    `now` is the time the date counts from, in seconds since 1970.
    """
    if retry_after is None:
        return None
    text = retry_after.strip()
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        at = parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError):
        return None
    return max(at - (time.time() if now is None else now), 0.0)
