"""Filters, transforms in SQL and routes through `penstock run`: JetStream, a stream, dead letters.

The tests share one running pipeline, as Spark takes a while to start.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.embedded.handles import Database, JetStream, Msg
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres

from ..pipeline import NO_TLS, PATIENCE, Penstock, penstock

CONFIG = """\
sources:
  shop:
    type: postgres
    url: ${SHOP_URL}
sinks:
  big:
    type: nats
    source: shop
    tables: [public.orders]
    url: ${NATS_URL}
    filter: record.amount > 100 and action <> 'delete'
    transform:
      sql: >-
        record.id as id, upper(record.name) as name, record.amount as amount,
        record.amount * 2 as double, record.data, record.data.tags[0] as tag, record.big,
        metadata.commit_lsn as lsn
    route: "'big.' || coalesce(record.region, 'none')"
  ruled:
    type: nats
    source: shop
    tables: [public.orders]
    url: ${NATS_URL}
    subject: "ruled.default.{record.id}"
    route:
      - when: action <> 'delete' and record.data.kind = 'vip'
        to: "ruled.vip.{record.region}.{record.id}"
      - {when: action <> 'delete' and record.amount > 1000, to: "ruled.large"}
  picky:
    type: nats
    source: shop
    tables: [public.orders]
    actions: [insert, update]
    url: ${NATS_URL}
    subject: picky
    filter: record.big like 'x%'
  free:
    type: nats
    source: shop
    tables: [public.words]
    url: ${NATS_URL}
    subject: "free.none.end"
    route: "'free.' || record.word || '.end'"
  wild:
    type: nats
    source: shop
    tables: [public.words]
    url: ${NATS_URL}
    subject: wild.default
    route: "case when record.word = 'empty' then 'wild.' || 'a' || '.' || '.b' end"
  stock:
    type: nats
    source: shop
    tables: [public.stock]
    actions: [insert, update]
    url: ${NATS_URL}
    subject: stock
    filter: record.quantity > 1
    transform: {sql: "record.id, record.quantity + 1 as more"}
  wide:
    type: nats
    source: shop
    tables: [public.wide]
    url: ${NATS_URL}
    subject: wide
    filter: record.n > 1e19 or record.d < '0001-01-01' or record.t > '250000-01-01'
    transform: {sql: "record.id, record.d - 1 as before, upper('straße') as text"}
  audit:
    type: stream
    source: shop
    tables: [public.orders]
    actions: [insert, update]
    group_by: [region]
    filter: record.amount >= 100
    transform: {sql: "record.id, round(record.amount, 0) as rounded"}
    route:
      - {when: record.region = 'eu', to: "eu/{record.id}"}
  lua:
    type: stream
    source: shop
    tables: [public.orders]
    transform:
      lua: |
        function transform(message)
          if message.record.id == 3 then error("three") end
          if message.record.id == 2 then return nil end
          message.record = {id = message.record.id, half = message.record.id / 2}
          return {message, message}
        end
spark:
  master: local[2]
