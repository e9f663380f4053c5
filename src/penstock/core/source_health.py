"""How a source, its pipeline and its sinks are, by the facts of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from penstock.core.health import (
    GRACE_SECONDS,
    Failure,
    HealthProblem,
    Level,
    Part,
    graced,
    worker_part,
)

STALL_SECONDS: Final = 10.0
"""How long messages may wait without any progress."""
START_SECONDS: Final = 60.0
"""The same of a source that has not run a batch yet: Spark takes a while to start."""
SILENCE_SECONDS: Final = 15.0
"""How long a source's capture may report nothing; it reports each second."""
_PAUSED: Final = "paused"


@dataclass(frozen=True, slots=True)
class SinkFacts:
    """A sink: `failure` is its newest outcome if that is one, None once it has taken messages again.

    `state` is `attached`, `behind`, `detached` (its messages wait in the store) or `paused` (they
    wait there on purpose). `reason` is why it fell behind. `refused` is why its expressions do not go
    with the columns that its tables have by now: messages that need those become dead letters.
    `stream` is that of a consumer of type nats, which else is like a sink.
    """

    name: str
    state: str = "attached"
    failure: Failure | None = None
    reason: Failure | None = None
    since: float | None = None
    backlog: int = 0
    refused: Failure | None = None
    stream: str | None = None


@dataclass(frozen=True, slots=True)
class SourceFacts:
    """A source and its pipeline.

    `started`: it has run a batch. `failure`: why it does not stream, or why its query ended, until
    there is progress again. `waiting` messages are captured and not delivered, the oldest since
    `waiting_since`; `progress_at` is when something was last delivered, `reported_at` when its capture
    last reported.
    """

    name: str
    started: bool = False
    failure: Failure | None = None
    waiting: int = 0
    waiting_since: float | None = None
    progress_at: float | None = None
    reported_at: float | None = None
    sinks: tuple[SinkFacts, ...] = ()


def subject_of(name: str, stream: str | None) -> str:
    """Return what a sink is called, or with its stream a consumer of type nats."""
    return f"sink {name}" if stream is None else f"consumer {stream}/{name}"


def sink_part(sink: SinkFacts) -> Part:
    """Return how a sink is. One alone never fails a source: the others go on."""
    subject = subject_of(sink.name, sink.stream)
    reason, fails = sink.reason, sink.failure is not None
    # A sink that only starts is in the state paused, too, for another reason.
    if reason is not None and reason.code == _PAUSED and sink.state == _PAUSED and not fails:
        return _paused(subject, sink, reason)
    if sink.stream is not None and sink.state == "behind" and not fails:
        cause = f"It is behind. {sink.backlog} messages wait in its stream."
        behind = Failure("behind", cause, "It catches up by itself.", sink.since)
        return Part.failing(subject, Level.DEGRADED, behind)
    why = sink.failure or (sink.reason if sink.state != "attached" else None)
    if why is None and sink.state in ("behind", "detached"):
        why = Failure("behind", "It is behind.", "It catches up by itself.", sink.since)
    if why is None:
        refused = sink.refused
        return Part.failing(subject, Level.DEGRADED, refused) if refused else Part(subject)
    problem = HealthProblem.of(subject, Level.DEGRADED, why)
    if sink.state != "attached":
        waiting = f"{sink.backlog} messages wait in the store."
        # What is being delivered is a matter of the past.
        past = "" if sink.failure is not None or why.code == "behind" else "It fell behind: "
        problem = replace(
            problem, cause=f"{past}{problem.cause} {waiting}",
            since=sink.since or why.since,
            remedy=problem.remedy if sink.failure is not None else "It catches up by itself.",
        )  # fmt: skip
    return Part.of(subject, [problem])


def _paused(subject: str, sink: SinkFacts, reason: Failure) -> Part:
    """Return how a sink or consumer is that someone has paused."""
    kind, where = ("sink", "the store") if sink.stream is None else ("consumer", "its stream")
    cause = f"{reason.cause} {sink.backlog} messages wait in {where}."
    remedy = f"Let it go on: penstock {kind} resume {sink.name}"
    return Part.failing(subject, Level.DEGRADED, Failure(_PAUSED, cause, remedy, sink.since))


