"""The HTTP client of webhooks, against endpoints that answer well, badly, late or never."""

from __future__ import annotations

import asyncio
import socket
import ssl
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.push_help import HANG, OK, Behaviour, Receiver, Request, answer, receiver

from penstock.core.tls import verifying_context
from penstock.push import http
from penstock.push.errors import EndpointError
from penstock.push.http import Endpoint, EndpointAnswer

HEADERS = b"webhook-id: msg_1\r\n"
LONG = 10.0


def run(
    test: Callable[[Receiver], Coroutine[Any, Any, None]], behaviour: Behaviour = lambda _: OK
) -> None:
    async def served() -> None:
        async with receiver(behaviour) as endpoint:
            await test(endpoint)

    asyncio.run(served())


def endpoint_of(receiver: Receiver, **headers: str) -> Endpoint:
    return Endpoint(receiver.url, headers, allow_private=True)


def test_what_is_sent() -> None:
    async def test(to: Receiver) -> None:
        url = f"http://me:p%40ss@127.0.0.1:{to.port}/häk/%2F?a=1&b=ü#part"
        endpoint = Endpoint(url, {"X-Team": "shop"}, allow_private=True)
        assert await endpoint.post(b'{"a":1}', HEADERS, LONG) == EndpointAnswer(200, None)
        (request,) = to.requests
        assert request.target == "/h%C3%A4k/%2F?a=1&b=%C3%BC"
        assert request.body == b'{"a":1}'
        assert request.headers == {
            "host": f"127.0.0.1:{to.port}",
            "content-type": "application/json",
            "content-length": "7",
            "user-agent": request.headers["user-agent"],
            "authorization": "Basic bWU6cEBzcw==",
            "x-team": "shop",
            "webhook-id": "msg_1",
        }
        assert "me" not in endpoint.address
        assert "p%40ss" not in endpoint.address
        endpoint.close()

    run(test)


@pytest.mark.parametrize(
    ("url", "target"),
    [
        ("", "/a/b"),
        ("/", "/a/b"),
        ("/hook", "/hook/a/b"),
        ("/hook/", "/hook/a/b"),
        ("?x=/1", "/a/b?x=/1"),
        ("/hook?x=1", "/hook/a/b?x=1"),
    ],
)
def test_a_path_stands_behind_the_url_s_own(url: str, target: str) -> None:
    async def test(to: Receiver) -> None:
        endpoint = Endpoint(f"http://127.0.0.1:{to.port}{url}", {}, allow_private=True)
        for path in ("/a/b", ""):
            assert await endpoint.post(b"{}", HEADERS, LONG, path) == EndpointAnswer(200, None)
        own = url if url.startswith("/") else f"/{url}"
        assert [request.target for request in to.requests] == [target, own]
        endpoint.close()

    run(test)


def test_a_given_authorization_comes_before_the_url_s() -> None:
    async def test(to: Receiver) -> None:
        url = f"http://me:pass@127.0.0.1:{to.port}"
        endpoint = Endpoint(url, {"Authorization": "Bearer x"}, allow_private=True)
        await endpoint.post(b"{}", HEADERS, LONG)
        assert to.requests[0].headers["authorization"] == "Bearer x"
        assert to.requests[0].target == "/"
        endpoint.close()

    run(test)


CHUNKED = b"HTTP/1.1 201 Created\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n"


@pytest.mark.parametrize(
    ("reply", "status", "connections"),
    [
        (OK, 200, 1),
        (b"HTTP/1.1 204 No Content\r\n\r\n", 204, 1),
        (CHUNKED, 201, 1),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + OK, 200, 1),
        (answer(200, "connection: close"), 200, 3),
        (b"HTTP/1.0 200 OK\r\nContent-Length: 0\r\n\r\n", 200, 3),
        (answer(302, "location: http://127.0.0.1:1/"), 302, 1),
        (answer(500, body=b"x" * 100_000), 500, 1),
        (answer(410), 410, 1),
        (b"HTTP/1.1 101 Switching\r\nUpgrade: h2c\r\nConnection: upgrade\r\n\r\n", 101, 3),
        (answer(200, body=b"x" * 3_000_000), 200, 3),  # read to a limit, then cut
    ],
)
def test_answers_and_whether_the_connection_is_used_again(
    reply: bytes, status: int, connections: int
) -> None:
    async def test(to: Receiver) -> None:
        endpoint = endpoint_of(to)
        for _ in range(3):
            assert (await endpoint.post(b"{}", HEADERS, LONG)).status == status
        assert len({request.connection for request in to.requests}) == connections
        endpoint.close()
        await to.until(lambda: to.open == 0)

    run(test, lambda _: reply)


