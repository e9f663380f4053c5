"""What a run knows about its sources and sinks, from their reports: for `/status` and `/metrics`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from penstock.backfill.request import Backfill
from penstock.core.counting import Counts, Ledger
from penstock.core.health import (
    Failure,
    Health,
    Part,
    SinkFacts,
    SourceFacts,
    backfill_part,
    iso,
    sources_parts,
)
from penstock.core.message import BatchPart, Position, format_lsn
from penstock.core.monitor import Report
from penstock.runtime import metrics
from penstock.runtime.consumer_watch import ConsumerWatch

_RATE_SECONDS: Final = 5.0
_WELL_SECONDS: Final = 5.0
"""How long a query that had failed must be idle and well for its failure to be over."""


class _Failing:
    """What has a failure, or none."""

    failure: Failure | None

    @property
    def error(self) -> str | None:
        """The failure's text, cause first."""
        return None if self.failure is None else self.failure.text

    @property
    def code(self) -> str | None:
        """The failure's code."""
        return None if self.failure is None else self.failure.code


@dataclass
class SourceState(_Failing):
    """A source's capture, as it last reported, and its query.

    `failure` is why it does not stream, or why its query ended: that stands until the next one has
    confirmed messages, or was idle for a while, and not only until it is tried.
    """

    state: str = "connecting"
    failure: Failure | None = None
    capture_failure: Failure | None = None
    query_failed: bool = False
    started: bool = False
    captured: int = 0
    confirmed: int = 0
    waiting: int = 0
    waiting_since: float | None = None
    reported_at: float | None = None
    progress_at: float | None = None
    well_since: float | None = None
    truncates_skipped: int = 0
    reconnects: int = 0
    received_lsn: int = 0
    confirmed_lsn: int = 0
    unread_bytes: int = 0
    warm: bool = False
    drained: bool = False
    restarts: int = 0
    done: list[int] | None = None

    @property
    def waited(self) -> float:
        """The age of the oldest message that is captured and not confirmed, in seconds."""
        since = self.waiting_since
        return 0.0 if since is None else max(time.time() - since, 0.0)

    def fail(self, failure: Failure) -> None:
        """Note a failure; the newest one is shown, with when the first of them was."""
        self.failure = failure.lasting(self.failure, time.time())

    def recover(self) -> None:
        """Note that it progresses."""
        self.failure, self.query_failed = None, False

    def look(self, now: float) -> None:
        """See whether what the capture has reported ends a failure that stood."""
        streams = self.state == "streaming"
        if not (streams and self.warm and not self.waiting):
            self.well_since = None
        elif self.well_since is None:
            self.well_since = now
        if self.query_failed:
            if self.well_since is not None and now - self.well_since >= _WELL_SECONDS:
                self.recover()
        elif streams:
            self.recover()


class Rate:
    """How many a second there were of late."""

    def __init__(self) -> None:
        now = time.monotonic()
        self._marks = ((now, 0), (now, 0))

    def note(self, count: int) -> None:
        """Take the count so far."""
        now = time.monotonic()
        if now - self._marks[1][0] > _RATE_SECONDS:
            self._marks = self._marks[1], (now, count)

    def per_second(self, count: int) -> float:
        """Return the rate, `count` being the count so far."""
        now, (at, then) = time.monotonic(), self._marks[0]
        if now - self._marks[1][0] > 2 * _RATE_SECONDS:
            at, then = self._marks[1]
        return (count - then) / max(now - at, 1.0)


@dataclass
class SinkState(_Failing):
    """A sink's counts since the run started, the error that holds it up now, and its backlog.

    `refused`: why its expressions don't go with the columns that its tables have by now.
    """

    type: str
    source: str
    delivered: int = 0
    duplicates: int = 0
    bytes: int = 0
    dead_lettered: int = 0
    filtered: int = 0
    retries: int = 0
    failure: Failure | None = None
    reason: Failure | None = None
    refused: Failure | None = None
    delivered_at: float = 0.0
    state: str = "attached"
    since: float | None = None
    backlog: int = 0
    backlog_bytes: int = 0
    rate: Rate = field(default_factory=Rate)

    @property
    def remedy(self) -> str:
        """What to do about the failure."""
        return "" if self.failure is None else self.failure.remedy

    def fail(self, code: str, text: str, remedy: str | None) -> None:
        """Note a failure; the newest one is shown, with when the first of them was."""
        now = time.time()
        self.failure = Failure.of(code, text, remedy, now).lasting(self.failure, now)

    def count(self, counts: Counts) -> None:
        """Add to what it has taken; each message comes here once."""
        self.delivered += counts.delivered
        self.bytes += counts.bytes
        self.dead_lettered += counts.dead_lettered
        self.filtered += counts.filtered
        self.rate.note(self.delivered)

    @property
    def behind(self) -> bool:
        """Whether its messages go to its backlog."""
        return self.state != "attached"

    @property
    def detached(self) -> bool:
        """Whether it has been behind for `detach_after`."""
        return self.state == "detached"


