"""A replication stream whose relations are looked up in the catalog together.

The server describes each table before its first change on a connection, and the capture asks the
catalog about each. Where many tables change, as behind the start of a stream, a query for each takes
seconds. So the messages that have arrived already are read ahead, and one query asks about the relations
among them. It reads the catalog as it is when all of them have arrived, as a query for each would.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Final

from penstock.core.errors import CaptureError
from penstock.postgres import pgoutput
from penstock.postgres.catalog import CaptureCatalog
from penstock.postgres.decoder import Includes
from penstock.postgres.pgoutput import ProtocolError, Relation
from penstock.postgres.replication import Keepalive, ReplicationStream
from penstock.postgres.table import Shape

_MESSAGES: Final = 2_000
_BYTES: Final = 1 << 20
_RELATION: Final = b"R"

Message = bytes | Keepalive


class ReadAhead:
    """Reads `stream`; used by the capture's thread alone."""

    def __init__(
        self, stream: ReplicationStream, catalog: CaptureCatalog, includes: Includes
    ) -> None:
        self._stream = stream
        self._catalog = catalog
        self._includes = includes
        self._ahead: deque[Message | CaptureError] = deque()
        # Each is of a message that is in `_ahead`: what comes later is looked up when it has come.
        self._shapes: dict[Relation, Shape] = {}

    def reader(self) -> Callable[[], Message | None]:
        """Return what reads the next messages, until `shape` is called."""
        return self.read if self._ahead else self._stream.read

    def read(self) -> Message | None:
        """Return the next message; see `ReplicationStream.read`."""
        if not self._ahead:
            return self._stream.read()
        found = self._ahead.popleft()
        if isinstance(found, CaptureError):
            raise found
        return found

    def shape(self, relation: Relation) -> Shape:
        """Return the shape of the relation that was read last; raises `CaptureError`."""
        shape = self._shapes.pop(relation, None)
        if shape is not None:
            return shape
        relations = [relation, *self._relations_ahead()]
        self._shapes = dict(zip(relations, self._catalog.shapes(relations), strict=True))
        return self._shapes.pop(relation)

    def _relations_ahead(self) -> list[Relation]:
        self._fill()
        found = []
        for data in self._ahead:
            if type(data) is bytes and data[:1] == _RELATION:
                try:
                    relation = pgoutput.parse(data)
                except ProtocolError:
                    break  # an error when its turn comes
                assert isinstance(relation, Relation)  # noqa: S101 - by its first byte
                if self._includes(relation.schema, relation.name):
                    found.append(relation)
        return found

    def _fill(self) -> None:
        """Read what has arrived, up to a bound."""
        size = sum(len(data) for data in self._ahead if type(data) is bytes)
        try:
            self._stream.receive()
            while len(self._ahead) < _MESSAGES and size < _BYTES:
                data = self._stream.read()
                if data is None:
                    return
                self._ahead.append(data)
                size += len(data) if type(data) is bytes else 0
        except CaptureError as error:
            self._ahead.append(error)  # once what came before it is handled
