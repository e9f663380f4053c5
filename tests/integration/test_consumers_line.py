"""The short way to the store: what is sent together, what fails, and what becomes of the connection."""

from __future__ import annotations

import asyncio
import os
import select
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import psycopg
import pytest
import uvloop
from psycopg import sql

from penstock.embedded.handles import Database
from penstock.streams.consumers import line
from penstock.streams.consumers.line import Call, Statement, numbers
from penstock.streams.consumers.sessions import Sessions
from penstock.streams.consumers.types import StoreUnavailable

from ..waits import await_true, until

SUM = Statement(sql.SQL("SELECT %(a)s::bigint + %(b)s::bigint, %(a)s::bigint, 7 %% 4"))
LENGTH = Statement(sql.SQL("SELECT length(%(text)s::text)"))
SLEEP = Call(Statement(sql.SQL("SELECT pg_sleep(60)")), {})
PID = Call(Statement(sql.SQL("SELECT pg_backend_pid()")), {})


@asynccontextmanager
async def sessions(url: str, size: int = 2) -> AsyncIterator[Sessions]:
    made = Sessions(url, size)
    try:
        yield made
    finally:
        await made.close()


async def until_asleep(database: Database) -> None:
    """Wait until the server runs `SLEEP`."""
    query = (
        "SELECT FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'PgSleep'"
    )
    await until(lambda: database.execute(query))


def run(work: Callable[[], Awaitable[None]], runs: Callable[..., None] = asyncio.run) -> None:
    async def bounded() -> None:
        await asyncio.wait_for(work(), 60)

    runs(bounded())


async def one(made: Sessions, call: Call) -> tuple[Any, ...]:
    (result,) = await made.run(call)
    (row,) = numbers(result)
    return row


def test_values_and_nulls(database: Database) -> None:
    async def work() -> None:
        async with sessions(database.url) as made:
            for number in range(3):  # prepared, then used
                assert await one(made, Call(SUM, {"a": number, "b": 1})) == (number + 1, number, 3)
            both = await made.run(Call(SUM, {"a": 1, "b": None}), Call(SUM, {"a": 2, "b": 2}))
            assert [numbers(result) for result in both] == [[(None, 1, 3)], [(4, 2, 3)]]

    run(work)


def test_a_value_larger_than_the_socket_takes_at_once(database: Database) -> None:
    async def work() -> None:
        async with sessions(database.url) as made:
            for _ in range(2):
                assert await one(made, Call(LENGTH, {"text": "ä" * 20_000_000})) == (20_000_000,)

    run(work)


def test_what_fails_is_raised_and_the_connection_goes_on(database: Database) -> None:
    async def work() -> None:
        async with sessions(database.url) as made:
            pid = await one(made, PID)
            missing = Call(Statement(sql.SQL("SELECT count(*) FROM later")), {})
            for _ in range(2):
                with pytest.raises(psycopg.errors.UndefinedTable):
                    await made.run(PID, missing, PID)
            divide = Statement(sql.SQL("SELECT 1 / %(n)s::int"))
            for _ in range(2):
                with pytest.raises(StoreUnavailable, match="division by zero"):
                    await made.run(Call(divide, {"n": 0}))
            with psycopg.connect(database.url, autocommit=True) as connection:
                connection.execute("CREATE TABLE later ()")
            assert await one(made, missing) == (0,)
            assert await one(made, Call(divide, {"n": 1})) == (1,)
            assert await one(made, PID) == pid

    run(work)


def test_a_connection_that_the_server_ended_is_not_used_again(database: Database) -> None:
    async def work() -> None:
        async with sessions(database.url) as made:
            pid = await one(made, PID)
            with psycopg.connect(database.url, autocommit=True) as connection:
                connection.execute("SELECT pg_terminate_backend(%s, 10000)", pid)
            assert await one(made, PID) != pid

    run(work)


