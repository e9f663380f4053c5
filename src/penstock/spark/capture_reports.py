"""The reports of one capture to its run, and the run's commands to it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Callable, Iterator
from multiprocessing import AuthenticationError

from penstock.core import log as logging
from penstock.core.errors import CaptureError
from penstock.core.message import Position
from penstock.core.monitor import Report, Reporter
from penstock.postgres.capture import CaptureStats
from penstock.spark.options import SourceOptions


class CaptureReports:
    """Sends the reports of a source's capture; `on_command` gets what the run commands.

    Nothing is sent before the first `errors`.
    """

    def __init__(self, options: SourceOptions, on_command: Callable[[Report], None]) -> None:
        self._options = options
        self._on_command = on_command
        self._reporter: Reporter | None = None
        # `life` keeps this capture's counts apart from those of earlier ones.
        self._head: Report = {"capture": options.name, "life": secrets.token_hex(8)}

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        """Connect, and report a `CaptureError` before Spark wraps it in traces."""
        if self._reporter is None:
            logging.configure()
            self._reporter = Reporter(self._options.monitor)
            self._reporter.listen(self._on_command)
        try:
            yield
        except CaptureError as found:
            error = found.recovered_by(self._options.recover)
            self.send({"state": "error", **_error_fields(error)})
            raise error from None

    def send(self, report: Report) -> None:
        """Send a report; it may be lost."""
        if self._reporter is not None:
            self._reporter.send({**self._head, **report})

    def request(self, report: Report) -> None:
        """Send a report that the run has handled when this returns, if there is a run."""
        if self._options.monitor is not None:
            # Not over `_reporter`: the thread that reads its commands would read the answer.
            with contextlib.suppress(OSError, EOFError, AuthenticationError):
                Reporter(self._options.monitor).request({**self._head, **report})

    def send_stats(
        self, stats: CaptureStats, waiting: tuple[int, float | None], done: Position | None
    ) -> None:
        """Send what a capture has counted.

        Args:
            stats: Its counts and state.
            waiting: How many messages wait, and for how many seconds the oldest one has.
            done: Up to where all is in the sinks, None before the query has run a batch.
        """
        self.send(
            {
                **vars(stats), **_error_fields(stats.error), "waiting": waiting[0],
                "waited": waiting[1], "warm": done is not None,
                "done": None if done is None else [*done],
            }
        )  # fmt: skip


def _error_fields(error: CaptureError | None) -> Report:
    if error is None:
        return {"error": None, "code": None, "remedy": None}
    return {"error": str(error), "code": error.code, "remedy": error.remedy}
