"""What the tests of the relay run against, and those of syncs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.outbox.sql.install import install

from ..loopback_api import Answer, Asked, LoopbackApi


class Crm(Protocol):
    """What a test's fixture `crm` gives: the objects of an API."""

    def answer(self, asked: Asked) -> Answer: ...


@pytest.fixture
def api(crm: Crm) -> Iterator[LoopbackApi]:
    """The API on the loopback address."""
    with LoopbackApi(crm.answer) as made:
        yield made


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
