"""What several integration tests are given."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from tests.api_help import ApiServer, Shop
from tests.conftest import SharedPostgres
from tests.streams_help import make_stream

from penstock.core.connect import connect
from penstock.embedded.handles import Database
from penstock.outbox.sql.install import install
from penstock.streams.records import StreamRecord
from penstock.streams.store import Store


def _store(url: str) -> None:
    Store.open(url).close()


def _outboxes(url: str) -> None:
    with connect(url) as connection:
        install(connection)


@pytest.fixture
def template(postgres: SharedPostgres, request: pytest.FixtureRequest) -> str | None:
    """The database that the test's own is a copy of: with the schema that its fixtures would make."""
    if "tide" in request.fixturenames:
        return postgres.template("template_outboxes", _outboxes)
    if {"store", "shop"} & set(request.fixturenames):
        return postgres.template("template_store", _store)
    return None


@pytest.fixture(scope="module")
def shared_database(postgres: SharedPostgres) -> Iterator[Database]:
    """A database with the schema of a store, for a file whose tests share it."""
    name = f"test_{uuid.uuid4().hex[:12]}"
    url = postgres.create_database(name, postgres.template("template_store", _store))
    database = Database(name, url)
    yield database
    database.drop(postgres.url)


@pytest.fixture
def store(database: Database) -> Iterator[Store]:
    with Store.open(database.url) as store:
        yield store


@pytest.fixture
def stream(store: Store) -> StreamRecord:
    return make_stream(store)


@pytest.fixture
def shop(database: Database) -> Iterator[Shop]:
    with Shop(database.url) as shop:
        yield shop


@pytest.fixture
def console(shop: Shop) -> ApiServer:
    """The API whose console `window` shows."""
    return shop.api
