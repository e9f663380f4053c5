"""What a client without a token can't do to the others: hold up, fill or use up the HTTP server."""

from __future__ import annotations

import contextlib
import json
import re
import select
import signal
import socket
import time
from collections.abc import Iterator
from functools import partial

import httpx
import pytest
from tests.integration.http_server import LARGE, Onlooker, Served
from tests.pipeline import NO_TLS
from tests.waits import at_once, await_true

MIB = 1 << 20
MUCH = 64 * MIB  # more than any of these may take before it is refused
GET = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
POST = b"POST /echo HTTP/1.1\r\nHost: x\r\n"
WAIT = 1.0  # seconds that another client may wait at the most
GROWTH = 24 * MIB  # bytes that the server may grow by


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with Served() as served:
        yield served


def flood(served: Served, start: bytes, more: bytes) -> bytes:
    """Send `start`, then `more` again and again until there is an answer; return that."""
    answer, sent = b"", 0
    with served.send(start) as connection:
        with contextlib.suppress(ConnectionError):
            while sent < MUCH and not select.select([connection], [], [], 0)[0]:
                connection.sendall(more)
                sent += len(more)
            # A server that has not answered by now takes it all: let it have an end.
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionError):
            while data := connection.recv(1 << 16):
                answer += data
    return answer


@pytest.mark.parametrize(
    ("start", "more", "status"),
    [
        pytest.param(GET + b"X: ", b"a" * MIB, 431, id="a header without end"),
        pytest.param(GET, b"a: b\r\n" * 100_000, 431, id="headers without end"),
        pytest.param(b"GET /healthz?", b"a" * MIB, 431, id="a URL without end"),
        pytest.param(b"", b"\r\n" * MIB, 431, id="empty lines without end"),
        pytest.param(
            POST + b"Content-Length: 1073741824\r\n\r\n", b"a" * MIB, 413, id="a body of 1 GiB"
        ),
        pytest.param(
            POST + b"Transfer-Encoding: chunked\r\n\r\n",
            b"100000\r\n" + b"a" * MIB + b"\r\n",
            413,
            id="chunks without end",
        ),
        pytest.param(
            POST + b"Transfer-Encoding: chunked\r\n\r\n",
            b"1\r\na\r\n" * 100_000,
            413,
            id="small chunks without end",
        ),
        pytest.param(
            POST + b"Transfer-Encoding: chunked\r\n\r\n1;", b"a" * MIB, 413, id="an extension"
        ),
        pytest.param(
            POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\n", b"a: b\r\n" * 100_000, 413,
            id="trailers without end",
        ),
    ],
)  # fmt: skip
def test_too_much(served: Served, start: bytes, more: bytes, status: int) -> None:
    before = served.memory
    with Onlooker(served) as onlooker:
        answer = flood(served, start, more)
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer[:200]
    assert json.loads(body)["status"] == status
    assert onlooker.worst < WAIT
    assert served.memory - before < GROWTH


def test_a_body_that_no_endpoint_reads(served: Served) -> None:
    head = b"GET /healthz HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    answer = flood(served, head, b"100000\r\n" + b"a" * MIB + b"\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert served.client.get("/healthz").status_code == 200


def test_pipelined_requests_wait_unparsed_and_are_answered_in_turn() -> None:
    with Served() as served:
        before = served.memory
        with Onlooker(served) as onlooker, served.connect() as connection:
            connection.sendall(b"GET /wait HTTP/1.1\r\n\r\n")
            served.until_waiting(1)
            connection.settimeout(0.5)  # it reads only so far
            with contextlib.suppress(TimeoutError):
                connection.sendall(b"GET /no HTTP/1.1\r\n\r\n" * 100_000)
            served.client.get("/healthz")
            assert served.memory - before < 6 * MIB
            served.client.post("/release")
            connection.settimeout(30)
            answers = b""
            while answers.count(b"HTTP/1.1 ") < 2_000:
                answers += connection.recv(1 << 20)
            statuses = re.findall(rb"HTTP/1\.1 (\d+)", answers)
            assert set(statuses[1:]) == {b"404"}
            assert statuses[0] == b"200"
        assert onlooker.worst < WAIT
        assert served.memory - before < GROWTH


def until_closed(connection: socket.socket, trickle: bytes = b"") -> tuple[bytes, float]:
    """Return what comes until the server closes, and the seconds until it does.

    A byte of `trickle` is sent each tenth of a second meanwhile.
    """
    began, answer, rest = time.monotonic(), b"", trickle
    with connection:
        connection.settimeout(0.1 if trickle else 8.0)
        while time.monotonic() - began < 8:
            try:
                data = connection.recv(1 << 16)
            except TimeoutError:
                with contextlib.suppress(ConnectionError):
                    connection.sendall(rest[:1])
                rest = rest[1:] or trickle
                continue
            except ConnectionError:
                data = b""
            if not data:
                return answer, time.monotonic() - began
            answer += data
    raise AssertionError(f"still open after 8 s; the answer so far: {answer[:200]!r}")


CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"


@pytest.mark.parametrize(
    ("target", "status"), [(b"GET /healthz", b"200"), (b"POST /nowhere", b"404")]
)
@pytest.mark.parametrize(
    "body",
    [
        pytest.param(b"100000\r\n" + b"a" * MIB + b"\r\n1\r\na\r\n", id="too large"),
        pytest.param(b"no chunk\r\n", id="broken"),
    ],
)
def test_a_refused_body_has_no_second_answer(
    served: Served, target: bytes, status: bytes, body: bytes
) -> None:
    with served.send(target + b" HTTP/1.1\r\nHost: x\r\n" + CHUNKED) as connection:
        first = connection.recv(1 << 16)  # before the body comes
        connection.sendall(body)
        rest, _ = until_closed(connection)
    assert re.findall(rb"HTTP/1\.1 (\d+)", first + rest) == [status]


