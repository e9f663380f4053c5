"""A sink that is cut off under load: nobody else notices, and nothing is lost or there twice.

`python -m tests.chaos --outage 120` runs it at length.
"""

from __future__ import annotations

import uuid
from pathlib import Path
from statistics import median

import pytest

from penstock.embedded.handles import Database
from penstock.embedded.postgres import EmbeddedPostgres

from ..chaos.outage import Outage, own_servers

SECONDS = 15


@pytest.mark.alone
def test_a_server_that_is_gone_under_load(
    postgres: EmbeddedPostgres, database: Database, server_dir: Path, tmp_path: Path
) -> None:
    name = f"store_{uuid.uuid4().hex[:8]}"
    store = Database(name, postgres.create_database(name))
    try:
        with own_servers(server_dir / name) as servers:
            outcome = Outage(tmp_path, database, store, *servers, seconds=SECONDS).run()
    finally:
        store.drop(postgres.url)
    print("\n".join(outcome.lines()))
    assert outcome.states == [
        "sink is behind, its messages wait in the store",
        "sink detached",
        "sink attached again, its backlog is delivered",
    ] or outcome.states == ["sink detached", "sink attached again, its backlog is delivered"]
    assert outcome.backlog > 1000
    assert max(outcome.slot_seconds) < 5
    for sink in ("stream", "nats"):
        before, during = outcome.before[sink], outcome.during[sink]
        assert len(during) > 500
        assert median(during) < max(2 * median(before), 0.3), sink
        assert max(during) < 5, sink
