"""When a request that failed is made again."""

from __future__ import annotations

import random
import time
from email.utils import parsedate_to_datetime
from typing import Final

LEAST: Final = 1.0
MOST: Final = 600.0


def delay(attempt: int, retry_after: float | None = None) -> float:
    """Return the seconds to wait after attempt number `attempt`, from 1.

    Twice as long each time, from 1 s to 10 min, and up to a fifth less or more; the endpoint's own
    Retry-After replaces it, within the same bounds.
    """
    if retry_after is not None:
        return min(max(retry_after, LEAST), MOST)
    jitter = random.uniform(0.8, 1.2)  # noqa: S311 - no secret
    return min(max(LEAST * 2.0 ** min(attempt - 1, 30) * jitter, LEAST), MOST)


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
