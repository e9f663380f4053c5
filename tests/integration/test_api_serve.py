"""`serve` as a process: it starts, ends in order on SIGTERM, and leaves nothing behind when killed."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import time
from typing import Self

import httpx
import pytest
from tests.api_help import ids, raw, rest, tokens
from tests.pipeline import NO_TLS, PATIENCE
from tests.streams_help import inserted, make_stream, publish
from tests.waits import Later

from penstock.api.serve import serve
from penstock.core.errors import ListenError, StoreError
from penstock.embedded.handles import Database
from penstock.streams.store import Store

WAIT = {"batch_size": 10, "wait_for_ms": 60_000}
_SERVE = "import sys; from penstock.api.serve import serve; sys.exit(serve(*sys.argv[1:]))"


class Process:
    """`serve` in a process of its own, and a client of it."""

    def __init__(self, url: str, token: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _SERVE, url, "127.0.0.1:0"], stderr=subprocess.PIPE, text=True
        )
        assert self.process.stderr is not None
        self.log = [json.loads(self.process.stderr.readline())]
        self.client = httpx.Client(
            base_url=self.log[0]["address"],
            headers={"Authorization": f"Bearer {token}"},
            timeout=60,
            trust_env=False,
            verify=NO_TLS,
        )

    def end(self, number: int) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(number)
        code = self.process.wait(timeout=60)
        assert self.process.stderr is not None
        self.log += [json.loads(line) for line in self.process.stderr]
        return code

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self.process.kill()
        self.process.wait(PATIENCE)
        assert self.process.stderr is not None
        self.process.stderr.close()


@pytest.fixture
def token(store: Store) -> str:
    return store.tokens.create("admin", "admin")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_ends_in_order(store: Store, token: str, number: int) -> None:
    stream = make_stream(store)
    with Process(store.url, token) as api:
        path = "/v1/http-consumers/events"
        publish(store, stream, [inserted(1)])
        assert ids(api.client.get("/v1/streams/events/receive", params=WAIT)) == [1]
        address = api.log[0]["address"].removeprefix("http://")
        waiting = [raw(address, token, f"{path}/next?wait_for_ms=60000") for _ in range(2)]
        raw(address, token, f"{path}/next?wait_for_ms=60000").close()
        for _ in range(2):  # when these are answered, those before them were read
            api.client.get("/v1/streams").raise_for_status()
        started = time.monotonic()
        assert api.end(number) == 0
        assert time.monotonic() - started < 4
        for connection in waiting:
            assert json.loads(rest(connection)) == {
                "data": [],
                "info": {"num_pending": 0, "num_ack_pending": 1},
            }
        assert [line["event"] for line in api.log] == ["serving", "ended"]
        with pytest.raises(httpx.ConnectError):
            api.client.get("/v1/streams")


def test_it_makes_the_schema_and_reports_that_it_is_ready(database: Database) -> None:
    with Process(database.url, "pst_none") as api:
        assert api.client.get("/healthz").json() == {"status": "ok"}
        assert api.client.get("/readyz").json() == {"status": "ready"}
        assert api.client.get("/v1/streams").status_code == 401
        assert api.client.get("/docs").status_code == 200
    assert database.execute("SELECT count(*) FROM penstock.streams") == [(0,)]


def test_killed_in_the_middle_of_all_it_loses_nothing(store: Store, token: str) -> None:
    stream = make_stream(store)
    publish(store, stream, [inserted(key) for key in range(20)])
    path = "/v1/streams/events"
    with Process(store.url, token) as api:
        held = api.client.get(f"{path}/receive", params=WAIT)
        acked = tokens(held)[:4]
        api.client.post(f"{path}/ack", json={"ack_ids": acked}).raise_for_status()
        waiting = Later(lambda: api.client.get("/v1/http-consumers/events/next", params=WAIT))
        assert ids(waiting.result()) == list(range(10, 20))
        assert api.end(signal.SIGKILL) == -signal.SIGKILL
    with Process(store.url, token) as api:
        assert ids(api.client.get(f"{path}/receive")) == []  # still held by the workers
        body = {"ack_ids": tokens(held)[4:]}
        assert api.client.post(f"{path}/ack", json=body).json() == {"success": True}
        body = {"ack_ids": tokens(waiting.result())}
        assert api.client.post(f"{path}/nack", json=body).json() == {"success": True}
        assert ids(api.client.get(f"{path}/receive", params=WAIT)) == list(range(10, 20))


def test_what_it_cannot_start_with(database: Database) -> None:
    with pytest.raises(ListenError, match="host:port"):
        serve(database.url, "nonsense")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        with pytest.raises(ListenError, match="in use"):
            serve(database.url, f"127.0.0.1:{taken.getsockname()[1]}")
        address = taken.getsockname()[1]
    url = f"postgresql://someone:hidden@127.0.0.1:{address}/nothing"
    with pytest.raises(StoreError) as caught:
        serve(url, "127.0.0.1:0")
    assert "hidden" not in str(caught.value)
