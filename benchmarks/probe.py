"""What the benchmarks ask JetStream: a small synchronous client that costs the machine little.

The harness shares its cores with the contenders, so it polls a stream's count with one small
request and reads messages in large chunks, stamped as they come and taken apart after the run.
"""

from __future__ import annotations

import bisect
import json
import re
import secrets
import select
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import accumulate
from typing import Any, Self
from urllib.parse import urlsplit

_RECEIVE = 1 << 20
_STATUS = re.compile(rb"NATS/1\.0 (\d{3})")

_PONG_EVERY_NS = 30 * 10**9

DUPLICATE_WINDOW_S = 120


class ProbeError(Exception):
    """The NATS server said no, or nothing."""


MESSAGE_ID = re.compile(rb"\r\nNats-Msg-Id: *([^\r\n]+)")
ROW_ID = re.compile(rb'"id": ?"?(\d+)')


@dataclass(slots=True)
class Received:
    """Bytes as they came from the socket, with the time at which each chunk was there."""

    chunks: list[bytes] = field(default_factory=list)
    times_ns: list[int] = field(default_factory=list)

    def messages(self) -> Iterator[tuple[int, bytes, bytes]]:
        """Yield each whole message: when its last byte had come, its headers, its body."""
        ends = list(accumulate(len(chunk) for chunk in self.chunks))
        data = b"".join(self.chunks)
        at = 0
        while True:
            line_end = data.find(b"\r\n", at)
            if line_end < 0:
                return
            words = data[at:line_end].split()
            start = line_end + 2
            if not words or words[0] not in (b"MSG", b"HMSG"):  # PING, +OK, INFO
                at = start
                continue
            total = int(words[-1])
            headers = int(words[-2]) if words[0] == b"HMSG" else 0
            if start + total + 2 > len(data):
                return
            when = self.times_ns[bisect.bisect_left(ends, start + total)]
            yield when, data[start : start + headers], data[start + headers : start + total]
            at = start + total + 2


