"""Backfills in the store: what the command line and a run may do to each other's work."""

from __future__ import annotations

import threading
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.pipeline import PATIENCE
from tests.waits import at_once, await_true

from penstock.backfill.request import OPEN, Backfill, BackfillRequest, Backfills
from penstock.core.errors import StoreError
from penstock.embedded.handles import Database
from penstock.streams.names import CHANNEL
from penstock.streams.store import Store

ORDERS = BackfillRequest("shop", "events", "public", "orders")
LINES = BackfillRequest("shop", "events", "public", "Odd Lines")


@pytest.fixture
def backfills(store: Store) -> Backfills:
    return Backfills(store)


def only(backfills: Backfills, request: BackfillRequest = ORDERS) -> int:
    (number,) = backfills.create([request])
    return number


def state(backfills: Backfills, number: int) -> Backfill:
    found = backfills.get(number)
    assert found is not None
    return found


def refused(backfills: Backfills, number: int, command: Any) -> str:
    with pytest.raises(StoreError) as error:
        backfills.command(number, command)
    return str(error.value)


def test_one_after_the_other_in_their_order(backfills: Backfills) -> None:
    first, second = backfills.create([ORDERS, LINES])
    assert backfills.claim("warehouse") is None
    claimed = backfills.claim("shop")
    assert claimed is not None
    assert (claimed.id, claimed.state, claimed.cursor) == (first, "running", None)
    assert backfills.progress(first, ("2024-01-01", "7"), 10)
    # A run that died comes back to it, and to its cursor.
    again = backfills.claim("shop")
    assert again is not None
    assert (again.id, again.cursor, again.rows_done) == (first, ["2024-01-01", "7"], 10)
    assert again.started_at == claimed.started_at
    assert backfills.finish(first, 12)
    done = state(backfills, first)
    assert (done.state, done.rows_done, done.rows_total) == ("done", 12, 12)
    assert done.ended_at is not None
    following = backfills.claim("shop")
    assert following is not None
    assert following.id == second
    assert following.table == 'public."Odd Lines"'


def test_of_a_table_and_a_sink_there_is_one_at_a_time(backfills: Backfills) -> None:
    first = only(backfills)
    with pytest.raises(StoreError) as error:
        backfills.create([LINES, ORDERS])
    assert str(error.value) == (
        f"There is backfill {first} of public.orders to sink events already: it is waiting."
        f" Let it end, or cancel it: `penstock backfill cancel {first}`."
    )
    assert [found.id for found in backfills.find()] == [first], "all of them or none"
    backfills.command(first, "pause")
    with pytest.raises(StoreError, match="`penstock backfill resume"):
        only(backfills)
    backfills.command(first, "cancel")
    assert only(backfills) > first


def test_commands_that_do_not_fit(backfills: Backfills) -> None:
    number = only(backfills)
    assert "is waiting: it can't be resumed." in refused(backfills, number, "resume")
    assert backfills.command(number, "pause").state == "paused"
    assert "is paused: it can't be paused." in refused(backfills, number, "pause")
    assert backfills.claim("shop") is None
    assert backfills.command(number, "resume").state == "waiting"
    backfills.claim("shop")
    assert backfills.fail(number, "no such column")
    failed = state(backfills, number)
    assert (failed.state, failed.error) == ("failed", "no such column")
    assert "is failed: it can't be cancelled. Start another" in refused(backfills, number, "cancel")
    resumed = backfills.command(number, "resume")
    assert (resumed.state, resumed.error, resumed.ended_at) == ("waiting", None, None)
    assert refused(backfills, 99, "pause") == (
        "There is no backfill 99. `penstock backfill list` lists them."
    )


def test_a_failed_one_is_not_resumed_beside_a_newer_one(backfills: Backfills) -> None:
    old = only(backfills)
    backfills.claim("shop")
    backfills.fail(old, "broken")
    only(backfills)
    assert "there is a newer one of its table" in refused(backfills, old, "resume")


