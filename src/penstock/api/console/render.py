"""Templates: Jinja2 with autoescape always on, and how the console writes figures and times."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

import orjson
from jinja2 import Environment, PackageLoader, StrictUndefined

from penstock import __version__
from penstock.api.console import exact
from penstock.api.console.assets import asset

NONE: Final = "\N{EN DASH}"
"""What stands where there is no value."""
_UNITS: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_KIBI: Final = 1024


def render(template: str, **values: Any) -> str:
    """Return a template with its values."""
    return _ENVIRONMENT.get_template(template).render(**values)


def seconds(value: float | None) -> str:
    """Return a duration as people read it: `0.4 s`, `12 s`, `3 min`, `5 h`, `2 d`."""
    if value is None:
        return NONE
    if value < 10:
        return f"{value:.1f} s"
    for size, unit, upto in ((1, "s", 120), (60, "min", 7200), (3600, "h", 172_800)):
        if value < upto:
            return f"{value / size:.0f} {unit}"
    return f"{value / 86_400:.0f} d"


def number(value: float | None) -> str:
    """Return a number with separators."""
    if value is None:
        return NONE
    return f"{value:,.1f}" if isinstance(value, float) and value % 1 else f"{value:,.0f}"


def size(value: float | None) -> str:
    """Return bytes in a unit that fits."""
    if value is None:
        return NONE
    for unit in _UNITS:
        if value < _KIBI or unit == _UNITS[-1]:
            break
        value /= _KIBI
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def time(value: str | datetime | None) -> str:
    """Return a time in UTC to the second."""
    if not value:
        return NONE
    at = datetime.fromisoformat(value) if isinstance(value, str) else value
    return at.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S")


def pretty(value: Any) -> str:
    """Return JSON over several lines; autoescape still applies."""
    return exact.dumps(value, orjson.OPT_INDENT_2)


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("penstock.api.console"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "seconds": seconds, "number": number, "size": size, "time": time, "pretty": pretty,
    }  # fmt: skip
    environment.globals |= {"version": __version__, "asset": asset, "NONE": NONE}
    return environment


_ENVIRONMENT: Final = _environment()
