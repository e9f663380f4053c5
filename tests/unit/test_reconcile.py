"""What a changed configuration means for the runs of sources, without any of them."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.config.settings import Config
from penstock.runtime.reconcile import Changes, changes, reads_alike, runs_alike, without

SHOP: dict[str, Any] = {"type": "postgres", "url": "postgresql://app@db/shop"}
STREAM: dict[str, Any] = {"type": "stream", "source": "shop"}
STOCK: dict[str, Any] = {"type": "stream", "source": "stock"}


def config(
    sources: dict[str, Any] | None = None,
    consumers: dict[str, Any] | None = None,
    nats: dict[str, Any] | None = None,
    **sinks: Any,
) -> Config:
    return Config.model_validate(
        {
            "sources": sources or {"shop": SHOP, "stock": {**SHOP, "slot": "stock"}},
            "sinks": sinks or {"orders": STREAM, "items": STOCK},
            "consumers": consumers or {},
            "nats_consumers": nats or {},
        }
    )


def test_nothing_changes() -> None:
    assert not changes(config(), config())
    assert changes(config(), config()) == Changes()


def test_only_the_source_of_a_sink_is_changed() -> None:
    new = config(orders=STREAM, items=STOCK, more=STREAM)
    assert changes(config(), new) == Changes(changes=("shop",))
    assert changes(new, config()) == Changes(changes=("shop",))
    filtered = config(orders={**STREAM, "filter": "record.a > 1"}, items=STOCK)
    assert changes(config(), filtered) == Changes(changes=("shop",))


def test_consumers_change_no_run() -> None:
    assert not changes(config(), config(consumers={"mail": {"stream": "orders"}}))


@pytest.mark.parametrize(
    "setting", [{"retention": "1d"}, {"ack_wait_ms": 5}, {"max_waiting": 3}, {"max_deliver": 2}]
)
def test_what_is_a_streams_own_changes_no_run(setting: dict[str, Any]) -> None:
    assert not changes(config(), config(orders={**STREAM, **setting}, items=STOCK))


def test_deletes_change_the_run_of_a_sink_that_sends_them() -> None:
    nats = {"type": "nats", "source": "shop", "url": "nats://n", "kind": "rows"}
    rows = {**STREAM, "kind": "rows"}
    had = config(orders=rows, out=nats)
    assert not changes(had, config(orders={**rows, "deletes": True}, out=nats))
    assert changes(had, config(orders=rows, out={**nats, "deletes": True})) == Changes(
        changes=("shop",)
    )


def test_a_nats_consumer_changes_the_run_of_its_streams_source_alone() -> None:
    mail: dict[str, Any] = {"type": "nats", "stream": "orders"}
    had = config(nats={"mail": mail})
    assert not changes(had, config(nats={"mail": mail}))
    assert changes(config(), had) == Changes(changes=("shop",))
    assert changes(had, config()) == Changes(changes=("shop",))
    for change in (
        {"filters": {"table": "orders"}},
        {"subject": "mail.{table}"},
        {"deletes": False},
    ):
        changed = config(nats={"mail": mail | change})
        expected = Changes() if change == {"deletes": False} else Changes(changes=("shop",))
        assert changes(had, changed) == expected, change
    moved = config(nats={"mail": mail | {"stream": "items"}})
    assert changes(had, moved) == Changes(changes=("shop", "stock"))
    assert list(moved.only("stock").nats_consumers) == ["mail"]
    assert not moved.only("shop").nats_consumers


def test_sources_come_and_go() -> None:
    alone = config({"shop": SHOP}, orders=STREAM)
    assert changes(alone, config()) == Changes(starts=("stock",))
    assert changes(config(), alone) == Changes(ends=("stock",))


def test_a_source_without_sinks_is_not_run() -> None:
    assert changes(config(), config(orders=STREAM)) == Changes(ends=("stock",))
    assert changes(config(orders=STREAM), config()) == Changes(starts=("stock",))


def test_a_sink_that_takes_from_another_source_changes_both() -> None:
    moved = config(orders=STREAM, items=STREAM, other=STOCK)
    assert changes(config(), moved) == Changes(changes=("shop", "stock"))


def test_the_slot_stays_the_same_where_only_tables_change() -> None:
    tables = config({"shop": {**SHOP, "tables": ["public.orders"]}}, orders=STREAM)
    slot = config({"shop": {**SHOP, "slot": "other"}}, orders=STREAM)
    alone = config({"shop": SHOP}, orders=STREAM)
    assert changes(alone, tables) == changes(alone, slot) == Changes(changes=("shop",))
    assert reads_alike(alone, tables, "shop")
    assert not reads_alike(alone, slot, "shop")


def test_a_run_without_what_is_made_anew() -> None:
    mail, work = {"type": "nats", "stream": "orders"}, {"stream": "orders"}
    whole = config(nats={"mail": mail}, consumers={"work": work}, orders=STREAM, more=STREAM)
    assert without(whole, ()) is whole
    alone = without(whole, {("consumer", "mail")})
    assert (set(alone.sinks), set(alone.consumers), set(alone.nats_consumers)) == (
        {"orders", "more"}, {"work"}, set()
    )  # fmt: skip
    assert not runs_alike(whole, alone, "shop")
    less = without(whole, {("sink", "orders"), ("source", "shop")})
    assert (set(less.sources), set(less.sinks)) == (set(whole.sources), {"more"})
    assert not less.consumers
    assert not less.nats_consumers  # those of a stream that goes


def test_the_configuration_of_one_source() -> None:
    whole = config(consumers={"mail": {"stream": "orders"}, "stock": {"stream": "items"}})
    only = whole.only("shop")
    assert (set(only.sources), set(only.sinks), set(only.consumers)) == (
        {"shop"}, {"orders"}, {"mail"}
    )  # fmt: skip
    assert (whole.sharing, only.sharing, config(orders=STREAM).sharing) == (2, 2, 1)
