"""What the tests of the relay run against: a database with the schema tide, a NATS of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.outbox.sql.install import install


@pytest.fixture
def app(database: Database) -> Database:
    """The application's database, with the schema tide."""
    with database.connect(autocommit=True) as connection:
        install(connection)
    return database


@pytest.fixture
def broker(server_dir: Path, request: pytest.FixtureRequest) -> Iterator[EmbeddedNats]:
    """A server that the test may stop."""
    with EmbeddedNats(server_dir / f"nats-{request.node.name}") as server:
        yield server


@pytest.fixture
def streams(broker: EmbeddedNats) -> Iterator[JetStream]:
    with JetStream(broker.url, error_cb=ignore_error) as handle:
        yield handle


async def ignore_error(_: Exception) -> None:
    """Stand in for nats-py's logging of every try to connect to a server that a test has stopped."""
