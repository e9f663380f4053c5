"""Messages that a transform multiplies, drops and fails, on their way through outages and crashes.

Whatever happens, each sink has all that was made of each message once, in the order of its groups, at
the subjects and paths of its route, and each that failed is a dead letter.
"""

from __future__ import annotations

import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import pytest
from tests.isolation_help import GROUPS, Source, loaded, nats_settings, position, stream_settings
from tests.streams_help import read
from tests.waits import await_true

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres
from penstock.spark.sink_plan import SinkPlan

WINDOW = 600
LUA = """
function transform(message)
    local id = message.record.id
    if id % 7 == 3 then return nil end
    if id % 11 == 5 then error("eleven") end
    if id % 5 ~= 0 then
        message.record = {id = id, part = 0, to = id % 3}
        return message
    end
    local made = {}
    for part = 0, 2 do
        made[#made + 1] = {record = {id = id, part = part, to = part}, action = message.action}
    end
    return made
end
"""
Made = tuple[int, int]
"""A message's number, and its part of what was made of it."""


def expected(count: int) -> list[Made]:
    return [
        (n, part)
        for n in range(count)
        if n % 7 != 3 and n % 11 != 5
        for part in range(1 if n % 5 else 3)
    ]


def to(made: Made) -> int:
    return made[1] if made[0] % 5 == 0 else made[0] % 3


def assert_whole(found: Iterable[Made], count: int, groups: int) -> None:
    """All is there once, and every group's in order."""
    listed = list(found)
    assert sorted(listed) == expected(count)
    of_group: dict[int, list[Made]] = defaultdict(list)
    for made in listed:
        of_group[made[0] % groups].append(made)
    for group, messages in of_group.items():
        assert messages == sorted(messages), f"group {group}: {messages[:50]}"


class Sinks:
    """A JetStream sink, on a server that a test may stop, and a stream, with the same steps."""

    def __init__(self, server: EmbeddedNats, stack: ExitStack, group_by: list[str] | None) -> None:
        self.server = server
        self.groups = GROUPS if group_by is None else 2
        self.streams = stack.enter_context(JetStream(server.url, error_cb=_ignore_error))
        self.name = f"S{uuid.uuid4().hex[:8]}"
        self.prefix = self.name.lower()
        self.streams.add_stream(self.name, f"{self.prefix}.>", duplicate_window=WINDOW)
        subject, path = f"{self.prefix}.to.{{record.to}}", "to/{record.to}"
        steps: dict[str, Any] = {"transform": {"lua": LUA}, "group_by": group_by}
        self.settings: dict[str, Any] = {
            "nats": nats_settings(
                server.url, subject=f"{self.prefix}.none", route=[{"to": subject}], **steps
            ),
            "events": stream_settings(route=[{"to": path}], **steps),
        }
        self.plans = {
            "nats": SinkPlan(0, route=(), templates=(subject,), always=True),
            "events": SinkPlan(1, route=(), templates=(path,), always=True),
        }

    def source(self, url: str) -> Source:
        # Of groups that are larger than the source's only one task keeps the order.
        tasks = 2 if self.groups == GROUPS else 1
        return Source(url, self.settings, tasks=tasks, plans=self.plans)

    def assert_all(self, source: Source) -> None:
        count = source.written
        await_true(lambda: not source.behind(), 40)
        published: list[Made] = []
        for message in self.streams.messages(self.name):
            record = orjson.loads(message.data)["record"]
            published.append(made := (record["id"], record["part"]))
            assert message.subject == f"{self.prefix}.to.{to(made)}"
        assert_whole(published, count, self.groups)
        stream = source.store.stream("events")
        assert stream is not None
        stored: list[Made] = []
        for found in read(source.store, stream):
            record, metadata = found.message["record"], found.message["metadata"]
            stored.append(made := (record["id"], record["part"]))
            assert metadata["route"] == f"to/{to(made)}"
            number, part = made
            lsn, idx = position(number)
            assert metadata["idempotency_key"] == f"tag-{lsn}-{idx}" + (f"-{part}" if part else "")
        assert_whole(stored, count, self.groups)
        failed = [n for n in range(count) if n % 11 == 5 and n % 7 != 3]
        for sink in self.settings:
            letters = source.store.letters.page(sink=sink, limit=count + 1)
            assert {letter.code for letter in letters} == {"transform_failed"}
            numbers = [orjson.loads(letter.message)["record"]["id"] for letter in letters]
            assert sorted(numbers) == failed


async def _ignore_error(_: Exception) -> None:
    """Stand in for nats-py's logging of every try to connect to a server that is down."""


@pytest.fixture(params=[None, ["half"]], ids=["source's groups", "own groups"])
def sinks(server_dir: Path, request: pytest.FixtureRequest) -> Iterator[Sinks]:
    with ExitStack() as stack:
        folder = server_dir / f"shaky-{uuid.uuid4().hex[:8]}"
        server = stack.enter_context(EmbeddedNats(folder))
        yield Sinks(server, stack, request.param)


def test_a_server_that_is_gone_for_a_while(sinks: Sinks, database: Database) -> None:
    with sinks.source(database.url) as source:
        source.warm()
        with loaded(source):
            await_true(lambda: source.written > 300)
            sinks.server.kill()
            await_true(lambda: "nats" in source.behind())
            behind = source.written
            await_true(lambda: source.written > behind + 500)
            sinks.server.start()
            await_true(lambda: source.states("nats")[-1] == "attached", 40)
            joined = source.written
            await_true(lambda: source.written > joined + 200)
        sinks.assert_all(source)
        assert source.waiting("nats") == 0


def test_crashes_in_the_middle_of_a_batch(sinks: Sinks, database: Database) -> None:
    """Some parts of it are there, others not, while the sink is behind and while it is not."""
    with sinks.source(database.url) as source:
        source.warm()
        source.batch(200)
        source.batch(400, only=[0])
        source.restart()
        source.batch(450)
        sinks.server.kill()
        source.batch(600)
        assert "nats" in source.behind()
        source.batch(800, only=[0], tasks=3 if sinks.groups == GROUPS else 1)
        source.restart()
        source.batch(900)
        sinks.server.start()
        source.batch(1000)
        sinks.assert_all(source)


def test_a_store_that_comes_and_goes(sinks: Sinks, server_dir: Path) -> None:
    """A part is tried again, and what was transformed for it before is not there twice."""
    with (
        EmbeddedPostgres(server_dir / f"pg-{uuid.uuid4().hex[:8]}") as server,
        sinks.source(server.create_database("store")) as source,
    ):
        source.warm()
        with loaded(source):
            for _ in range(3):
                at = source.written
                await_true(lambda at=at: source.written > at + 200)  # type: ignore[misc]  # mypy infers no lambda with a default
                server.kill()
                server.start()
            at = source.written
            await_true(lambda: source.written > at + 200, 40)
        sinks.assert_all(source)


def test_dead_letters_that_the_store_refuses_are_waited_for(
    sinks: Sinks, database: Database
) -> None:
    with sinks.source(database.url) as source:
        source.warm()
        source.batch(3)
        source.refuse_letters = "The store is away."
        with loaded(source, rows=400):
            await_true(lambda: any(r.get("code") == "dead_letters" for r in source.reports))
            at = source.written
            source.refuse_letters = None
            await_true(lambda: source.written > at)
        sinks.assert_all(source)
