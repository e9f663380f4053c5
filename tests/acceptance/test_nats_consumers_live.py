"""A consumer of type nats changes in a run: its syncs, and its JetStream stream from outside."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import orjson

from penstock.desired.entities import Change
from penstock.desired.state import DesiredState
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.streams.store import Store
from penstock.syncs.connectors.contract import Record
from penstock.syncs.records.writer import RecordWriter

from ..pipeline import PATIENCE, Penstock, penstock
from ..waits import await_end

HANDED_OVER = "the slot is handed over"
STAYS, COMES = uuid4(), uuid4()
SYNCED = {
    "type": "nats", "stream": "events", "url": "${NATS_URL}", "subject": "synced.mail",
}  # fmt: skip
SYNCS = """\
store: ${STORE_URL}
credentials:
  live: {provider: servicenow, properties: {instance: none, username: u, password: p}}
syncs:
  incidents: {provider: servicenow, collections: [incident], credential: live, status: disabled}
consumers:
  mail: CONSUMER
spark:
  master: local[2]
"""


class Records(threading.Thread):
    """Writes one version of a record of each of two syncs after the other until it is stopped."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._stopping = threading.Event()
        self.last = 0
        self.start()

    def run(self) -> None:
        with closing(RecordWriter(self._url)) as writer:
            while not self._stopping.wait(0.01):
                version = [Record("row", orjson.dumps({"n": self.last + 1}))]
                for sync in (STAYS, COMES):
                    writer.write(sync, "servicenow", "servicenow:incident", version)
                self.last += 1

    def stop(self) -> list[int]:
        self._stopping.set()
        await_end(self)
        return list(range(1, self.last + 1))


