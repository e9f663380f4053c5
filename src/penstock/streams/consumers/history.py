"""Where messages of a stream stand with its consumers, each with its dead letter."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import datetime
from typing import Final, NamedTuple

from penstock.config.consumers import ConsumerType
from penstock.streams.consumers.entry import DeliveryFailure, StreamPosition
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.search import StreamSearch
from penstock.streams.consumers.sessions import SQL
from penstock.streams.consumers.types import ConsumerInfo, UnknownConsumer

CONSUMERS: Final = 25
"""How many consumers are asked at the most: each costs some queries."""
_AT_ONCE: Final = 4


class Letter(NamedTuple):
    """A message's dead letter."""

    id: int
    code: str
    reason: str
    at: datetime
    replayed_at: datetime | None


class ConsumerStanding(NamedTuple):
    """Where a message stands with a consumer; `state` is a `Stage`, or `dead`. Times are in µs."""

    consumer: str
    type: ConsumerType
    state: str
    deliver_count: int
    until: int | None
    failure: DeliveryFailure | None
    letter: Letter | None


async def history(
    consumers: Consumers,
    of: str,
    search: StreamSearch,
    at: Sequence[StreamPosition],
    name: str | None,
) -> tuple[list[list[ConsumerStanding]], int]:
    """Return where each message stands with the first consumers, and how many others the stream has.

    With a `name`, where each stands with that consumer alone. `of` is the stream's name or UUID.
    """
    stream = (await consumers.own(of)).info.stream
    of_stream = [info for info in await consumers.known() if info.stream == stream]
    of_stream.sort(key=lambda info: info.name)
    asked = [info for info in of_stream if info.name == name] if name else of_stream[:CONSUMERS]
    some = asyncio.Semaphore(_AT_ONCE)

    async def one(info: ConsumerInfo, position: StreamPosition) -> ConsumerStanding | None:
        async with some:
            try:
                consumer = await consumers.get(info.name)
                standing = await consumer.standing(position)
            except UnknownConsumer:  # deleted meanwhile
                return None
        letter, count = letters.get((info.id, position), (None, 0))
        stage = standing.stage
        is_dead = letter is not None and letter.replayed_at is None and stage == "done"
        return ConsumerStanding(
            info.name,
            info.type,
            "dead" if is_dead else stage,
            standing.deliver_count or count,
            standing.until,
            standing.failure,
            letter,
        )

    letters: dict[tuple[int, StreamPosition], tuple[Letter, int]] = {}
    ids = [info.id for info in asked]
    for position in at:
        rows = await search.sessions.rows(SQL["letters_at"], (ids, *position))
        for id_, number, code, reason, count, when, replayed in rows:
            letters[id_, position] = Letter(number, code, reason, when, replayed), count
    found = []
    for position in at:
        listed = await asyncio.gather(*[one(info, position) for info in asked])
        found.append([each for each in listed if each is not None])
    return found, len(of_stream) - len(asked)
