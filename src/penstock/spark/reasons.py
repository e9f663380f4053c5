"""Why Spark does not start, or a query ended: the one line that names the cause, and what to do.

Spark's errors are traces of several causes, the outermost first, and often the innermost one has it. Of
a process that does not come up only its standard error has the reason.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from penstock.core.health import Failure

_TRACE: Final = "Traceback (most recent call last)"
_CAUSED_BY: Final = "Caused by: "
_LOST: Final = ("Python worker exited unexpectedly", "Connection reset", "java.io.EOFException")
_RAISED: Final = re.compile(r"(?P<path>(?:\w+\.)*)(?P<name>\w+)(?:: (?P<text>.*))?\Z", re.DOTALL)
_ENDS: Final = re.compile(
    r"\s*\Z|\s+at |\s+File \"|\s*SQLSTATE: |Driver stacktrace|Caused by: |JVM stacktrace|==="
)
_STATES: Final = re.compile(r"(\s*SQLSTATE: \w{5})+\s*\Z")
_PY4J: Final = "An error occurred while calling "
_FROM_WORKER: Final = "Error from python worker:"
_PATH_WAS: Final = "PYTHONPATH was:"
_NO_WORKER: Final = (
    _FROM_WORKER, "Python worker failed to connect back", "Cannot run program",
    "while reading the port number from",
)  # fmt: skip
_JAVA_RAISED: Final = re.compile(r"(?:\w+\.)+\w+(?:Exception|Error): (?!.*(?:Exception|Error): )")
_SAYS_NOTHING: Final = (
    "SocketTimeoutException: Accept timed out", "InvocationTargetException", "ExecutionException",
    "java.util.concurrent.TimeoutException",
)  # fmt: skip
_STOPPED: Final = "stopped SparkContext"
_LOGGED: Final = " spark ERROR "
_SETTING: Final = re.compile(r"INVALID_CONF_VALUE|CANNOT_MODIFY_CONFIG|in the config \"")
_RAISED_LINE: Final = re.compile(r"(?:\w+\.)*\w*(?:Error|Exception)\b|.*No module named")
_NO_REASON: Final = (
    "Error: Could not create the Java Virtual Machine", "Error: A fatal exception has occurred",
    "Error occurred during initialization of VM",
)  # fmt: skip
_LINES: Final = 3
_CONF: Final = (
    "Correct the settings below `spark` in the configuration, or leave them out; `penstock check` looks"
    " at Java."
)
_LONGEST: Final = 4_000
_RETRIED: Final = "It starts again by itself, and nothing is lost."
_STAYS: Final = "What was not delivered is still in the slot."
_UNKNOWN: Final = f"{_RETRIED} Where it ends each time, report this with the log."


def query_failure(
    error: BaseException, errors: Sequence[str] = (), *, retried: bool = True
) -> Failure:
    """Return why a query ended by `error`: cause first, without the traces around it.

    `errors` is what Spark's processes wrote last to standard error.
    """
    failure = _query_failure(error, errors)
    if retried:
        return failure
    return replace(failure, remedy=failure.remedy.replace(_RETRIED, _STAYS))


def _query_failure(error: BaseException, errors: Sequence[str]) -> Failure:
    text = str(error)
    lines = text.splitlines()
    raised = _python_error(lines)
    if raised is not None:
        return Failure("worker_failed", raised, _UNKNOWN)
    if any(words in text for words in _NO_WORKER):
        return _no_worker(lines, errors)
    caused = _java_error(lines) or type(error).__name__
    if any(lost in caused for lost in _LOST):
        return Failure(
            "worker_lost", f"A Python worker of Spark's has ended: {caused}",
            f"{_RETRIED} Where it happens again, see whether the machine lacks memory.",
        )  # fmt: skip
    if _SETTING.search(caused) is not None:
        return Failure("spark_conf", caused, _CONF)
    return Failure("query", caused, _UNKNOWN)


def start_failure(error: BaseException, errors: Sequence[str] = ()) -> Failure:
    """Return why Spark's session can't be had; `errors` is what its JVM wrote to standard error."""
    caused = _java_error(str(error).splitlines()) or type(error).__name__
    logged = [line.partition(_LOGGED)[2] for line in errors if _LOGGED in line]
    if _STOPPED in caused and logged:
        caused = logged[0]
    return Failure("spark", f"Spark can't start: {_ended(caused)}", _CONF)


def java_failure(printed: Sequence[str]) -> Failure:
    """Return why Spark's JVM has ended at its start, by what it wrote to standard error."""
    found = [line for line in printed if not line.startswith(_NO_REASON)]
    caused = " ".join(_ended(line) for line in found[-_LINES:]) or "it wrote no reason."
    return Failure("spark", f"Spark's Java process does not start: {caused}", _CONF)


def _no_worker(lines: list[str], errors: Sequence[str]) -> Failure:
    """Return why no Python worker comes up: the trace has only that Spark waited for it."""
    found = [line.strip() for line in lines if line.strip()]
    if _FROM_WORKER in found:
        wrote = found[found.index(_FROM_WORKER) + 1 :]
        caused = " ".join(itertools.takewhile(lambda line: not line.startswith(_PATH_WAS), wrote))
    else:
        raised = [line for line in errors if _RAISED_LINE.match(line)]
        reason = next(line for line in found if any(words in line for words in _NO_WORKER))
        caused = " ".join(map(_ended, [_short(_without_head(reason)), *raised[-_LINES:]]))
    return Failure(
        "no_worker",
        f"Spark's Python workers do not start: {_ended(_cut(caused))}",
        "See which settings below `spark.conf` concern Python or addresses, and whether 127.0.0.1 can be"
        f" reached and the machine has memory left. {_RETRIED}",
    )


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
    """Return the innermost cause that has a text; without any, what stands first."""
    found = [line.strip() for line in lines if line.strip()]
    if len(found) > 1 and found[0].startswith(_PY4J):
        found = [found[1].removeprefix(": "), *found[2:]]
    causes = [line.removeprefix(_CAUSED_BY) for line in found if line.startswith(_CAUSED_BY)]
    useful = [cause for cause in causes if not any(words in cause for words in _SAYS_NOTHING)]
    if useful:
        return _short(useful[-1])
    return _short(_STATES.sub("", found[0])) if found else None


def _without_head(line: str) -> str:
    """Return an exception without what Spark and Py4J put before it in its line."""
    found = _JAVA_RAISED.search(line)
    return line if found is None else line[found.start() :]


def _ended(text: str) -> str:
    return text if text.endswith((".", "!", "?")) else f"{text}."


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
