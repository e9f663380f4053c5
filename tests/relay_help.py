"""What the tests of `penstock relay` share: the process, and what they write and ask in SQL."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.embedded.handles import Database, JetStream

from .pipeline import Penstock


def relay(folder: Path, app: Database, streams: JetStream, *options: str) -> Penstock:
    folder.mkdir(exist_ok=True)
    environment = {"NATS_URL": streams.url}
    return Penstock(folder, "--url", app.url, *options, command="relay", environment=environment)


def bodies(streams: JetStream, stream: str) -> list[Any]:
    return [json.loads(message.data) for message in streams.messages(stream)]


def status(app: Database, pipeline: str) -> dict[str, Any]:
    found: dict[str, Any] = app.execute("select tide.relay_status(%s)", [pipeline])[0][0]
    return found


def slots(app: Database) -> int:
    """Return how many slots the database has."""
    query = "select from pg_replication_slots where database = current_database()"
    return len(app.execute(query))


def publish(app: Database, *numbers: int) -> None:
    """Publish numbers, each in a transaction of its own."""
    for number in numbers:
        app.execute("select tide.outbox_publish('notifications', to_jsonb(%s::int))", [number])


def publish_at_once(app: Database, first: int, last: int) -> None:
    """Publish numbers in one transaction."""
    app.execute(
        "select count(tide.outbox_publish('notifications', to_jsonb(n)))"
        " from generate_series(%s::int, %s) as n", [first, last],
    )  # fmt: skip


def set_outbox(
    app: Database, pipeline: str, stream: str, *, group: str = "nats-group", **config: object
) -> None:
    given = {"sink_type": "nats", "url": "${env:NATS_URL}", "subject": stream.lower(), **config}
    values = [pipeline, group, json.dumps(given)]
    app.execute("select tide.relay_set_outbox(%s, 'notifications', %s, %s)", values)
