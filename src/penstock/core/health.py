"""Ready, starting, degraded or failed: the one definition, for all that reports how a run is.

Pure functions over plain facts and `now`; every time is Unix time in seconds. `RunState` and the relays
know the facts of a process, `penstock status` those that it sees itself. `/healthz`, `/readyz`,
`/status`, `/metrics` and `penstock status` with its exit code are all derived from a `Health`.

A part is *failed* where it does not move and will not within seconds: the store does not answer, a
source does not stream, none of its sinks takes messages, or messages wait and nothing progresses. It
is *degraded* where it moves and something is wrong. A part that is `starting` has never progressed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any, Final

from penstock.core.errors import PenstockError

GRACE_SECONDS: Final = 3.0
"""How long a failure may last before what it concerns counts as failed: most are over by then."""
STALL_SECONDS: Final = 10.0
"""How long messages may wait without any progress."""
START_SECONDS: Final = 60.0
"""The same of a source that has not run a batch yet: Spark takes a while to start."""
SILENCE_SECONDS: Final = 15.0
"""How long a source's capture may report nothing; it reports each second."""

_SEE_LOG: Final = "The log of this process has more."


class Level(IntEnum):
    """How a part is; the level of a whole is the greatest of its parts'."""

    READY = 0
    DEGRADED = 1
    STARTING = 2
    FAILED = 3

    @property
    def word(self) -> str:
        """The level as `/status` has it."""
        return self.name.lower()

    @property
    def serves(self) -> bool:
        """Whether messages move: what `/readyz` answers."""
        return self in (Level.READY, Level.DEGRADED)


@dataclass(frozen=True, slots=True)
class Failure:
    """What went wrong with something, and since when it has not succeeded again."""

    code: str
    cause: str
    remedy: str = ""
    since: float | None = None

    @classmethod
    def of(
        cls, code: str | None, text: str | None, remedy: str | None, since: float | None = None
    ) -> Failure:
        """Return a failure of an error's whole text, which may end in its remedy."""
        cause = (text or "").strip()
        if remedy and cause != remedy.strip():
            cause = cause.removesuffix(remedy.strip()).strip()
        return cls(code or "unknown", cause, (remedy or "").strip(), since)

    @classmethod
    def by(cls, error: PenstockError) -> Failure:
        """Return what is stored of an error."""
        return cls(error.code, error.message, error.remedy)

    def lasting(self, before: Failure | None, now: float) -> Failure:
        """Return this failure, since the one was that it follows without a success in between."""
        return replace(self, since=now if before is None else before.since)

    @property
    def text(self) -> str:
        """Cause and remedy."""
        return f"{self.cause} {self.remedy}".strip()


