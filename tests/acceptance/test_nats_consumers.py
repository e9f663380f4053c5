"""A consumer of type nats through `penstock run`: what the stream held first, then what comes."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import orjson
import yaml

from penstock.desired.entities import Change
from penstock.desired.state import DesiredState
from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats
from penstock.streams.store import Store

from ..pipeline import PATIENCE, Penstock, penstock
from .test_follow import Load

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
# JetStream would take its messages for copies of those of `copy`.
TWICE = COPY.replace("  copy:", "  twice:").replace("copy.{table}", "copy.twice.{table}")
WRITE = """
DO $$ BEGIN FOR of IN 0..9 LOOP
    UPDATE items SET n = n + 1;
    UPDATE others SET n = n + 1;
    COMMIT;
END LOOP; END $$
"""


COPY_OTHERS = """
CREATE FUNCTION copy() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    INSERT INTO others VALUES (NEW.id); RETURN NULL;
END $$;
CREATE TRIGGER copy AFTER INSERT ON items FOR EACH ROW EXECUTE FUNCTION copy();
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

        def cause(subject: str) -> str:
            problems = pipeline.status()["problems"]
            return " ".join(p["cause"] for p in problems if p["subject"] == subject)

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
        file.write_text(text.replace("spark:\n", f"{COPY}{TWICE}spark:\n"))
        streams.add_stream("COPY", "copy.>")
        pipeline.start().wait_ready()
        # What can't be run is left out, and named.
        for subject in ("source shop", "consumer twice"):
            pipeline.wait_for(
                lambda of=subject: "twice: it and consumer copy put the same" in cause(of),  # type: ignore[misc]
                PATIENCE, f"refused at {subject}",
            )  # fmt: skip
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


def test_its_tables_change_under_load(
    database: Database, nats: JetStream, nats_server: EmbeddedNats, tmp_path: Path
) -> None:
    """Messages of the table that stays come once each and in order; JetStream drops no copies here."""
    database.execute("CREATE TABLE items (id bigint PRIMARY KEY, price numeric)")
    database.execute("INSERT INTO items VALUES (0, 0)")
    database.execute("CREATE TABLE others (id bigint PRIMARY KEY)")
    database.execute(COPY_OTHERS)
    environment = {"SHOP_URL": database.url, "NATS_URL": nats_server.url}
    text = CONFIG.replace("filter: record.n <> 7", "actions: [insert, update]")
    spec = yaml.safe_load(text)["consumers"]["mail"]
    (tmp_path / "penstock.yaml").write_text(text.replace("FILTER", "items"))
    nats.add_stream("MAIL", "mail.>", duplicate_window=0.1)
    with ExitStack() as stack:
        stack.callback(nats.delete_stream, "MAIL")
        run = stack.enter_context(Penstock(tmp_path, environment=environment))
        run.start().wait_ready()
        store = stack.enter_context(Store(database.url))
        state = DesiredState(store, environment)
        load = Load(database, 1)

        def handed_over() -> list[dict[str, object]]:
            return [e for e in run.events() if e["event"] == "the slot is handed over"]

        def read() -> dict[str, list[dict[str, Any]]]:
            found: dict[str, list[dict[str, Any]]] = {"items": [], "others": []}
            for message in nats.messages("MAIL"):
                body = orjson.loads(message.data)
                found[body["metadata"]["table_name"]].append(body["record"])
            return found

        def take(*tables: str) -> None:
            """Have the consumer take these tables, and wait until it does."""
            before = len(handed_over())
            after = spec | {"filters": {"table": list(tables)}}
            state.write([Change("consumer", "mail", None, after)], by="test", door="api")
            run.wait_for(lambda: len(handed_over()) > before, PATIENCE, "handed over")

        run.wait_for(lambda: len(read()["items"]) > 10, PATIENCE, "delivering")
        take("items", "others")
        run.wait_for(lambda: len(read()["others"]) > 10, PATIENCE, "delivering the other table")
        take("items")
        at = load.last
        run.wait_for(lambda: load.last > at + 10, PATIENCE, "writing")
        written = load.stop()
        run.wait_for(
            lambda: any(r["price"] == str(written[-1]) for r in read()["items"]),
            PATIENCE, "delivering all",
        )  # fmt: skip
        found = read()
        assert all(e["in_order"] for e in handed_over())
        assert [int(r["price"]) for r in found["items"] if r["id"] == 0] == written
        assert [r["id"] for r in found["items"] if r["id"]] == written
        others = [r["id"] for r in found["others"]]
        assert others == [*range(others[0], others[-1] + 1)]
        assert written[0] < others[0] < others[-1] < written[-1]
        assert run.stop() == 0


def _count(streams: JetStream, stream: str = "MAIL") -> int:
    return streams.info(stream).state.messages
