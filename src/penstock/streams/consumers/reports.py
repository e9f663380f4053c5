"""What clients report about deliveries, decided on a consumer's state. No I/O."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from penstock.streams.consumers.ack_tokens import Ref
from penstock.streams.consumers.entry import DeliveryFailure
from penstock.streams.consumers.state import Held, State

EXPIRED: Final = "expired"
UNKNOWN: Final = "unknown"
NACKED: Final = "a worker nacked it without a reason"
NOT_ACKED: Final = "it was not acked within ack_wait_ms"

Kind = Literal["ack", "nack", "extend", "release"]
Refused = list[tuple[int, str]]
"""The refused deliveries of a request: the index in its `refs`, and the reason."""


@dataclass(frozen=True, slots=True)
class Request:
    """A client's request about deliveries; `value` is a time in µs, `failure` belongs to a nack."""

    kind: Kind
    refs: Sequence[Ref | None]
    value: int = 0
    failure: tuple[int | None, str | None] = (None, None)  # HTTP status, reason


class Reports:
    """Collects what the requests of one step change.

    Args:
        state: The consumer's, advanced to the time.
        now: The time, in µs.
        max_deliver: How often a message is handed out; -1 is for ever.
    """

    def __init__(self, state: State, now: int, max_deliver: int) -> None:
        self._state = state
        self._now = now
        self._max_deliver = max_deliver
        self.gone: set[int] = set()
        """The numbers of what is held no longer."""
        self.freed: set[int] = set()
        """The groups of these."""
        self.moved: dict[int, int] = {}
        """When deliveries come back, in µs, by number."""
        self.released: set[int] = set()
        self.failed: dict[DeliveryFailure, list[int]] = {}
        self.dead: dict[int, Held] = {}
        """What becomes a dead letter, by number."""
        self.unsure = False
        """Whether a token was met that another process may know more of."""

    def take(self, request: Request) -> Refused:
        """Take one request; return what is refused."""
        match request.kind:
            case "ack":
                return self.ack(request.refs)
            case "nack":
                return self.nack(request.refs, request.value, *request.failure)
            case "extend":
                return self.extend(request.refs, request.value)
            case "release":
                return self.release(request.refs)

    def ack(self, refs: Sequence[Ref | None]) -> Refused:
        """Take deliveries as done; return what is refused."""
        numbers, refused, _gone = self._sort(refs)
        self.remove(numbers)
        return refused

    def nack(
        self,
        refs: Sequence[Ref | None],
        delay: int,
        status: int | None = None,
        reason: str | None = None,
    ) -> Refused:
        """Make deliveries available again after `delay` µs; they failed, for the reason given."""
        numbers, refused, _gone = self._sort(refs)
        if numbers:
            self.fail(numbers, status, NACKED if reason is None else reason)
        limit = self._max_deliver
        self.kill([n for n in numbers if 0 < limit <= self._state.held[n][4]])
        until = self._in(delay)
        self.moved.update((n, until) for n in numbers if n not in self.dead)
        return refused

    def extend(self, refs: Sequence[Ref | None], time: int) -> Refused:
        """Give deliveries `time` µs from now; what is done is refused too."""
        numbers, refused, gone = self._sort(refs)
        self.moved.update((n, self._in(time)) for n in numbers)
        return sorted(refused + [(at, UNKNOWN) for at in gone])

    def release(self, refs: Sequence[Ref | None]) -> Refused:
        """Give deliveries back: available at once, and not counted."""
        numbers, refused, _gone = self._sort(refs)
        self.moved.update((n, self._in(0)) for n in numbers)
        self.released.update(numbers)
        return refused

    def fail(self, numbers: Sequence[int], status: int | None, reason: str) -> None:
        """Record why deliveries failed; the first reason in a step stands."""
        known = {number for failed in self.failed.values() for number in failed}
        if new := [number for number in dict.fromkeys(numbers) if number not in known]:
            failure = DeliveryFailure(self._now, status, reason)
            self.failed.setdefault(failure, []).extend(new)

    def cause(self, number: int) -> str:
        """Return why the last delivery of a message failed."""
        for failure, numbers in self.failed.items():
            if number in numbers:
                return failure.reason
        known = self._state.failed.get(number)
        return NOT_ACKED if known is None else known.reason

    def remove(self, numbers: Iterable[int]) -> None:
        """Hold messages no longer."""
        held, freed = self._state.held, self.freed
        for number in numbers:
            message = held[number]
            freed.add(message[2])
            if message[3] is not None:
                freed.add(message[3])
        self.gone.update(numbers)

    def kill(self, numbers: list[int]) -> None:
        """Make dead letters of messages."""
        self.dead.update((number, self._state.held[number]) for number in numbers)
        self.remove(numbers)

    def _in(self, time: int) -> int:
        # 0 is before all times, whatever the clocks of other processes.
        return self._now + time if time > 0 else 0

    def _sort(self, refs: Sequence[Ref | None]) -> tuple[list[int], Refused, list[int]]:
        """Return the numbers of what is held, what is refused, and the indexes of what is gone."""
        held, numbers, others = self._state.held, [], []
        for at, ref in enumerate(refs):
            if (
                ref is not None
                and (message := held.get(ref[2])) is not None
                and message[0] == ref[0]
                and message[1] == ref[1]
                and ref[2] not in self.gone
            ):
                numbers.append(ref[2])
            else:
                others.append((at, ref))
        if not others:
            return numbers, [], []
        self.unsure = True
        refused: Refused = []
        gone: list[int] = []
        positions: set[tuple[int, int]] | None = None
        for at, ref in others:
            if ref is None or not self._state.epoch <= ref[2] < self._state.next:
                refused.append((at, UNKNOWN))
                continue
            if ref[2] not in self.gone:
                if positions is None:
                    positions = {m[:2] for number, m in held.items() if number not in self.gone}
                if (ref[0], ref[1]) in positions or (ref[0], ref[1]) in self._state.replays:
                    refused.append((at, EXPIRED))
                    continue
            gone.append(at)
        return numbers, refused, gone
