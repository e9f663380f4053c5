"""The connections between the processes of one run, whose clients prove that they have its key.

They are those of `multiprocessing.connection`, and so is the challenge. An address is `host:port:key`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Final

_HANDSHAKE_SECONDS: Final = 10
_PAUSE_SECONDS: Final = 0.1
_CLOSE_SECONDS: Final = 1.0


class Acceptor:
    """Listens at `host`, and calls `serve` with each connection in a thread of its own.

    A stranger that sends nothing keeps none of the others waiting. A connection is closed when `serve`
    returns.
    """

    def __init__(self, host: str, serve: Callable[[Connection[Any, Any]], None], name: str) -> None:
        self._serve = serve
        self._listener = socket.create_server((host, 0), backlog=128)
        self._closed = False
        self.port: int = self._listener.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; connections stay. May be called again."""
        if self._closed:
            return
        self._closed = True
        # Closing the socket beneath a thread that waits at it would end neither the wait nor the
        # listening, and the thread might take connections of the next file of that number.
        with contextlib.suppress(OSError):
            socket.create_connection(self._listener.getsockname(), _CLOSE_SECONDS).close()
        self._thread.join(_CLOSE_SECONDS)
        self._listener.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                made, _ = self._listener.accept()
            except OSError:  # too many files are open, for one
                time.sleep(_PAUSE_SECONDS)
                continue
            threading.Thread(target=self._take, args=(made,), daemon=True).start()

    def _take(self, made: socket.socket) -> None:
        with Connection(made.detach()) as connection:
            if not self._closed:
                self._serve(connection)


def authenticate(connection: Connection[Any, Any], key: str) -> None:
    """Have a client prove that it has the key, and prove so to it.

    Raises `AuthenticationError`, `EOFError` or `OSError`.
    """
    # A `close` by another thread would not end the wait for what a stranger does not send.
    _limit(connection, _HANDSHAKE_SECONDS)
    deliver_challenge(connection, key.encode())
    answer_challenge(connection, key.encode())
    _limit(connection, 0)


def connect(address: str) -> Connection[Any, Any]:
    """Connect to `host:port:key`, whose end does `authenticate`; raises as that does."""
    host, port, key = address.rsplit(":", 2)
    with socket.create_connection((host, int(port)), _HANDSHAKE_SECONDS) as made:
        made.settimeout(None)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        # Reports have no answer: the second would wait for the first one's delayed ACK.
        made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection: Connection[Any, Any] = Connection(made.detach())
    answer_challenge(connection, key.encode())
    deliver_challenge(connection, key.encode())
    return connection


def _limit(connection: Connection[Any, Any], seconds: int) -> None:
    """Have each read of a connection end after so many seconds, of 0 never."""
    with socket.socket(fileno=os.dup(connection.fileno())) as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", seconds, 0))
