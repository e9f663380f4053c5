"""What Spark's processes write to standard error, made fit for a log that people and machines read.

The JVM and its Python workers share one stream. Lines that are log lines of ours pass as they are.
The JVM's banner goes; of a trace only the line that says what happened stays, and not even that where
a query's thread or a worker ends: a failure is raised in Python and told there, and what an orderly
stop breaks off is no failure.
"""

from __future__ import annotations

import logging
import sys
from typing import IO, Final

_BANNER: Final = (
    "WARNING: Using incubator modules",
    "Setting default log level",
    "To adjust logging level",
    "Using Spark's default log4j",
    "PySpark daemon failed to flush",
)
_QUERY_ENDS: Final = 'Exception in thread "stream execution thread'
_WORKER_ENDS: Final = ("BrokenPipeError", "ConnectionResetError", "EOFError")
_JAVA_TRACE: Final = ("\tat ", "\t... ", "Caused by:", "\tSuppressed:")


class Filter:
    """Decides line by line; `take` returns what is to be said, or None."""

    def __init__(self) -> None:
        self._in_trace = False

    def take(self, line: str) -> str | None:
        """Return the line if it says something, without its end."""
        line = line.rstrip("\n")
        if self._in_trace:
            if not line or line[0].isspace():
                return None
            self._in_trace = False
            return None if line.startswith(_WORKER_ENDS) else line
        if line.startswith("Traceback (most recent call last)"):
            self._in_trace = True
            return None
        if not line.strip() or line.startswith((*_BANNER, *_JAVA_TRACE, _QUERY_ENDS)):
            return None
        if line.startswith(("  File ", "    ")):  # of a trace that another line has cut
            return None
        return None if line.startswith(_WORKER_ENDS) else line


def forward(stream: IO[bytes]) -> None:
    """Pass a process's standard error on, until its end."""
    wanted = Filter()
    log = logging.getLogger("spark")
    for raw in stream:
        line = wanted.take(raw.decode(errors="replace"))
        if line is None:
            continue
        if line.startswith("{") or sys.stderr.isatty():
            sys.stderr.write(line + "\n")
            sys.stderr.flush()
        else:
            log.warning("%s", line)
