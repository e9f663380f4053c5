"""One step of a consumer, as an entry of its log in JSON. No I/O.

Times are microseconds since 1970. Deliveries are numbered from 1, over the consumer's whole life.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

StreamPosition = tuple[int, int]
"""lsn, idx."""
Message = tuple[int, int, int, int | None]
"""lsn, idx, group, and the group that the message left, if it left one."""
Parked = tuple[int, int, int, int, int]
"""How many, then lsn and idx of where the next one may be, then those of the last."""


class DeliveryFailure(NamedTuple):
    """Why a delivery failed, and when, in µs; `status` is that of a webhook's HTTP answer."""

    at: int
    status: int | None
    reason: str


@dataclass(slots=True)
class Entry:
    """One step; what is empty changes nothing."""

    cursor: tuple[int, int] | None = None
    passed: int = 0  # messages between the old cursor and the new one
    done: list[tuple[int, int]] = field(default_factory=list)  # ranges of numbers, ends included
    lapsed: int = 0  # how many of `done` the stream has no more: they were neither acked nor failed
    moved: list[tuple[int, list[int]]] = field(default_factory=list)  # until, numbers
    released: list[int] = field(default_factory=list)  # no longer counted as delivered
    redelivered: list[int] = field(default_factory=list)  # handed out again, under new numbers
    new: list[Message] = field(default_factory=list)  # handed out for the first time, after those
    until: int = 0  # of `redelivered` and `new`
    parked: list[tuple[int, Parked | None]] = field(default_factory=list)  # None: no more
    replays: list[Message] = field(default_factory=list)
    dropped: list[tuple[int, int]] = field(default_factory=list)  # replays that are no more
    failures: list[tuple[DeliveryFailure, list[int]]] = field(default_factory=list)
    """What failed, by the numbers before this step; those in `done` too are dead letters."""
    rewound: bool = False

    def encode(self) -> bytes:
        """Return the entry as JSON; what is empty is left out."""
        body: dict[str, Any] = {}
        if self.cursor is not None:
            body["c"] = self.cursor
            body["n"] = self.passed
        if self.done:
            body["d"] = [number for ends in self.done for number in ends]
        if self.lapsed:
            body["x"] = self.lapsed
        if self.moved:
            body["m"] = self.moved
        if self.released:
            body["r"] = self.released
        if self.redelivered:
            body["a"] = self.redelivered
        if self.new:
            base = self.new[0][0]
            lsns, idxs, groups, olds = zip(*self.new, strict=True)
            body["b"] = base
            body["l"] = [lsn - base for lsn in lsns]
            body["i"] = idxs
            body["g"] = groups
            if any(old is not None for old in olds):
                body["o"] = olds
        if self.redelivered or self.new:
            body["u"] = self.until
        if self.parked:
            body["p"] = self.parked
        if self.replays:
            body["y"] = self.replays
        if self.dropped:
            body["z"] = self.dropped
        if self.failures:
            body["f"] = [(*failure, numbers) for failure, numbers in self.failures]
        if self.rewound:
            body["w"] = True
        return orjson.dumps(body)

    @classmethod
    def decode(cls, body: dict[str, Any]) -> Entry:
        """Read what `encode` wrote, parsed."""
        ends = body.get("d", ())
        base = body.get("b", 0)
        groups = body.get("g", ())
        olds = body.get("o") or (None,) * len(groups)
        lsns = [base + lsn for lsn in body.get("l", ())]
        cursor = body.get("c")
        return cls(
            cursor=None if cursor is None else (cursor[0], cursor[1]),
            passed=body.get("n", 0),
            done=list(zip(ends[::2], ends[1::2], strict=True)),
            lapsed=body.get("x", 0),
            moved=body.get("m", []),
            released=body.get("r", []),
            redelivered=body.get("a", []),
            new=list(zip(lsns, body.get("i", ()), groups, olds, strict=True)),
            until=body.get("u", 0),
            parked=[(group, parked and tuple(parked)) for group, parked in body.get("p", ())],
            replays=[(m[0], m[1], m[2], m[3]) for m in body.get("y", ())],
            dropped=[(p[0], p[1]) for p in body.get("z", ())],
            failures=failures_of(body.get("f", ())),
            rewound=body.get("w", False),
        )


def failures_of(found: Iterable[Any]) -> list[tuple[DeliveryFailure, list[int]]]:
    """Read failures that `encode` wrote, each with its numbers."""
    return [(DeliveryFailure(at, status, why), numbers) for at, status, why, numbers in found]
