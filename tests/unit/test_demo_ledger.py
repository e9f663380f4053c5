"""The demo's ledger can find fault: loss, duplicates, wrong order, messages from nowhere; its shop."""

from __future__ import annotations

import io
import json
from collections import Counter
from types import SimpleNamespace
from unittest.mock import MagicMock

import orjson
import pytest
from rich.console import Console
from tests.waits import await_end

from penstock.demo import shop as shop_module
from penstock.demo.consumer import read_change
from penstock.demo.ledger import DELETED, Change, Ledger, Result, latency
from penstock.demo.shop import TABLES, Shop, Transaction, Writer
from penstock.demo.view import View

INSERT = Change("orders", 1, "insert", 1)
UPDATE = Change("orders", 1, "update", 2)
AGAIN = Change("orders", 1, "update", 3)
DELETE = Change("orders", 1, "delete", DELETED)
OTHER = Change("orders", 2, "insert", 1)


def outcome(committed: list[Change], received: list[Change]) -> Result:
    ledger = Ledger(TABLES)
    for at, change in enumerate(committed):
        ledger.committed([change], float(at))
    for at, change in enumerate(received):
        ledger.received(change, at + 0.05)
    return ledger.result()


def faults(result: Result) -> tuple[int, int, int, int]:
    return result.lost, result.duplicates, result.out_of_order, result.unexpected


def test_all_in_order_is_good() -> None:
    changes = [INSERT, OTHER, UPDATE, AGAIN, DELETE]
    result = outcome(changes, changes)
    assert faults(result) == (0, 0, 0, 0)
    assert result.good
    assert (result.committed, result.delivered) == (5, 5)
    assert result.latency.p50 == pytest.approx(50)
    assert result.rows_per_second == pytest.approx(5 / 4.05)


def test_order_between_rows_is_free() -> None:
    result = outcome([INSERT, OTHER, UPDATE], [OTHER, INSERT, UPDATE])
    assert faults(result) == (0, 0, 0, 0)


def newest(committed: list[Change], received: list[Change]) -> Result:
    ledger = Ledger(TABLES, newest_only=True)
    for change in committed:
        ledger.committed([change], 0.0)
    for change in received:
        ledger.received(change, 0.05)
    return ledger.result()


def test_the_newest_version_stands_for_those_before_it() -> None:
    assert faults(newest([INSERT, UPDATE, AGAIN, DELETE], [DELETE])) == (0, 0, 0, 0)
    assert faults(newest([INSERT, UPDATE, AGAIN], [UPDATE])) == (1, 0, 0, 0)
    assert faults(newest([INSERT, UPDATE], [UPDATE, INSERT])) == (0, 0, 1, 0)
    early = Ledger(TABLES, newest_only=True)
    early.received(UPDATE, 0.0)
    early.committed([INSERT], 0.1)
    assert early.result().unexpected == 1, "nothing has changed it so far"
    early.committed([UPDATE], 0.2)
    assert faults(early.result()) == (0, 0, 0, 0)


def test_what_came_before_the_clock_makes_no_rate() -> None:
    ledger = Ledger(TABLES)
    ledger.committed([INSERT], 0.0)
    ledger.received(INSERT, 5.0)
    ledger.restart_clock()
    ledger.committed([UPDATE], 10.0)
    ledger.received(UPDATE, 12.0)
    assert ledger.result().rows_per_second == pytest.approx(0.5)
    assert ledger.result().delivered == 2


@pytest.mark.parametrize("gone", [INSERT, UPDATE, AGAIN, DELETE])
def test_a_lost_change_is_found(gone: Change) -> None:
    changes = [INSERT, UPDATE, AGAIN, DELETE]
    result = outcome(changes, [c for c in changes if c != gone])
    assert faults(result) == (1, 0, 0, 0)
    assert not result.good
    assert "orders 1 never arrived" in result.examples[0]


@pytest.mark.parametrize(
    "received",
    [
        [UPDATE, INSERT, AGAIN, DELETE],
        [INSERT, AGAIN, UPDATE, DELETE],
        [INSERT, UPDATE, DELETE, AGAIN],
    ],
)
def test_wrong_order_in_a_row_is_found(received: list[Change]) -> None:
    result = outcome([INSERT, UPDATE, AGAIN, DELETE], received)
    assert faults(result) == (0, 0, 1, 0)
    assert not result.good
    assert "orders 1" in result.examples[0]


def test_a_replay_is_a_duplicate_and_no_change_of_order() -> None:
    result = outcome([INSERT, UPDATE, DELETE], [INSERT, UPDATE, INSERT, UPDATE, DELETE, DELETE])
    assert faults(result) == (0, 3, 0, 0)
    assert result.good


def test_what_was_never_committed_is_found() -> None:
    result = outcome([INSERT], [INSERT, UPDATE])
    assert faults(result) == (0, 0, 0, 1)
    assert not result.good
    stray = outcome([], [Change("coupons", 1, "insert", 1)])
    assert faults(stray) == (0, 0, 0, 1)


def test_a_message_may_come_before_its_commit_is_recorded() -> None:
    ledger = Ledger(TABLES)
    ledger.received(INSERT, 1.0)
    ledger.committed([INSERT], 2.0)
    assert faults(ledger.result()) == (0, 0, 0, 0)
    assert ledger.result().latency.p50 == 0.0
    assert ledger.outstanding() == 0


