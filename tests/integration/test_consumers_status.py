"""The status of many consumers, read at once: what each consumer reports of itself, in few queries."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from tests.consumers_help import run, serving, tokens
from tests.streams_help import inserted, make_stream, publish, updated

from penstock.core.message import Position
from penstock.embedded.handles import Database
from penstock.streams.consumers import status
from penstock.streams.consumers.facts import ConsumerFacts
from penstock.streams.consumers.registry import Consumers
from penstock.streams.consumers.types import ConsumerSpec
from penstock.streams.store import Store

FILTERS: list[dict[str, Any]] = [
    {},
    {"filters": {"table": "none"}},
    {"filters": {"action": "insert"}},
    {"deliver_policy": "new"},
    {"max_deliver": 1},
]


def alike(facts: ConsumerFacts | None) -> ConsumerFacts | None:
    """Leave out what moves with the clock, but that there is a lag."""
    return None if facts is None else replace(facts, lag_seconds=float(facts.lag_seconds > 0))


@pytest.mark.parametrize("kind", ["changes", "rows"])
def test_what_is_read_at_once_is_what_each_reports(store: Store, kind: str) -> None:
    seed = random.randrange(1 << 30)
    chance = random.Random(seed)

    async def work() -> None:
        stream = make_stream(store, kind=kind)
        async with serving(store) as here, serving(store) as there, serving(store) as third:
            names = [f"c{number}" for number in range(len(FILTERS))]
            for name, settings in zip(names, FILTERS, strict=True):
                await here.create(ConsumerSpec(name, "events", "pull", settings))
            for _ in range(12):
                keys = [chance.randrange(10) for _ in range(chance.randrange(6))]
                changes = [
                    inserted(key) if chance.random() < 0.5 else updated(key, changed=1)
                    for key in keys
                ]
                if changes:
                    publish(store, stream, changes)
                for name in names:
                    await step(chance.choice([here, there]), name, chance)
                for registry in (here, third):
                    # A look at one by itself may bury what has failed too often, after its answer.
                    for _ in range(20):
                        each = await by_itself(store, [*names, "events"])
                        found = {i.name: alike(f) for i, f in await registry.facts()}
                        if found == each:
                            break
                    assert found == each, f"seed {seed}"

    run(work)


async def by_itself(store: Store, names: list[str]) -> dict[str, ConsumerFacts | None]:
    """Return what each consumer reports in a process that has served nothing and knows nothing."""
    async with serving(store) as fresh:
        return {name: alike(await (await fresh.get(name)).facts()) for name in names}


async def step(registry: Consumers, name: str, chance: random.Random) -> None:
    consumer = await registry.get(name)
    received = (await consumer.receive(chance.randrange(1, 4), 0.0)).deliveries
    given = tokens(received)
    what = chance.randrange(5)
    if what == 0:
        await consumer.ack(given)
    elif what == 1:
        await consumer.nack(given, chance.choice([0.0, 60.0]), reason="no shop")
    elif what == 2:
        await consumer.ack(given[1:])
    elif what == 3 and chance.random() < 0.3:
        await consumer.rewind(chance.choice(["all", "new", Position(1, 0)]))


def test_a_page_takes_a_few_queries(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    rows = status._rows

    async def counting(*args: Any) -> Any:
        made.append(args[1])
        return await rows(*args)

    async def work() -> None:
        stream = make_stream(store)
        async with serving(store) as here, serving(store) as there:
            for number in range(30):
                await here.create(ConsumerSpec(f"c{number:02}", "events"))
            publish(store, stream, [inserted(key) for key in range(20)])
            for name in ("c00", "c01"):  # one of them, and so its log, is served here
                given = tokens((await (await here.get(name)).receive(3, 5.0)).deliveries)
                await (await here.get(name)).ack(given[:1])
            monkeypatch.setattr(status, "_rows", counting)
            page = await there.page("", 31)
            found = {info.name: facts for info, facts in await there.facts(page)}
            assert len(found) == 31
            assert len(made) <= 8, made
            assert all(of.newest is None for of in there._consumers.values()), (
                "none is served for it"
            )
            first, last = found["c00"], found["c29"]
            assert first is not None
            assert last is not None
            assert (first.lag_messages, first.in_flight) == (19, 2)
            assert (last.lag_messages, last.in_flight) == (20, 0)
            assert last.lag_seconds > 0

    run(work)


def test_who_is_far_behind_is_looked_at_by_itself(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status, "_LOOKED_AT", 1)

    async def work() -> None:
        stream = make_stream(store)
        async with serving(store) as consumers:
            await consumers.create(ConsumerSpec("far", "events"))
            publish(store, stream, [inserted(key) for key in range(250)])
            info = await consumers.named(["far", "none"])
            ((_, facts),) = await consumers.facts(info)
            assert facts is not None
            assert facts.lag_messages == 250

    run(work)


def test_one_that_is_deleted_meanwhile_hides_no_other(store: Store, database: Database) -> None:
    async def work() -> None:
        make_stream(store)
        async with serving(store) as consumers, serving(store) as others:
            for name in ("gone", "there"):
                await consumers.create(ConsumerSpec(name, "events"))
            infos = await consumers.list()
            await others.delete("gone")
            found = {info.name: facts for info, facts in await consumers.facts(infos)}
            assert sorted(found) == ["events", "there"]
            # Its log alone is gone: as in the moment before the rest follows.
            (info,) = await consumers.named(["there"])
            database.execute(f"DROP TABLE penstock.consumer_{info.id}")
            found = {info.name: facts for info, facts in await consumers.facts()}
            assert found["there"] is None
            assert found["events"] is not None

    run(work)
