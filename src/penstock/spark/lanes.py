"""The lanes of long batches, the tasks' end: parts of rounds come in, and reports go back.

The process of the capture listens. Each task of a long batch connects to it twice: where Spark reads,
for what the lane is handed (`read`), and where it writes to the sinks, for its reports (`Reports`).
These are two processes, perhaps on another machine. As for the run's monitor, a challenge keeps out
clients without the secret, which the tasks of the query have.

A frame is its length in four bytes and its bytes: to the reader one that begins with its kind, from the
writer a report. These are sockets of our own, not Flight: a small frame takes the sender
15 µs of CPU there, 40 over Flight.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from typing import IO, Any, Final, cast

import msgspec
from pyspark.sql.datasource import InputPartition

from penstock.core.acceptor import connect
from penstock.core.blocks import Opening
from penstock.core.errors import SparkError

LENGTH: Final = struct.Struct("!I")
READ_SIZE: Final = 1 << 18
_KEEPALIVE: Final = (
    ("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 4), ("TCP_USER_TIMEOUT", 20_000),
)  # fmt: skip
"""A machine that is gone without a word is noticed within half a minute."""

MORE: Final = b"m"
"""A frame with a block of a part that has more."""
LAST: Final = b"l"
"""A frame with the last block of what is sent at once."""
END: Final = b"e"
"""The frame that ends a lane."""
AGAIN: Final = b"a"
"""The frame to a reader of what another has read."""


@dataclass
class Lane(InputPartition):
    """One task of the long batch `batch`."""

    address: str = field(repr=False)
    batch: int
    number: int


def read(lane: Lane, session: int) -> Iterator[tuple[bytes, bytes]]:
    """Yield the frames of a lane, kind and bytes, until its end.

    Raises `SparkError` where the process of the capture is gone.
    """
    try:
        sock = connected(lane.address, ["read", lane.batch, lane.number, session])
        with sock, sock.makefile("rb", READ_SIZE) as made:
            file = cast("IO[bytes]", made)
            for kind, data in frames(file):
                if kind == END:
                    return
                if kind == AGAIN:
                    raise SparkError(
                        "read_twice",
                        f"Lane {lane.number} of long batch {lane.batch} was read before, and its"
                        " messages are not kept.",
                        remedy="A query with latency=realtime can read its stream once a batch: persist"
                        " the frame before its second action, or set latency=batch.",
                    )
                yield kind, data
    except (OSError, EOFError, AuthenticationError) as error:
        raise SparkError(
            "capture_gone",
            f"The process that captures the changes is gone ({type(error).__name__}).",
            remedy="Spark starts the query again; the log has why it ended.",
            transient=True,
        ) from None


def frames(file: IO[bytes]) -> Iterator[tuple[bytes, bytes]]:
    """Yield the frames that come, kind and bytes; raises `EOFError` and `OSError`."""
    while True:
        data = _exactly(file, *LENGTH.unpack(_exactly(file, LENGTH.size)))
        yield data[:1], data[1:]


def _exactly(file: IO[bytes], size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError
    return data


class Reports:
    """The task's reports of the parts that it has delivered.

    Its methods raise `OSError` where the process of the capture is gone.
    """

    def __init__(self, opening: Opening) -> None:
        self._sock = connected(
            opening.address, ["write", opening.batch, opening.lane, opening.session]
        )

    def send(self, report: list[Any]) -> None:
        """Send a report."""
        data = msgspec.msgpack.encode(report)
        self._sock.sendall(LENGTH.pack(len(data)) + data)

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()


def connected(address: str, hello: list[Any]) -> socket.socket:
    """Return a connection to the process that has the lanes; `hello` is sent first."""
    connection = connect(address)
    connection.send_bytes(msgspec.msgpack.encode(hello))
    return socket_of(connection)


def socket_of(connection: Connection[Any, Any]) -> socket.socket:
    """Return the socket of a connection, which is closed."""
    with connection:
        sock = socket.socket(fileno=os.dup(connection.fileno()))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _KEEPALIVE:
        if (option := getattr(socket, name, None)) is not None:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
    return sock
