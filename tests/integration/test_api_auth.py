"""Tokens: what needs one, what each role may do, and that a revoked one is worthless at once."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psycopg
import pytest
from structlog.testing import capture_logs
from tests.api_help import Shop, ids, known, problem, tokens
from tests.waits import await_true

from penstock.api import auth
from penstock.cli.api_tools import ApiTools
from penstock.embedded.handles import Database
from penstock.streams.store import Store


@pytest.fixture
def shop(database: Database) -> Iterator[Shop]:
    """An API with all that a process can lend it."""
    with Shop(database.url, ApiTools()) as shop:
        yield shop


@pytest.fixture(scope="module")
def closed(shared_database: Database) -> Iterator[Shop]:
    """The same, for tests that change nothing."""
    with Shop(shared_database.url, ApiTools()) as shop:
        yield shop


@pytest.fixture(scope="module")
def document(closed: Shop) -> Any:
    """What `/openapi.json` has, without a token; making it takes a second."""
    with closed.api.as_bearer(None) as client:
        return client.get("/openapi.json").json()


@pytest.fixture(scope="module")
def endpoints(document: Any) -> list[tuple[str, str]]:
    """Method and path of all that OpenAPI knows, with names in place of parameters."""
    names = {"{consumer}": "workers", "{stream}": "events", "{id}": "1"}
    found = []
    for path, operations in document["paths"].items():
        target = re.sub(r"{\w+}", lambda match: names.get(match[0], "shop"), path)
        found += [(method.upper(), target) for method in operations]
    return found


@pytest.mark.parametrize(
    "authorization",
    [None, "", "Bearer", "Bearer pst_wrong", "Basic YTpi", "pst_wrong", "Bearer é"],
)
def test_without_a_token_nothing_is_answered(
    closed: Shop, endpoints: list[tuple[str, str]], authorization: str | None
) -> None:
    header = {} if authorization is None else {b"Authorization": authorization.encode()}
    with closed.api.as_bearer(None) as client:
        for method, path in endpoints:
            answer = client.request(method, path, headers=header)
            problem(answer, 401)
            assert answer.headers["www-authenticate"] == 'Bearer realm="penstock"'
        problem(client.get("/v1/nothing", headers=header), 401)


def test_docs_are_open(closed: Shop, document: Any) -> None:
    with closed.api.as_bearer(None) as client:
        assert "swagger" in client.get("/docs").text.lower()
    assert document["info"]["title"] == "Penstock"
    assert "HTTPBearer" in document["components"]["securitySchemes"]
    for operations in document["paths"].values():
        for operation in operations.values():
            assert operation["security"] == [{"HTTPBearer": []}]
            assert operation["summary"]


def test_a_worker_may_consume_and_nothing_else(
    shop: Shop, endpoints: list[tuple[str, str]]
) -> None:
    path = shop.consumer()
    worker = shop.worker("w", "workers")
    shop.publish(1)
    answer = worker.get(f"{path}/next", params={"wait_for_ms": 20_000})
    assert ids(answer) == [1]
    body = {"ack_tokens": tokens(answer)}
    assert worker.post(f"{path}/extend", json=body).status_code == 200
    assert worker.post(f"{path}/nack", json=body).status_code == 200
    again = {"ack_tokens": tokens(worker.get(f"{path}/next"))}
    assert worker.post(f"{path}/ack", json=again).status_code == 200
    consuming = ("next", "receive", "ack", "nack", "extend")
    for method, target in endpoints:
        if not target.endswith(consuming):
            problem(worker.request(method, target), 403)
    assert shop.client.get(path).status_code == 200  # it was not deleted
    for method, needed in (("GET", "a viewer's or an admin's"), ("DELETE", "an admin's")):
        refused = problem(worker.request(method, path), 403)["detail"]
        assert refused == f"The token 'w' may only consume: this request needs {needed}."


def test_a_viewer_reads_and_changes_and_consumes_nothing(
    shop: Shop, endpoints: list[tuple[str, str]]
) -> None:
    path = shop.consumer()
    token = shop.store.tokens.create("v", "viewer")
    with shop.api.as_bearer(token) as client:
        viewer = known(client)
        for method, target in endpoints:
            answer = viewer.request(method, target)
            if target.endswith(("next", "receive", "ack", "nack", "extend")):
                problem(answer, 403)
            elif method == "GET" or target == "/v1/plan":
                assert answer.status_code not in (401, 403, 500), (method, target, answer.text)
            else:
                assert "may only read" in problem(answer, 403)["detail"]
    assert shop.client.get(path).status_code == 200


def test_a_workers_token_is_for_its_consumers(shop: Shop) -> None:
    mine, other = shop.consumer(), shop.consumer("other")
    worker, group = shop.worker("w", "workers"), shop.worker("g", "events")
    assert worker.get(f"{mine}/next").status_code == 200
    for path in (other, "/v1/streams/events", "/v1/http-consumers/nothing"):
        receive = "receive" if "streams" in path else "next"
        problem(worker.get(f"{path}/{receive}"), 403)
        for action in ("ack", "nack", "extend"):
            problem(worker.post(f"{path}/{action}", json={"ack_tokens": []}), 403)
    assert group.get("/v1/streams/events/receive").status_code == 200
    problem(group.get(f"{mine}/next"), 403)
    everywhere = shop.store.tokens.create("all", "worker", None)
    with shop.api.as_bearer(everywhere) as client:
        assert known(client).get(f"{mine}/next").status_code == 200
        assert client.get("/v1/streams/events/receive").status_code == 200


def test_a_new_token_is_good_and_a_revoked_one_bad_at_once(shop: Shop) -> None:
    token = shop.store.tokens.create("short-lived", "admin")
    with shop.api.as_bearer(token) as client:
        started = time.monotonic()
        _until(client, 200)
        shop.store.tokens.revoke("short-lived")
        _until(client, 401)
        assert time.monotonic() - started < 4  # before a look without a notification


def _until(client: httpx.Client, status: int) -> None:
    await_true(
        lambda: client.get("/v1/streams").status_code == status,
        what=f"the API answers {status}, as its tokens now are",
    )


def test_a_new_token_is_good_before_the_api_is_notified(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is looked up when it is first seen; unknown ones cost the store one look in a while."""
    looks = 0
    read_once = auth.KnownTokens._read_once

    async def counted(tokens: auth.KnownTokens) -> None:
        nonlocal looks
        looks += 1
        await read_once(tokens)

    monkeypatch.setattr(auth.KnownTokens, "_read_once", counted)
    monkeypatch.setattr(auth, "_SECONDS", 3600.0)  # nor are they read without a notification
    monkeypatch.setattr(auth, "_UNKNOWN_SECONDS", 0.0)
    with Shop(database.url, ApiTools()) as shop:
        assert shop.client.get("/v1/streams").status_code == 200  # the first reading is done
        for token, path, status in (
            ("pst_a", "/v1/streams", 200),
            ("pst_b", "/v1/http-consumers/nobody/next", 404),  # by the short way of workers
        ):
            database.execute(
                "INSERT INTO penstock.tokens (name, hash, role) VALUES (%s, sha256(%s), 'admin')",
                [token, token.encode()],
            )
            before = looks
            with shop.api.as_bearer(token) as client:
                assert client.get(path).status_code == status
                assert client.get(path).status_code == status
            assert looks == before + 1
        monkeypatch.setattr(auth, "_UNKNOWN_SECONDS", 3600.0)
        with shop.api.as_bearer("pst_wrong") as client:
            for _ in range(50):
                problem(client.get("/v1/streams"), 401)
        assert looks == before + 1


