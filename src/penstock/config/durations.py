"""Durations of the file: a whole number and its unit."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated, Any, Final

from pydantic import BeforeValidator

_DURATION: Final = re.compile(r"(\d{1,9})([smhd])\Z")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_LONGEST: Final = timedelta(days=36_500)


def parse(value: Any) -> timedelta:
    """Return a duration as the file has it; raises `ValueError`."""
    if isinstance(value, timedelta):
        return value
    match = _DURATION.match(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected a number and its unit, as in 90s, 30m, 12h or 7d")
    seconds = int(match[1]) * _SECONDS[match[2]]
    if not 0 < seconds <= _LONGEST.total_seconds():
        raise ValueError(f"expected 1s to {_LONGEST.days}d")
    return timedelta(seconds=seconds)


Duration = Annotated[timedelta, BeforeValidator(parse)]
"""1s to 36500d, written as 90s, 30m, 12h or 7d."""


def shown(value: timedelta) -> str:
    """Return a duration as the file has it, in its largest whole unit; below seconds as `0.5s`."""
    seconds = value.total_seconds()
    for unit, size in reversed(_SECONDS.items()):
        if seconds and not seconds % size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:g}s"
