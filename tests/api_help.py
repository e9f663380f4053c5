"""The API for tests: over real HTTP, in a thread, on a store of the test's own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
from types import TracebackType
from typing import Any, Self

import httpx
import psycopg
from tests.streams_help import inserted, make_stream, publish

from penstock.api.app import Api
from penstock.api.health import Server
from penstock.api.manage.context import Tools
from penstock.core.message import Position
from penstock.embedded.handles import Database
from penstock.streams.store import Store

from .pipeline import NO_TLS
from .waits import await_true

TIMEOUT = 120.0


class ApiServer:
    """One instance of the API; several may stand over one store."""

    def __init__(self, url: str, token: str, tools: Tools | None = None) -> None:
        self.app = Api(url, tools=tools)
        self._server = Server(self.app, "127.0.0.1:0")
        self.address = self._server.address
        self.client = self.as_bearer(token)

    def as_bearer(self, token: str | None) -> httpx.Client:
        headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx.Client(
            base_url=f"http://{self.address}", headers=headers, timeout=TIMEOUT, trust_env=False,
            verify=NO_TLS,
        )  # fmt: skip

    def until_waiting(self, count: int) -> None:
        """Wait until so many receives do."""
        await_true(lambda: self.app.receives.count == count, what=f"{count} receives wait")

    def stop(self) -> None:
        self._server.close()

    def close(self) -> None:
        self.client.close()
        self.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Shop:
    """A store with a stream and one instance of the API, asked as an admin."""

    def __init__(self, url: str, tools: Tools | None = None, stream: str = "events") -> None:
        self._tools = tools
        self._name = stream
        self._stack = contextlib.ExitStack()
        self.store = self._stack.enter_context(Store.open(url))
        self.stream = make_stream(self.store, stream)
        self.token = self.store.tokens.create("admin", "admin")
        self.api = self.serve()
        self.client = self.api.client

    def serve(self) -> ApiServer:
        """Return one more instance of the API over the store."""
        return self._stack.enter_context(ApiServer(self.store.url, self.token, self._tools))

    def publish(self, *keys: Any) -> list[Position]:
        """Publish an insert with each of these ids, a group each; return their positions."""
        return publish(self.store, self.stream, [inserted(key) for key in keys])

    def worker(self, name: str, *consumers: str) -> httpx.Client:
        """Return a client with a worker's token for these consumers."""
        token = self.store.tokens.create(name, "worker", consumers)
        return known(self._stack.enter_context(self.api.as_bearer(token)))

    def consumer(self, name: str = "workers", **settings: Any) -> str:
        """Make a consumer of the stream and return its path."""
        body = {"name": name, "stream": self._name, **settings}
        answer = self.client.post("/v1/http-consumers", json=body)
        assert answer.status_code == 201, answer.text
        return f"/v1/http-consumers/{name}"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


def ids(answer: httpx.Response) -> list[Any]:
    """Return the `id` column of each message in a receive's answer."""
    assert answer.status_code == 200, answer.text
    return [item.get("data", item)["record"]["id"] for item in answer.json()["data"]]


def tokens(answer: httpx.Response) -> list[str]:
    """Return the tokens or ids to ack by of each message in a receive's answer."""
    assert answer.status_code == 200, answer.text
    return [item.get("ack_token") or item["ack_id"] for item in answer.json()["data"]]


def until_a_place_is_taken(url: str, consumer: str) -> None:
    """Wait until a process holds one of a consumer's `max_waiting` places, as the store has it."""
    held = (
        "SELECT FROM penstock.receive_permits p JOIN penstock.consumers c ON c.id = p.consumer_id"
        " WHERE c.name = %s AND p.permits > 0"
    )
    with psycopg.connect(url, autocommit=True) as connection:
        await_true(
            lambda: connection.execute(held, [consumer]).fetchall(), what="a receive takes a place"
        )


def refuse_lines(database: Database) -> None:
    """Have the store refuse each new line of its audit log, until trigger `refuse` is dropped."""
    database.execute(
        "CREATE OR REPLACE FUNCTION refuse_line() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        " RAISE EXCEPTION 'no line'; END $$;"
        " CREATE TRIGGER refuse BEFORE INSERT ON penstock.audit"
        " FOR EACH ROW EXECUTE FUNCTION refuse_line()"
    )


def known(client: httpx.Client) -> httpx.Client:
    """Wait until the API, which is notified of new tokens, knows the client's; return the client."""
    await_true(
        lambda: client.get("/v1/streams").status_code != 401, what="the API knows the new token"
    )
    return client


def problem(answer: httpx.Response, status: int, *fields: str) -> dict[str, Any]:
    """Check that an answer is a problem with this status, of these fields; return it."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = answer.json()
    assert body["type"] == "about:blank"
    assert body["status"] == status
    assert body["title"]
    assert body["detail"]
    assert "Traceback" not in answer.text
    assert [error["field"] for error in body["errors"]] == list(fields), body
    assert all(error["message"] for error in body["errors"])
    return body


def run_curl(command: str, token: str) -> Any:
    """Run a command of curl that a page shows, with a worker's token; return the answer, a 200."""
    env = {"PATH": os.environ["PATH"], "PENSTOCK_TOKEN": token}
    shown = command.replace("curl -s", "curl -s --write-out '\n%{http_code}'", 1)
    done = subprocess.run(
        ["sh", "-c", shown], env=env, capture_output=True, text=True, timeout=60, check=True
    )
    body, _, status = done.stdout.rpartition("\n")
    assert status == "200", done.stdout
    return json.loads(body)


def raw(address: str, token: str, target: str, method: str = "GET") -> socket.socket:
    """Send a request without a body over a socket of its own, and return the socket."""
    host, _, port = address.rpartition(":")
    connection = socket.create_connection((host, int(port)), timeout=TIMEOUT)
    head = f"{method} {target} HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {token}\r\n\r\n"
    connection.sendall(head.encode())
    return connection


def rest(connection: socket.socket) -> bytes:
    """Return the body of the answer, empty if none comes before the server closes."""
    with connection:
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    return answer.partition(b"\r\n\r\n")[2]
