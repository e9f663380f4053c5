"""The settings of a JetStream stream: what a sink wants of them, what there is, and how these differ."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any, Final, NamedTuple

from penstock.config.durations import shown
from penstock.config.jetstream import JetStreamSettings
from penstock.config.sinks import NatsSinkSettings

_NANOSECONDS: Final = 10**9
_DURATIONS: Final = ("max_age", "duplicate_window")
_LIMITS: Final = ("max_msgs_per_subject", "max_bytes", "max_msgs")
_API_NAMES: Final = {"replicas": "num_replicas"}
_FLAGS: Final = {
    "subjects": "subjects", "retention": "retention", "storage": "storage",
    "max_msgs_per_subject": "max-msgs-per-subject", "max_age": "max-age", "max_bytes": "max-bytes",
    "max_msgs": "max-msgs", "discard": "discard", "duplicate_window": "dupe-window",
    "replicas": "replicas",
}  # fmt: skip
_FIXED: Final = frozenset({"storage", "retention"})
"""What a stream keeps for life, retention at least to and from `workqueue`."""


class Difference(NamedTuple):
    """A setting of a stream that is not as its sink wants it, and the command that mends it."""

    setting: str
    wanted: str
    found: str
    fix: str


def stream_name(settings: NatsSinkSettings, sink: str) -> str:
    """Return the name of the stream that a sink, called `sink`, wants."""
    wanted = settings.stream_config
    given = (wanted and wanted.name) or settings.stream
    return given or re.sub(r"[^A-Z0-9_-]", "_", sink.upper())


def demanded_name(settings: NatsSinkSettings) -> str | None:
    """Return the name that the stream must have, None where any will do."""
    return (settings.stream_config and settings.stream_config.name) or settings.stream


def wanted_config(settings: NatsSinkSettings, sink: str) -> dict[str, Any]:
    """Return the stream that a sink wants, as JetStream's API takes it."""
    found: dict[str, Any] = {
        "name": stream_name(settings, sink),
        "subjects": list(settings.wildcards()),
        "storage": "file",
    }
    given = {} if settings.stream_config is None else settings.stream_config.given()
    given.pop("name", None)
    for key, value in given.items():
        found[_API_NAMES.get(key, key)] = _as_api(value)
    return found


def _as_api(value: Any) -> Any:
    if isinstance(value, timedelta):
        return int(value.total_seconds()) * _NANOSECONDS
    return list(value) if isinstance(value, tuple) else value


def flags(wanted: JetStreamSettings | None) -> str:
    """Return the options of `nats stream add` for what a sink wants, but for the subjects."""
    given = {} if wanted is None else wanted.given()
    given = {"storage": "file", "duplicate_window": timedelta(minutes=2)} | given
    return " ".join(_flag(k, v) for k, v in given.items() if k not in ("name", "subjects"))


def differences(settings: NatsSinkSettings, found: Mapping[str, Any]) -> Iterator[Difference]:
    """Yield what differs between what a sink wants and a stream's settings, as the API has them."""
    given = {} if settings.stream_config is None else settings.stream_config.given()
    name = str(found.get("name"))
    for key, wanted in given.items():
        if key == "name":
            continue
        there = _as_file(key, found.get(_API_NAMES.get(key, key)))
        if there == (tuple(sorted(wanted)) if key == "subjects" else wanted):
            continue
        fix = f"nats stream edit {name} {_flag(key, wanted)}"
        if key in _FIXED:
            fix = f"make a new stream with {_flag(key, wanted)}"
        yield Difference(key, _text(key, wanted), _text(key, there), fix)


def _as_file(key: str, value: Any) -> Any:
    """Return a value of the API as the file would have it."""
    if key == "subjects":
        return tuple(sorted(value or ()))
    if key in _DURATIONS:
        return timedelta(microseconds=int(value or 0) / 1000)
    if key in _LIMITS:
        return int(value) if int(value or 0) > 0 else -1
    return value


def _text(key: str, value: Any) -> str:
    if key in _LIMITS and value == -1:
        return "unlimited"
    if isinstance(value, timedelta):
        return shown(value) if value else "unlimited"
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _flag(key: str, value: Any) -> str:
    if key == "subjects":
        return f'--subjects "{",".join(value)}"'
    text = shown(value) if isinstance(value, timedelta) else str(value)
    return f"--{_FLAGS[key]}={text}" if text.startswith("-") else f"--{_FLAGS[key]} {text}"
