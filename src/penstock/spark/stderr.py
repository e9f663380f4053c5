"""What Spark's processes write to standard error, made fit for a log that people and machines read.

The JVM and its Python workers share one stream. Lines that are log lines of ours pass as they are.
The JVM's banner goes; of a trace only the line with what happened stays, and not even that where
a query's thread or a worker ends: a failure is raised in Python and logged there, and what an orderly
stop breaks off is no failure.
"""

from __future__ import annotations

import collections
import logging
import os
import sys
import threading
from typing import Final

_BANNER: Final = (
    "WARNING: Using incubator modules",
    "WARNING: package ",  # a module option that this Java has no use for
    "Setting default log level",
    "To adjust logging level",
    "Using Spark's default log4j",
    "PySpark daemon failed to flush",
)
_LAST: Final = 20
_QUERY_ENDS: Final = 'Exception in thread "stream execution thread'
_WORKER_ENDS: Final = ("BrokenPipeError", "ConnectionResetError", "EOFError")
_JAVA_TRACE: Final = ("\tat ", "\t... ", "Caused by:", "\tSuppressed:")


class Filter:
    """Decides line by line; `take` returns what to print, or None."""

    def __init__(self) -> None:
        self._in_trace = False

    def take(self, line: str) -> str | None:
        """Return the line without its end, None if it is noise."""
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


class Forwarder:
    """Passes on what processes write to `file`, their standard error, until the last one has ended.

    From `follow` on it reads, in a thread. Nothing is passed on before `started`: of a process that
    never starts it is part of the error.
    `last` returns the newest lines, our own log's left out.
    """

    def __init__(self) -> None:
        self._read, self.file = os.pipe()
        self._last: collections.deque[str] = collections.deque(maxlen=_LAST)
        self._held: list[str] | None = []
        self._passing = threading.Lock()
        self._thread: threading.Thread | None = None

    def close(self) -> None:
        """Close this process's own end, once others have it."""
        os.close(self.file)

    def follow(self) -> None:
        """Begin to read."""
        # Made here: Python 3.13.0 starts no thread that is of before a fork.
        self._thread = threading.Thread(target=self._run, name="spark-stderr", daemon=True)
        self._thread.start()

    def started(self) -> None:
        """Pass on what was held back, and all that comes."""
        with self._passing:
            for line in self._held or ():
                _pass_on(line)
            self._held = None

    def last(self, seconds: float = 0.0) -> list[str]:
        """Return the newest lines; those that come within `seconds`, if the processes end by then."""
        if self._thread is not None:
            self._thread.join(seconds)
        return list(self._last)

    def _run(self) -> None:
        lines = Filter()
        with os.fdopen(self._read, "rb") as stream:
            for raw in stream:
                line = lines.take(raw.decode(errors="replace"))
                if line is None:
                    continue
                if not line.startswith("{"):
                    self._last.append(line)
                with self._passing:
                    if self._held is None:
                        _pass_on(line)
                    else:
                        self._held.append(line)


def _pass_on(line: str) -> None:
    if line.startswith("{") or sys.stderr.isatty():
        sys.stderr.write(line + "\n")
        sys.stderr.flush()
    else:
        logging.getLogger("spark").warning("%s", line)
