"""The body of `/status`: a run's sources, sinks, store and backfills as JSON."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from penstock.core.health import Health, iso
from penstock.core.message import format_lsn
from penstock.runtime.sink_state import SinkState
from penstock.runtime.source_state import SourceState


def sources_json(
    sources: Mapping[str, SourceState],
    health: Health,
    holder: str | None = None,
    standing_by: str | None = None,
) -> dict[str, Any]:
    """Return each source by name; `holder` is this process, `standing_by` the one that runs them."""
    return {
        name: {
            "level": health.part(f"source {name}").level.word,
            "state": s.state if standing_by is None else "standing by",
            "holder": standing_by or holder,
            "error": s.error,
            "code": s.code,
            "captured": s.captured,
            "waiting": s.waiting,
            "oldest_waiting_seconds": round(s.waited, 1),
            "deliveries": s.deliveries,
            "delivery_seconds": round(s.delivery_us / 1e6, 3),
            "truncates_skipped": s.truncates_skipped,
            "reconnects": s.reconnects,
            "restarts": s.restarts,
            "confirmed_lsn": format_lsn(s.confirmed_lsn),
        }
        for name, s in sources.items()
    }


def sinks_json(
    sinks: Mapping[str, SinkState], sources: Mapping[str, SourceState]
) -> dict[str, Any]:
    """Return each sink by name; `sources` are those that they take from."""
    return {n: _sink_json(sink, sources) for n, sink in sinks.items() if sink.stream is None}


def nats_consumers_json(
    sinks: Mapping[str, SinkState], sources: Mapping[str, SourceState]
) -> dict[str, Any]:
    """Return each NATS consumer by name; `sinks` has them beside the sinks."""
    return {
        name: {"stream": sink.stream, "lag_messages": sink.backlog, **_sink_json(sink, sources)}
        for name, sink in sinks.items()
        if sink.stream is not None
    }


def store_json(error: str | None, health: Health) -> dict[str, Any]:
    """Return the store: `error` of the run itself, or else the first problem of its health."""
    problems = health.part("store").problems
    return {"error": error or (problems[0].cause if problems else None)}


def _sink_json(sink: SinkState, sources: Mapping[str, SourceState]) -> dict[str, Any]:
    retrying = sink.failure is not None and not sink.behind
    counts = {
        "type": sink.type,
        "state": "retrying" if retrying else sink.state,
        "delivered": sink.delivered,
        "per_second": round(sink.rate.per_second(sink.delivered), 1),
        "duplicates": sink.duplicates,
        "dead_lettered": sink.dead_lettered,
        "filtered": sink.filtered,
        "retries": sink.retries,
        "lag_seconds": round(sink.lag(sources[sink.source].waited, time.time()), 1),
        "error": sink.error,
        "code": sink.code,
    }
    if sink.type == "stream":
        # A consumer can read all that the capture knows to be done.
        done = sources[sink.source].done
        return counts | {"head": None if done is None else format_lsn(done[0])}
    return counts | {
        "since": iso(sink.since),
        "backlog": sink.backlog,
        "backlog_bytes": sink.backlog_bytes,
    }
