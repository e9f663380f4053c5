"""To which sinks a part is handed; the sinks themselves, and the store, are left out."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator, Set
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.streams_help import Change, wire

from penstock.config.sinks import NatsSinkSettings
from penstock.core.blocks import Block
from penstock.core.errors import SinkError
from penstock.core.message import DELETE, INSERT, Position, RoundPart
from penstock.spark.routes import Route
from penstock.spark.shared_sinks import SharedSinks
from penstock.spark.sink_writer import SinkDelivery, SinkWriter
from penstock.spark.store_writer import StoreTarget
from penstock.spark.writer import FanOut, Worker

PART = RoundPart(Position(0, -1), Position(9, 9), 0, 1, look=False)


class Sinks:
    """The sinks `s0` to `s99`, each of a table, and `all`; notes what each one gets, and where."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.got: dict[str, list[list[str]]] = {}
        self.threads: set[str] = set()

        def deliver(writer: SinkWriter, blocks: Iterator[Block], _: object) -> SinkDelivery:
            self.threads.add(threading.current_thread().name)
            got = self.got.setdefault(writer.name, [])
            done = SinkDelivery()
            for block in blocks:
                got.append(block.messages.column("table_name").to_pylist())
                done.delivered += block.messages.num_rows
            return done

        def deliver_shared(
            shared: SharedSinks, block: Block, names: Set[str]
        ) -> dict[str, SinkDelivery]:
            return {name: deliver(shared._writers[name], iter([block]), None) for name in names}

        monkeypatch.setattr(SinkWriter, "deliver", deliver)
        monkeypatch.setattr(SharedSinks, "deliver", deliver_shared)

    def worker(self, *, has_all: bool) -> Worker:
        tables: dict[str, Any] = {f"s{n}": [f"public.t{n}"] for n in range(100)}
        if has_all:
            tables["all"] = None
        settings = {"type": "nats", "source": "shop", "subject": "x"}
        routes = [
            Route(name, NatsSinkSettings.model_validate({**settings, "tables": of}))
            for name, of in tables.items()
        ]
        return Worker(FanOut("shop", routes, StoreTarget("", 1, 0), None))


@pytest.fixture
def sinks(monkeypatch: pytest.MonkeyPatch) -> Sinks:
    return Sinks(monkeypatch)


def block(*tables: str, last: bool = True) -> Block:
    return Block(PART, wire([Change(table=table) for table in tables]), last=last)


def test_a_part_goes_to_the_sinks_that_get_something_of_it(sinks: Sinks) -> None:
    worker = sinks.worker(has_all=True)
    more = iter([block("t2", "t3", last=False), block("t1")])
    outcome = worker.write(block("t1", "other", last=False), more)
    assert sinks.got == {
        "s1": [["t1", "other"], ["t1"]],  # its steps leave the other one out
        "s2": [["t2", "t3"]],
        "s3": [["t2", "t3"]],
        "all": [["t1", "other"], ["t2", "t3"], ["t1"]],
    }
    assert set(outcome.written) == {"s1", "s2", "s3", "all"}
    worker.close()


def test_one_that_concerns_a_single_sink_takes_no_other_thread(sinks: Sinks) -> None:
    worker = sinks.worker(has_all=False)
    worker.write(block("t7", "t7"), iter(()))
    assert sinks.got == {"s7": [["t7", "t7"]]}
    assert sinks.threads == {threading.current_thread().name}
    worker.close()


@functools.cache
def sharing() -> Worker:
    of: dict[str, dict[str, Any]] = {
        "s1": {"tables": ["public.t1"]},
        "s2": {"tables": ["public.t2", "public.t3"], "actions": ["delete"]},
        "all": {},
        "public": {"tables": ["public.*"]},
    }
    settings = {"type": "nats", "source": "shop", "subject": "x"}
    routes = [
        Route(name, NatsSinkSettings.model_validate({**settings, **its}))
        for name, its in of.items()
    ]
    return Worker(FanOut("shop", routes, StoreTarget("", 1, 0), None))


KINDS = st.tuples(st.sampled_from(["t1", "t2", "t3", "t150"]), st.sampled_from([INSERT, DELETE]))


@given(kinds=st.lists(KINDS, min_size=1, max_size=8))
def test_sinks_that_share_a_connection_get_what_they_get_by_themselves(
    kinds: list[tuple[str, str]],
) -> None:
    worker = sharing()
    (shared,) = worker.shared
    whole = Block(PART, wire([Change(table=table, action=action) for table, action in kinds]))
    names = worker.audience(whole.messages)
    found = dict(shared._shared_out(whole, names))
    assert found.keys() == names
    for name, its_block in found.items():
        steps = worker.sink_writers[name].steps
        assert steps(its_block).messages.equals(steps(whole).messages)


def test_sinks_that_are_all_behind_are_not_connected_to(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = [
        Route(name, NatsSinkSettings.model_validate({"type": "nats", "source": "shop", "url": url}))
        for url in ("nats://one", "nats://two")
        for name in (f"{url[-3:]}-a", f"{url[-3:]}-b")
    ]
    worker = Worker(FanOut("shop", routes, StoreTarget("", 1, 0), None))
    asked: list[Set[str]] = []

    def connect(_: SharedSinks, names: Set[str]) -> dict[str, SinkError]:
        asked.append(names)
        return {}

    monkeypatch.setattr(SharedSinks, "connect", connect)
    monkeypatch.setattr(worker.store, "behind", lambda: {"one-a", "one-b", "two-a"})
    monkeypatch.setattr(worker.store, "fall_behind", lambda *_: None)
    worker.connect()
    assert asked == [{"two-b"}]
    worker.close()


def test_one_that_concerns_no_sink_is_done_at_once(sinks: Sinks) -> None:
    worker = sinks.worker(has_all=False)
    outcome = worker.write(block("other"), iter(()))
    assert (sinks.got, outcome.total, outcome.counts) == ({}, 0, {})
    worker.close()


@pytest.mark.parametrize("behind", [set[str](), {"s1"}])
def test_a_part_that_looks_takes_no_other_thread_where_no_sink_is_behind(
    sinks: Sinks, monkeypatch: pytest.MonkeyPatch, behind: set[str]
) -> None:
    worker = sinks.worker(has_all=False)
    looks: list[set[str]] = []

    def look() -> set[str]:
        looks.append(behind)
        return behind

    monkeypatch.setattr(worker.store, "behind", look)
    monkeypatch.setattr(worker.store, "patiently", lambda attempt: 0)
    part = PART._replace(look=True)
    outcome = worker.write(
        Block(part, wire([Change(table=table) for table in ("t1", "t2")])), iter(())
    )
    assert outcome.behind is bool(behind)
    assert worker.sees_behind is bool(behind)
    assert (len(looks), sorted(sinks.got)) == (1, [] if behind else ["s1", "s2"])
    assert sinks.threads <= {threading.current_thread().name}
    worker.close()
