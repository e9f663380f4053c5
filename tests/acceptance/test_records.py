"""Records through `penstock run`: from the records table to workers over HTTP and to NATS."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode
from uuid import UUID

import orjson

from penstock.embedded.handles import Database, JetStream
from penstock.streams.store import Store
from penstock.syncs.connectors.contract import Record
from penstock.syncs.records.purge import purge
from penstock.syncs.records.writer import RecordWriter

from ..pipeline import PATIENCE, Penstock
from .api import Api

SYNC = UUID("902261b0-6b22-48a0-8d6b-2fdb16cf8402")
CONFIG = """\
store: ${STORE}
credentials:
  live: {provider: servicenow, properties: {instance: none, username: u, password: p}}
syncs:
  incidents: {provider: servicenow, collections: [incident], credential: live, status: disabled}
sinks:
  open:
    type: stream
    source: syncs
    filter: "record.data ->> 'state' = 'open'"
consumers:
  changes: {type: nats, stream: events, url: "${NATS}", create_stream: true}
  newest: {type: nats, stream: records, url: "${NATS}", create_stream: true}
  workers: {stream: events, filters: {provider: servicenow}}
  opened: {stream: open}
spark:
  master: local[2]
"""


def incident(state: str, *, deleted: bool = False) -> Record:
    """Return a version of an incident."""
    return Record("inc_2891", b"" if deleted else orjson.dumps({"state": state}), deleted=deleted)


def test_from_the_records_table_to_http_and_nats(
    database: Database, nats: JetStream, tmp_path: Path
) -> None:
    (tmp_path / "penstock.yaml").write_text(CONFIG)
    environment = {"STORE": database.url, "NATS": nats.url}
    with Penstock(tmp_path, environment=environment) as pipeline:
        pipeline.start().wait_ready()
        with Store(database.url) as store:
            api = Api(pipeline, store.tokens.create("admin", "admin"))
        writer = RecordWriter(database.url)
        for version in (incident("open"), incident("done"), incident("", deleted=True)):
            writer.write(SYNC, "servicenow", "servicenow:incident", [version])
        writer.write(SYNC, "servicenow", "servicenow:incident", [incident("open")])

        events: list[dict[str, object]] = []

        def all_came() -> bool:
            events.extend(each["event"] for each in api.receive("workers"))
            return len(events) == 4

        pipeline.wait_for(all_came, PATIENCE, "four events")
        pipeline.wait_for(lambda: len(nats.messages("CHANGES")) == 4, PATIENCE, "four in NATS")
        subject = f"{SYNC}.servicenow.servicenow:incident.inc_2891"
        published = nats.messages("CHANGES")
        types = ["inserted", "updated", "deleted", "inserted"]
        assert [event["event"] for event in events] == types
        assert [m.subject for m in published] == [
            f"sequin-events.default.{subject}.{kind}" for kind in types
        ]
        assert [orjson.loads(m.data)["event"] for m in published] == events
        assert events[1]["changes"]["data"] == {"state": "open"}  # type: ignore[index]
        assert events[3]["changes"]["deleted"] is True  # type: ignore[index]

        def found(**filters: object) -> list[str]:
            asked = urlencode({"sync_id": SYNC, **filters})
            return [each["event"]["event"] for each in api("GET", f"/v1/events?{asked}")["data"]]

        of = {"collection_id": "servicenow:incident", "upstream_id": "inc_2891"}
        assert found() == found(**of) == found(provider="servicenow", **of) == types
        assert found(**of, deleted="true") == found(deleted="true") == ["deleted"]
        assert found(upstream_id="inc_2891") == types
        assert found(upstream_id="inc_1") == found(**{**of, "upstream_id": "inc_1"}) == []
        assert found(collection_id="servicenow:task") == found(provider="crm") == []

        def newest() -> list[dict[str, object]]:
            return [orjson.loads(m.data)["record"] for m in nats.messages("NEWEST")]

        pipeline.wait_for(
            lambda: [r["updated_at"] for r in newest()] == [events[3]["updated_at"]],
            PATIENCE, "the newest record",
        )  # fmt: skip
        (record,) = newest()
        assert (record["data"], record["deleted"]) == ({"state": "open"}, False)
        assert nats.messages("NEWEST")[0].subject == f"sequin-records.default.{subject}"
        opened = [each["event"]["event"] for each in api.receive("opened")]
        assert opened[0] == "inserted"

        assert purge(database.url, SYNC) == 1
        writer.write(SYNC, "servicenow", "servicenow:incident", [incident("new")])
        pipeline.wait_for(lambda: len(nats.messages("CHANGES")) == 5, PATIENCE, "no event of it")
        writer.close()
        assert pipeline.stop() == 0