def test_an_answer_whose_end_is_the_connection_s() -> None:
    async def test(to: Receiver) -> None:
        task = asyncio.create_task(endpoint_of(to).post(b"{}", HEADERS, LONG))
        await to.got(1)
        to.drop_connections()
        assert (await task).status == 200

    async def served() -> None:
        async with receiver(lambda _: b"HTTP/1.1 200 OK\r\n\r\nsome of it") as to:
            await test(to)

    asyncio.run(served())


def test_retry_after() -> None:
    async def test(to: Receiver) -> None:
        endpoint = endpoint_of(to)
        assert await endpoint.post(b"{}", HEADERS, LONG) == EndpointAnswer(429, "17")
        endpoint.close()

    run(test, lambda _: answer(429, "Retry-After: 17"))


def test_requests_at_once_have_connections_of_their_own() -> None:
    async def test(to: Receiver) -> None:
        endpoint = endpoint_of(to)
        to.pause = 0.05
        for _ in range(3):
            await asyncio.gather(*(endpoint.post(b"{}", HEADERS, LONG) for _ in range(5)))
        assert to.most_at_once == 5
        assert len({request.connection for request in to.requests}) == 5
        endpoint.close()

    run(test)


@pytest.mark.parametrize(
    ("reply", "code"),
    [
        (None, "connection_lost"),
        (b"SSH-2.0-OpenSSH_9.6\r\n", "bad_answer"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\n", "bad_answer"),
        (b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1_000_000, "bad_answer"),
    ],
)
def test_no_answer(reply: bytes | None, code: str) -> None:
    async def test(to: Receiver) -> None:
        endpoint = endpoint_of(to, authorization="Bearer secret")
        with pytest.raises(EndpointError) as caught:
            await endpoint.post(b"{}", HEADERS, LONG)
        assert caught.value.code == code
        assert str(to.port) in str(caught.value)
        assert "hook" not in str(caught.value)
        await to.until(lambda: to.open == 0)
        assert len(to.requests) == 1

    run(test, lambda _: reply)


def test_a_request_that_takes_too_long_is_cut_off() -> None:
    async def test(to: Receiver) -> None:
        endpoint = endpoint_of(to)
        with pytest.raises(EndpointError, match="no answer within 100 ms") as caught:
            await endpoint.post(b"{}", HEADERS, 0.1)
        assert caught.value.code == "timeout"
        await to.until(lambda: to.open == 0)

    run(test, lambda _: HANG)


def test_an_answer_that_never_ends_is_cut_off() -> None:
    async def test(to: Receiver) -> None:
        with pytest.raises(EndpointError, match="within 100 ms"):
            await endpoint_of(to).post(b"{}", HEADERS, 0.1)
        await to.until(lambda: to.open == 0)

    run(test, lambda _: b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nx")


def test_no_server_there() -> None:
    async def test() -> None:
        with socket.create_server(("127.0.0.1", 0)) as reserved:
            port = reserved.getsockname()[1]
        endpoint = Endpoint(f"http://127.0.0.1:{port}/secret", {}, allow_private=True)
        with pytest.raises(EndpointError) as caught:
            await endpoint.post(b"{}", HEADERS, LONG)
        assert caught.value.code == "connection_refused"
        assert "secret" not in str(caught.value)

    asyncio.run(test())


def test_a_connection_that_was_closed_while_unused_is_no_failure() -> None:
    used: list[int] = []

    def closes_when_used_again(request: Request) -> bytes | None:
        used.append(request.connection)
        return OK if used.count(request.connection) == 1 else None

    async def test(to: Receiver) -> None:
        endpoint = endpoint_of(to)
        await endpoint.post(b"{}", HEADERS, LONG)
        assert (await endpoint.post(b"{}", HEADERS, LONG)).status == 200
        assert used == [0, 0, 1]
        endpoint.close()

    run(test, closes_when_used_again)


def test_a_connection_unused_for_long_is_not_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(to: Receiver) -> None:
        endpoint = endpoint_of(to)
        await endpoint.post(b"{}", HEADERS, LONG)
        monkeypatch.setattr(http, "_IDLE_SECONDS", 0.0)
        await endpoint.post(b"{}", HEADERS, LONG)
        assert [request.connection for request in to.requests] == [0, 1]
        endpoint.close()

    run(test)


def test_an_answer_without_a_request_is_not_taken_for_the_next_one_s() -> None:
    async def test(to: Receiver) -> None:
        endpoint = endpoint_of(to)
        assert (await endpoint.post(b"{}", HEADERS, LONG)).status == 500
        assert (await endpoint.post(b"{}", HEADERS, LONG)).status == 500
        assert [request.connection for request in to.requests] == [0, 1]
        endpoint.close()

    run(test, lambda _: answer(500) + answer(200))


# Addresses: the one that was checked is the one connected to.


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "2130706433", "127.1"]
)
def test_private_addresses_are_refused_unless_allowed(host: str) -> None:
    async def test(to: Receiver) -> None:
        endpoint = Endpoint(f"http://{host}:{to.port}/", {}, allow_private=False)
        with pytest.raises(EndpointError) as caught:
            await endpoint.post(b"{}", HEADERS, LONG)
        assert caught.value.code == "private_address"
        assert to.open == 0
        assert to.requests == []

    run(test)