def test_a_second_request_is_refused_by_itself(served: Served) -> None:
    with served.send(GET + b"\r\n") as connection:
        first = connection.recv(1 << 16)
        connection.sendall(b"nonsense\r\n\r\n")
        rest, _ = until_closed(connection)
    assert re.findall(rb"HTTP/1\.1 (\d+)", first + rest) == [b"200", b"400"]


def test_an_answer_before_100_continue_ends_the_connection(served: Served) -> None:
    head = b"POST /nowhere HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"
    answer, _ = until_closed(served.send(head + b"Expect: 100-continue\r\n\r\n"))
    assert re.findall(rb"HTTP/1\.1 (\d+)", answer) == [b"404"]
    assert b"connection: close" in answer


def test_a_body_comes_after_100_continue(served: Served) -> None:
    head = POST + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n"
    with served.send(head) as connection:
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"ab")
        answer, _ = until_closed(connection)
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert answer.endswith(b"\r\n\r\nab")


@pytest.fixture(scope="module")
def hasty() -> Iterator[Served]:
    """A server whose times are a second each, but for the one for an idle connection."""
    with Served(head_s=1.0, body_s=1.0, unread_s=1.0, linger_s=0.5, idle_s=2.0) as served:
        yield served


SLOW = {
    "nothing": (b"", b"", b""),
    "half a head": (GET + b"Ho", b"", b"408"),
    "a head, byte by byte": (b"", GET + b"X: " + b"a" * 1000, b"408"),
    "empty lines": (b"", b"\r\n", b"408"),
    "no body": (POST + b"Content-Length: 9\r\n\r\n", b"", b"408"),
    "a body, byte by byte": (POST + b"Content-Length: 999\r\n\r\n", b"a", b"408"),
    "chunks": (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\na\r\n", b"408"),
    "a body after its answer": (GET + b"Content-Length: 999\r\n\r\n", b"a", b"200"),
    "nothing after an answer": (GET + b"\r\n", b"", b"200"),
    "half a second head": (GET + b"\r\n" + GET, b"", b"408"),
    "more after a refusal": (b"nonsense\r\n\r\n", b"more", b"400"),
}


def test_too_slow(hasty: Served) -> None:
    def attempt(case: tuple[bytes, bytes, bytes]) -> tuple[list[bytes], float]:
        sent, trickle, _ = case
        answer, seconds = until_closed(hasty.send(sent), trickle)
        return re.findall(rb"HTTP/1\.1 (\d+)", answer)[-1:], seconds

    found = at_once(*[partial(attempt, case) for case in SLOW.values()])
    results = dict(zip(SLOW, found, strict=True))
    expected = {name: [status] if status else [] for name, (_, _, status) in SLOW.items()}
    assert {name: status for name, (status, _) in results.items()} == expected
    assert {name: seconds for name, (_, seconds) in results.items() if seconds > 6} == {}


def test_a_client_that_reads_nothing_is_let_go_and_a_slow_one_gets_all(hasty: Served) -> None:
    idle = hasty.files
    with hasty.send(b"GET /large HTTP/1.1\r\n\r\n"), hasty.connect() as closing:
        closing.sendall(b"GET /large HTTP/1.1\r\nConnection: close\r\n\r\n")
        slow = hasty.send(b"GET /large HTTP/1.1\r\nConnection: close\r\n\r\n")
        got = 0
        with slow:
            while data := slow.recv(2 * MIB):
                got += len(data)
                time.sleep(0.1 if got < LARGE // 2 else 0)  # longer than the others may stay
        assert got > LARGE
        await_true(lambda: hasty.files <= idle, what="the server lets the idle clients go")


def test_connections_do_not_use_up_the_files() -> None:
    files = 128
    # A new connection may be let go for a newer one before its request is read.
    with Served(files=files) as served, Onlooker(served, keeps=True) as onlooker:
        keeps = httpx.Client(base_url=served.client.base_url, trust_env=False, verify=NO_TLS)
        with contextlib.ExitStack() as stack, keeps:
            first = keeps.get("/healthz").extensions["network_stream"]
            for number in range(500):
                sent = GET if number % 2 else b""
                with contextlib.suppress(ConnectionError):
                    stack.enter_context(served.send(sent))
            assert served.files < files
            # It has been used, and is not the one to go.
            assert keeps.get("/healthz").extensions["network_stream"] is first
            assert served.client.get("/healthz").status_code == 200
    assert onlooker.worst < WAIT


def test_where_all_connections_are_under_way_another_one_is_503() -> None:
    with Served(files=64) as served, contextlib.ExitStack() as stack:
        for count in range(1, 32):
            stack.enter_context(served.send(b"GET /wait HTTP/1.1\r\n\r\n"))
            served.until_waiting(count)  # over the client's connection, which is one more
        served.client.close()
        stack.enter_context(served.send(b"GET /wait HTTP/1.1\r\n\r\n"))
        with served.connect() as refused:
            answer = refused.recv(1 << 16)
        assert answer.startswith(b"HTTP/1.1 503 ")
        assert b"retry-after: 1" in answer


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_no_client_holds_the_end_up(number: int) -> None:
    starts = [b"", GET, GET + b"\r\n", GET + b"Content-Length: 9\r\n\r\n", b"nonsense\r\n\r\n"]
    with Served(grace=1_000) as served, contextlib.ExitStack() as stack:
        for start in starts:
            stack.enter_context(served.send(start))
        served.client.get("/healthz")
        served.process.send_signal(number)
        served.process.wait(timeout=60)
