"""Two `penstock run` over one store: one runs the source, the other takes it over within 15 s."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats

from ..pipeline import PATIENCE, Penstock, left_of

CONFIG = """\
sources:
  shop:
    type: postgres
    url: ${DATABASE_URL}
sinks:
  standby:
    type: nats
    source: shop
    url: ${NATS_URL}
    subject: "standby.{table}"
store: ${DATABASE_URL}
spark:
  master: local[2]
"""
WITHIN = 15.0


@pytest.mark.alone
def test_a_standby_takes_over_what_a_killed_run_leaves(
    database: Database, nats: JetStream, nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    database.execute("CREATE TABLE orders (id bigint PRIMARY KEY, step int)")
    nats.add_stream("STANDBY", "standby.>", duplicate_window=3600)
    environment = {"DATABASE_URL": database.url, "NATS_URL": nats_server.url}
    folders = [tmp_path / name for name in ("first", "second")]
    for folder in folders:
        folder.mkdir()
        (folder / "penstock.yaml").write_text(CONFIG)
    with (
        Penstock(folders[0], environment=environment) as first,
        Penstock(folders[1], environment=environment) as second,
    ):
        first.start().wait_ready()
        second.start()
        second.wait_for(lambda: ready(second) == "standing by", PATIENCE, "standing by")
        second.wait_for(lambda: "ready to take the source over" in events(second), PATIENCE, "warm")
        (told,) = [e for e in second.events() if e["event"].startswith("standing by: ")]
        assert told["source"] == "shop"
        assert f"(process {first.process.pid}) runs source shop" in told["event"]
        found = second.status()["sources"]["shop"]
        assert found["state"] == "standing by"
        assert found["holder"] == told["holder"] == first.status()["sources"]["shop"]["holder"]

        for number in range(1, 201):
            database.execute("INSERT INTO orders VALUES (%s, 0)", [number])
            if number % 2:
                database.execute("UPDATE orders SET step = 1 WHERE id = %s", [number])
        family, before = first.tree(), len(second.events())
        first.process.kill()
        killed = time.monotonic()
        first.process.wait(PATIENCE)
        assert left_of(family) == []  # so that none of its own delivers this
        database.execute("INSERT INTO orders VALUES (1000, 0)")
        second.wait_for(lambda: has(nats, 1000), PATIENCE, "delivering")
        seconds = time.monotonic() - killed
        said = [(e["timestamp"], e["event"]) for e in second.events()[before:]]
        print(f"taken over after {seconds:.1f} s: {said}")
        assert seconds < WITHIN, said
        second.wait_for(lambda: ready(second) == "ready", PATIENCE, "ready")
        messages = [json.loads(m.data) for m in nats.messages("STANDBY")]
        rows = [(m["record"]["id"], m["record"]["step"]) for m in messages]
        assert sorted(rows) == sorted(
            [(n, 0) for n in range(1, 201)] + [(n, 1) for n in range(1, 201, 2)] + [(1000, 0)]
        )
        for number in range(1, 201, 2):  # in a row's order
            assert rows.index((number, 0)) < rows.index((number, 1))
        assert second.stop() == 0
    nats.delete_stream("STANDBY")


def ready(run: Penstock) -> str:
    code, body = run.get("/readyz")
    return str(json.loads(body)["status"]) if code == 200 else ""


def events(run: Penstock) -> list[str]:
    return [event["event"] for event in run.events()]


def has(nats: JetStream, number: int) -> bool:
    messages = nats.messages("STANDBY")
    return any(json.loads(message.data)["record"]["id"] == number for message in messages)
