"""`penstock run` that nobody stops: endpoints, sinks, dead letters, a sink that is down, a lost slot.

Most tests share one running pipeline, as Spark takes a while to start; the last one ends it.
`test_stop.py` has what ends a run, `test_errors.py` what keeps one from starting.
"""

from __future__ import annotations

import json
import shlex
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import psycopg
import pytest
from prometheus_client.parser import text_string_to_metric_families

from penstock.embedded.handles import Database, JetStream, Msg
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres

from ..pipeline import NO_TLS, PATIENCE, Penstock, left_of, penstock, spark_workers

PG_PASSWORD = "pg-s3cret-hunter2"
NATS_PASSWORD = "nats-s3cret-hunter3"
SERVER = f"""
authorization {{ user: penstock, password: "{NATS_PASSWORD}" }}
max_payload: 16KB
"""
CONFIG = """\
sources:
  shop:
    type: postgres
    url: ${SHOP_URL}
    tables: ["public.*"]
  stock:
    type: postgres
    url: ${STOCK_URL}
    tables: [public.items]
sinks:
  orders:
    type: nats
    source: shop
    tables: [public.orders]
    group_by: [customer_id]
    url: ${NATS_URL}
    user: penstock
    password: ${NATS_PASSWORD}
    subject: "orders.{record.customer_id}.{action}"
  removals:
    type: nats
    source: shop
    actions: [delete, truncate]
    url: ${NATS_URL}
    user: penstock
    password: ${NATS_PASSWORD}
    subject: "removals.{table}"
  stock:
    type: nats
    source: stock
    url: ${NATS_URL}
    user: penstock
    password: ${NATS_PASSWORD}
    transform: {sql: "record.id as id, record.name as name"}  # of which Spark computes nothing
spark:
  master: local[2]
"""
SOURCE_FAMILIES = {
    "penstock_source_streaming", "penstock_captured_messages", "penstock_truncates_skipped",
    "penstock_reconnects", "penstock_restarts", "penstock_received_lsn", "penstock_confirmed_lsn",
    "penstock_unread_bytes", "penstock_waiting_messages", "penstock_oldest_waiting_seconds",
}  # fmt: skip
SINK_FAMILIES = {
    "penstock_sink_up", "penstock_delivered_messages", "penstock_duplicate_messages",
    "penstock_delivered_bytes", "penstock_dead_letters", "penstock_sink_retries",
    "penstock_last_delivery_seconds", "penstock_sink_behind", "penstock_sink_detached",
    "penstock_backlog_messages", "penstock_backlog_bytes", "penstock_filtered_messages",
}  # fmt: skip
CONSUMER_FAMILIES = {
    f"penstock_consumer_{name}"
    for name in (
        "up", "lag_messages", "lag_seconds", "in_flight", "waiting_for_retry", "redeliveries",
        "failures", "dead_letters",
    )
}  # fmt: skip