class Names:
    """A resolver whose answers change: each call takes the next list of addresses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> None:
        self.answers = list(answers)
        self.real = socket.getaddrinfo
        monkeypatch.setattr(socket, "getaddrinfo", self)

    def __call__(self, host: Any, port: Any, *args: Any, **others: Any) -> Any:
        if host != "hook.test":
            return self.real(host, port, *args, **others)
        addresses = self.answers.pop(0)
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (a, port)) for a in addresses]


def test_a_name_that_changes_between_check_and_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the name resolved again to connect, the request would get through."""
    names = Names(monkeypatch, ["8.8.8.8"], ["127.0.0.1"])
    asked: list[Any] = []

    async def test(to: Receiver) -> None:
        loop = asyncio.get_running_loop()
        real = loop.create_connection

        async def connect(factory: Any, host: Any, *args: Any, **others: Any) -> Any:
            asked.append(host)
            if host == "8.8.8.8":
                raise OSError(113, "No route to host")
            return await real(factory, host, *args, **others)

        monkeypatch.setattr(loop, "create_connection", connect)
        endpoint = Endpoint(f"http://hook.test:{to.port}/", {}, allow_private=False)
        with pytest.raises(EndpointError, match=r"hook.test:\d+ \(8.8.8.8\) cannot be reached"):
            await endpoint.post(b"{}", HEADERS, LONG)
        with pytest.raises(EndpointError) as caught:
            await endpoint.post(b"{}", HEADERS, LONG)
        assert caught.value.code == "private_address"
        assert asked == ["8.8.8.8"]
        assert names.answers == []
        assert to.requests == []

    run(test)


def test_the_name_stays_in_the_request(monkeypatch: pytest.MonkeyPatch) -> None:
    Names(monkeypatch, ["127.0.0.2", "127.0.0.1"])

    async def test(to: Receiver) -> None:
        endpoint = Endpoint(f"http://hook.test:{to.port}/", {}, allow_private=True)
        assert (await endpoint.post(b"{}", HEADERS, LONG)).status == 200  # the second address
        assert to.requests[0].headers["host"] == f"hook.test:{to.port}"
        endpoint.close()

    run(test)


# TLS


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of `hook.test` with its key."""
    path = tmp_path_factory.mktemp("tls") / "hook.pem"
    command = [
        "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
        "-days", "2", "-subj", "/CN=hook.test", "-addext", "subjectAltName=DNS:hook.test",
        "-keyout", str(path), "-out", str(path.with_suffix(".crt")),
    ]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    with path.open("a") as whole:
        whole.write(path.with_suffix(".crt").read_text())
    return path


@pytest.mark.parametrize(("host", "trusted"), [("hook.test", True), ("localhost", False)])
def test_tls_is_verified_for_the_name(
    host: str, trusted: bool, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Names(monkeypatch, ["127.0.0.1"])
    client = verifying_context(certificate.with_suffix(".crt"))
    monkeypatch.setattr(http, "_tls", lambda *_: client)
    asked: list[str | None] = []

    async def test() -> None:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(certificate)
        server.sni_callback = lambda _sock, name, _context: asked.append(name)
        async with receiver(tls=server) as to:
            endpoint = Endpoint(f"https://{host}:{to.port}/", {}, allow_private=True)
            if trusted:
                for _ in range(2):
                    assert (await endpoint.post(b"{}", HEADERS, LONG)).status == 200
                assert len({request.connection for request in to.requests}) == 1
            else:
                with pytest.raises(EndpointError, match="Hostname mismatch") as caught:
                    await endpoint.post(b"{}", HEADERS, LONG)
                assert caught.value.code == "tls"
            endpoint.close()
        assert asked == [host]

    asyncio.run(test())


def test_an_unknown_certificate(certificate: Path) -> None:
    async def test() -> None:
        server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        server.load_cert_chain(certificate)
        async with receiver(tls=server) as to:
            endpoint = Endpoint(f"https://127.0.0.1:{to.port}/", {}, allow_private=True)
            with pytest.raises(EndpointError, match="TLS failed: self") as caught:
                await endpoint.post(b"{}", HEADERS, LONG)
            assert caught.value.code == "tls"

    asyncio.run(test())
