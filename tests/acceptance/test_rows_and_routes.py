"""Kind rows over JetStream, and a stream's routes on their way to a webhook, through `penstock run`."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import orjson

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats

from ..pipeline import PATIENCE, Penstock
from ..waits import await_end

CONFIG = """\
sources:
  shop:
    type: postgres
    url: ${SHOP_URL}
sinks:
  copy:
    type: nats
    source: shop
    kind: rows
    url: ${NATS_URL}
  events:
    type: stream
    source: shop
    route:
      - {when: action <> 'delete' and record.price > 100, to: "big/{record.name}"}
      - {when: action <> 'delete' and record.price > 10, to: "middling"}
consumers:
  hooks:
    type: webhook
    stream: events
    url: ${HOOK_URL}
    allow_private: true
    batch: true
spark:
  master: local[2]
"""


@contextmanager
def endpoint(posted: list[tuple[str, Any]]) -> Iterator[str]:
    """Serve an endpoint that notes the path and the messages of each request."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            posted.extend((self.path, message) for message in orjson.loads(body)["data"])
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hooks/?v=2"
    finally:
        server.shutdown()
        await_end(thread)
        server.server_close()


def test_rows_and_routes(database: Database, server_dir: Path, tmp_path: Path) -> None:
    posted: list[tuple[str, Any]] = []
    database.execute("CREATE TABLE items (id int PRIMARY KEY, name text, price numeric)")
    (tmp_path / "penstock.yaml").write_text(CONFIG)
    with ExitStack() as stack:
        nats = stack.enter_context(EmbeddedNats(server_dir / "nats-rows-and-routes"))
        streams = stack.enter_context(JetStream(nats.url))
        streams.add_stream("ITEMS", "shop.public.items")
        url = stack.enter_context(endpoint(posted))
        environment = {"SHOP_URL": database.url, "NATS_URL": nats.url, "HOOK_URL": url}
        pipeline = stack.enter_context(Penstock(tmp_path, environment=environment))
        pipeline.start().wait_ready()
        for statement in (
            "INSERT INTO items VALUES (1, '../a b', 1000), (2, 'two', 50), (3, 'three', 5)",
            "UPDATE items SET price = price + 1 WHERE id = 2",
            "UPDATE items SET id = 20 WHERE id = 2",
            "DELETE FROM items WHERE id IN (1, 3)",
        ):
            database.execute(statement)
        pipeline.wait_for(lambda: len(posted) == 7, PATIENCE, "all at the webhook")
        pipeline.wait_for(
            lambda: streams.info("ITEMS").state.messages == 5, PATIENCE, "in the stream"
        )
        reported = [orjson.loads(message.data) for message in streams.messages("ITEMS")]
    assert all(list(message) == ["record", "metadata"] for message in reported)
    rows = [(message["record"]["id"], message["record"]["price"]) for message in reported]
    assert sorted(rows) == [(1, "1000"), (2, "50"), (2, "51"), (3, "5"), (20, "51")]
    assert [row for row in rows if row[0] in (2, 20)] == [(2, "50"), (2, "51"), (20, "51")]
    paths: dict[int, list[tuple[str, str]]] = defaultdict(list)
    for path, message in posted:
        paths[message["record"]["id"]].append((message["action"], path))
    assert paths == {
        1: [("insert", "/hooks/big/%252E%252E%252Fa%2520b?v=2"), ("delete", "/hooks/?v=2")],
        2: [("insert", "/hooks/middling?v=2"), ("update", "/hooks/middling?v=2")],
        3: [("insert", "/hooks/?v=2"), ("delete", "/hooks/?v=2")],
        20: [("update", "/hooks/middling?v=2")],
    }
