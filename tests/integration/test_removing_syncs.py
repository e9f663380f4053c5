"""What is left of the syncs goes with the last one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tests.integration.test_removing import Bed

from penstock.embedded.handles import Database
from penstock.streams.store import Store


@pytest.fixture
def bed(database: Database) -> Iterator[Bed]:
    with Store.open(database.url) as store:
        yield Bed(store)


def test_the_slot_of_the_syncs_goes_with_the_last_one(bed: Bed, database: Database) -> None:
    def slots() -> list[Any]:
        query = "SELECT 1 FROM pg_replication_slots WHERE slot_name = 'penstock_syncs'"
        return database.execute(query)

    database.execute("SELECT pg_create_logical_replication_slot('penstock_syncs', 'pgoutput')")
    try:
        sync = {"provider": "stripe", "collections": ["prices"], "credential": "live"}
        live = {"provider": "stripe", "properties": {"api_key": "x"}}
        before = bed.write(("credential", "live", live), ("sync", "a", sync), ("sync", "b", sync))
        bed.register(before)
        bed.write(("sync", "a", None))
        assert bed.left() == []
        bed.write(("sync", "b", None))
        assert bed.left() == ["syncs"]
        after = bed.write(("sync", "b", sync))  # one that comes again begins with a slot of its own
        assert bed.remover.left("syncs", after.only("syncs"))
        assert bed.remover.before_run("syncs", after.only("syncs")) is None
        assert (bed.left(), slots()) == ([], [])
        database.execute("SELECT pg_create_logical_replication_slot('penstock_syncs', 'pgoutput')")
        bed.write(("sync", "b", None))
        bed.remover.sweep()
        assert (bed.left(), slots()) == ([], [])
        assert set(bed.streams()) == {"records", "events"}
    finally:
        if slots():
            database.execute("SELECT pg_drop_replication_slot('penstock_syncs')")