def source_part(source: SourceFacts, now: float, store: Part | None = None) -> Part:
    """Return how a source with its pipeline is; `store` is what its messages may wait for."""
    subject = f"source {source.name}"
    problems = []
    if (failure := source.failure) is not None:
        problems.append(HealthProblem.of(subject, graced(failure, now), failure))
    if (held_up := _held_up(source, now)) is not None:
        problems.append(HealthProblem.of(subject, Level.FAILED, held_up))
    silent = source.reported_at is not None and now - source.reported_at >= SILENCE_SECONDS
    if source.started and silent:
        silence = _silent(now - (source.reported_at or now))
        problems.append(HealthProblem.of(subject, Level.FAILED, silence))
    stalled = _stalled(source, now)
    if stalled is not None and not any(p.level is Level.FAILED for p in problems):
        if store is not None and store.level is Level.FAILED:
            first = store.problems[0]
            stalled = replace(
                stalled, cause=f"{stalled.cause} They wait for the store: {first.cause}",
                remedy=first.remedy,
            )  # fmt: skip
        problems.append(HealthProblem.of(subject, Level.FAILED, stalled))
    return Part.of(subject, problems, starting=not source.started)


def backfill_part(number: int, failure: Failure) -> Part:
    """Return how a backfill is that failed."""
    subject = f"backfill {number}"
    remedy = failure.remedy or f"Repair that, then: penstock backfill resume {number}"
    return Part.failing(subject, Level.DEGRADED, replace(failure, remedy=remedy))


def sources_parts(sources: Sequence[SourceFacts], store: Failure | None, now: float) -> list[Part]:
    """Return the parts of a run: its store, which may fail, its sources and their sinks."""
    of_store = worker_part("store", store, now)
    parts = [of_store]
    for source in sources:
        parts.append(source_part(source, now, of_store))
        parts += map(sink_part, source.sinks)
    return parts


def _held_up(source: SourceFacts, now: float) -> Failure | None:
    """Return why none of a source's sinks takes messages, None where one does, or did a moment ago."""
    # A sink that is paused without a failure is so on purpose, or only starts: it is not to take any.
    live = [sink for sink in source.sinks if sink.state != _PAUSED or sink.failure is not None]
    failures = [sink.failure for sink in live if sink.failure is not None]
    if not live or len(failures) < len(live):
        return None
    since = max((failure.since or 0.0 for failure in failures), default=0.0)
    if now - since < GRACE_SECONDS:
        return None
    first = failures[0]
    names = ", ".join(sink.name for sink in live)
    if len(live) == 1:
        what = f"Its sink {names} takes no messages"
    else:
        what = f"None of its sinks ({names}) takes messages"
    return Failure("sinks_held_up", f"{what}: {first.cause}", first.remedy, since or None)


def _silent(seconds: float) -> Failure:
    return Failure(
        "silent", f"Its capture has reported nothing for {seconds:.0f} s.",
        "See whether this machine is overloaded or processes of Spark's are stopped; else restart"
        " penstock: nothing is lost by that.",
    )  # fmt: skip


def _stalled(source: SourceFacts, now: float) -> Failure | None:
    """Return that messages wait and nothing progresses, if that has been so for too long."""
    if not source.waiting:
        return None
    since = max(source.waiting_since or 0.0, source.progress_at or 0.0)
    if now - since < (STALL_SECONDS if source.started else START_SECONDS):
        return None
    waited = now - (source.waiting_since or since)
    return Failure(
        "stalled",
        f"{source.waiting} messages wait, the oldest for {waited:.0f} s, and none was delivered for"
        f" {now - since:.0f} s.",
        "See whether a process of Spark's is stopped or hangs (ps -o pid,stat,cmd): where one is"
        " killed, its task starts again. Nothing is lost by restarting penstock either.",
        since or None,
    )
