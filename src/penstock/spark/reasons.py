"""Why a query ended: the one line of Spark's traces that names the cause, and what to do."""

from __future__ import annotations

import re
from typing import Final

from penstock.health import Failure

_TRACE: Final = "Traceback (most recent call last)"
_CAUSED_BY: Final = "Caused by: "
_LOST: Final = ("Python worker exited unexpectedly", "Connection reset", "java.io.EOFException")
_RAISED: Final = re.compile(r"(?P<path>(?:\w+\.)*)(?P<name>\w+)(?:: (?P<text>.*))?\Z", re.DOTALL)
_ENDS: Final = re.compile(
    r"\s*\Z|\s+at |\s+File \"|\s*SQLSTATE: |Driver stacktrace|Caused by: |JVM stacktrace|==="
)
_STATES: Final = re.compile(r"(\s*SQLSTATE: \w{5})+\s*\Z")
_LONGEST: Final = 4_000
_RETRIED: Final = "It starts again by itself, and nothing is lost."
_UNKNOWN: Final = f"{_RETRIED} Where it ends each time, report this with the log."


def query_failure(error: BaseException) -> Failure:
    """Return why a query ended by `error`: cause first, without the traces around it."""
    lines = str(error).splitlines()
    raised = _python_error(lines)
    if raised is not None:
        return Failure("worker_failed", raised, _UNKNOWN)
    caused = _java_error(lines) or type(error).__name__
    if any(lost in caused for lost in _LOST):
        return Failure(
            "worker_lost", f"A Python worker of Spark's has ended: {caused}",
            f"{_RETRIED} Where it happens again, see whether the machine lacks memory.",
        )  # fmt: skip
    return Failure("query", caused, _UNKNOWN)


def _python_error(lines: list[str]) -> str | None:
    """Return what the last Python trace in the text ends in."""
    starts = [number for number, line in enumerate(lines) if _TRACE in line]
    if not starts:
        return None
    after = iter(lines[starts[-1] + 1 :])
    first = next((line for line in after if line.strip() and not line[0].isspace()), None)
    if first is None:
        return None
    text = [first]
    for line in after:
        if _ENDS.match(line):
            break
        text.append(line)
    return _short("\n".join(text))


def _java_error(lines: list[str]) -> str | None:
    causes = [line.strip() for line in lines if line.strip().startswith(_CAUSED_BY)]
    if causes:
        return _short(causes[-1].removeprefix(_CAUSED_BY))
    return next((_cut(_STATES.sub("", line.strip())) for line in lines if line.strip()), None)


def _short(raised: str) -> str:
    """Return an exception's line without its module, and one of our own without its class."""
    raised = _STATES.sub("", raised).strip()
    found = _RAISED.match(raised)
    if found is None:
        return _cut(raised)
    name, text = found["name"], (found["text"] or "").strip()
    if not text:
        return name
    return _cut(text if found["path"].startswith("penstock.") else f"{name}: {text}")


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} …"
