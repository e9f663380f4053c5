"""A webhook's endpoint that answers 200 to everything and counts.

`python -m benchmarks.streams.endpoint PORT PROGRESS LOG`: slot 0 of the file PROGRESS has how many
different messages came, slot 1 the requests; the head of the first request goes to the file LOG.
"""

from __future__ import annotations

import asyncio
import re
import sys
from pathlib import Path
from typing import ClassVar, cast

import orjson
import uvloop

from benchmarks.streams.progress import Progress

_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"


class Endpoint(asyncio.Protocol):
    """One connection."""

    requests = 0
    messages: ClassVar[set[int]] = set()

    def __init__(self, progress: Progress, log: Path) -> None:
        self._progress = progress
        self._log = log
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        """Answer what is whole."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._data, 0, end)
            start = end + 4
            stop = start + (int(length[1]) if length else 0)
            if len(self._data) < stop:
                return
            self._count(self._data[:end], self._data[start:stop])
            self._data = self._data[stop:]
            self._transport.write(_ANSWER)

    def _count(self, head: bytes, body: bytes) -> None:
        if not Endpoint.requests:
            self._log.write_bytes(head)
        content = orjson.loads(body)
        Endpoint.requests += 1
        for message in content.get("data", [content]):
            Endpoint.messages.add(message["record"]["id"])
        self._progress.mark(0, len(Endpoint.messages))
        self._progress.mark(1, Endpoint.requests)


async def serve(port: int, progress: Progress, log: Path) -> None:
    """Serve until the process ends."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Endpoint(progress, log), "127.0.0.1", port)
    print("ready", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    with Progress(Path(sys.argv[2])) as shared:
        uvloop.run(serve(int(sys.argv[1]), shared, Path(sys.argv[3])))
