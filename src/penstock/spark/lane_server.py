"""The lanes of long batches, the end of the capture's process: it listens for the tasks.

One thread sends parts and takes reports, over sockets that do not block; see `penstock.spark.lanes`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import selectors
import socket
import threading
from collections import deque
from dataclasses import dataclass, field
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection
from queue import Empty, SimpleQueue
from typing import Any, Final

import msgspec

from penstock.core.acceptor import Acceptor, authenticate
from penstock.spark.lanes import AGAIN, END, LENGTH, READ_SIZE, socket_of

_LOOK_SECONDS: Final = 0.5


def await_open(opened: threading.Event, thread: threading.Thread) -> None:
    """Wait until the polling thread has opened a batch, or has ended.

    A task that comes before is refused, as of another batch: so none may be planned before.
    """
    while thread.is_alive() and not opened.wait(_LOOK_SECONDS):
        pass


@dataclass(slots=True)
class Joined:
    """A lane's task is there, connected to its sinks."""

    lane: int


@dataclass(slots=True)
class Lost:
    """A lane's task is gone."""

    lane: int


@dataclass(slots=True)
class Reported:
    """A lane's task has sent a report."""

    lane: int
    report: list[Any]


Event = Joined | Lost | Reported


@dataclass(eq=False)
class _Peer:
    """A task's connection, for one role."""

    sock: socket.socket
    role: str
    batch: int
    lane: int
    session: int
    received: bytearray = field(default_factory=bytearray)
    unsent: deque[memoryview] = field(default_factory=deque)
    waits: bool = False


@dataclass
class _Attempts:
    """The attempts of a lane's task, the oldest first, which is the one that counts."""

    readers: list[_Peer] = field(default_factory=list)
    writers: list[_Peer] = field(default_factory=list)
    joined: int | None = None  # the session
    read: int = -1
    """The last batch that was read to its end."""

    def pair(self, batch: int, *, reports: bool) -> int | None:
        """Return the session of the oldest reader, if it is of a batch and its writer is there too."""
        if not self.readers or self.readers[0].batch != batch:
            return None
        session = self.readers[0].session
        there = not reports or any(w.session == session for w in self.writers)
        return session if there else None


