"""Penstock in memory: its public names, its clock, what it refuses, and the page about it."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest
from tests.waits import await_end

from penstock import testing
from penstock.core.errors import ConfigError
from penstock.streams.consumers.types import ConsumerSpec, NameTaken, TooManyWaiting
from penstock.testing import (
    UNCHANGED,
    Clock,
    InMemoryPenstock,
    InMemoryTable,
    Sent,
    UnsupportedError,
)
from penstock.transforms.base import TransformError

SOURCES = {"shop": {"type": "postgres", "url": "postgresql:///shop", "tables": ["public.*"]}}
STREAM = {"type": "stream", "source": "shop"}
NATS = {"type": "nats", "source": "shop", "url": "nats://localhost", "subject": "s.{table}"}
COLUMNS = {"id": "bigint", "name": "text", "body": "text"}


def made(sink: dict[str, Any] | None = None, **others: Any) -> InMemoryPenstock:
    clock = others.pop("clock", None)
    config = {"sources": SOURCES, "sinks": {"items": {**STREAM, **(sink or {})}}, **others}
    return InMemoryPenstock(config, clock=clock)


def table(penstock: InMemoryPenstock, **others: Any) -> InMemoryTable:
    return penstock.source().table("public.items", COLUMNS, **others)


def bodies(penstock: InMemoryPenstock, sink: str = "items") -> list[Any]:
    return [sent.body for sent in penstock.sink(sink).messages]


# Names and the page


def test_the_names_are_listed_once() -> None:
    package = Path(testing.__file__).parent
    tree = ast.parse((package / "__init__.py").read_text())
    imported = {
        alias.name: node.module
        for node in tree.body
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    assert sorted(imported) == sorted(testing.__all__)
    assert len(set(testing.__all__)) == len(testing.__all__)
    for name, module in imported.items():
        found = getattr(testing, name)
        assert found is getattr(sys.modules[module], name)
        assert found.__doc__


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "testing.md"
TEXT = PAGE.read_text()
SNIPPETS = list(re.finditer(r"^```python\n(.*?)^```", TEXT, re.M | re.S))
TESTS = re.findall(r"^def (test_\w+)", TEXT, re.M)


def page() -> dict[str, Any]:
    """The page's names: its snippets are one module."""
    module = ModuleType("page")
    for snippet in SNIPPETS:
        lines = "\n" * TEXT.count("\n", 0, snippet.start(1))
        exec(compile(lines + snippet[1], str(PAGE), "exec"), module.__dict__)
    return module.__dict__


@pytest.mark.parametrize("name", TESTS)
def test_the_page(name: str) -> None:
    page()[name]()


def test_each_snippet_of_the_page_has_a_test() -> None:
    assert len(SNIPPETS) == len(TESTS) == 6
    assert all("def test_" in snippet[1] for snippet in SNIPPETS)


# Changes


def test_a_transaction_is_committed_as_a_whole_or_not_at_all() -> None:
    penstock = made()
    items = table(penstock)
    with penstock.source().transaction():
        items.insert(id=1)
        items.insert(id=2)
    with contextlib.suppress(ZeroDivisionError), penstock.source().transaction():
        items.delete(1)
        items.insert(id=3)
        raise ZeroDivisionError
    items.update(1, name="x")
    metadata = [body["metadata"] for body in bodies(penstock)]
    assert [found["commit_idx"] for found in metadata] == [0, 1, 0]
    assert metadata[0]["transaction_id"] == metadata[1]["transaction_id"]
    assert metadata[1]["commit_lsn"] < metadata[2]["commit_lsn"]
    assert sorted(items.rows) == [(b"1",), (b"2",)]


def test_runs_of_a_test_have_the_same_keys() -> None:
    found = []
    for _ in range(2):
        penstock = made()
        table(penstock).insert(id=1)
        found.append(bodies(penstock))
    assert found[0] == found[1]
    assert len({body["metadata"]["idempotency_key"] for body in found[0]}) == 1


def test_an_unchanged_large_value() -> None:
    for identity, unavailable in (("default", ["body"]), ("full", [])):
        penstock = made()
        items = table(penstock, replica_identity=identity)
        items.insert(id=1, body="long")
        items.update(1, name="x", body=UNCHANGED)
        items.update(1, name="y")
        _, updated, again = bodies(penstock)
        assert updated["metadata"]["unavailable"] == unavailable
        assert updated["record"].get("body") == (None if unavailable else "long")
        assert again["record"]["body"] == "long"