@dataclass(frozen=True, slots=True)
class Problem:
    """What is wrong with one thing: how bad it is, why, and what to do; the texts are never empty.

    `subject` is what it is about: `store`, `source shop`, `sink orders`, `consumer orders/mail`,
    `relay group default`, `pipeline mail`, `backfill 7`, `run`.
    """

    subject: str
    level: Level
    code: str
    cause: str
    remedy: str = ""
    since: float | None = None

    def __post_init__(self) -> None:
        """Fill what must not be empty."""
        object.__setattr__(self, "cause", self.cause.strip() or f"{self.subject}: {self.code}.")
        object.__setattr__(self, "remedy", self.remedy.strip() or _SEE_LOG)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Problem:
        """Return what `as_json` made a dictionary of."""
        since = body.get("since")
        at = None if since is None else datetime.fromisoformat(since).timestamp()
        level = Level[str(body["level"]).upper()]
        code, cause, remedy = (str(body[key]) for key in ("code", "cause", "remedy"))
        return cls(str(body["subject"]), level, code, cause, remedy, at)

    def as_json(self) -> dict[str, Any]:
        """Return it as `/status` has it."""
        return {
            "subject": self.subject, "level": self.level.word, "code": self.code,
            "cause": self.cause, "remedy": self.remedy, "since": iso(self.since),
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Part:
    """A source, a sink, the store, …: its level, and what is wrong with it.

    No problem is worse than the level, and a part that is degraded or failed has at least one.
    """

    subject: str
    level: Level = Level.READY
    problems: tuple[Problem, ...] = ()

    @classmethod
    def of(cls, subject: str, problems: Iterable[Problem], *, starting: bool = False) -> Part:
        """Return a part that is as bad as the worst of its problems."""
        found = tuple(problems)
        least = Level.STARTING if starting else Level.READY
        return cls(subject, max([least, *(p.level for p in found)]), found)


@dataclass(frozen=True, slots=True)
class Health:
    """A whole of parts."""

    parts: tuple[Part, ...] = ()

    @property
    def level(self) -> Level:
        """The worst level of a part."""
        return max((part.level for part in self.parts), default=Level.READY)

    @property
    def problems(self) -> tuple[Problem, ...]:
        """All problems, the worst first."""
        found = [problem for part in self.parts for problem in part.problems]
        return tuple(sorted(found, key=lambda p: -p.level))

    @property
    def goes_on(self) -> bool:
        """Whether the process goes on by itself: what `/healthz` answers."""
        return self.part("run").level is not Level.FAILED

    @classmethod
    def from_json(cls, reported: dict[str, Any]) -> Health:
        """Return what `as_json` made a dictionary of; raises `KeyError`, `TypeError`, `ValueError`."""
        problems = [Problem.from_json(problem) for problem in reported["problems"]]
        return cls(
            tuple(
                Part(name, Level[level.upper()], tuple(p for p in problems if p.subject == name))
                for name, level in reported["parts"].items()
            )
        )

    def part(self, subject: str) -> Part:
        """Return the part of a subject; ready where there is none."""
        return next((part for part in self.parts if part.subject == subject), Part(subject))

    def as_json(self) -> dict[str, Any]:
        """Return what `/status` has of it: `level`, `parts` and `problems`."""
        levels: dict[str, Level] = {}
        for part in self.parts:
            levels[part.subject] = max(part.level, levels.get(part.subject, Level.READY))
        return {
            "level": self.level.word,
            "parts": {subject: level.word for subject, level in levels.items()},
            "problems": [problem.as_json() for problem in self.problems],
        }


# -- facts, and what follows from them


@dataclass(frozen=True, slots=True)
class SinkFacts:
    """A sink: `failure` is its newest outcome if that is one, None once it has taken messages again.

    `state` is `attached`, `behind`, `detached` (its messages wait in the store) or `paused` (they
    wait there on purpose). `reason` is why it fell behind. `refused` is why its expressions do not go
    with the columns that its tables have by now: messages that need those become dead letters.
    """

    name: str
    state: str = "attached"
    failure: Failure | None = None
    reason: Failure | None = None
    since: float | None = None
    backlog: int = 0
    refused: Failure | None = None


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


def sink_part(sink: SinkFacts) -> Part:
    """Return how a sink is. One alone never fails a source: the others go on."""
    subject = f"sink {sink.name}"
    why = sink.failure or (sink.reason if sink.state != "attached" else None)
    if why is None and sink.state in ("behind", "detached"):
        why = Failure("behind", "It is behind.", "It catches up by itself.", sink.since)
    if why is None:
        refused = sink.refused
        return Part.of(subject, [_of(subject, refused, Level.DEGRADED)] if refused else [])
    problem = _of(subject, why, Level.DEGRADED)
    if sink.state != "attached":
        waiting = f"{sink.backlog} messages wait in the store."
        # What is being delivered is a matter of the past.
        past = "" if sink.failure is not None or why.code == "behind" else "It fell behind: "
        problem = replace(
            problem, code=why.code, cause=f"{past}{problem.cause} {waiting}",
            since=sink.since or why.since,
            remedy=problem.remedy if sink.failure is not None else "It catches up by itself.",
        )  # fmt: skip
    return Part.of(subject, [problem])


def source_part(source: SourceFacts, now: float, store: Part | None = None) -> Part:
    """Return how a source with its pipeline is; `store` is what its messages may wait for."""
    subject = f"source {source.name}"
    problems = []
    if (failure := source.failure) is not None:
        problems.append(_of(subject, failure, _graced(failure.since, now)))
    if (held_up := _held_up(source, now)) is not None:
        problems.append(_of(subject, held_up, Level.FAILED))
    silent = source.reported_at is not None and now - source.reported_at >= SILENCE_SECONDS
    if source.started and silent:
        problems.append(_of(subject, _silent(now - (source.reported_at or now)), Level.FAILED))
    stalled = _stalled(source, now)
    if stalled is not None and not any(p.level is Level.FAILED for p in problems):
        if store is not None and store.level is Level.FAILED:
            first = store.problems[0]
            stalled = replace(
                stalled, cause=f"{stalled.cause} They wait for the store: {first.cause}",
                remedy=first.remedy,
            )  # fmt: skip
        problems.append(_of(subject, stalled, Level.FAILED))
    return Part.of(subject, problems, starting=not source.started)


def backfill_part(number: int, failure: Failure) -> Part:
    """Return how a backfill is that failed."""
    subject = f"backfill {number}"
    remedy = failure.remedy or f"Repair that, then: penstock backfill resume {number}"
    return Part.of(subject, [_of(subject, replace(failure, remedy=remedy), Level.DEGRADED)])


def sources_parts(sources: Sequence[SourceFacts], store: Failure | None, now: float) -> list[Part]:
    """Return the parts of a run: its store, which may fail, its sources and their sinks."""
    of_store = worker_part("store", store, now)
    parts = [of_store]
    for source in sources:
        parts.append(source_part(source, now, of_store))
        parts += map(sink_part, source.sinks)
    return parts


def worker_part(
    subject: str, failure: Failure | None, now: float, *, starting: bool = False
) -> Part:
    """Return how something is that works on its own, such as a relay: well, or failing."""
    if failure is None:
        return Part.of(subject, (), starting=starting)
    return Part.of(subject, [_of(subject, failure, _graced(failure.since, now))])


def pipeline_part(name: str, failure: Failure) -> Part:
    """Return the part of one pipeline of a relay that does not run; the others do."""
    subject = f"pipeline {name}"
    return Part.of(subject, [_of(subject, failure, Level.DEGRADED)])


def consumer_part(name: str, failure: Failure | None) -> Part:
    """Return how a consumer is, named `stream/consumer`; others go on where one does not."""
    subject = f"consumer {name}"
    return Part.of(subject, [] if failure is None else [_of(subject, failure, Level.DEGRADED)])


def seen_part(subject: str, level: Level, failure: Failure) -> Part:
    """Return the part of what was checked from outside, once, and is not as it should be."""
    return Part.of(subject, [_of(subject, failure, level)])


def run_part(failure: Failure) -> Part:
    """Return the part of a process that can't go on without a repair."""
    return Part.of("run", [_of("run", failure, Level.FAILED)])


def iso(at: float | None) -> str | None:
    """Return a time as JSON has it."""
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")


def _of(subject: str, failure: Failure, level: Level) -> Problem:
    return Problem(subject, level, failure.code, failure.cause, failure.remedy, failure.since)


def _graced(since: float | None, now: float) -> Level:
    return Level.DEGRADED if since is not None and now - since < GRACE_SECONDS else Level.FAILED


def _held_up(source: SourceFacts, now: float) -> Failure | None:
    """Return why none of a source's sinks takes messages, if that is so and not but for a moment."""
    # A sink that is held without a failure is disabled, or only starts: it is not to take any.
    live = [sink for sink in source.sinks if sink.state != "paused" or sink.failure is not None]
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