def test_a_revoked_token_is_bad_where_notifications_are_lost(
    shop: Shop, database: Database
) -> None:
    token = shop.store.tokens.create("short-lived", "admin")
    with shop.api.as_bearer(token) as client:
        _until(client, 200)
        started = time.monotonic()
        database.execute("UPDATE penstock.tokens SET revoked_at = now() WHERE name = 'short-lived'")
        _until(client, 401)
        assert time.monotonic() - started < 8


def test_tokens_survive_a_lost_connection(shop: Shop, database: Database) -> None:
    # Only then they are read: the server listens before, and has nothing to survive by.
    assert shop.client.get("/v1/streams").status_code == 200
    ended = database.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE application_name = 'penstock tokens' AND datname = current_database()"
    )
    assert ended == [(True,)]
    assert shop.client.get("/v1/streams").status_code == 200
    token = shop.store.tokens.create("late", "admin")
    with shop.api.as_bearer(token) as client:
        _until(client, 200)


def test_tokens_that_can_not_be_read_are_reported_once(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    Store.open(database.url).close()
    monkeypatch.setattr(auth, "_RETRY_SECONDS", 0.01)
    connect, tries = psycopg.AsyncConnection.connect, 0
    read = asyncio.Event()

    async def failing(url: str, **options: Any) -> psycopg.AsyncConnection[Any]:
        nonlocal tries
        tries += 1
        if tries > 5:
            read.set()
            return await connect(url, **options)
        refused = 'connection to server at "127.0.0.1", port 1 failed: Connection refused'
        raise psycopg.OperationalError(refused)

    monkeypatch.setattr(psycopg.AsyncConnection, "connect", failing)

    async def follow() -> None:
        tokens = auth.KnownTokens(database.url)
        await tokens.open()
        assert tokens.error is not None
        await asyncio.wait_for(read.wait(), 30)
        async with asyncio.timeout(60):
            while not tokens.fresh:
                await asyncio.sleep(0.01)
        assert tokens.error is None
        await tokens.close()

    with capture_logs() as logs:
        asyncio.run(follow())
    failed, again = logs
    assert failed["code"] == "connection_refused"
    assert "Connection refused" in failed["error"]
    assert again["event"] == "the API's tokens are read again"