"""


@dataclass
class Shop:
    """A running pipeline and its servers."""

    database: Database
    nats: EmbeddedNats
    streams: JetStream
    pipeline: Penstock
    environment: dict[str, str]
    token: str

    def wait_for(self, condition: Callable[[], bool], what: str, timeout: float = PATIENCE) -> None:
        self.pipeline.wait_for(condition, timeout, what)

    def messages(self, stream: str, count: int) -> list[Msg]:
        self.wait_for(
            lambda: self.streams.info(stream).state.messages >= count,
            f"at {count} messages in {stream}",
        )
        return self.streams.messages(stream)

    def stream(self, name: str) -> list[dict[str, Any]]:
        """Receive and acknowledge all that a stream has for its own consumer."""
        url = f"http://{self.pipeline.listen}/v1/streams/{name}"
        headers = {"Authorization": f"Bearer {self.token}"}
        found: list[dict[str, Any]] = []
        while True:
            body_ = {"batch_size": 100, "wait_for_ms": 1000}
            answer = httpx.post(f"{url}/receive", json=body_, headers=headers, verify=NO_TLS)
            assert answer.status_code == 200, answer.text
            data = answer.json()["data"]
            if not data:
                return found
            found += [each["data"] for each in data]
            ids = {"ack_ids": [each["ack_id"] for each in data]}
            assert httpx.post(f"{url}/ack", json=ids, headers=headers, verify=NO_TLS).is_success

    def letters(self, sink: str) -> list[dict[str, Any]]:
        done = penstock("dead-letters", "list", "--sink", sink, "--json",
                        cwd=self.pipeline.folder, environment=self.environment)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return [self.letter(letter["id"]) for letter in json.loads(done.stdout)]

    def replay(self, number: int, *arguments: str, code: int = 0) -> str:
        done = penstock("dead-letters", "replay", str(number), *arguments,
                        cwd=self.pipeline.folder, environment=self.environment)  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        assert "Traceback" not in done.stderr
        return done.stdout + done.stderr

    def letter(self, number: int) -> dict[str, Any]:
        done = penstock("dead-letters", "show", str(number), "--json",
                        cwd=self.pipeline.folder, environment=self.environment)  # fmt: skip
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture(scope="module")
def shop(
    postgres: EmbeddedPostgres, server_dir: Any, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("expressions")
    with ExitStack() as stack:
        nats = stack.enter_context(EmbeddedNats(server_dir / "nats-expressions"))
        streams = stack.enter_context(JetStream(nats.url, error_cb=_ignore_error))
        database = Database("expressions", postgres.create_database("expressions"))
        stack.callback(database.drop, postgres.url)
        database.execute(
            "CREATE TABLE orders (id bigint PRIMARY KEY, region text, amount numeric(10,2),"
            " name text, data jsonb, big text);"
            "ALTER TABLE orders ALTER big SET STORAGE EXTERNAL;"
            "CREATE TABLE words (id bigint PRIMARY KEY, word text);"
            "CREATE TABLE wide (id bigint PRIMARY KEY, n numeric, d date, t timestamptz);"
            "CREATE TABLE stock (id bigint PRIMARY KEY, quantity int, note text)"
        )
        for name, subject in (
            ("BIG", "big.>"), ("RULED", "ruled.>"), ("PICKY", "picky"), ("FREE", "free.*.end"),
            ("WILD", "wild.>"), ("STOCK", "stock"), ("WIDE", "wide"),
        ):  # fmt: skip
            streams.add_stream(name, subject)
        environment = {"SHOP_URL": database.url, "NATS_URL": nats.url}
        (folder / "penstock.yaml").write_text(CONFIG)
        pipeline = stack.enter_context(Penstock(folder, environment=environment))
        pipeline.start().wait_ready()
        made = penstock("token", "create", "reader", cwd=folder, environment=environment)
        yield Shop(database, nats, streams, pipeline, environment, made.stdout.strip())


async def _ignore_error(_: Exception) -> None:
    """Stand in for nats-py's logging of every try to connect to a server that is down."""


def body(message: Msg) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(message.data)
    return found


def test_what_the_sinks_get(shop: Shop) -> None:
    shop.database.execute(
        "INSERT INTO orders VALUES"
        """ (1, 'eu', 150.50, 'Ann', '{"kind": "vip", "tags": ["a", 1.10]}', repeat('x', 3000)),"""
        " (2, 'us', 50, 'Bob', '{}', null),"
        " (3, null, 2000, 'Öz', null, repeat('y', 3000)),"
        " (4, 'a.b *>', 100.01, null, '[1]', 'x')"
    )
    shop.database.execute("UPDATE orders SET amount = 99 WHERE id = 4")
    shop.database.execute("DELETE FROM orders WHERE id = 2")

    big = shop.messages("BIG", 3)
    assert [m.subject for m in big] == ["big.eu", "big.none", "big.a%2Eb%20%2A%3E"]
    records = [body(m)["record"] for m in big]
    lsn = body(big[0])["metadata"]["commit_lsn"]
    assert records[0] == {
        "id": 1, "name": "ANN", "amount": "150.50", "double": "301.00",
        "data": {"kind": "vip", "tags": ["a", 1.10]}, "tag": "a", "big": "x" * 3000, "lsn": lsn,
    }  # fmt: skip
    assert b'"tags": ["a", 1.10]' in big[0].data
    assert records[1]["name"] == "ÖZ"
    assert (records[1]["data"], records[1]["tag"]) == (None, None)
    assert records[2]["name"] is None

    ruled = shop.messages("RULED", 6)
    assert sorted(m.subject for m in ruled) == [
        "ruled.default.2", "ruled.default.2", "ruled.default.4", "ruled.default.4", "ruled.large",
        "ruled.vip.eu.1",
    ]  # fmt: skip
    assert [m.subject for m in shop.messages("PICKY", 3)] == ["picky"] * 3


def test_a_stream_with_a_filter_a_transform_and_paths(shop: Shop) -> None:
    found = {m["record"]["id"]: m for m in shop.stream("audit")}
    assert set(found) == {1, 3, 4}
    assert found[1]["record"] == {"id": 1, "rounded": "151"}
    assert found[1]["metadata"]["route"] == "eu/1"
    assert "route" not in found[3]["metadata"]