def test_one_that_ends_in_the_middle_is_unavailable_and_replaced(database: Database) -> None:
    async def work() -> None:
        async with sessions(database.url) as made:
            (pid,) = await one(made, PID)
            asleep = asyncio.create_task(made.run(SLEEP))
            await until_asleep(database)
            with psycopg.connect(database.url, autocommit=True) as connection:
                connection.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
            with pytest.raises(StoreUnavailable):
                await asleep
            assert await one(made, PID) != (pid,)

    run(work)


@pytest.mark.parametrize("runs", [asyncio.run, uvloop.run])
def test_a_reset_with_an_answer_before_it(database: Database, runs: Callable[..., None]) -> None:
    """The event loop sees both at once; libpq reads the answer, then needs the loop once more.

    uvloop, on which the API runs, calls a socket's reader once when the socket has failed, and never
    again.
    """

    async def work() -> None:
        async with sessions(database.url) as made:
            (pid,) = await one(made, PID)
            number = made._lines[0].connection.fileno()
            # The next connection has the same number, as no lower one is free.
            while (filler := os.dup(0)) < number:
                fillers.callback(os.close, filler)
            os.close(filler)
            poll = select.poll()
            poll.register(number, select.POLLIN)
            # More than the backend reads at once: what it leaves has the kernel reset the connection.
            unread = Call(LENGTH, {"text": "x" * 1_000_000})
            asleep = asyncio.create_task(made.run(SLEEP, unread))
            await until_asleep(database)
            with psycopg.connect(database.url, autocommit=True) as connection:
                connection.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
            # Without the event loop, which must not see the answer before the reset.
            await_true(
                lambda: poll.poll(10_000)[0][1] & select.POLLERR,
                what="the kernel resets the connection",
            )
            assert poll.poll(0)[0][1] & select.POLLIN
            with pytest.raises(StoreUnavailable):
                await asyncio.wait_for(asleep, 10)
            for _ in range(2):
                assert await one(made, PID) != (pid,)
            assert made._lines[0].connection.fileno() == number  # the new one's, too

    with ExitStack() as fillers:
        run(work, runs)


def test_one_that_could_not_be_asked_is_closed(database: Database) -> None:
    """In pipeline mode with nothing to answer, it would have the next statement wait for ever."""

    async def work() -> None:
        async with sessions(database.url) as made:
            pid = await one(made, PID)
            assert await one(made, Call(LENGTH, {"text": "a"})) == (1,)
            invalid = Call(LENGTH, {"text": "\ud800"})
            with pytest.raises(UnicodeEncodeError):
                await made.run(invalid, PID)
            for _ in range(2):
                assert await one(made, PID) != pid

    run(work)


def test_one_whose_task_was_cancelled_is_closed(database: Database) -> None:
    async def work() -> None:
        async with sessions(database.url) as made:
            pid = await one(made, PID)
            asleep = asyncio.create_task(made.run(SLEEP))
            await until_asleep(database)
            asleep.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asleep
            assert await one(made, PID) != pid

    run(work)


def test_the_oldest_of_many_statements_are_dropped(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "_MOST_PREPARED", 3)

    async def work() -> None:
        async with sessions(database.url) as made:
            calls = [Call(Statement(sql.SQL(f"SELECT {n}")), {}) for n in range(6)]
            for _ in range(2):
                for number, call in enumerate(calls):
                    assert await one(made, call) == (number,)
            kept = Statement(sql.SQL("SELECT count(*) FROM pg_prepared_statements"))
            assert await one(made, Call(kept, {})) == (3,)

    run(work)


def test_both_kinds_of_connections_together_are_no_more_than_allowed(database: Database) -> None:
    async def work() -> None:
        async with sessions(database.url, size=2) as made:
            for _ in range(2):
                await asyncio.gather(*[made.run(PID) for _ in range(4)])
                await asyncio.gather(*[made.rows("SELECT pg_sleep(0.05)") for _ in range(4)])
            query = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
                " AND application_name = 'penstock consumers'"
            )
            async with asyncio.timeout(30):
                while (await made.rows(query))[0][0] > 2:  # one that was closed may still end
                    await asyncio.sleep(0.05)

    run(work)