class LaneServer:
    """Listens for the tasks of one query's long batches; `host` is where executors reach it.

    With `reports` a lane has joined when its writer is there too. One thread calls `poll`, `send` and
    `end`; any may call `wake`.
    """

    def __init__(self, host: str, *, reports: bool) -> None:
        self._reports = reports
        self._key = secrets.token_hex(16)
        self._selector = selectors.DefaultSelector()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_read, False)
        os.set_blocking(self._wake_write, False)
        self._selector.register(self._wake_read, selectors.EVENT_READ)
        self._arrived: SimpleQueue[_Peer] = SimpleQueue()
        self._batch = -1
        self._lanes: dict[int, _Attempts] = {}
        self._closed = False
        self._acceptor = Acceptor(host, self._greet, "lanes")
        self.address = f"{host}:{self._acceptor.port}:{self._key}"

    def open(self, batch: int) -> None:
        """Begin a batch: tasks of others are ended as they come."""
        self._batch = batch

    def wake(self) -> None:
        """End the wait of `poll`."""
        with contextlib.suppress(OSError):  # full, so it wakes; or closed
            os.write(self._wake_write, b"\0")

    def poll(self, seconds: float) -> list[Event]:
        """Return what has happened, waiting so long for something to happen."""
        events: list[Event] = []
        for key, mask in self._selector.select(seconds):
            peer = key.data
            if peer is None:
                with contextlib.suppress(BlockingIOError):
                    os.read(self._wake_read, 4096)
                self._take_arrived(events)
                continue
            if mask & selectors.EVENT_WRITE and peer.sock.fileno() >= 0:
                self._flush(peer)
            if mask & selectors.EVENT_READ and peer.sock.fileno() >= 0:
                self._receive(peer, events)
        return events

    def send(self, lane: int, kind: bytes, data: bytes) -> None:
        """Send a frame to a lane that has joined; what it does not take now goes with `poll`."""
        attempts = self._lanes.get(lane)
        if attempts is not None and attempts.readers:
            self._send(attempts.readers[0], kind, data)

    @property
    def unsent(self) -> bool:
        """Whether some lane has not taken all that was sent to it."""
        return any(a.readers and a.readers[0].unsent for a in self._lanes.values())

    def end(self) -> None:
        """End all lanes of the batch."""
        self._batch = -1
        for attempts in self._lanes.values():
            if attempts.joined is not None:
                attempts.read = attempts.readers[0].batch
            attempts.joined = None
            for nth, reader in enumerate(attempts.readers):
                self._send(reader, AGAIN if nth and attempts.read == reader.batch else END, b"")

    def close(self) -> None:
        """Hang up on all tasks; may be called again."""
        if self._closed:
            return
        self._closed = True
        self._acceptor.close()
        for key in list(self._selector.get_map().values()):
            if key.data is not None:
                key.data.sock.close()
        self._selector.close()

    # -- in its own thread

    def _greet(self, connection: Connection[Any, Any]) -> None:
        """Have a task prove what it is; strangers are hung up on."""
        try:
            authenticate(connection, self._key)
            hello = msgspec.msgpack.decode(connection.recv_bytes())
            made = socket_of(connection)
        except (OSError, EOFError, AuthenticationError, msgspec.DecodeError):
            return
        made.setblocking(False)
        self._arrived.put(_Peer(made, *hello))
        self.wake()

    # -- in the polling thread

    def _take_arrived(self, events: list[Event]) -> None:
        with contextlib.suppress(Empty):
            while True:
                peer = self._arrived.get_nowait()
                self._selector.register(peer.sock, selectors.EVENT_READ, peer)
                attempts = self._lanes.setdefault(peer.lane, _Attempts())
                (attempts.readers if peer.role == "read" else attempts.writers).append(peer)
                if peer.role == "read" and peer.batch != self._batch:
                    self._send(peer, AGAIN if peer.batch == attempts.read else END, b"")
                else:
                    self._pair(peer.lane, attempts, events)

    def _pair(self, lane: int, attempts: _Attempts, events: list[Event]) -> None:
        found = attempts.pair(self._batch, reports=self._reports)
        if found == attempts.joined:
            return
        if attempts.joined is not None:
            events.append(Lost(lane))
        attempts.joined = found
        if found is not None:
            events.append(Joined(lane))

    def _receive(self, peer: _Peer, events: list[Event]) -> None:
        try:
            data = peer.sock.recv(READ_SIZE)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer, events)
            return
        peer.received += data
        at = 0
        while len(peer.received) - at >= LENGTH.size:
            (size,) = LENGTH.unpack_from(peer.received, at)
            end = at + LENGTH.size + size
            if len(peer.received) < end:
                break
            report = msgspec.msgpack.decode(bytes(peer.received[at + LENGTH.size : end]))
            events.append(Reported(peer.lane, report))
            at = end
        del peer.received[:at]

    def _drop(self, peer: _Peer, events: list[Event]) -> None:
        self._selector.unregister(peer.sock)
        peer.sock.close()
        attempts = self._lanes[peer.lane]
        (attempts.readers if peer.role == "read" else attempts.writers).remove(peer)
        if peer.role == "write":
            # Its reader is of no use any more; Spark has both tried again.
            for reader in [r for r in attempts.readers if r.session == peer.session]:
                self._drop(reader, events)
        self._pair(peer.lane, attempts, events)

    def _send(self, peer: _Peer, kind: bytes, data: bytes) -> None:
        frame = memoryview(b"".join((LENGTH.pack(len(data) + 1), kind, data)))
        peer.unsent.append(frame)
        if len(peer.unsent) == 1:
            self._flush(peer)

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.unsent:
                view = peer.unsent[0]
                sent = peer.sock.send(view)
                if sent < len(view):
                    peer.unsent[0] = view[sent:]
                else:
                    peer.unsent.popleft()
        except BlockingIOError:
            pass
        except OSError:
            peer.unsent.clear()  # `poll` finds it closed
        if bool(peer.unsent) != peer.waits:
            peer.waits = bool(peer.unsent)
            mask = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.waits else 0)
            self._selector.modify(peer.sock, mask, peer)