def test_a_restarted_clock_forgets_times_but_no_fault() -> None:
    ledger = Ledger(TABLES)
    ledger.committed([OTHER, INSERT, UPDATE], 1.0)
    for change in (OTHER, UPDATE, INSERT):
        ledger.received(change, 9.0)
    ledger.restart_clock()
    ledger.committed([AGAIN], 10.0)
    ledger.received(AGAIN, 10.01)
    result = ledger.result()
    assert faults(result) == (0, 0, 1, 0)
    assert (result.committed, result.delivered) == (4, 4)
    assert result.latency == pytest.approx((10, 10))


def test_percentiles_are_nearest_ranks() -> None:
    assert latency([i / 1000 for i in range(1, 101)]) == pytest.approx((50, 99))
    assert latency([]) == (None, None)
    assert latency([0.007]) == pytest.approx((7, 7))


def body(table: str, action: str, **record: object) -> bytes:
    return orjson.dumps({"record": record, "action": action, "metadata": {"table_name": table}})


def test_a_change_is_read_from_the_message_itself() -> None:
    assert (
        read_change("shop.public.orders.update", body("orders", "update", id=1, version=2))
        == UPDATE
    )
    assert read_change("shop.public.orders.delete", body("orders", "delete", id=1)) == DELETE


@pytest.mark.parametrize(
    ("subject", "data"),
    [
        ("shop.public.orders.update", body("payments", "update", id=1, version=2)),
        ("shop.public.orders.insert", body("orders", "insert", id=1, version=2)),
        ("shop.public.orders.update", body("orders", "update", id=1)),
        ("shop.public.orders.read", body("orders", "read", id=1, version=1)),
        ("shop.public.orders.insert", b"{"),
    ],
)
def test_a_message_with_other_content_is_refused(subject: str, data: bytes) -> None:
    with pytest.raises((KeyError, ValueError)):
        read_change(subject, data)


def shop_transactions(count: int, size: int = 1) -> list[Transaction]:
    shop = Shop(first=1, step=2, size=size, seed=7)
    return [shop.next() for _ in range(count)]


def test_the_shop_makes_every_kind_of_change() -> None:
    transactions = shop_transactions(1000)
    kinds = Counter((c.table, c.action) for t in transactions for c in t.changes)
    assert set(kinds) == {
        (table, action) for table in TABLES for action in ("insert", "update", "delete")
    }
    assert any(transaction.rollback for transaction in transactions)
    assert max(len(transaction.changes) for transaction in transactions) > 10


@pytest.mark.parametrize("size", [1, 5])
def test_the_shop_counts_versions_without_gaps_and_keeps_to_its_keys(size: int) -> None:
    versions: dict[tuple[str, int], int] = {}
    for transaction in shop_transactions(2000, size):
        assert transaction.rollback == (not transaction.changes)
        for table, key, action, version in transaction.changes:
            before = versions.get((table, key), 0)
            assert key % 2 == 1
            assert before < DELETED
            assert (action == "insert") == (before == 0)
            assert version == (DELETED if action == "delete" else before + 1)
            versions[table, key] = version


def test_the_result_is_one_json_object() -> None:
    result = outcome([INSERT, OTHER], [INSERT])
    assert json.loads(json.dumps(result.as_dict())) == {
        "committed": 2,
        "delivered": 1,
        "lost": 1,
        "duplicates": 0,
        "out_of_order": 0,
        "unexpected": 0,
        "rows_per_second": 20.0,
        "latency_ms": {"p50": 50.0, "p99": 50.0},
    }


@pytest.mark.parametrize("terminal", [True, False])
def test_the_view_shows_counts_and_summary(terminal: bool) -> None:
    out = io.StringIO()
    view = View(Console(file=out, force_terminal=terminal, width=100))
    ledger = Ledger(TABLES)
    ledger.committed([INSERT, OTHER], 1.0)
    ledger.received(INSERT, 1.012)
    view.step("starting [Spark]…")
    records, events = Ledger(["customers"]), Ledger(["customers"])
    version = Change("customers", 1, "insert", 1)
    records.committed([version], 1.0)
    events.committed([version], 1.0)
    events.received(version, 1.5)
    (of_records,), (of_events,) = records.counts(), events.counts()
    of_events = of_events._replace(table="API events")
    view.update(ledger.counts(), of_events, ledger.counts(), [3, 4], of_records, "writing")
    view.summary({"JetStream": ledger.result(), "stream": Ledger(TABLES).result()})
    text = out.getvalue()
    assert "starting [Spark]…" in text
    assert "12 ms" in text
    assert "worker 1 took 3, worker 2 took 4" in text
    assert "API records: 1 versions, 0 delivered or replaced, lag 1" in text
    if terminal:
        assert "API events" in text
    else:
        # An API is polled: what that takes is no latency of the rows.
        assert "writing: committed 2, delivered 1, lag 1, 0 rows/s, p50 12 ms, p99 12 ms" in text
        assert "API events: 1 versions, 1 delivered, lag 0, p50 500 ms" in text
    assert "JetStream: orders 2 never arrived in version 1" in text
    assert ("customers" in text) == terminal


def test_a_writer_keeps_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a transaction takes no time, for five seconds of a clock that only waiting moves."""
    now = 0.0

    class Stop:
        def wait(self, seconds: float) -> bool:
            nonlocal now
            now += seconds
            return now >= 5

    monkeypatch.setattr(shop_module, "connect", MagicMock())
    monkeypatch.setattr(shop_module, "time", SimpleNamespace(perf_counter=lambda: now))
    made: list[Change] = []
    writer = Writer("", lambda changes, _: made.extend(changes), Shop(1, 1, 1, seed=1), 300)
    monkeypatch.setattr(writer, "_stopping", Stop())
    writer.start()
    await_end(writer)
    assert writer.error is None
    assert 5 * 300 <= len(made) <= 5 * 300 + 20  # the last transaction, which may be a large one
