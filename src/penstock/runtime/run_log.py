"""The log of runs: each cause once, until it is over."""

from __future__ import annotations

import time
from collections.abc import Collection, Container

import structlog

from penstock.core.health import Failure
from penstock.core.monitor import Report

log = structlog.get_logger("penstock")


class RunLog:
    """Logs the reports and the queries of one run, or of several beside each other.

    The messages of the sinks in `starting` were kept before the run; the log names that.
    """

    def __init__(self, starting: Collection[str] = ()) -> None:
        self._starting = starting
        self._store: set[str] = set()  # codes of the store's failures that are logged
        self._behind: dict[str, set[str]] = {}  # sink -> codes of its failures that are logged
        self._ended: dict[str, tuple[float, str]] = {}  # source -> since when, and why last
        self._failed: set[str] = set()  # texts of the failures of no single source

    def report(self, report: Report, consumers: Container[str] = ()) -> None:
        """Log the dead letters, the store's failure, and the failures of sinks that are behind.

        `consumers` are those of type nats, which are among the sinks.
        """
        for letter in report.get("dead") or ():
            name = report["sink"]
            log.error(
                "dead letter", **{"consumer" if name in consumers else "sink": name},
                code=letter["code"], reason=letter["reason"],
                idempotency_key=letter["idempotency_key"],
            )  # fmt: skip
        if "store" in report:
            self._log_store(report)
        elif "sink" in report:
            self._log_sink(report["sink"], report)

    def _log_store(self, report: Report) -> None:
        error = report["store"]
        if error is None:
            if self._store:
                log.info("the store answers again")
            self._store.clear()
        # A store that refuses dead letters may do so for ever: each try is logged.
        elif report["code"] not in self._store - {"dead_letters"}:
            self._store.add(report["code"])
            log.error("the store fails, everything waits for it", code=report["code"], error=error)

    def _log_sink(self, name: str, report: Report) -> None:
        if report.get("behind"):
            if name in self._starting:
                log.warning("sink is behind, its kept messages wait in the store", sink=name,
                            code=report["code"], error=report["error"])  # fmt: skip
            self._behind.setdefault(name, set()).add(report["code"])
        elif report.get("state") == "attached":
            self._behind.pop(name, None)
        elif name in self._behind and (code := report.get("code")) not in {
            None, *self._behind[name],
        }:  # fmt: skip
            self._behind[name].add(str(code))
            log.warning("sink still behind", sink=name, code=code, error=report["error"])

    def failed(self, failure: Failure, source: str | None = None) -> None:
        """Log why a run can't go on, once where several can't for the same reason."""
        if source is not None:
            log.error("run failed", code=failure.code, error=failure.text, source=source)
        elif failure.text not in self._failed:
            self._failed.add(failure.text)
            log.error("run failed", code=failure.code, error=failure.text)

    def query_ended(self, source: str, failure: Failure, retry_in: float) -> None:
        """Log why a query ended, once until the source streams again or the cause changes."""
        since, logged = self._ended.get(source, (time.monotonic(), ""))
        self._ended[source] = since, failure.text
        if failure.text != logged:
            log.error("query ended; starting it again", source=source, code=failure.code,
                      error=failure.text, retry_in=retry_in)  # fmt: skip

    def streams(self, source: str, restarts: int) -> None:
        """Log that a source streams again, if its query has ended before."""
        if source in self._ended:
            since, _ = self._ended.pop(source)
            log.info("the source streams again", source=source, restarts=restarts,
                     seconds=round(time.monotonic() - since, 1))  # fmt: skip
