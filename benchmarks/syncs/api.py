"""A fake API as a process of its own: `python -m benchmarks.syncs.api RECORDS`.

It prints its port, and serves until it is ended. Pages are made when they are asked for, so that each
side gets the same ones and none waits for the other's.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self
from urllib.parse import parse_qs, urlsplit

from benchmarks.contenders import HERE, ContenderError

PATH = "contacts"
_OBJECT = (
    b'{"id":%d,"changed":%d,"at":%d,"created":%d,"object":"customer","name":"Customer number %d",'
    b'"email":"customer.%d@example.com","phone":"+49 30 %08d","currency":"eur","balance":%d,'
    b'"delinquent":false,"livemode":true,"address":{"line1":"Long street %d","city":"Berlin",'
    b'"postal_code":"%05d","country":"DE","state":null},"description":"a note of the customer"}'
)
_STEP_MS = 1000
_FAR_MS = 60_000
"""How far before the start the newest object has changed: no poll's overlap reaches it again."""


class _Objects:
    """`count` objects, by their numbers, in the order in which they have changed."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._began_ms = time.time_ns() // 1_000_000 - _FAR_MS - count * _STEP_MS
        self._changed: dict[int, tuple[int, int]] = {}  # by number: ms, and ns exactly
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """Forget the requests so far."""
        self.asked: dict[str, float] = {"requests": 0, "first": 0.0, "last": 0.0}

    def change(self, number: int) -> int:
        """Change an object; return when, in ns of Unix time."""
        with self._lock:
            at = time.time_ns()
            # Later than all others, so that they have one order.
            newest = max((ms for ms, _ in self._changed.values()), default=0)
            self._changed.pop(number, None)
            self._changed[number] = (max(at // 1_000_000, newest), at)
            return at

    def page(self, since: int | None, begin: int, limit: int) -> bytes:
        """Return a page, and note that it was asked for."""
        now = time.time()
        with self._lock:
            self.asked["requests"] += 1
            self.asked["first"] = self.asked["first"] or now
            changed = dict(self._changed)
        first = 0
        if since is not None:
            first = min(max(-((self._began_ms - since) // _STEP_MS), 0), self._count)
        numbers: Any = range(first, self._count)
        if changed:
            numbers = [n for n in numbers if n not in changed]
            numbers += [n for n, (ms, _) in changed.items() if since is None or ms >= since]
        some = numbers[begin : begin + limit]
        objects = b",".join([self._object(n, *changed.get(n, (None, 0))) for n in some])
        end = begin + limit
        following = b'"%d"' % end if end < len(numbers) else b"null"
        self.asked["last"] = time.time()
        return b'{"data":[%b],"cursors":{"next":%b}}' % (objects, following)

    def _object(self, n: int, ms: int | None, ns: int) -> bytes:
        at = self._began_ms + n * _STEP_MS
        return _OBJECT % (n, at if ms is None else ms, ns, at, n, n, n, n, n, n % 100_000)


def main() -> None:
    """Serve."""
    objects = _Objects(int(sys.argv[1]))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
            if parts.path == f"/{PATH}":
                since = query.get("since")
                body = objects.page(
                    None if since is None else int(since),
                    int(query.get("cursor", 0)), int(query.get("limit", 100)),
                )  # fmt: skip
            elif parts.path == "/_change":
                body = json.dumps(objects.change(int(query["number"]))).encode()
            else:
                body = json.dumps(objects.asked).encode()
                if parts.path == "/_reset":
                    objects.reset()
            head = (
                f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
            )
            self.wfile.write(head.encode() + b"\r\n\r\n" + body)

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    print(server.server_port, flush=True)
    server.serve_forever()


@dataclass(frozen=True, slots=True)
class Asked:
    """What was asked of the API since it was reset; times in seconds of Unix time."""

    requests: int
    first: float
    last: float


class FakeApi:
    """The API that runs at `url`."""

    def __init__(self, url: str) -> None:
        self.url = url

    def reset(self) -> None:
        """Forget the requests so far."""
        self._get("/_reset")

    def asked(self) -> Asked:
        """Return what was asked of it."""
        found = self._get("/_stats")
        return Asked(int(found["requests"]), found["first"], found["last"])

    def change(self, number: int) -> int:
        """Change an object; return when, in ns of Unix time."""
        return int(self._get(f"/_change?number={number}"))

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.url + path, timeout=60) as answer:
            return json.loads(answer.read())

    @classmethod
    @contextmanager
    def serve(cls, records: int) -> Iterator[Self]:
        """Start one with so many objects; ends it, however the block is left."""
        command = [sys.executable, "-m", "benchmarks.syncs.api", str(records)]
        with subprocess.Popen(command, cwd=Path(HERE).parent, stdout=subprocess.PIPE) as process:
            try:
                assert process.stdout is not None
                port = process.stdout.readline().strip().decode()
                if not port:
                    raise ContenderError("the fake API does not start")
                yield cls(f"http://127.0.0.1:{port}")
            finally:
                process.kill()


if __name__ == "__main__":
    main()
