"""The limits in an API's headers: Retry-After, and how many requests are left."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Final

_EPOCH: Final = 1_000_000_000
_EPOCH_MS: Final = 1_000_000_000_000
_REMAINING: Final = ("x-ratelimit-remaining", "ratelimit-remaining", "x-rate-limit-remaining")
_LIMIT: Final = ("x-ratelimit-limit", "ratelimit-limit", "x-rate-limit-limit")
_RESET: Final = ("x-ratelimit-reset", "ratelimit-reset", "x-rate-limit-reset")
_SALESFORCE: Final = re.compile(r"api-usage=(\d+)/(\d+)")
_PART: Final = re.compile(r"\b(limit|remaining|reset|r|t)\s*=\s*(\d+)")


@dataclass(frozen=True, slots=True)
class RateHeaders:
    """What an answer's headers have; None where they lack it.

    `reset` is in how many seconds `remaining` is full again.
    """

    remaining: int | None = None
    limit: int | None = None
    reset: float | None = None


def retry_after(headers: Mapping[str, str], now: datetime) -> float | None:
    """Return the seconds of `Retry-After`, a number or an HTTP date; None without a usable one.

    `now` is the API's own time.
    """
    text = _lower(headers).get("retry-after", "").strip()
    if not text:
        return None
    number = _number(text)
    if number is not None:
        return number
    then = http_date(text)
    return None if then is None else max((then - now).total_seconds(), 0.0)


def http_date(text: str) -> datetime | None:
    """Return the time of an HTTP date, None where it is none."""
    try:
        found = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def rate_limit(headers: Mapping[str, str], now: datetime) -> RateHeaders:
    """Return what the headers of an answer have of the requests that are left."""
    of = _lower(headers)
    remaining = _first(of, _REMAINING)
    if remaining is not None:
        return RateHeaders(int(remaining), _whole(_first(of, _LIMIT)), _seconds(of, now))
    if "ratelimit" in of:
        parts = {name: int(value) for name, value in _PART.findall(of["ratelimit"])}
        left = parts.get("remaining", parts.get("r"))
        reset = parts.get("reset", parts.get("t"))
        if left is not None:
            return RateHeaders(left, parts.get("limit"), None if reset is None else float(reset))
    remaining = _first(of, ("x-hubspot-ratelimit-remaining",))
    if remaining is not None:
        interval = _first(of, ("x-hubspot-ratelimit-interval-milliseconds",))
        return RateHeaders(
            int(remaining),
            _whole(_first(of, ("x-hubspot-ratelimit-max",))),
            None if interval is None else interval / 1000,
        )
    if match := _SALESFORCE.search(of.get("sforce-limit-info", "")):
        used, allowed = int(match[1]), int(match[2])
        return RateHeaders(max(allowed - used, 0), allowed)
    return RateHeaders()


def _lower(headers: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in headers.items()}


def _seconds(of: Mapping[str, str], now: datetime) -> float | None:
    reset = _first(of, _RESET)
    if reset is None:
        return None
    if reset > _EPOCH_MS:
        reset /= 1000
    return max(reset - now.timestamp(), 0.0) if reset > _EPOCH else reset


def _first(of: Mapping[str, str], names: tuple[str, ...]) -> float | None:
    for name in names:
        # `100, 100;w=60` names the limit first.
        if name in of and (number := _number(re.split(r"[,;]", of[name])[0].strip())) is not None:
            return number
    return None


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) and number >= 0 else None