@dataclass
class Shop:
    """A running pipeline of two sources and three sinks, and its servers."""

    postgres: EmbeddedPostgres
    shop: Database
    stock: Database
    nats: EmbeddedNats
    streams: JetStream
    pipeline: Penstock
    environment: dict[str, str]

    def wait_for(self, condition: Callable[[], bool], what: str, timeout: float = PATIENCE) -> None:
        self.pipeline.wait_for(condition, timeout, what)

    def workers(self) -> list[psutil.Process]:
        """The Python workers of Spark's tasks; the captures' processes are left out."""
        return spark_workers(self.pipeline.tree())

    def wait_messages(self, stream: str, count: int) -> list[Msg]:
        self.wait_for(
            lambda: self.streams.info(stream).state.messages >= count,
            f"at {count} messages in {stream}",
        )
        return self.streams.messages(stream)

    def sink(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.pipeline.status()["sinks"][name]
        return found

    def level(self, part: str) -> str:
        return str(self.pipeline.status()["parts"][part])

    def problem(self, subject: str) -> dict[str, Any]:
        """The worst problem of a subject, which `penstock status` has too."""
        problems = self.pipeline.status()["problems"]
        found = next((p for p in problems if p["subject"] == subject), None)
        assert found is not None, problems
        assert found["cause"]
        assert found["remedy"]
        return dict(found)

    def is_not_ready(self, code: str, subject: str) -> dict[str, Any]:
        """Wait until all agree that it is not ready, and why; return the problem."""
        self.wait_for(lambda: self.pipeline.get("/readyz")[0] == 503, "not ready")
        self.wait_for(
            lambda: [p["code"] for p in self.pipeline.status()["problems"]
                     if (p["subject"], p["level"]) == (subject, "failed")][:1] == [code],
            f"naming {code}",
        )  # fmt: skip
        assert self.metric("penstock_health", part=subject) == 0
        problem = self.problem(subject)
        exit_code, text = self.command("status")
        assert exit_code == 1
        assert f"✗ {subject}: " in text
        assert text.splitlines()[-1] == "failed"
        return problem

    def metric(self, name: str, **labels: str) -> float:
        for family in text_string_to_metric_families(self.pipeline.get("/metrics")[1]):
            for sample in family.samples:
                if sample.name == name and sample.labels == labels:
                    return sample.value
        raise AssertionError(f"no metric {name} {labels}")

    def command(self, *arguments: str) -> tuple[int, str]:
        done = penstock(
            *arguments, "--listen", self.pipeline.listen,
            cwd=self.pipeline.folder, environment={"COLUMNS": "200", **self.environment},
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def letters(self, *arguments: str) -> str:
        done = penstock("dead-letters", *arguments, cwd=self.pipeline.folder,
                        environment=self.environment)  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout


@pytest.fixture(scope="module")
def shop(
    postgres: EmbeddedPostgres, server_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Shop]:
    folder = tmp_path_factory.mktemp("run")
    with ExitStack() as stack:
        nats = stack.enter_context(EmbeddedNats(server_dir / "nats-with-login", SERVER))
        login = {"user": "penstock", "password": NATS_PASSWORD, "error_cb": _ignore_error}
        streams = stack.enter_context(JetStream(nats.url, **login))
        databases = []
        for name in ("run_shop", "run_stock"):
            databases.append(Database(name, postgres.create_database(name)))
            stack.callback(databases[-1].drop, postgres.url)
        shop_database, stock_database = databases
        shop_database.execute(
            "CREATE TABLE orders (id bigint PRIMARY KEY, customer_id bigint, note text);"
            "ALTER TABLE orders REPLICA IDENTITY FULL;"
            "CREATE TABLE payments (id bigint PRIMARY KEY, amount numeric)"
        )
        stock_database.execute("CREATE TABLE items (id bigint PRIMARY KEY, name text)")
        for name, subject in (
            ("ORDERS", "orders.>"), ("REMOVALS", "removals.>"), ("STOCK", "stock.>")
        ):  # fmt: skip
            streams.add_stream(name, subject)
        secret = f"postgres:{PG_PASSWORD}@"
        environment = {
            "SHOP_URL": shop_database.url.replace("postgres@", secret),
            "STOCK_URL": stock_database.url.replace("postgres@", secret),
            "NATS_URL": nats.url,
            "NATS_PASSWORD": NATS_PASSWORD,
        }
        (folder / "penstock.yaml").write_text(CONFIG)
        pipeline = stack.enter_context(Penstock(folder, environment=environment))
        pipeline.start().wait_ready()
        yield Shop(
            postgres, shop_database, stock_database, nats, streams, pipeline, environment
        )  # fmt: skip


@contextmanager
def stopped(processes: list[psutil.Process]) -> Iterator[None]:
    """Processes that do nothing meanwhile, and hold all that they have."""
    assert processes
    for process in processes:
        process.suspend()
    try:
        yield
    finally:
        for process in processes:
            process.resume()


async def _ignore_error(_: Exception) -> None:
    """Stand in for nats-py's logging of every try to connect to a server that is down."""


def body(message: Msg) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(message.data)
    return found


def test_it_reports_that_it_is_ready(shop: Shop) -> None:
    def ready_events() -> list[dict[str, Any]]:
        return [event for event in shop.pipeline.events() if event["event"] == "ready"]

    shop.wait_for(lambda: bool(ready_events()), "logged, which follows the first good answer")
    ready = ready_events()
    assert len(ready) == 1
    assert ready[0]["listen"] == shop.pipeline.listen
    assert ready[0]["sources"] == ["shop", "stock"]
    assert shop.pipeline.get("/readyz") == (200, '{"status":"ready"}')
    assert shop.pipeline.get("/healthz") == (200, '{"status":"ok"}')
    assert shop.pipeline.get("/nothing")[0] == 404


def test_each_step_of_the_start_is_logged(shop: Shop) -> None:
    events = shop.pipeline.events()
    begun = [e for e in events if e["event"] == "starting"]
    done = [e for e in events if e["event"] == "started"]
    steps = [e["step"] for e in begun]
    assert steps == ["program", "store", "source", "source", "Java", "Spark", "sinks", "sinks"]
    assert sorted(e["step"] for e in done) == sorted(steps)
    assert {e["source"] for e in done if e["step"] == "source"} == {"shop", "stock"}
    sinks = {e["source"]: e["sinks"] for e in done if e["step"] == "sinks"}
    assert sinks == {"shop": ["orders", "removals"], "stock": ["stock"]}
    (ready,) = [e for e in events if e["event"] == "ready"]
    assert all(0 <= e["seconds"] <= ready["seconds"] for e in done)
    assert sum(e["seconds"] for e in done if e["step"] in ("Java", "Spark")) > 0
    assert events.index(begun[0]) == 0


def test_each_sink_gets_what_it_asks_for(shop: Shop) -> None:
    with shop.shop.connect() as connection:
        for i in range(1, 41):
            connection.execute("INSERT INTO orders VALUES (%s, %s, 'new')", [i, i % 4])
            connection.execute("INSERT INTO payments VALUES (%s, 1.50)", [i])
    shop.shop.execute("UPDATE orders SET note = 'paid' WHERE id <= 20")
    shop.shop.execute("UPDATE orders SET customer_id = 9 WHERE id = 1")
    shop.shop.execute("DELETE FROM orders WHERE id > 30")
    shop.shop.execute("DELETE FROM payments WHERE id = 1")
    shop.shop.execute("TRUNCATE payments")
    shop.stock.execute("INSERT INTO items VALUES (1, 'Schräge Tür')")

    orders = shop.wait_messages("ORDERS", 71)
    assert len(orders) == 71
    assert {body(m)["metadata"]["table_name"] for m in orders} == {"orders"}
    assert {m.subject for m in orders if body(m)["action"] == "delete"} == {
        f"orders.{c}.delete" for c in range(4)
    }
    # By customer, across rows: the order of the WAL.
    positions = defaultdict(list)
    for message in orders:
        data = body(message)
        position = data["metadata"]["commit_lsn"], data["metadata"]["commit_idx"]
        for group in {data["record"]["customer_id"], (data["changes"] or {}).get("customer_id")}:
            positions[group].append(position)
    del positions[None]
    assert set(positions) == {0, 1, 2, 3, 9}
    for found in positions.values():
        assert found == sorted(found, key=lambda p: (_lsn(p[0]), p[1]))

    removals = shop.wait_messages("REMOVALS", 12)
    assert sorted(m.subject for m in removals) == (
        ["removals.orders"] * 10 + ["removals.payments"] * 2
    )
    assert body(removals[-1])["action"] == "truncate"

    stock = shop.wait_messages("STOCK", 1)
    assert [m.subject for m in stock] == ["stock.public.items.insert"]
    assert body(stock[0])["record"] == {"id": 1, "name": "Schräge Tür"}


def _lsn(lsn: Any) -> int:
    if isinstance(lsn, int):
        return lsn
    high, _, low = str(lsn).partition("/")
    return int(high, 16) << 32 | int(low, 16) if low else int(high)


def test_metrics_are_prometheus_text(shop: Shop) -> None:
    code, text = shop.pipeline.get("/metrics")
    assert code == 200
    families = {family.name: family for family in text_string_to_metric_families(text)}
    assert shop.metric("penstock_store_up") == 1
    parts = {"store", "source shop", "source stock", "sink orders", "sink removals", "sink stock"}
    health = families.pop("penstock_health")
    assert {sample.labels["part"]: sample.value for sample in health.samples} == dict.fromkeys(
        parts, 3.0
    )
    for lone in ("store_up", "backfill_rows_done", "backfill_rows_estimated"):
        assert families.pop(f"penstock_{lone}").documentation
    for name in CONSUMER_FAMILIES:  # it has no consumers
        assert families.pop(name).samples == []
    assert set(families) == SOURCE_FAMILIES | SINK_FAMILIES
    for name, family in families.items():
        label = "source" if name in SOURCE_FAMILIES else "sink"
        expected = {"shop", "stock"} if label == "source" else {"orders", "removals", "stock"}
        assert {sample.labels[label] for sample in family.samples} == expected
        assert family.documentation
    for sink, count in {"orders": 71, "removals": 12, "stock": 1}.items():
        shop.wait_for(
            lambda sink=sink, count=count: (  # type: ignore[misc]  # mypy infers no lambda with a default
                shop.metric("penstock_delivered_messages_total", sink=sink) == count
            ),
            f"counting what {sink} got",
        )
    assert shop.metric("penstock_sink_up", sink="orders") == 1
    assert shop.metric("penstock_source_streaming", source="stock") == 1
    shop.wait_for(
        lambda: shop.metric("penstock_captured_messages_total", source="shop") >= 40 * 2 + 33,
        "counting what was captured",
    )


def test_a_message_too_large_is_a_dead_letter(shop: Shop) -> None:
    before = shop.streams.info("STOCK").state.messages
    shop.stock.execute("INSERT INTO items VALUES (100, repeat('x', 20000)), (101, 'small')")
    shop.stock.execute("UPDATE items SET name = 'smaller' WHERE id = 100")

    found = [body(m) for m in shop.wait_messages("STOCK", before + 2)[before:]]
    assert sorted((f["record"]["id"], f["action"]) for f in found) == [
        (100, "update"), (101, "insert")
    ]  # fmt: skip
    shop.wait_for(lambda: shop.sink("stock")["dead_lettered"] == 1, "counting the dead letter")
    assert shop.metric("penstock_dead_letters_total", sink="stock") == 1
    (listed,) = json.loads(shop.letters("list", "--sink", "stock", "--json"))
    letter = json.loads(shop.letters("show", str(listed["id"]), "--json"))
    assert letter["code"] == "message_too_large"
    assert "16384" in letter["reason"]
    assert letter["subject"] == "stock.public.items.insert"
    dead = json.loads(letter["message"])
    assert dead["record"] == {"id": 100, "name": "x" * 20000}
    assert dead["metadata"]["idempotency_key"] == letter["idempotency_key"]
    events = [e for e in shop.pipeline.events() if e["event"] == "dead letter"]
    assert [e["idempotency_key"] for e in events] == [letter["idempotency_key"]]


def test_a_sink_that_is_down_holds_back_nothing_and_is_reported(shop: Shop) -> None:
    count = shop.streams.info("ORDERS").state.messages
    shop.nats.kill()
    shop.shop.execute("INSERT INTO orders SELECT i, 1, 'late' FROM generate_series(201, 210) i")
    ((end,),) = shop.shop.execute("SELECT pg_current_wal_lsn()")
    shop.wait_for(lambda: shop.sink("orders")["state"] == "behind", "reporting that it is behind")
    slot = "SELECT confirmed_flush_lsn < %s, active FROM pg_replication_slots WHERE slot_name = %s"
    shop.wait_for(
        lambda: shop.shop.execute(slot, [end, "penstock_shop"]) == [(False, True)],
        "confirming the slot",
    )
    shop.wait_for(lambda: shop.sink("orders")["backlog"] == 10, "reporting the backlog")

    found = shop.sink("orders")
    assert "connection refused" in found["error"]
    assert "Start nats-server" in found["error"]
    assert found["since"]
    assert shop.metric("penstock_sink_up", sink="orders") == 0
    assert shop.metric("penstock_sink_behind", sink="orders") == 1
    assert shop.metric("penstock_sink_detached", sink="orders") == 0
    assert shop.metric("penstock_backlog_messages", sink="orders") == 10
    assert shop.pipeline.get("/healthz")[0] == 200  # it goes on by itself
    problem = shop.is_not_ready("sinks_held_up", "source shop")
    assert shop.level("source shop") == "failed"
    assert "orders, removals" in problem["cause"]
    assert "connection refused" in problem["cause"]
    assert "Start nats-server" in problem["remedy"]
    assert shop.sink("removals")["state"] == "retrying"  # nothing came for it
    assert shop.metric("penstock_health", part="sink orders") == 2
    code, text = shop.command("status")
    assert code == 1
    assert "✗ source shop: None of its sinks (orders, removals) takes messages" in text
    assert "! sink orders: " in text
    assert "10 messages wait in the store" in text
    assert "Start nats-server" in text
    code, text = shop.command("status", "--json")
    assert code == 1
    assert json.loads(text)["running"]["sinks"]["orders"]["backlog"] == 10

    shop.nats.start()
    late = shop.wait_messages("ORDERS", count + 10)[count:]
    assert sorted(body(m)["record"]["id"] for m in late) == list(range(201, 211))
    for name in ("orders", "removals", "stock"):
        shop.wait_for(lambda name=name: shop.sink(name)["state"] == "attached", "well again")  # type: ignore[misc]  # mypy infers no lambda with a default
    assert shop.sink("orders")["error"] is None
    assert shop.sink("orders")["backlog"] == 0
    shop.wait_for(lambda: shop.pipeline.get("/readyz")[0] == 200, "ready again")
    code, text = shop.command("status")
    assert (code, text.splitlines()[-1]) == (0, "ready")
    reported = [e for e in shop.pipeline.events() if e.get("sink") == "orders"]
    # On a slow machine what is asked above takes longer than `detach_after`.
    assert [e["event"] for e in reported if e["event"] != "sink detached"] == [
        "sink is behind, its messages wait in the store",
        "sink attached again, its backlog is delivered",
    ]
    assert reported[0]["code"] in ("connection_refused", "connection_lost")


def test_the_embedded_store_is_restarted(shop: Shop) -> None:
    """What is written meanwhile arrives, and no process is restarted for it."""
    folder = shop.pipeline.folder / ".penstock"

    def postmaster() -> psutil.Process:
        lines = (folder / "store" / "postmaster.pid").read_text().splitlines()
        return psutil.Process(int(lines[0]))

    def restarted() -> list[dict[str, Any]]:
        events = [e for e in shop.pipeline.events() if "embedded store" in e["event"]]
        return events if events and events[-1]["event"] == "the embedded store runs again" else []

    def health() -> tuple[int, dict[str, Any]]:
        return shop.pipeline.get("/readyz")[0], shop.pipeline.status()

    count = shop.streams.info("ORDERS").state.messages
    assert shop.pipeline.get("/readyz")[0] == 200
    # What makes it start is missing for a while, so that the outage can be looked at.
    configuration = folder / "store" / "postgresql.conf"
    configuration.rename(folder / "kept.conf")
    killed = postmaster()
    killed.kill()
    shop.shop.execute("INSERT INTO orders SELECT i, 1, 'kept' FROM generate_series(301, 310) i")
    began = time.monotonic()
    shop.wait_for(lambda: shop.pipeline.get("/readyz")[0] == 503, "not ready")
    assert time.monotonic() - began < 5.0  # noticed within a second; the machine may be busy
    shop.wait_for(lambda: "does not start" in json.dumps(health()[1]), "naming the cause")
    code, status = health()
    assert code == 503
    (problem,) = [p for p in status["problems"] if p["subject"] == "store"]
    assert problem["level"] == "failed"
    assert problem["code"] == "embedded_store_down"
    assert "the embedded store has ended" in problem["cause"]
    assert ".penstock/store.log" in problem["remedy"]
    assert "Start Postgres there" not in json.dumps(status)
    (folder / "kept.conf").rename(configuration)

    late = shop.wait_messages("ORDERS", count + 10)[count:]
    assert sorted(body(m)["record"]["id"] for m in late) == list(range(301, 311))
    shop.wait_for(lambda: bool(restarted()), "logging the restart")
    shop.wait_for(lambda: shop.pipeline.get("/readyz")[0] == 200, "ready again")
    events = restarted()
    assert events[0]["event"] == "the embedded store ended; starting it again"
    assert events[0]["cause"] == "killed by SIGKILL"
    assert 1 <= len(events[1:-1]) <= 2  # why it did not start, each cause once
    assert "postgresql.conf" in events[1]["error"]

    def claimed() -> list[str]:
        events = shop.pipeline.events()
        return sorted(e["source"] for e in events if e["event"] == "the source is claimed again")

    shop.wait_for(lambda: claimed() == ["shop", "stock"], "claiming both sources again")
    assert [e for e in shop.pipeline.events() if e["event"].startswith("query ended")] == []
    assert [s["restarts"] for s in shop.pipeline.status()["sources"].values()] == [0, 0]
    # It is one and the same store, on one port, and everything works with it again.
    assert postmaster() != killed
    token = penstock("token", "create", "after", cwd=shop.pipeline.folder,
                     environment=shop.environment)  # fmt: skip
    assert token.returncode == 0, token.stderr
    shop.wait_for(
        lambda: httpx.get(
            f"http://{shop.pipeline.listen}/v1/streams",
            headers={"Authorization": f"Bearer {token.stdout.strip()}"}, verify=NO_TLS,
        ).status_code == 403,
        "knowing the token",
    )  # fmt: skip


def test_a_second_run_waits_for_the_slot_and_reports_it(shop: Shop, tmp_path: Path) -> None:
    (tmp_path / "penstock.yaml").write_text(CONFIG)
    with Penstock(tmp_path, environment=shop.environment) as second:
        second.start()
        second.wait_for(
            lambda: "waiting for the slot" in second.log(), PATIENCE, "reporting the slot"
        )
        assert second.get("/readyz")[0] == 503
        assert second.stop() == 0
        assert second.stray() == []
        warnings = [e for e in second.events() if e["level"] == "warning"]
    assert {w["source"] for w in warnings} <= {"shop", "stock"}  # each waits for its own
    assert len({w["source"] for w in warnings}) == len(warnings) > 0
    for warning in warnings:
        assert warning["code"] == "slot_in_use"
        assert f"penstock_{warning['source']}" in warning["error"]
    assert shop.pipeline.status()["sources"]["shop"]["state"] == "streaming"


def test_a_store_that_answers_no_more_is_noticed_while_all_is_idle(shop: Shop) -> None:
    pid = (shop.pipeline.folder / ".penstock" / "store" / "postmaster.pid").read_text()
    postmaster = psutil.Process(int(pid.split()[0]))
    with stopped([postmaster, *postmaster.children(recursive=True)]):
        problem = shop.is_not_ready("no_answer", "store")
        assert "has not answered" in problem["cause"]
        assert shop.pipeline.status()["store"]["error"]
        assert shop.metric("penstock_store_up") == 0
    shop.wait_for(lambda: shop.pipeline.get("/readyz")[0] == 200, "ready again")
    assert shop.pipeline.status()["store"]["error"] is None


def test_workers_that_are_stopped_are_noticed_when_messages_wait(shop: Shop) -> None:
    before = shop.streams.info("STOCK").state.messages
    shop.stock.execute("INSERT INTO items VALUES (200, 'soon')")
    shop.wait_messages("STOCK", before + 1)  # Spark ends workers that idle for a minute
    with stopped(shop.workers()):
        shop.stock.execute("INSERT INTO items VALUES (201, 'late')")
        problem = shop.is_not_ready("stalled", "source stock")
        assert "1 messages wait" in problem["cause"]
        found = shop.pipeline.status()["sources"]["stock"]
        assert found["waiting"] == 1
        assert found["oldest_waiting_seconds"] >= 10
        assert shop.metric("penstock_waiting_messages", source="stock") == 1
        assert shop.metric("penstock_oldest_waiting_seconds", source="stock") >= 10
        assert shop.level("source shop") == "ready"  # nothing waits there
    shop.wait_for(lambda: shop.pipeline.get("/readyz")[0] == 200, "ready again")
    shop.wait_for(
        lambda: shop.pipeline.status()["sources"]["stock"]["waiting"] == 0, "nothing waits"
    )


def test_a_dropped_publication_is_reported(shop: Shop) -> None:
    """Postgres 18 passes over what is written meanwhile, with a WARNING and no error."""
    shop.stock.execute("DROP PUBLICATION penstock_stock")
    shop.stock.execute("INSERT INTO items VALUES (300, 'unpublished')")
    ((end,),) = shop.stock.execute("SELECT pg_current_wal_lsn()")

    def passed_over() -> bool:
        slot = "SELECT confirmed_flush_lsn >= %s FROM pg_replication_slots WHERE slot_name = %s"
        return shop.stock.execute(slot, [end, "penstock_stock"]) == [(True,)]

    shop.wait_for(
        lambda: "publication_missing" in shop.pipeline.log() or passed_over(), "reporting it"
    )
    assert not passed_over()
    problem = shop.is_not_ready("publication_missing", "source stock")
    assert "penstock_stock" in problem["cause"]
    # The query is tried again meanwhile: the reason stands all the while, the log's own.
    logged = [e for e in shop.pipeline.events() if e.get("code") == "publication_missing"]
    restarts = shop.pipeline.status()["sources"]["stock"]["restarts"]

    def tried_again() -> bool:
        found = shop.pipeline.status()["sources"]["stock"]
        assert found["error"] == f"{problem['cause']} {problem['remedy']}"
        assert shop.pipeline.get("/readyz")[0] == 503
        return bool(found["restarts"] > restarts)

    shop.wait_for(tried_again, "trying again")
    assert logged[0]["error"] == f"{problem['cause']} {problem['remedy']}"


def test_a_slot_dropped_while_it_runs_ends_the_run(shop: Shop) -> None:
    family = shop.pipeline.tree()
    drop_slot(shop.postgres, "penstock_shop")
    assert shop.pipeline.wait() == 1
    failed = [e for e in shop.pipeline.events() if e.get("code") == "slot_missing"]
    assert failed
    assert failed[-1]["level"] == "error"
    assert "penstock_shop" in failed[-1]["error"]
    assert "backfill" in failed[-1]["error"]
    assert left_of(family) == []


def test_no_password_was_shown_anywhere(shop: Shop) -> None:
    """Among the last, so that everything above was logged by now."""
    code, everything = shop.command("status")
    assert code == 1
    everything += shop.pipeline.stderr_path.read_text()
    everything += (shop.pipeline.folder / "stdout.log").read_text()
    assert PG_PASSWORD not in everything
    assert NATS_PASSWORD not in everything


def test_the_log_is_one_json_object_a_line(shop: Shop) -> None:
    assert shop.pipeline.stray() == []


def test_what_was_printed_followed_to_the_letter_delivers_again(shop: Shop) -> None:
    """The dropped slot's and the dropped publication's command, and then a run: all rows are there."""
    for at in (400, 401):
        shop.shop.execute("INSERT INTO orders VALUES (%s, 1, 'missed')", [at])
        shop.stock.execute("INSERT INTO items VALUES (%s, 'missed')", [at])
    printed = {e["source"]: e["error"] for e in shop.pipeline.events() if "Run: " in e.get("error", "")
               and "source" in e}  # fmt: skip
    assert set(printed) == {"shop", "stock"}
    for text in printed.values():
        program, *words = shlex.split(text[text.rindex("Run: ") + 5 :])
        assert program == "penstock"
        done = penstock(*words, "--yes", "--backfill", cwd=shop.pipeline.folder,
                        environment=shop.environment)  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
    shop.pipeline.start().wait_ready()
    shop.stock.execute("INSERT INTO items VALUES (402, 'live')")

    def are_all_there() -> bool:
        orders = shop.shop.execute("SELECT id, note FROM orders WHERE length(note) < 1000")
        items = shop.stock.execute("SELECT id, name FROM items")
        return (folded(shop, "ORDERS", "note"), folded(shop, "STOCK", "name")) == (
            dict(orders), dict(items)
        )  # fmt: skip

    shop.wait_for(are_all_there, "folded to what the tables have")
    assert shop.pipeline.stop() == 0


def folded(shop: Shop, stream: str, column: str) -> dict[int, str]:
    """Return what a consumer of a stream has of a table, after all messages in their order."""
    rows: dict[int, str] = {}
    for message in map(body, shop.streams.messages(stream)):
        record = message["record"]
        if message["action"] == "delete":
            rows.pop(record["id"], None)
        else:
            rows[record["id"]] = record[column]
    return rows


def drop_slot(postgres: EmbeddedPostgres, slot: str) -> None:
    """Drop a slot that a walsender holds, however fast that comes back."""
    deadline = time.monotonic() + PATIENCE
    with psycopg.connect(postgres.url, autocommit=True) as admin:
        while time.monotonic() < deadline:
            admin.execute(
                "SELECT pg_terminate_backend(active_pid, 5000) FROM pg_replication_slots"
                " WHERE slot_name = %s AND active_pid IS NOT NULL",
                [slot],
            )
            try:
                admin.execute("SELECT pg_drop_replication_slot(%s)", [slot])
            except psycopg.errors.ObjectInUse:
                threading.Event().wait(0.01)
            else:
                return
    raise AssertionError(f"slot {slot} was in use all the time")
