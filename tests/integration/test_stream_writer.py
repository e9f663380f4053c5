"""What a pipeline writes to a stream: whole, once, in order, and never with a gap for a reader."""

from __future__ import annotations

from collections.abc import Iterator

import orjson
import pytest
from tests.streams_help import deleted, inserted, make_stream, publish, updated

from penstock.embedded.handles import Database
from penstock.streams.store import Store


@pytest.fixture
def store(database: Database) -> Iterator[Store]:
    with Store.open(database.url) as store:
        yield store


def test_messages_are_what_the_contract_says(store: Store, database: Database) -> None:
    stream = make_stream(store)
    positions = publish(store, stream, [inserted(1, name="é"), updated(1, name="b"), deleted(1)])
    rows = database.execute("SELECT * FROM penstock.segment_1 ORDER BY lsn, idx")
    assert [row[:2] for row in rows] == positions
    assert [row[4:8] for row in rows] == [
        (None, "public", "items", action) for action in ("insert", "update", "delete")
    ]
    message = orjson.loads(rows[0][8])
    assert list(message) == ["record", "changes", "action", "metadata"]
    assert message["record"] == {"id": 1, "name": "é"}
    assert message["changes"] is None
    assert message["metadata"]["commit_lsn"] == 101
    assert all(row[8].endswith("}}") for row in rows)
    assert store.head(1) == positions[-1]
