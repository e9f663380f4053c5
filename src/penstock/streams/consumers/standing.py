"""Where one message stands with a consumer, from the consumer's state. No I/O, no clock."""

from __future__ import annotations

from typing import Literal, NamedTuple

from penstock.streams.consumers.entry import DeliveryFailure, StreamPosition
from penstock.streams.consumers.state import State

Stage = Literal["waiting", "in_flight", "retry", "replay", "filtered", "done"]


class Standing(NamedTuple):
    """How far a message is.

    Attributes:
        stage: `waiting` for its first delivery; `in_flight`; `retry`, to be handed out again;
            `replay`, a dead letter that waits to be; `filtered`, never handed out; `done`: acked, a
            dead letter, or from before the place where the consumer has begun.
        deliver_count: How often it was handed out, as far as that is known.
        until: When it may be handed out again, in µs; None where it waits for nothing.
        failure: Why its last delivery failed.
    """

    stage: Stage
    deliver_count: int = 0
    until: int | None = None
    failure: DeliveryFailure | None = None


def standing_of(state: State, at: StreamPosition, group: int, now: int, *, taken: bool) -> Standing:
    """Return where the message at `at` stands, in µs; `taken` is whether the filter lets it through."""
    for number, (lsn, idx, _, _, count, until) in state.held.items():
        if (lsn, idx) == at:
            out = until > now and number not in state.returned
            waits = until if until > now else None
            stage: Stage = "in_flight" if out else "retry"
            return Standing(stage, count, waits, state.failed.get(number))
    if at in state.replays:
        return Standing("replay")
    if not taken:
        return Standing("filtered")
    if at > state.cursor:
        return Standing("waiting")
    parked = state.parked.get(group)
    if parked is not None and parked[1:3] <= at <= parked[3:5]:
        return Standing("waiting")
    return Standing("done")