class Probe:
    """One connection to one NATS server."""

    def __init__(self, url: str, timeout: float = 10) -> None:
        parts = urlsplit(url)
        self._socket = socket.create_connection((parts.hostname or "", parts.port or 4222), timeout)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._timeout = timeout
        self._tail = b""
        self._greeting = b""
        self._inbox = f"_INBOX.{secrets.token_hex(8)}"  # two probes must not share one
        self._pong_ns = time.monotonic_ns()
        self._replies = 0
        self._send(
            b'CONNECT {"verbose":false,"pedantic":false,"headers":true,"no_responders":true,'
            b'"lang":"python","version":"0","name":"bench"}\r\n'
            + f"SUB {self._inbox}.* 1\r\n".encode()
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def create_stream(self, name: str) -> None:
        """Make an empty file-backed stream for the subjects `<name>.>`, away with an older one."""
        self.delete_stream(name)
        self._api(
            f"STREAM.CREATE.{name}",
            {
                "name": name,
                "subjects": [f"{name}.>"],
                "storage": "file",
                "retention": "limits",
                "discard": "old",
                "max_msgs": -1,
                "max_bytes": -1,
                "max_age": 0,
                "num_replicas": 1,
                "duplicate_window": DUPLICATE_WINDOW_S * 10**9,
            },
        )

    def delete_stream(self, name: str) -> None:
        """Drop a stream if it is there."""
        try:
            self._api(f"STREAM.DELETE.{name}")
        except ProbeError as error:
            if "10059" not in str(error):  # stream not found
                raise

    def count(self, name: str) -> int:
        """Return how many messages the stream holds."""
        return int(self._api(f"STREAM.INFO.{name}")["state"]["messages"])

    def count_of(self, name: str, subject: str) -> int:
        """Return how many messages the stream holds under a subject, which may have wildcards."""
        state = self._api(f"STREAM.INFO.{name}", {"subjects_filter": subject})["state"]
        return sum((state.get("subjects") or {}).values())

    def time_of(self, name: str, subject: str, *, first: bool) -> datetime:
        """Return when the stream took the first, or the last, message under a subject.

        Raises `ProbeError` where there is none.
        """
        which = {"next_by_subj": subject, "seq": 1} if first else {"last_by_subj": subject}
        stored = self._api(f"STREAM.MSG.GET.{name}", which)["message"]["time"]
        # Nanoseconds, which `datetime` does not take.
        return datetime.fromisoformat(re.sub(r"(\.\d{6})\d*Z", r"\1+00:00", stored))

    def server_version(self) -> str:
        """Return the server's version, from what it says to every client."""
        found = re.search(rb'"version":"([^"]+)"', self._greeting)
        return found[1].decode() if found else "unknown"

    def read(self, name: str, expected: int, timeout: float = 120) -> Received:
        """Return all messages of the stream, at least `expected` of them if they are there."""
        self.subscribe(name)
        received = Received()
        deadline = time.monotonic() + timeout
        seen = 0
        # A header cut in two by a chunk's end is not counted here; then the silence ends the loop.
        while seen < expected and self.receive(received, 1) and time.monotonic() < deadline:
            seen += received.chunks[-1].count(b"\r\nNats-Msg-Id:")
        return received

    def subscribe(self, name: str, subject: str = ">") -> None:
        """Have an ephemeral consumer push the whole stream, and what follows, to this connection.

        Of the stream only what `subject`, which may have wildcards, covers. From then on the
        connection is for `receive` only.
        """
        deliver = f"_DELIVER.{secrets.token_hex(8)}"
        self._api(
            f"CONSUMER.CREATE.{name}",
            {
                "stream_name": name,
                "config": {
                    "deliver_policy": "all",
                    "deliver_subject": deliver,
                    "filter_subject": subject,
                    "ack_policy": "none",
                    "max_deliver": -1,
                    "inactive_threshold": 600 * 10**9,
                },
            },
        )
        self._send(f"SUB {deliver} 2\r\n".encode())

    def receive(self, into: Received, timeout: float) -> int:
        """Add what has come to `into` and return its size; waits at most `timeout` seconds."""
        ready, _, _ = select.select([self._socket], [], [], timeout)
        if not ready:
            return 0
        chunk = self._socket.recv(_RECEIVE)
        now = time.monotonic_ns()
        if not chunk:
            raise ProbeError("the NATS server closed the connection; see its log")
        if now - self._pong_ns > _PONG_EVERY_NS:
            # Not waiting for the PING spares a search of every chunk.
            self._send(b"PONG\r\n")
            self._pong_ns = now
        into.chunks.append(chunk)
        into.times_ns.append(now)
        return len(chunk)

    def _api(self, subject: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        """Make a JetStream API request and return the answer."""
        self._replies += 1
        inbox = f"{self._inbox}.{self._replies}"
        payload = json.dumps(body).encode() if body else b""
        self._send(f"PUB $JS.API.{subject} {inbox} {len(payload)}\r\n".encode() + payload + b"\r\n")
        deadline = time.monotonic() + self._timeout
        while True:
            for headers, data in self._read_messages(inbox.encode(), deadline):
                status = _STATUS.match(headers)
                if status:
                    raise ProbeError(f"JetStream request {subject}: status {status[1].decode()}")
                answer: dict[str, Any] = json.loads(data)
                if "error" in answer:
                    raise ProbeError(f"JetStream request {subject}: {answer['error']}")
                return answer

    def _read_messages(self, inbox: bytes, deadline: float) -> Iterator[tuple[bytes, bytes]]:
        """Yield the whole messages to `inbox` that the next chunk completes."""
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([self._socket], [], [], left)[0]:
            raise ProbeError(f"no answer from the NATS server within {self._timeout} s")
        chunk = self._socket.recv(_RECEIVE)
        if not chunk:
            raise ProbeError("the NATS server closed the connection; see its log")
        self._tail += chunk
        while b"\r\n" in self._tail:
            line, _, rest = self._tail.partition(b"\r\n")
            words = line.split()
            verb = words[0] if words else b""
            if verb in (b"MSG", b"HMSG"):
                total = int(words[-1])
                if len(rest) < total + 2:
                    return
                headers = int(words[-2]) if verb == b"HMSG" else 0
                self._tail = rest[total + 2 :]
                if words[1] == inbox:
                    yield rest[:headers], rest[headers:total]
                continue
            if verb == b"INFO":
                self._greeting = line
            elif verb == b"PING":
                self._send(b"PONG\r\n")
            elif verb == b"-ERR":
                raise ProbeError(f"the NATS server refused: {line.decode()}")
            self._tail = rest

    def _send(self, data: bytes) -> None:
        self._socket.sendall(data)