def test_what_a_run_stores_of_a_backfill_that_was_stopped(backfills: Backfills) -> None:
    number = only(backfills)
    backfills.claim("shop")
    backfills.command(number, "pause")
    assert backfills.progress(number, ("5",), 5), "what was under way is done"
    assert not backfills.fail(number, "lost"), "it goes on at its cursor when it is resumed"
    assert state(backfills, number).state == "paused"
    backfills.command(number, "cancel")
    assert not backfills.progress(number, ("9",), 9)
    assert not backfills.finish(number, 9)
    assert not backfills.set_error(number, "lost")
    found = state(backfills, number)
    assert (found.state, found.cursor, found.rows_done) == ("cancelled", ["5"], 5)


def test_more_rows_than_estimated(backfills: Backfills) -> None:
    (number,) = backfills.create([BackfillRequest("shop", "events", "public", "t", rows_total=10)])
    backfills.claim("shop")
    backfills.progress(number, ("5",), 5)
    assert state(backfills, number).rows_total == 10
    backfills.progress(number, ("15",), 15)
    assert state(backfills, number).rows_total == 15


def test_initial_ones_come_once(backfills: Backfills) -> None:
    request = BackfillRequest("shop", "events", "public", "orders", initial=True)
    (number,) = backfills.create_initial([request])
    backfills.claim("shop")
    backfills.finish(number, 0)
    assert backfills.create_initial([request]) == []
    assert backfills.with_initial("shop") == {("events", "public", "orders")}
    assert backfills.with_initial("other") == set()
    assert only(backfills) > number, "one by hand may follow"


def test_a_run_is_notified_at_once(backfills: Backfills, database: Database) -> None:
    with psycopg.connect(database.url, autocommit=True) as connection:
        connection.execute(f"LISTEN {CHANNEL}")
        number = only(backfills)
        for command in ("pause", "resume", "cancel"):
            backfills.command(number, command)
        payloads = [n.payload for n in connection.notifies(timeout=60, stop_after=4)]
    assert payloads == ["b"] * 4


def test_whether_a_run_has_the_source(store: Store, backfills: Backfills) -> None:
    number = only(backfills)
    assert not state(backfills, number).is_run
    source = store.register_source("shop", "tag")
    with store.claim_source(source.id) as mine:
        assert mine
        assert state(backfills, number).is_run
    await_true(lambda: not state(backfills, number).is_run)  # once the server has seen it go


def test_many_that_start_the_same_at_once(database: Database) -> None:
    together = threading.Barrier(4, timeout=PATIENCE)

    def start() -> int | str:
        with Store.open(database.url) as store:
            together.wait()
            try:
                return Backfills(store).create([ORDERS])[0]
            except StoreError as error:
                return error.code

    found = at_once(*[start] * 4)
    assert found.count("backfill_exists") == 3


COMMANDS = ("pause", "resume", "cancel", "claim", "progress", "finish", "fail", "create")


@settings(max_examples=40, deadline=None,
          suppress_health_check=[HealthCheck.function_scoped_fixture])  # fmt: skip
@given(steps=st.lists(st.sampled_from(COMMANDS), max_size=12))
def test_any_sequence_of_steps(database: Database, backfills: Backfills, steps: list[str]) -> None:
    """What has ended stays so, one is open at most, and progress never goes back."""
    database.execute("TRUNCATE penstock.backfills")
    seen: dict[int, Backfill] = {}
    done = 0
    number = only(backfills)
    for step in steps:
        before = state(backfills, number)
        try:
            if step in ("pause", "resume", "cancel"):
                backfills.command(number, step)  # type: ignore[arg-type]  # wrong on purpose
            elif step == "claim":
                claimed = backfills.claim("shop")
                assert (claimed is None) == (before.state not in ("waiting", "running"))
            elif step == "progress":
                done += 1
                moved = backfills.progress(number, (str(done),), done)
                assert moved == (before.state in ("running", "paused"))
            elif step == "finish":
                assert backfills.finish(number, done) == (before.state in ("running", "paused"))
            elif step == "fail":
                assert backfills.fail(number, "x") == (before.state == "running")
            else:
                number = only(backfills)
                assert not before.is_open
        except StoreError:
            assert state(backfills, before.id) == before, step
        rows = {found.id: found for found in backfills.find()}
        assert sum(found.state in OPEN for found in rows.values()) <= 1
        for id_, old in seen.items():
            if old.state in ("done", "cancelled"):
                assert rows[id_] == old
            assert rows[id_].rows_done >= old.rows_done or rows[id_].state == "done"
        seen = rows
