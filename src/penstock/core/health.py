"""Ready, starting, degraded or failed: the one definition, for all that reports how a run is.

Pure functions over plain facts and `now`; every time is Unix time in seconds. `RunState` and the relays
know the facts of a process, `penstock status` those that it sees itself. `/healthz`, `/readyz`,
`/status`, `/metrics` and `penstock status` with its exit code are all derived from a `Health`.

A part is *failed* where it does not move and will not within seconds: the store does not answer, a
source does not stream, none of its sinks takes messages, or messages wait and nothing progresses. It
is *degraded* where it moves and something is wrong. A part that is `starting` has never progressed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from enum import IntEnum
from typing import Any, Final

from penstock.core.errors import Concern, PenstockError, SetupError

GRACE_SECONDS: Final = 3.0
"""How long a failure may last before what it concerns counts as failed: most are over by then."""

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
    concerns: Concern | None = None

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
        return cls(error.code, error.message, error.remedy, concerns=error.concerns)

    def error(self) -> SetupError:
        """Return the error of a configuration that fails by it."""
        return SetupError(self.code, self.cause, remedy=self.remedy, concerns=self.concerns)

    def lasting(self, before: Failure | None, now: float) -> Failure:
        """Return this failure, since the one was that it follows without a success in between."""
        return replace(self, since=now if before is None else before.since)

    @property
    def text(self) -> str:
        """Cause and remedy."""
        return f"{self.cause} {self.remedy}".strip()


@dataclass(frozen=True, slots=True)
class HealthProblem:
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
    def of(cls, subject: str, level: Level, failure: Failure) -> HealthProblem:
        """Return the problem that a failure is for a subject."""
        return cls(subject, level, failure.code, failure.cause, failure.remedy, failure.since)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> HealthProblem:
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
    problems: tuple[HealthProblem, ...] = ()

    @classmethod
    def of(cls, subject: str, problems: Iterable[HealthProblem], *, starting: bool = False) -> Part:
        """Return a part that is as bad as the worst of its problems."""
        found = tuple(problems)
        least = Level.STARTING if starting else Level.READY
        return cls(subject, max([least, *(p.level for p in found)]), found)

    @classmethod
    def failing(cls, subject: str, level: Level, failure: Failure) -> Part:
        """Return a part with one problem."""
        return cls.of(subject, [HealthProblem.of(subject, level, failure)])


@dataclass(frozen=True, slots=True)
class Health:
    """A whole of parts."""

    parts: tuple[Part, ...] = ()

    @property
    def level(self) -> Level:
        """The worst level of a part."""
        return max((part.level for part in self.parts), default=Level.READY)

    @property
    def problems(self) -> tuple[HealthProblem, ...]:
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
        problems = [HealthProblem.from_json(problem) for problem in reported["problems"]]
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


def worker_part(
    subject: str, failure: Failure | None, now: float, *, starting: bool = False
) -> Part:
    """Return how something is that works on its own, such as a relay: well, or failing."""
    if failure is None:
        return Part.of(subject, (), starting=starting)
    return Part.failing(subject, graced(failure, now), failure)


def run_part(failure: Failure) -> Part:
    """Return the part of a process that can't go on without a repair."""
    return Part.failing("run", Level.FAILED, failure)


def graced(failure: Failure, now: float) -> Level:
    """Return how bad a failure is by now: most are over within `GRACE_SECONDS`."""
    since = failure.since
    return Level.DEGRADED if since is not None and now - since < GRACE_SECONDS else Level.FAILED


def iso(at: float | None) -> str | None:
    """Return a time as JSON has it."""
    return None if at is None else datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds")
