"""A consumer of type nats through `penstock run`: what the stream held first, then what comes."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path

import orjson

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats

from ..pipeline import PATIENCE, Penstock, penstock

CONFIG = """\
store: ${SHOP_URL}
sources:
  shop:
    type: postgres
    url: ${SHOP_URL}
    tables: [public.items, public.others]
sinks:
  events:
    type: stream
    source: shop
    filter: record.n <> 7
consumers:
  mail:
    type: nats
    stream: events
    url: ${NATS_URL}
    subject: "mail.{table}.{action}"
    detach_after: 1s
    filters: {table: [FILTER]}
spark:
  master: local[2]
"""
COPY = """\
  copy:
    type: nats
    stream: events
    url: ${NATS_URL}
    subject: "copy.{table}"
"""
WRITE = """
DO $$ BEGIN FOR of IN 0..9 LOOP
    UPDATE items SET n = n + 1;
    UPDATE others SET n = n + 1;
    COMMIT;
END LOOP; END $$
"""


async def _ignore_error(_: Exception) -> None:
    """Stand in for nats-py's logging of every try to connect to a server that is down."""


def test_from_the_beginning(database: Database, server_dir: Path, tmp_path: Path) -> None:
    """NATS is away at first, and for a moment; then the filter changes at a restart."""
    for table in ("items", "others"):
        database.execute(f"CREATE TABLE {table} (id int PRIMARY KEY, n int)")
    file = tmp_path / "penstock.yaml"
    file.write_text(CONFIG.replace("FILTER", "items"))
    with ExitStack() as stack:
        nats = stack.enter_context(EmbeddedNats(server_dir / "nats-consumers"))
        streams = stack.enter_context(JetStream(nats.url, error_cb=_ignore_error))
        streams.add_stream("MAIL", "mail.>")
        nats.kill()
        environment = {"SHOP_URL": database.url, "NATS_URL": nats.url}
        pipeline = stack.enter_context(Penstock(tmp_path, environment=environment))
        pipeline.start().wait_ready()
        for table in ("items", "others"):
            database.execute(f"INSERT INTO {table} SELECT id, 0 FROM generate_series(1, 20) id")
        database.execute(WRITE)

        def consumer() -> dict[str, object]:
            found: dict[str, object] = pipeline.status()["nats_consumers"]["mail"]
            return found

        # 20 items in 11 versions, but for the one that the stream leaves out.
        pipeline.wait_for(lambda: consumer()["lag_messages"] == 200, PATIENCE, "in the stream")
        assert consumer()["error"]
        assert pipeline.get("/readyz")[0] == 200
        nats.start()
        database.execute(WRITE)
        pipeline.wait_for(lambda: consumer()["state"] == "attached", PATIENCE, "at the head")
        database.execute(WRITE)
        nats.kill()
        database.execute(WRITE)
        pipeline.wait_for(lambda: consumer()["state"] != "attached", PATIENCE, "behind")
        nats.start()
        database.execute(WRITE)
        pipeline.wait_for(lambda: _count(streams) == 20 * 50, PATIENCE, "all of the items")
        pipeline.stop()

        text = CONFIG.replace("FILTER", "items, others")
        file.write_text(text.replace("spark:\n", f"{COPY}spark:\n"))
        streams.add_stream("COPY", "copy.>")
        pipeline.start().wait_ready()
        # A new one begins with what is there, though nothing comes.
        pipeline.wait_for(lambda: _count(streams, "COPY") == 2 * 20 * 50, PATIENCE, "a copy")
        database.execute(WRITE)
        pipeline.wait_for(lambda: _count(streams) == 20 * 70, PATIENCE, "all of both")
        pipeline.wait_for(lambda: _count(streams, "COPY") == 2 * 20 * 60, PATIENCE, "all again")
        listed = penstock("consumer", "list", "--json", cwd=tmp_path, environment=environment)
        _, shown = orjson.loads(listed.stdout)
        assert (shown["name"], shown["stream"], shown["dropped"]) == ("mail", "events", 0)
        messages = [orjson.loads(message.data) for message in streams.messages("MAIL")]
    versions = defaultdict(list)
    for message in messages:
        metadata, record = message["metadata"], message["record"]
        versions[metadata["table_name"], record["id"]].append(record["n"])
        assert metadata["consumer"]["name"] == "mail"
    for (table, _), found in versions.items():
        first = 0 if table == "items" else 51
        assert found == [n for n in range(first, 61) if n != 7]
    assert Counter(table for table, _ in versions) == {"items": 20, "others": 20}


def _count(streams: JetStream, stream: str = "MAIL") -> int:
    return streams.info(stream).state.messages