def test_its_syncs_change_while_records_come(
    database: Database, nats: JetStream, nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    """Events of the sync that stays come once each and in order; JetStream drops no copies here."""
    environment = {"STORE_URL": database.url, "NATS_URL": nats_server.url}
    first = SYNCED | {"filters": {"sync_id": [str(STAYS)]}}
    (tmp_path / "penstock.yaml").write_text(SYNCS.replace("CONSUMER", json.dumps(first)))
    nats.add_stream("SYNCED", "synced.>", duplicate_window=0.1)
    with ExitStack() as stack:
        stack.callback(nats.delete_stream, "SYNCED")
        run = stack.enter_context(Penstock(tmp_path, environment=environment))
        run.start().wait_ready()
        state = DesiredState(stack.enter_context(Store(database.url)), environment)
        load = Records(database.url)
        stack.callback(load.stop)

        def handed_over() -> list[dict[str, Any]]:
            return [e for e in run.events() if e["event"] == HANDED_OVER]

        def read() -> dict[UUID, list[int]]:
            found = defaultdict[UUID, list[int]](list)
            for message in nats.messages("SYNCED"):
                event = orjson.loads(message.data)["event"]
                found[UUID(event["sync_id"])].append(event["data"]["n"])
            return found

        def take(*syncs: UUID) -> None:
            """Have the consumer take these syncs, and wait until it does."""
            before, filters = len(handed_over()), {"sync_id": [str(sync) for sync in syncs]}
            after = SYNCED | {"filters": filters}
            state.write([Change("consumer", "mail", None, after)], by="test", door="api")
            run.wait_for(lambda: len(handed_over()) > before, PATIENCE, "handed over")

        run.wait_for(lambda: len(read()[STAYS]) > 10, PATIENCE, "delivering")
        take(STAYS, COMES)
        run.wait_for(lambda: len(read()[COMES]) > 10, PATIENCE, "delivering the other sync")
        take(STAYS)
        at = load.last
        run.wait_for(lambda: load.last > at + 10, PATIENCE, "writing")
        written = load.stop()
        run.wait_for(lambda: written[-1] in read()[STAYS], PATIENCE, "delivering all")
        found = read()
        assert all(e["in_order"] for e in handed_over())
        assert found.keys() == {STAYS, COMES}
        assert found[STAYS] == written
        comes = found[COMES]
        assert comes == [*range(comes[0], comes[-1] + 1)]
        assert written[0] < comes[0] < comes[-1] < written[-1]
        assert run.stop() == 0


MAIL = """\
store: ${SHOP_URL}
sources:
  shop:
    type: postgres
    url: ${SHOP_URL}
sinks:
  events: {type: stream, source: shop}
consumers:
  mail:
    type: nats
    stream: events
    url: ${NATS_URL}
    subject: "made.{table}"
    detach_after: 1s
    create_stream: true
    stream_config: {max_age: 7d}
    filters: {table: [TABLES]}
spark:
  master: local[2]
"""
DAYS = 24 * 3600


def test_its_jetstream_stream_is_changed_and_deleted_from_outside(
    database: Database, nats: JetStream, nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    """What a run has made it never changes, and makes again when it takes a change up."""
    for table in ("items", "others"):
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY)")
    environment = {"SHOP_URL": database.url, "NATS_URL": nats_server.url}

    def apply(*tables: str) -> None:
        (tmp_path / "penstock.yaml").write_text(MAIL.replace("TABLES", ", ".join(tables)))
        if len(tables) > 1:
            done = penstock("apply", "--yes", cwd=tmp_path, environment=environment)
            assert done.returncode == 0, done.stderr

    def mail() -> dict[str, Any]:
        found: dict[str, Any] = run.status().get("nats_consumers", {}).get("mail", {})
        return found

    def ids() -> list[int]:
        return [json.loads(m.data)["record"]["id"] for m in nats.messages("MAIL")]

    def there() -> bool:
        return "MAIL" in (nats.api("STREAM.NAMES", {})["streams"] or ())

    def differences() -> list[str]:
        report = penstock("check", "--json", cwd=tmp_path, environment=environment)
        found = json.loads(report.stdout)["findings"]
        return [f["message"] for f in found if "stream_config wants" in f["message"]]

    def handed_over() -> int:
        return len([e for e in run.events() if e["event"] == HANDED_OVER])

    apply("items")
    with ExitStack() as stack:
        stack.callback(nats.api, "STREAM.DELETE.MAIL", {})
        run = stack.enter_context(Penstock(tmp_path, environment=environment))
        run.start().wait_ready()
        database.execute("INSERT INTO items VALUES (1)")
        run.wait_for(lambda: ids() == [1], PATIENCE, "published")
        assert nats.info("MAIL").config.max_age == 7 * DAYS
        assert differences() == []

        config = nats.api("STREAM.INFO.MAIL", {})["config"]
        nats.api("STREAM.UPDATE.MAIL", config | {"max_age": DAYS * 10**9})
        apply("items", "others")
        run.wait_for(lambda: handed_over() == 1, PATIENCE, "changed")
        database.execute("INSERT INTO others VALUES (2)")
        run.wait_for(lambda: ids() == [1, 2], PATIENCE, "published")
        assert nats.info("MAIL").config.max_age == DAYS
        assert differences() == ["max_age: stream_config wants 7d, it has 1d"]

        nats.delete_stream("MAIL")
        database.execute("INSERT INTO items VALUES (3)")
        run.wait_for(lambda: mail().get("state") == "detached", PATIENCE, "detached")
        assert "no_stream" in json.dumps(mail())
        assert not there()
        apply("others", "items")
        run.wait_for(lambda: handed_over() == 2, PATIENCE, "changed again")
        run.wait_for(there, PATIENCE, "making the stream again")
        run.wait_for(lambda: ids() == [3], PATIENCE, "publishing what has waited")
        assert nats.info("MAIL").config.max_age == 7 * DAYS
        assert differences() == []
        made = [e for e in run.events() if e["event"] == "made the sink's stream"]
        assert [e["stream"] for e in made] == ["MAIL", "MAIL"]
        assert run.stop() == 0