def test_truncates_reach_the_sinks_that_list_them() -> None:
    sinks = {"items": STREAM, "all": {**STREAM, "actions": ["insert", "truncate"]}}
    penstock = made(sinks=sinks)
    items = table(penstock)
    items.insert(id=1)
    items.truncate()
    items.insert(id=1)
    assert [body["action"] for body in bodies(penstock)] == ["insert", "insert"]
    assert [body["action"] for body in bodies(penstock, "all")] == ["insert", "truncate", "insert"]


@pytest.mark.parametrize("deletes", [True, False])
def test_rows_of_kind_rows_supersede_each_other(*, deletes: bool) -> None:
    penstock = made({"kind": "rows", "deletes": deletes})
    items = table(penstock)
    items.insert(id=1, name="a")
    items.insert(id=2, name="b")
    items.update(1, name="c")
    items.update(2, id=3)
    with penstock.client("/v1/streams/items") as http:
        got = []
        while more := http.get("/receive?batch_size=10").json()["data"]:
            got += [m["data"] for m in more]
            http.post("/ack", json={"ack_ids": [m["ack_id"] for m in more]})
    found = [(m["record"]["id"], m.get("action")) for m in got]
    assert found == [(1, None), *([(2, "delete")] if deletes else []), (3, None)]


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (lambda t: t.insert(id=1, nme="x"), ValueError, "lacks the column 'nme'"),
        (lambda t: t.insert(id=7), ValueError, "has a row with id = 7 already"),
        (lambda t: t.insert(name="x"), ValueError, "the key (id) has no value"),
        (lambda t: t.insert(id=1, name=UNCHANGED), ValueError, "has no value before"),
        (lambda t: t.update(8, name="x"), KeyError, "has no row with id = 8"),
        (lambda t: t.update(7, id=9), ValueError, "has a row with id = 9 already"),
        (lambda t: t.delete(7, 7), TypeError, "got 2 values"),
        (lambda t: t.insert(id=object()), TypeError, "public.items.id"),
    ],
)
def test_changes_that_no_table_takes(wrong: Any, error: type[Exception], text: str) -> None:
    penstock = made()
    items = table(penstock)
    items.insert(id=7)
    items.insert(id=9)
    before = dict(items.rows)
    with pytest.raises(error, match=re.escape(text)):
        wrong(items)
    assert items.rows == before
    assert len(bodies(penstock)) == 2


