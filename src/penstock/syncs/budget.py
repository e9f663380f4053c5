"""The budget of a credential: how many requests it may make, and when. Pure, no I/O.

All lanes share one budget per credential. No stretch of `interval` seconds has more than the allowed
requests, and no more than `concurrency` are under way. What an API reports of itself narrows that: a 429
holds all requests up, and what its headers leave is not exceeded before they are renewed.
Polls come before backfills; where both wait, one request in four is a backfill's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Final

from penstock.syncs.sync import Limit

_GRAINS: Final = 50
"""Grants so close together, as a part of the interval, count as of the last one's time."""
_YIELDED: Final = 3
"""After so many requests of polls one of a backfill is next, where both wait."""
_HELD_SECONDS: Final = 1.0
"""How long a 429 that gives no time holds the requests up at first; each one after it, twice as long."""
_MOST_HELD_SECONDS: Final = 300.0


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """What an answer has of the API's own limits; times in seconds from now.

    `limited`: it was refused for them, a 429. `remaining` requests are left for `reset` seconds.
    """

    limited: bool = False
    retry_after: float | None = None
    remaining: int | None = None
    reset: float | None = None


Ticket = tuple[int, int]
"""A lane, and the number that it gave to a request."""


@dataclass
class CredentialBudget:
    """The requests of one credential; `limit` may change at any time."""

    limit: Limit
    requests: int = 0
    """How many were granted."""
    limited: int = 0
    """How many the API has refused."""
    _granted: deque[tuple[float, int]] = field(default_factory=deque)
    _under_way: set[Ticket] = field(default_factory=set)
    _first: deque[Ticket] = field(default_factory=deque)
    _later: deque[Ticket] = field(default_factory=deque)
    _firsts: int = 0
    _held_until: float = 0.0
    _held: float = 0.0
    _left: int | None = None
    _left_until: float = 0.0

    def ask(self, ticket: Ticket, *, first: bool) -> None:
        """Have a request wait for its turn."""
        (self._first if first else self._later).append(ticket)

    def answered(self, ticket: Ticket, answer: ApiLimits, now: float) -> None:
        """Note that a request has its answer."""
        self._under_way.discard(ticket)
        if answer.limited:
            self.limited += 1
            if answer.retry_after is not None:
                held = answer.retry_after
            elif self._held_until <= now:
                self._held = min(max(_HELD_SECONDS, 2 * self._held), _MOST_HELD_SECONDS)
                held = self._held
            else:
                held = 0.0  # one of several that were under way
            self._held_until = max(self._held_until, now + held)
        elif now >= self._held_until:
            self._held = 0.0
        if answer.remaining is not None and answer.reset is not None:
            # Those that are under way may not be counted yet.
            self._left = max(0, answer.remaining - len(self._under_way))
            self._left_until = now + answer.reset

    def cancel(self, ticket: Ticket) -> None:
        """Forget a request that is not made."""
        self._under_way.discard(ticket)
        for waiting in (self._first, self._later):
            if ticket in waiting:
                waiting.remove(ticket)

    def lose(self, lane: int) -> None:
        """Forget the requests of a lane that is gone."""
        self._under_way = {ticket for ticket in self._under_way if ticket[0] != lane}
        self._first = deque(ticket for ticket in self._first if ticket[0] != lane)
        self._later = deque(ticket for ticket in self._later if ticket[0] != lane)

    def grant(self, now: float) -> list[Ticket]:
        """Return the requests that may be made now."""
        given: list[Ticket] = []
        while (self._first or self._later) and self._opens_at(now) <= now:
            if len(self._under_way) >= max(1, self.limit.concurrency):
                break
            given.append(self._next())
            self._under_way.add(given[-1])
            self._count(now)
        return given

    def wake_at(self, now: float) -> float | None:
        """Return when a request that waits may be made, None where none does, or others are to end."""
        if not (self._first or self._later):
            return None
        if len(self._under_way) >= max(1, self.limit.concurrency):
            return None
        return self._opens_at(now)

    @property
    def used(self) -> int:
        """How many requests of the interval are used, as of the last grant."""
        return sum(count for _, count in list(self._granted))

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or is under way."""
        return not (self._first or self._later or self._under_way)

    def _next(self) -> Ticket:
        if self._first and (not self._later or self._firsts < _YIELDED):
            self._firsts += bool(self._later)
            return self._first.popleft()
        self._firsts = 0
        return self._later.popleft()

    def _opens_at(self, now: float) -> float:
        """Return from when on one more request may be made."""
        at = self._held_until
        if self._left is not None:
            if now >= self._left_until:
                self._left = None
            elif self._left == 0:
                at = max(at, self._left_until)
        while self._granted and self._granted[0][0] + self.limit.interval <= now:
            self._granted.popleft()
        if self.used >= max(1, self.limit.requests):
            at = max(at, self._granted[0][0] + self.limit.interval)
        return at

    def _count(self, now: float) -> None:
        self.requests += 1
        if self._left is not None:
            self._left -= 1
        last = self._granted[-1] if self._granted else None
        if last is not None and now - last[0] < self.limit.interval / _GRAINS:
            self._granted[-1] = now, last[1] + 1
        else:
            self._granted.append((now, 1))
