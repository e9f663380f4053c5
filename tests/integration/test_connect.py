"""Connections to a real server: their settings, and none left open where preparing one fails."""

from __future__ import annotations

import asyncio
from typing import Any

import psycopg
import pytest
from tests.waits import await_true

from penstock.core.connect import connect, connect_async, is_lost
from penstock.embedded.handles import Database
from penstock.postgres.connect import connect_source
from penstock.streams.connect import connect as connect_store

SESSIONS = (
    "SELECT application_name, pid FROM pg_stat_activity WHERE datname = current_database()"
    " AND pid <> pg_backend_pid()"
)
ENCODING: Any = "SHOW client_encoding"


def names(database: Database) -> list[str]:
    return [name for name, _ in database.execute(SESSIONS)]


def test_sync_and_async_sessions_are_alike(database: Database) -> None:
    with connect(database.url, application_name="one") as session:
        found = [session.execute(ENCODING).fetchall(), names(database), session.autocommit]

    async def same() -> list[object]:
        async with await connect_async(database.url, application_name="one") as session:
            rows = await (await session.execute(ENCODING)).fetchall()
            return [rows, names(database), session.autocommit]

    assert found == [[("UTF8",)], ["one"], True] == asyncio.run(same())


def test_a_session_that_can_not_be_prepared_is_closed(database: Database) -> None:
    with pytest.raises(psycopg.errors.DivisionByZero):
        connect(database.url, session="SELECT 1 / %s::int", values=[0])

    async def same() -> None:
        with pytest.raises(psycopg.errors.DivisionByZero):
            await connect_async(database.url, session="SELECT 1 / %s::int", values=[0])

    asyncio.run(same())
    await_true(lambda: names(database) == [])


def test_a_store_s_session_is_prepared(database: Database) -> None:
    database.execute(
        f"ALTER DATABASE {database.name} SET default_transaction_isolation = serializable"
    )
    with connect_store(database.url) as session:
        assert session.execute("SHOW transaction_isolation").fetchall() == [("read committed",)]
        assert names(database) == ["penstock"]


def test_a_source_s_url_may_name_the_application(database: Database) -> None:
    with connect_source(database.url, "penstock:shop"):
        assert names(database) == ["penstock:shop"]
    await_true(lambda: names(database) == [])
    joint = "&" if "?" in database.url else "?"
    with connect_source(f"{database.url}{joint}application_name=replica", "penstock:shop"):
        assert names(database) == ["replica"]


def test_a_session_that_the_server_ended_is_lost(database: Database) -> None:
    with connect(database.url) as session:
        session.execute("LISTEN news")
        assert not is_lost(session)
        database.execute("NOTIFY news")
        assert not is_lost(session)
        ((_, pid),) = database.execute(SESSIONS)
        database.execute("SELECT pg_terminate_backend(%s, 5000)", [pid])
        await_true(lambda: is_lost(session))
    assert is_lost(session)
