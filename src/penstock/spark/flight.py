"""Arrow Flight from the capture to the executors, for batches too large to travel in a task.

A ticket is `<secret>:<number>`; each server has a new secret, which is known only to the
tasks of its query.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator

import pyarrow as pa
from pyarrow import flight


class BatchServer(flight.FlightServerBase):  # type: ignore[misc]  # pyarrow has no types
    """Serves batches by number for as long as it holds them."""

    def __init__(self, host: str) -> None:
        super().__init__(f"grpc://{host}:0")
        self.location = f"grpc://{host}:{self.port}"
        self._secret = secrets.token_hex(16)
        self._batches: dict[int, pa.RecordBatch] = {}
        self._next = 0
        self._lock = threading.Lock()

    def offer(self, batch: pa.RecordBatch) -> str:
        """Keep a batch and return the ticket that fetches it."""
        with self._lock:
            self._next += 1
            self._batches[self._next] = batch
            return f"{self._secret}:{self._next}"

    def forget(self) -> None:
        """Drop all batches: their tasks have ended."""
        with self._lock:
            self._batches.clear()

    def do_get(
        self, _: flight.ServerCallContext, ticket: flight.Ticket
    ) -> flight.RecordBatchStream:
        """Answer a ticket with its batch (Flight's own interface)."""
        secret, _, number = ticket.ticket.decode().partition(":")
        if not secrets.compare_digest(secret, self._secret):
            raise flight.FlightUnauthenticatedError("unknown ticket")
        with self._lock:
            batch = self._batches.get(int(number))
        if batch is None:
            raise flight.FlightServerError(f"batch {number} is gone")
        return flight.RecordBatchStream(pa.RecordBatchReader.from_batches(batch.schema, [batch]))


_clients: dict[str, flight.FlightClient] = {}


def fetch(location: str, ticket: str) -> Iterator[pa.RecordBatch]:
    """Yield the batches behind a ticket; the connection lasts for the worker's life."""
    client = _clients.get(location)
    if client is None:
        # A worker serves one query after another; what an ended one left behind is closed.
        for old in _clients.values():
            old.close()
        _clients.clear()
        client = _clients[location] = flight.connect(location)
    for chunk in client.do_get(flight.Ticket(ticket.encode())):
        yield chunk.data
