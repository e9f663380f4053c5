"""What several integration tests are given."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.api_help import ApiServer, Shop
from tests.streams_help import make_stream

from penstock.embedded.handles import Database
from penstock.streams.records import StreamRecord
from penstock.streams.store import Store


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