@pytest.mark.parametrize(
    ("name", "columns", "others", "text"),
    [
        ("other.items", COLUMNS, {}, "does not capture other.items: it has public.*"),
        ("public.*", COLUMNS, {}, "expected one table"),
        ("public.t", {"id": "mood"}, {}, "'mood' is no built-in type"),
        ("public.t", {"a": "int"}, {}, "the key of public.t names no column: id"),
        ("public.t", COLUMNS, {"replica_identity": "index"}, "expected default or full"),
    ],
)
def test_tables_that_can_t_be(name: str, columns: Any, others: Any, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        made().source().table(name, columns, **others)


# Sinks


@pytest.mark.parametrize(
    ("sink", "key"),
    [
        ({"filter": "action = 'insert'"}, "filter"),
        ({"transform": {"sql": "record.id as id"}}, "transform.sql"),
        ({"route": "record.name"}, "route"),
        ({"route": [{"when": "action = 'insert'", "to": "a"}, {"to": "b"}]}, "route"),
    ],
)
def test_sql_is_refused_with_what_to_do(sink: dict[str, Any], key: str) -> None:
    with pytest.raises(UnsupportedError) as error:
        made(sink)
    assert f"sinks.items.{key} is SQL" in str(error.value)
    assert "penstock try" in error.value.remedy


def doubled(message: dict[str, Any]) -> list[dict[str, Any]] | None:
    if message["record"]["name"] == "bad":
        raise ValueError("no such name")
    return [message, {**message, "record": {"copy": True}}]


def test_a_transform_in_python_and_a_route() -> None:
    penstock = made({"transform": {"python": f"{__name__}:doubled"}, "route": [{"to": "{table}"}]})
    items = table(penstock)
    items.insert(id=1, name="a")
    items.insert(id=2, name="bad")
    first, second = bodies(penstock)
    assert second["record"] == {"copy": True}
    assert second["metadata"]["idempotency_key"] == first["metadata"]["idempotency_key"] + "-1"
    assert first["metadata"]["route"] == "items"
    (letter,) = penstock.sink("items").dead_letters
    assert letter.code == "transform_failed"
    assert "no such name" in letter.reason


def test_code_that_can_t_be_loaded() -> None:
    with pytest.raises(TransformError, match="no_such_module"):
        made({"transform": {"python": "no_such_module:f"}})


def test_what_nats_can_t_take_is_a_dead_letter() -> None:
    penstock = made(sinks={"out": {**NATS, "subject": "s.{record.name}"}})
    items = table(penstock, replica_identity="full")
    items.insert(id=1, name="a.b")
    items.insert(id=2, name="x" * 70_000)
    (sent,) = penstock.sink("out").messages
    assert isinstance(sent, Sent)
    assert sent.subject == "s.a%2Eb"
    (letter,) = penstock.sink("out").dead_letters
    assert letter.code == "subject_too_long"


def test_a_file(tmp_path: Path) -> None:
    file = tmp_path / "penstock.yaml"
    file.write_text(
        "sources: {shop: {type: postgres, url: '${URL}'}}\n"
        "sinks: {items: {type: stream, source: shop}}\n"
        "consumers: {mailer: {stream: items, max_deliver: 3}}\n"
    )
    penstock = InMemoryPenstock.from_file(file, {"URL": "postgresql:///shop"})
    table(penstock).insert(id=1)
    assert penstock.consumer("mailer").settings.max_deliver == 3
    assert len(penstock.stream("items").rows) == 1
    with pytest.raises(ConfigError, match="URL"):
        InMemoryPenstock.from_file(file, {})
    with pytest.raises(KeyError, match="expected one of items"):
        penstock.sink("item")


# Consumers over HTTP


@pytest.fixture
def penstock() -> Iterator[InMemoryPenstock]:
    with made() as penstock:
        yield penstock


def test_order_by_row_and_refused_acks(penstock: InMemoryPenstock) -> None:
    items = table(penstock)
    for number in (1, 2):
        items.insert(id=number)
        items.update(number, name="x")
    with penstock.client("/v1/streams/items") as http:
        got = http.get("/receive?batch_size=10").json()["data"]
        assert [m["data"]["record"]["id"] for m in got] == [1, 2]
        late = [m["ack_id"] for m in got]
        penstock.clock.advance(timedelta(seconds=30))
        again = http.get("/receive?batch_size=10").json()["data"]
        assert [m["data"]["metadata"] for m in again] == [m["data"]["metadata"] for m in got]
        refused = http.post("/ack", json={"ack_ids": late})
        assert refused.status_code == 409
        assert http.post("/ack", json={"ack_ids": [m["ack_id"] for m in again]}).is_success
        more = http.get("/receive?batch_size=10").json()["data"]
        assert [m["data"]["action"] for m in more] == ["update", "update"]


def test_a_blocking_receive_advances_the_clock(penstock: InMemoryPenstock) -> None:
    started = penstock.clock.now
    table(penstock).insert(id=1)
    with penstock.client("/v1/streams/items") as http:
        (first,) = http.get("/receive").json()["data"]
        http.post("/nack", json={"ack_ids": [first["ack_id"]], "delay_ms": 5_000})
        assert len(http.get("/receive?wait_for_ms=20000").json()["data"]) == 1
        assert penstock.clock.now - started == timedelta(seconds=5)
        assert http.get("/receive?wait_for_ms=20000").json()["data"] == []
        assert penstock.clock.now - started == timedelta(seconds=25)


def test_a_blocking_client_in_an_event_loop(penstock: InMemoryPenstock) -> None:
    async def served() -> None:
        with penstock.client("/v1/streams/items") as http:
            http.get("/receive")

    with pytest.raises(RuntimeError, match="use an async client"):
        asyncio.run(served())


def test_an_async_receive_waits_for_a_message_or_the_clock(penstock: InMemoryPenstock) -> None:
    items = table(penstock)

    async def received(http: httpx.AsyncClient) -> list[Any]:
        answer = await http.get("/receive", params={"wait_for_ms": 60_000})
        return list(answer.json()["data"])

    acts: list[tuple[Callable[[], None], int | None]] = [
        (lambda: items.insert(id=1), 1),
        (lambda: penstock.clock.advance(29), None),
        (lambda: penstock.clock.advance(1), 1),  # it was not acked within 30 seconds
        (lambda: penstock.clock.advance(60), 1),
    ]

    async def served() -> None:
        async with penstock.async_client("/v1/streams/items") as http:
            for act, count in acts:
                task = asyncio.create_task(received(http))
                for _ in range(50):
                    await asyncio.sleep(0)
                assert not task.done()
                act()
                if count is None:
                    await asyncio.sleep(0)
                    task.cancel()
                    await asyncio.wait([task])
                else:
                    assert len(await asyncio.wait_for(task, 60)) == count

    asyncio.run(served())


@pytest.mark.parametrize(
    ("filters", "taken"),
    [
        (
            {"action": ["insert", "delete"]},
            [("items", "insert"), ("items", "delete"), ("others", "insert")],
        ),
        ({"table": "others"}, [("others", "insert")]),
        ({"table": ["public.others", "none"]}, [("others", "insert")]),
        ({"collection_id": "public.*", "action": "update"}, [("items", "update")]),
        ({"resource_id": "other"}, []),
    ],
)
def test_filters(filters: dict[str, Any], taken: list[tuple[str, str]]) -> None:
    penstock = made(consumers={"some": {"stream": "items", "filters": filters}})
    items = table(penstock)
    items.insert(id=1)
    items.update(1, name="x")
    items.delete(1)
    penstock.source().table("public.others", COLUMNS).insert(id=1)
    found: list[tuple[str, str]] = []
    with penstock.client("/v1/http-consumers/some") as http:
        while got := http.get("/next").json():
            assert got["info"]["num_pending"] == max(len(taken) - len(found) - 1, 0)
            if not got["data"]:
                break
            (message,) = got["data"]
            found.append((message["metadata"]["table_name"], message["action"]))
            http.post("/ack", json={"ack_tokens": [message["ack_token"]]})
    assert found == taken


def test_a_message_that_dies_in_a_receive_is_drained() -> None:
    penstock = made(consumers={"one": {"stream": "items", "max_deliver": 1}})
    table(penstock).insert(id=1)

    async def served() -> None:
        consumer = penstock.consumer("one")
        assert len((await consumer.receive(1)).deliveries) == 1
        drained = asyncio.create_task(consumer.drained())
        penstock.clock.advance(30)
        for _ in range(5):
            await asyncio.sleep(0)
        assert not drained.done()
        assert (await consumer.receive(1)).deliveries == []
        await asyncio.wait_for(drained, 60)
        (letter,) = await consumer.messages("dead")
        assert letter.deliver_count == 1

    asyncio.run(served())


def test_max_waiting() -> None:
    penstock = made(consumers={"one": {"stream": "items", "max_waiting": 1}})

    async def served() -> None:
        consumer = penstock.consumer("one")
        waiting = asyncio.create_task(consumer.receive(1, 10.0))
        await asyncio.sleep(0)
        with pytest.raises(TooManyWaiting):
            await consumer.receive(1, 10.0)
        penstock.clock.advance(10)
        assert (await waiting).deliveries == []

    asyncio.run(served())


def test_threads_share_a_stream(penstock: InMemoryPenstock) -> None:
    items = table(penstock)
    for number in range(60):
        items.insert(id=number)
    seen: list[int] = []

    def work() -> None:
        with penstock.client("/v1/streams/items") as http:
            while got := http.get("/receive?batch_size=5").json()["data"]:
                seen.extend(m["data"]["record"]["id"] for m in got)
                http.post("/ack", json={"ack_ids": [m["ack_id"] for m in got]})

    threads = [threading.Thread(target=work, daemon=True) for _ in range(4)]
    for thread in threads:
        thread.start()
    await_end(*threads)
    assert sorted(seen) == list(range(60))


def test_tokens(penstock: InMemoryPenstock) -> None:
    worker = penstock.token("worker", ["other"])
    with penstock.client("/v1/streams/items", worker) as http:
        assert http.get("/receive").status_code == 403
        assert http.get("/receive", headers={"Authorization": "Bearer x"}).status_code == 401
    own = httpx.Client(base_url="http://any", transport=penstock.transport())
    assert own.get("/v1/streams").status_code == 401


def test_two_of_them_share_nothing() -> None:
    one, other = made(), InMemoryPenstock({"sources": SOURCES, "sinks": {"orders": STREAM}})
    for penstock, name in ((one, "items"), (other, "orders")):
        table(penstock).insert(id=1)
        with penstock.client("/v1") as http:
            assert [each["name"] for each in http.get("/streams").json()["data"]] == [name]
            assert len(http.get(f"/streams/{name}/receive").json()["data"]) == 1


def test_consumers_are_managed_over_http() -> None:
    penstock = made({"actions": ["insert"]})
    items = table(penstock)
    items.insert(id=1)
    with penstock.client("/v1") as http:
        new = {"name": "late", "stream": "items", "deliver_policy": "new", "max_deliver": 1}
        assert http.post("/http-consumers", json=new).status_code == 201
        assert http.post("/http-consumers", json=new).status_code == 409
        items.insert(id=2)
        (message,) = http.get("/http-consumers/late/next?batch_size=5").json()["data"]
        assert message["record"]["id"] == 2
        http.post("/http-consumers/late/nack", json={"ack_tokens": [message["ack_token"]]})
        status = http.get("/http-consumers/late").json()["status"]
        assert (status["dead_letters"], status["failures"]) == (1, 1)
        (letter,) = http.get("/http-consumers/late/dead-letters").json()["data"]
        assert http.post(f"/http-consumers/late/dead-letters/{letter['id']}/replay").is_success
        assert (
            http.patch("/http-consumers/late", json={"max_deliver": 5}).json()["max_deliver"] == 5
        )
        assert len(http.get("/http-consumers/late/next").json()["data"]) == 1
        would = http.post("/http-consumers/late/rewind?dry_run=true", json={"to": "new"}).json()
        assert would["losses"] == ["consumer late skips 1 message that it is not done with"]
        would = http.post("/http-consumers/late/rewind?dry_run=true", json={"to": "all"}).json()
        assert would["consequences"] == ["consumer late delivers 2 messages again"]
        assert http.post("/http-consumers/late/rewind", json={"to": "all"}).is_success
        got = http.get("/http-consumers/late/next?batch_size=5").json()["data"]
        assert [m["record"]["id"] for m in got] == [1, 2]
        assert {c["name"] for c in http.get("/http-consumers").json()["data"]} == {"items", "late"}
        assert http.delete("/http-consumers/late").is_success
        assert http.get("/http-consumers/late/next").status_code == 404
        assert http.delete("/http-consumers/items").status_code == 409
    with pytest.raises(NameTaken):
        penstock.consumers.add(ConsumerSpec("items", "items"))


def test_a_receive_that_waits_ends_with_its_consumer(penstock: InMemoryPenstock) -> None:
    async def served() -> None:
        async with penstock.async_client("/v1") as http:
            await http.post("/http-consumers", json={"name": "gone", "stream": "items"})
            task = asyncio.create_task(http.get("/http-consumers/gone/next?wait_for_ms=60000"))
            for _ in range(50):
                await asyncio.sleep(0)
            await http.delete("/http-consumers/gone")
            assert (await asyncio.wait_for(task, 60)).status_code == 404

    asyncio.run(served())


# The clock


def test_a_clock() -> None:
    clock = Clock()
    before = clock.now
    clock.advance(1.5)
    assert clock.now - before == timedelta(seconds=1.5)
    with pytest.raises(ValueError, match="goes forward only"):
        clock.advance(-1)
    with pytest.raises(ValueError, match="no offset"):
        Clock(datetime(2026, 1, 1))


def test_a_running_clock_ends_a_wait_by_itself() -> None:
    penstock = made(clock=Clock(running=True))

    async def served() -> None:
        async with penstock.async_client("/v1/streams/items") as http:
            answer = await asyncio.wait_for(http.get("/receive?wait_for_ms=50"), 60)
            assert answer.json()["data"] == []

    before = penstock.clock.now
    asyncio.run(served())
    assert penstock.clock.now - before >= timedelta(milliseconds=50)
