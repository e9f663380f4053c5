"""Connections within a run: strangers keep nobody waiting, and what is closed listens no more."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

import pytest

from penstock.core import acceptor
from penstock.core.acceptor import Acceptor, authenticate, connect

KEY = "a" * 32
WAIT = 60.0


class Listening:
    """An end whose clients send one text each."""

    def __init__(self) -> None:
        self.received: SimpleQueue[bytes] = SimpleQueue()
        self.refused: SimpleQueue[BaseException] = SimpleQueue()
        self.acceptor = Acceptor("127.0.0.1", self._serve, "listening")
        self.address = f"127.0.0.1:{self.acceptor.port}:{KEY}"

    def _serve(self, connection: Connection[Any, Any]) -> None:
        try:
            authenticate(connection, KEY)
            self.received.put(connection.recv_bytes())
        except (OSError, EOFError, AuthenticationError) as error:
            self.refused.put(error)

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.acceptor.port), WAIT)


@pytest.fixture
def listening() -> Iterator[Listening]:
    listening = Listening()
    yield listening
    listening.acceptor.close()


@pytest.mark.parametrize("sent", [b"", b"\0\0\0\x14", b"\0\0\0\x14abc"])
def test_a_stranger_that_stops_is_hung_up_on_and_keeps_nobody_waiting(
    listening: Listening, sent: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(acceptor, "_HANDSHAKE_SECONDS", 1)
    with listening.dial() as stranger:
        stranger.sendall(sent)
        with connect(listening.address) as client:
            client.send_bytes(b"first")
            assert listening.received.get(timeout=WAIT) == b"first"
        with contextlib.suppress(ConnectionResetError):
            while stranger.recv(4096):
                pass  # the challenge, and then the end
        assert isinstance(listening.refused.get(timeout=WAIT), OSError)


def test_a_client_may_be_silent_once_it_is_known(
    listening: Listening, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[int] = []
    limit = acceptor._limit

    def noted(connection: Connection[Any, Any], seconds: int) -> None:
        limits.append(seconds)
        limit(connection, seconds)

    monkeypatch.setattr(acceptor, "_limit", noted)
    with connect(listening.address) as client:
        client.send_bytes(b"late")
        assert listening.received.get(timeout=WAIT) == b"late"
    assert limits[0] > 0
    assert limits[-1] == 0


def test_a_wrong_key_is_refused(listening: Listening) -> None:
    with pytest.raises(AuthenticationError):
        connect(listening.address[:-1] + "b")
    assert isinstance(listening.refused.get(timeout=WAIT), AuthenticationError)


def test_what_is_closed_listens_no_more_and_leaves_no_thread() -> None:
    before = set(threading.enumerate())
    listening = Listening()
    with connect(listening.address) as client:
        listening.acceptor.close()
        listening.acceptor.close()
        assert [t.name for t in set(threading.enumerate()) - before if t.name == "listening"] == []
        with pytest.raises(OSError):
            listening.dial()
        client.send_bytes(b"kept")
        assert listening.received.get(timeout=WAIT) == b"kept"
