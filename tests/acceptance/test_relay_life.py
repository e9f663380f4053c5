"""What a relay lives through: kills and restarts of what is around it."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.embedded.postgres import EmbeddedPostgres

from ..pipeline import Penstock
from ..relay_help import bodies, publish, publish_at_once, relay, set_outbox, status

KEPT = 10_000
WINDOW = 600.0
"""Seconds for which JetStream knows what it has: a busy machine may take long for a restart."""


@pytest.fixture
def store(postgres: EmbeddedPostgres) -> Iterator[Database]:
    """A database that is not the application's."""
    name = f"store_{uuid.uuid4().hex[:12]}"
    store = Database(name, postgres.create_database(name))
    yield store
    store.drop(postgres.url)


def error_of(process: Penstock, pipeline: str) -> object:
    return process.status().get("sinks", {}).get(pipeline, {}).get("error")


def test_kept_messages_stay_first_whatever_fails(
    app: Database, store: Database, broker: EmbeddedNats, streams: JetStream, tmp_path: Path
) -> None:
    """NATS is killed while they are read, and then the relay; its store is elsewhere."""
    streams.add_stream("A", "a", duplicate_window=WINDOW)
    app.execute("select tide.outbox_create('notifications')")
    publish_at_once(app, 1, KEPT)
    set_outbox(app, "a", "A")
    app.execute("select tide.relay_enable('a')")
    with relay(tmp_path, app, streams, "--store", store.url) as process:
        process.start()
        process.wait_for(lambda: streams.info("A").state.messages > 0, 150, "some delivered")
        publish(app, *range(KEPT + 1, KEPT + 11))
        broker.kill()
        publish(app, *range(KEPT + 11, KEPT + 21))
        process.wait_for(lambda: error_of(process, "a") is not None, 60, "told")
        process.kill_tree()
        broker.start()
        assert streams.info("A").state.messages < KEPT
        process.start()
        publish(app, *range(KEPT + 21, KEPT + 31))
        process.wait_for(lambda: streams.info("A").state.messages >= KEPT + 30, 150, "delivered")
        process.wait_for(lambda: status(app, "a")["state"] == "running", 60, "running")
        assert process.stop() == 0
    assert bodies(streams, "A") == list(range(1, KEPT + 31))
    assert store.execute("select name from penstock.sources") != []
    assert app.execute("select 1 from pg_namespace where nspname = 'penstock'") == []