class State(Collector):
    """The state of a run; reports come from many threads, readers take what is there.

    `sinks` gives each sink's type and source.
    """

    def __init__(self, sources: Iterable[str], sinks: Mapping[str, tuple[str, str]]) -> None:
        self.sources = {name: SourceState() for name in sources}
        self.sinks = {name: SinkState(*sink) for name, sink in sinks.items()}
        self.store_failure: Failure | None = None
        self.backfills: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._last: dict[tuple[str, str], int] = {}
        self._lives: dict[str, str] = {}
        self._ledgers = {name: Ledger() for name in self.sources}

    @property
    def store_error(self) -> str | None:
        """Why the store fails what is asked of it, None where it does not."""
        return None if self.store_failure is None else self.store_failure.text

    def update(self, report: Report) -> None:
        """Take in a capture's or a sink's report."""
        with self._lock:
            if "capture" in report:
                self._update_source(report["capture"], report)
            elif "part" in report:
                self._count_part(report)
            elif "sink" in report:
                self._update_sink(self.sinks[report["sink"]], report)
            elif "store" in report:
                self._update_store(report)

    def _update_source(self, name: str, report: Report) -> None:
        source, now = self.sources[name], time.time()
        source.reported_at = now
        for key in _REPORTED:
            if key in report:
                setattr(source, key, report[key])
        if "waited" in report:
            waited = report["waited"]
            source.waiting_since = None if waited is None else now - waited
        # Counters go on over a restart of the query, whose capture counts from 0 again.
        if (life := report.get("life", "")) != self._lives.get(name, ""):
            self._lives[name] = life
            self._last = {key: last for key, last in self._last.items() if key[0] != name}
        confirmed = source.confirmed
        for key in ("captured", "confirmed", "truncates_skipped", "reconnects"):
            if key in report:
                self._count(name, source, key, report[key])
        source.started = source.started or source.warm
        if source.confirmed > confirmed:
            source.progress_at = now
            source.recover()
        if report.get("error") is not None:
            source.fail(Failure.of(report["code"], report["error"], report.get("remedy"), now))
            source.capture_failure = source.failure
        else:
            source.capture_failure = None
            source.look(now)

    def _update_sink(self, sink: SinkState, report: Report) -> None:
        if "error" in report:
            sink.fail(report["code"], report["error"], report.get("remedy"))
            sink.retries += 1
            if report.get("behind"):
                sink.reason = sink.failure
        elif "state" in report:
            sink.state, sink.since = report["state"], report["since"]
            sink.backlog = report["backlog"]
            sink.backlog_bytes = report["backlog_bytes"]
            if not sink.behind:
                sink.failure = sink.reason = None
            elif sink.reason is None and report.get("why"):
                sink.reason = Failure.of(report.get("why_code"), report["why"], None, time.time())
        else:
            sink.duplicates += report["duplicates"]
            if report.get("counted", True):
                sink.count(Counts(report["delivered"], report["bytes"], len(report["dead"]), 0))
            sink.failure = None
            sink.delivered_at = time.time()
            if (report["delivered"] or report["dead"]) and sink.source in self.sources:
                self.sources[sink.source].progress_at = sink.delivered_at

    def begin_query(self, report: Report) -> Report:
        """Return to a worker where its query counts from."""
        with self._lock:
            floors = self._ledgers[report["source"]].begin(report["query"])
            return {"floors": {name: [*floor] for name, floor in floors.items()}}

    def _count_part(self, report: Report) -> None:
        start, end, *rest = report["part"]
        part = BatchPart(Position(*start), Position(*end), *rest)
        counts = {name: Counts(*of) for name, of in report["counts"].items()}
        ledger = self._ledgers[report["source"]]
        for name, new in ledger.add(report["query"], part, counts).items():
            self.sinks[name].count(new)

    def go_on_from(self, earlier: State) -> None:
        """Count on from where another run of this process ended, which had some of the same sinks."""
        with self._lock, earlier._lock:
            same = []
            for name, sink in self.sinks.items():
                before = earlier.sinks.get(name)
                if before is None or (before.type, before.source) != (sink.type, sink.source):
                    continue
                same.append(name)
                for key in _SINK_COUNTERS:
                    setattr(sink, key, getattr(before, key))
                sink.delivered_at, sink.rate = before.delivered_at, before.rate
            for name, source in self.sources.items():
                if (of := earlier.sources.get(name)) is not None:
                    for key in _SOURCE_COUNTERS:
                        setattr(source, key, getattr(of, key))
                    self._ledgers[name] = earlier._ledgers[name]
                    self._ledgers[name].keep(same)

    def _update_store(self, report: Report) -> None:
        if report["store"] is None:
            self.store_failure = None
        else:
            since = report.get("since", time.time())
            failure = Failure.of(report["code"], report["store"], report.get("remedy"))
            self.store_failure = failure.lasting(self.store_failure, since)

    def query_failed(self, source: str, failure: Failure) -> None:
        """Note that a source's query has ended by an error."""
        with self._lock:
            state = self.sources[source]
            state.state, state.query_failed, state.warm = "error", True, False
            state.well_since = None
            state.fail(failure)

    def parts(self) -> list[Part]:
        """Return the store, the sources, the sinks and the failed backfills, with what is wrong."""
        with self._lock:
            sources = [
                SourceFacts(
                    name, s.started, s.failure, s.waiting, s.waiting_since, s.progress_at,
                    s.reported_at,
                    tuple(
                        SinkFacts(n, k.state, k.failure, k.reason, k.since, k.backlog, k.refused)
                        for n, k in self.sinks.items()
                        if k.source == name
                    ),
                )
                for name, s in self.sources.items()
            ]  # fmt: skip
            store = self.store_failure
        failed = [b for b in self.backfills if b["state"] == "failed"]
        return [
            *sources_parts(sources, store, time.time()),
            *(
                backfill_part(b["number"], Failure("backfill_failed", b["error"] or ""))
                for b in failed
            ),
        ]

    def health(self) -> Health:
        """Return how this run is."""
        return Health(tuple(self.parts()))

    def _count(self, name: str, source: SourceState, key: str, value: int) -> None:
        last = self._last.get((name, key), 0)
        setattr(source, key, getattr(source, key) + (value - last if value >= last else value))
        self._last[name, key] = value

    def hold(self, sink: str, code: str, error: str | None, remedy: str = "") -> None:
        """Note that a sink's messages only wait, and why; `error` is None where that is as it should."""
        state = self.sinks[sink]
        state.state = "held"
        state.failure = None if error is None else Failure.of(code, error, remedy, time.time())

    def release(self, sink: str) -> None:
        """Note that a held sink's messages wait no longer."""
        state = self.sinks[sink]
        if state.state == "held":
            state.state, state.failure = "behind", None

    def as_json(self) -> dict[str, Any]:
        """Return the body of `/status`."""
        health = self.health()
        with self._lock:
            return health.as_json() | {
                "sources": {
                    name: {
                        "level": health.part(f"source {name}").level.word,
                        "state": s.state,
                        "error": s.error,
                        "code": s.code,
                        "captured": s.captured,
                        "waiting": s.waiting,
                        "oldest_waiting_seconds": round(s.waited, 1),
                        "truncates_skipped": s.truncates_skipped,
                        "reconnects": s.reconnects,
                        "restarts": s.restarts,
                        "confirmed_lsn": format_lsn(s.confirmed_lsn),
                    }
                    for name, s in self.sources.items()
                },
                "sinks": {name: self._sink(s) for name, s in self.sinks.items()},
                "store": {"error": self.store_error or _cause_of(health.part("store"))},
                "backfills": self.backfills,
            }

    def show_backfills(self, backfills: Iterable[Backfill]) -> None:
        """Take the backfills that are open, or failed in this run."""
        self.backfills = [
            {
                "number": b.id, "source": b.source, "sink": b.sink, "table": b.table,
                "state": b.state, "rows_done": b.rows_done, "rows_total": b.rows_total,
                "error": b.error,
            }
            for b in backfills
        ]  # fmt: skip

    def _sink(self, s: SinkState) -> dict[str, Any]:
        counts = {
            "type": s.type,
            # It is not said to be well while it tries the same messages again.
            "state": "retrying" if s.failure is not None and not s.behind else s.state,
            "delivered": s.delivered,
            "per_second": round(s.rate.per_second(s.delivered), 1),
            "duplicates": s.duplicates,
            "dead_lettered": s.dead_lettered,
            "filtered": s.filtered,
            "retries": s.retries,
            "error": s.error,
            "code": s.code,
        }
        if s.type == "stream":
            # All that the capture knows to be done can be read.
            done = self.sources[s.source].done
            return counts | {"head": None if done is None else format_lsn(done[0])}
        return counts | {
            "since": iso(s.since),
            "backlog": s.backlog,
            "backlog_bytes": s.backlog_bytes,
        }

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of `/metrics` (Prometheus's own interface)."""
        health = self.health()
        yield metrics.of_health(health)
        with self._lock:
            yield from metrics.of_sources(self.sources)
            yield from metrics.of_sinks(self.sinks)
            yield metrics.of_store(health)
            yield from metrics.of_backfills(self.backfills)


class States(Collector):
    """Several runs of one process as one: what `/status` and `/metrics` have of all of them.

    `runs` gives their states, `relays` the state of each outbox's relay, `parts` what else the process
    knows the health of; all are asked each time. `consumers` are those of the store.
    """

    def __init__(
        self,
        runs: Callable[[], Iterable[State]],
        relays: Callable[[], dict[str, Any]],
        parts: Callable[[], Iterable[Part]] = tuple,
        consumers: ConsumerWatch | None = None,
    ) -> None:
        self._runs = runs
        self._relays = relays
        self._parts = parts
        self._consumers = consumers

    @property
    def sinks(self) -> dict[str, SinkState]:
        """The sinks of all runs, by name."""
        return {name: sink for state in self._runs() for name, sink in state.sinks.items()}

    def as_json(self) -> dict[str, Any]:
        """Return the body of `/status`."""
        health = self.health()
        runs = [state.as_json() for state in self._runs()]
        body: dict[str, Any] = {**health.as_json(), "sources": {}, "sinks": {}}
        for of_run in runs:
            body["sources"] |= of_run["sources"]
            body["sinks"] |= of_run["sinks"]
        errors = [of_run["store"]["error"] for of_run in runs]
        body["store"] = {"error": next((error for error in errors if error is not None), None)}
        body["backfills"] = [backfill for of_run in runs for backfill in of_run["backfills"]]
        if self._consumers is not None:
            body["consumers"] = self._consumers.as_json()
        relays = self._relays()
        return body | ({"relays": relays} if relays else {})

    def health(self) -> Health:
        """Return how the process is: its runs, their store once, and what else it knows of."""
        found: dict[str, Part] = {}
        for part in (*(p for state in self._runs() for p in state.parts()), *self._parts()):
            before = found.get(part.subject)
            if before is None or part.level > before.level:
                found[part.subject] = part
        return Health(tuple(found.values()))

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of all runs; a name comes once (Prometheus's own interface)."""
        metric = metrics.of_health(self.health())
        found: dict[str, Metric] = {metric.name: metric}
        for state in self._runs():
            for metric in state.collect():
                if metric.name == "penstock_health":
                    continue
                if metric.name in found:
                    found[metric.name].samples.extend(metric.samples)
                else:
                    found[metric.name] = metric
        yield from found.values()
        if self._consumers is not None:
            yield from self._consumers.collect()


def _cause_of(part: Part) -> str | None:
    problem = next(iter(part.problems), None)
    return None if problem is None else problem.cause


_SINK_COUNTERS: Final = (
    "delivered", "duplicates", "bytes", "dead_lettered", "filtered", "retries",
)  # fmt: skip
_SOURCE_COUNTERS: Final = ("captured", "truncates_skipped", "reconnects", "restarts")
_REPORTED: Final = (
    "state", "received_lsn", "confirmed_lsn", "unread_bytes", "warm", "drained", "done", "waiting",
)  # fmt: skip