def test_a_transform_in_lua(shop: Shop) -> None:
    found = shop.stream("lua")
    assert [m["record"] for m in found if m["record"]["id"] == 1] == [{"id": 1, "half": 0.5}] * 2
    assert {m["record"]["id"] for m in found} == {1, 4}
    (letter,) = shop.letters("lua")
    assert letter["code"] == "transform_failed"
    assert "three" in letter["reason"]
    assert json.loads(letter["message"])["record"]["id"] == 3


def test_what_the_wal_lacks(shop: Shop) -> None:
    """A filter on it fails the message; a bare column is left out, and named."""
    before = shop.streams.info("PICKY").state.messages
    shop.database.execute("UPDATE orders SET name = 'Anna' WHERE id = 1")
    shop.database.execute("INSERT INTO orders VALUES (5, 'eu', 1, 'E', null, 'x')")
    shop.messages("PICKY", before + 1)
    shop.wait_for(lambda: bool(shop.letters("picky")), "at a dead letter")
    (letter,) = shop.letters("picky")
    assert letter["code"] == "filter_failed"
    assert "record.big is not in the WAL" in letter["reason"]
    assert json.loads(letter["message"])["record"]["name"] == "Anna"
    assert json.loads(letter["message"])["action"] == "update"

    message = body(shop.messages("BIG", 4)[3])
    assert message["record"]["name"] == "ANNA"
    assert "big" not in message["record"]
    assert message["metadata"]["unavailable"] == ["big"]


def test_numbers_and_times_that_spark_has_not(shop: Shop) -> None:
    shop.database.execute(
        "INSERT INTO wide VALUES (1, '1e20', null, null), (2, 'NaN', null, null),"
        " (3, '1e-25', null, null), (4, '-Infinity', null, null), (5, null, '0044-03-15 BC', null),"
        " (6, null, null, 'infinity'),"
        " (7, null, null, '260000-01-01'), (8, '-1e400', '10000-01-01', '0044-03-15 BC'),"
        " (9, 'Infinity', 'infinity', null)"
    )
    records = [body(m)["record"] for m in shop.messages("WIDE", 6)]
    assert [record["id"] for record in records] == [1, 2, 5, 6, 7, 9]
    assert records[2] == {"id": 5, "before": "0044-03-14 BC", "text": "STRAßE"}
    assert records[5]["before"] == "infinity"
    assert shop.letters("wide") == []


def test_a_route_that_is_none_is_a_dead_letter(shop: Shop) -> None:
    shop.database.execute(
        "INSERT INTO words VALUES (1, 'free.x'), (2, '$JS.API'), (3, ''), (4, 'a b'), (5, null),"
        " (6, 'empty')"
    )
    assert [m.subject for m in shop.messages("FREE", 6)] == [
        "free.free%2Ex.end", "free.%24JS%2EAPI.end", "free.%empty.end", "free.a%20b.end",
        "free.none.end", "free.empty.end",
    ]  # fmt: skip
    wild = shop.messages("WILD", 5)
    assert {m.subject for m in wild} == {"wild.default"}
    shop.wait_for(lambda: bool(shop.letters("wild")), "at a dead letter")
    (letter,) = shop.letters("wild")
    assert letter["code"] == "route_failed"
    assert "wild.a..b" in letter["reason"]


def test_a_routed_subject_survives_a_backlog(shop: Shop) -> None:
    count = shop.streams.info("BIG").state.messages
    shop.nats.kill()
    shop.database.execute(
        "INSERT INTO orders SELECT i, 'r' || i % 3, 500, 'late', null, null"
        " FROM generate_series(101, 110) i"
    )
    shop.wait_for(
        lambda: shop.pipeline.status()["sinks"]["big"]["backlog"] == 10, "reporting the backlog"
    )
    shop.nats.start()
    late = shop.messages("BIG", count + 10)[count:]
    assert [m.subject for m in late] == [f"big.r{i % 3}" for i in range(101, 111)]
    assert [body(m)["record"]["double"] for m in late] == ["1000.00"] * 10
    assert [body(m)["record"]["id"] for m in late] == list(range(101, 111))


