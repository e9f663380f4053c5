"""What a NATS sink makes of refusals, of odd servers and of its settings."""

from __future__ import annotations

import pickle
import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError
from tests.nats_frames_help import batch
from tests.waits import await_end

from penstock.config.nats import NatsSinkConfig, redact
from penstock.core.errors import SinkError
from penstock.sinks.nats.errors import refused_by_stream
from penstock.sinks.nats.retries import BACKOFF_MAX, backoff
from penstock.sinks.nats.sink import NatsSink


def test_backoff_grows_to_its_limit() -> None:
    assert 0.07 < backoff(1) <= 0.1
    assert 0.15 <= backoff(2) <= 0.2
    assert 7 < backoff(100) <= BACKOFF_MAX


@pytest.mark.parametrize(
    ("err_code", "text", "code", "transient"),
    [
        (10054, "message size exceeds maximum allowed", "message_too_large", False),
        (10060, "expected stream does not match", "wrong_stream", True),
        (10077, "maximum bytes exceeded", "stream_full", True),
        (10047, "insufficient storage resources available", "stream_full", True),
        (10039, "JetStream not enabled for account", "jetstream_not_enabled", True),
        (10167, "too many requests", "too_many_requests", True),
        (10109, "invalid operation on sealed stream", "stream_refused", True),
    ],
)
def test_refusals(err_code: int, text: str, code: str, transient: bool) -> None:
    body = {"error": {"err_code": err_code, "description": text}, "stream": "S"}
    error = refused_by_stream(body, NatsSinkConfig(), "a.b")
    assert (error.code, error.transient) == (code, transient)
    assert text in error.message
    assert error.remedy


@pytest.fixture
def silent_server() -> Iterator[int]:
    """A port that takes connections, sends an INFO without headers, and nothing more."""
    listener = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            taken.append(connection)
            connection.sendall(b'INFO {"headers":false}\r\n')

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    await_end(thread)
    for connection in taken:
        connection.close()


def test_a_server_without_headers(silent_server: int) -> None:
    sink = NatsSink(NatsSinkConfig(url=f"nats://127.0.0.1:{silent_server}"), name="n", source="s")
    with pytest.raises(SinkError) as caught:
        sink.write(batch(1))
    assert caught.value.code == "headers_unsupported"


def test_an_empty_batch_needs_no_server() -> None:
    sink = NatsSink(NatsSinkConfig(url="nats://127.0.0.1:1"), name="n", source="s")
    assert sink.write(batch(0)).delivered == 0


def test_config_pickles_and_hides_secrets() -> None:
    config = NatsSinkConfig(
        url="nats://me:hush%40@a:1, tok3n@[::1]:2,tls://c", user="u", password="hush2"
    )
    assert pickle.loads(pickle.dumps(config)) == config
    assert "hush" not in repr(config)
    assert "tok3n" not in repr(config)
    assert [str(s) for s in config.servers] == ["nats://a:1", "nats://[::1]:2", "tls://c:4222"]
    first, second, _ = config.servers
    assert (first.user, first.password, second.token) == ("me", "hush@", "tok3n")
    assert redact(config.url) == "nats://a:1, [::1]:2,tls://c"


@pytest.mark.parametrize(
    ("settings", "what"),
    [
        ({"url": ""}, "empty"),
        ({"url": "http://me:hush@h"}, "unknown scheme 'http'"),
        ({"url": "nats://me:hu/sh@h"}, "not a list of servers"),
        ({"url": "nats://me:hush@h:99999"}, "not a list of servers"),
        ({"subject": "a.{x}"}, "unknown variable"),
        ({"stream": "a.b"}, "cannot name a stream"),
        ({"group_by": []}, "one or more columns"),
        ({"user": "u"}, "password is missing"),
        ({"token": "hush", "nkey_seed": "hush"}, "use one way to log in"),
        ({"tls_cert": "c.pem"}, "tls_key is missing"),
        ({"tls": False, "tls_ca_cert": "c.pem"}, "tls is false"),
        ({"nope": 1}, "Extra inputs"),
        ({"ack_timeout": 0}, "greater than 0"),
    ],
)
def test_config_errors(settings: dict[str, Any], what: str) -> None:
    with pytest.raises(ValidationError) as caught:
        NatsSinkConfig(**settings)
    assert what in str(caught.value)
    assert "hush" not in str(caught.value)
    assert "hu/sh" not in str(caught.value)
