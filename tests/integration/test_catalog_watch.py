"""Filters of consumers follow the tables of a source that runs: new columns, and dropped ones."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from tests.waits import await_true

from penstock.config.settings import Config
from penstock.core.errors import ConfigError
from penstock.core.health import Level, Part
from penstock.desired.entities import Change
from penstock.desired.state import DesiredState
from penstock.embedded.handles import Database
from penstock.runtime.catalog_watch import CatalogWatch
from penstock.runtime.consumer_watch import ConsumerWatch
from penstock.streams.consumers.registry import Consumers
from penstock.streams.store import Store


@pytest.fixture
def store(database: Database) -> Iterator[Store]:
    database.execute("CREATE TABLE items (id bigint PRIMARY KEY)")
    with Store.open(database.url) as store:
        store.register_stream("events", store.make_source("shop", "tag"), "changes", None)
        entities = [
            Change("source", "shop", None, {"type": "postgres", "url": database.url}),
            Change("sink", "events", None, {"type": "stream", "source": "shop"}),
        ]
        DesiredState(store, {}).write(entities, by="x", door="api")
        yield store


@pytest.fixture
def watch(store: Store) -> Iterator[None]:
    config = Config.model_validate(
        {
            "sources": {"shop": {"type": "postgres", "url": store.url, "slot": "s", "publication": "p"}},
            "sinks": {"events": {"type": "stream", "source": "shop"}},
        }
    )  # fmt: skip
    with CatalogWatch(store.url, config.sources):
        yield


@pytest.mark.usefixtures("watch")
def test_filters_follow_the_tables(store: Store, database: Database) -> None:
    state = DesiredState(store, {})
    spec = {"stream": "events", "filters": {"sql": "record.size > 1"}}

    def why_refused() -> str:
        try:
            state.write([Change("consumer", "large", None, spec)], by="x", door="api")
        except ConfigError as error:
            return str(error)
        return ""

    await_true(lambda: "unknown column record.size" in why_refused())  # before that none are known
    database.execute("ALTER TABLE items ADD size int")
    await_true(lambda: not why_refused())
    assert parts(store)["consumer events/large"].level is Level.READY
    database.execute("ALTER TABLE items DROP size")
    await_true(lambda: bool(state.refusals()))
    part = parts(store)["consumer events/large"]
    assert part.level is Level.DEGRADED
    assert "unknown column record.size" in part.problems[0].cause
    database.execute("ALTER TABLE items ADD size bigint")
    await_true(lambda: not state.refusals())
    assert parts(store)["consumer events/large"].level is Level.READY


@pytest.mark.usefixtures("watch")
def test_one_that_was_refused_is_served_once_its_column_is_there(
    store: Store, database: Database
) -> None:
    state = DesiredState(store, {})
    spec: dict[str, Any] = {"stream": "events", "filters": {"sql": "record.size > 1"}}
    change = [Change("consumer", "large", None, spec)]
    state.write(change, by="x", door="file", lenient=True)  # as a run applies a file
    assert "consumer large" in parts(store)
    database.execute("ALTER TABLE items ADD size int")
    await_true(lambda: "consumer events/large" in parts(store))
    assert state.refusals() == []


def parts(store: Store) -> dict[str, Part]:
    """The parts of all consumers, as `/status` has them."""

    async def work() -> dict[str, Part]:
        consumers, watch = Consumers(store.url), ConsumerWatch()
        await watch.look(consumers)
        await consumers.close()
        return {part.subject: part for part in watch.parts()}

    return asyncio.run(work())