def test_a_dead_letter_is_replayed_through_the_filter_and_transform_of_now(shop: Shop) -> None:
    """One that fails again stays; a stream's has no place any more."""
    (letter,) = shop.letters("picky")
    output = shop.replay(letter["id"], code=1)
    assert "fails again: the filter can't be evaluated: record.big is not in the WAL" in output
    (lua,) = shop.letters("lua")
    output = shop.replay(lua["id"], code=1)
    assert "has no place in stream lua any more" in output
    assert "penstock backfill start --sink lua" in output

    count = shop.streams.info("PICKY").state.messages
    text = CONFIG.replace("filter: record.big like 'x%'", "\n    ".join([
        "filter: action = 'update' or record.big like 'x%'",
        "transform: {sql: 'upper(record.name) as loud, record.id'}",
        "route: \"case when record.id = 1 then 'picky' end\"",
    ]))  # fmt: skip
    other = shop.pipeline.folder / "other.yaml"
    other.write_text(text)
    assert f"Replayed {letter['id']}" in shop.replay(letter["id"], "-c", str(other))
    message = shop.messages("PICKY", count + 1)[count]
    assert message.subject == "picky"
    assert body(message)["record"] == {"loud": "ANNA", "id": 1}
    assert message.headers["Nats-Msg-Id"] == letter["idempotency_key"]
    assert shop.letter(letter["id"])["replayed_at"] is not None


def test_nothing_else_was_logged(shop: Shop) -> None:
    assert shop.pipeline.stray() == []
    assert {e["event"] for e in shop.pipeline.events() if e["level"] == "error"} == {"dead letter"}


def test_a_query_is_planned_anew_where_a_table_is_altered(shop: Shop) -> None:
    """Each row comes once, in order, by the columns that its table had; or it is a dead letter."""

    def stock(count: int) -> list[dict[str, Any]]:
        return [body(m)["record"] for m in shop.messages("STOCK", count)]

    execute = shop.database.execute
    words = shop.streams.info("FREE").state.messages
    execute("INSERT INTO stock VALUES (1, 5), (2, 0)")
    execute("ALTER TABLE stock ALTER quantity TYPE numeric")
    execute("INSERT INTO stock VALUES (3, 5.5), (4, 0.5)")
    assert stock(2) == [{"id": 1, "more": 6}, {"id": 3, "more": "6.5"}]

    # In the middle of a transaction, whose first rows come as they were.
    execute(
        "BEGIN; INSERT INTO stock VALUES (5, 7);"
        "ALTER TABLE stock RENAME quantity TO amount; INSERT INTO stock VALUES (6, 7);"
        "ALTER TABLE stock RENAME amount TO quantity;"
        "ALTER TABLE stock ALTER quantity TYPE int; INSERT INTO stock VALUES (7, 7); COMMIT"
    )
    assert [record["id"] for record in stock(4)] == [1, 3, 5, 7]
    (letter,) = shop.letters("stock")
    assert json.loads(letter["message"])["record"]["id"] == 6
    assert letter["code"] == "filter_failed"
    assert "record.quantity is not in the message: its table lacked the column" in letter["reason"]

    execute("ALTER TABLE stock DROP COLUMN quantity")
    execute("INSERT INTO stock VALUES (8, 'x')")
    execute("INSERT INTO words VALUES (8, 'goes on')")
    assert len(shop.messages("FREE", words + 1)) == words + 1
    shop.wait_for(lambda: len(shop.letters("stock")) == 2, "at the second dead letter")
    assert {json.loads(each["message"])["record"]["id"] for each in shop.letters("stock")} == {6, 8}
    refused = [e for e in shop.pipeline.events() if e["event"].startswith("altered tables refuse")]
    assert [event["sink"] for event in refused] == ["stock"]
    assert "unknown column record.quantity" in refused[0]["error"]

    assert [(p["subject"], p["level"], p["code"]) for p in shop.pipeline.status()["problems"]] == [
        ("sink stock", "degraded", "expression")
    ]

    execute("ALTER TABLE stock ADD COLUMN quantity bigint")
    execute("INSERT INTO stock VALUES (9, null, 9)")
    assert stock(5)[4] == {"id": 9, "more": 10}
    status = shop.pipeline.status()
    assert (status["sources"]["shop"]["restarts"], status["problems"]) == (0, [])
    assert len(shop.letters("stock")) == 2


def test_a_run_whose_filter_names_no_column_does_not_start(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "penstock.yaml").write_text(
        "sources: {shop: {type: postgres, url: '${SHOP_URL}', slot: never, publication: never}}\n"
        "sinks: {out: {type: stream, source: shop, filter: 'record.amuont > 1'}}\n"
    )
    done = penstock("run", cwd=tmp_path, environment=shop.environment)
    assert done.returncode == 1
    assert "sinks.out.filter: position 1: unknown column record.amuont" in done.stderr
    assert "did you mean record.amount?" in done.stderr
    assert "Traceback" not in done.stderr
