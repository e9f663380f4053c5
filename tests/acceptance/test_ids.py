"""Every entity has a UUID, which paths take as they take its name; messages have their consumer's."""

from __future__ import annotations

import json
import threading
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from penstock.embedded.handles import Database, JetStream
from penstock.embedded.nats import EmbeddedNats

from ..cli import run
from ..pipeline import PATIENCE, Penstock
from .api import Api


@contextmanager
def webhook() -> Iterator[tuple[str, list[Any]]]:
    """Give the URL of a server, and what was posted to it."""
    posted: list[Any] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", posted
        server.shutdown()


def consumers_of(messages: list[dict[str, Any]]) -> set[tuple[str, str]]:
    found = [message["metadata"]["consumer"] for message in messages]
    return {(consumer["id"], consumer["name"]) for consumer in found}


def test_messages_have_the_ids_of_their_consumers(
    tmp_path: Path, database: Database, nats_server: EmbeddedNats
) -> None:
    database.execute("CREATE TABLE items (id bigint PRIMARY KEY)")
    (tmp_path / "penstock.yaml").write_text(f"store: {database.url}\n")
    with ExitStack() as stack:
        url, posted = stack.enter_context(webhook())
        streams = stack.enter_context(JetStream(nats_server.url))
        for name in ("sink", "consumer"):  # each has the messages of the other, with their ids
            streams.add_stream(f"IDS_{name}", f"ids.{name}")
            stack.callback(streams.delete_stream, f"IDS_{name}")
        pipeline = stack.enter_context(Penstock(tmp_path))
        pipeline.start().wait_ready()
        api = Api(pipeline, run(tmp_path, "token create ops --role admin").split()[-1])
        nats = {"type": "nats", "target": "cluster"}
        entities = {
            "targets/cluster": {"type": "nats", "url": nats_server.url},
            "sources/shop": {"type": "postgres", "url": database.url, "tables": ["public.items"]},
            "sinks/events": {"type": "stream", "source": "shop"},
            "sinks/direct": {**nats, "source": "shop", "subject": "ids.sink"},
            "consumers/mail": {**nats, "stream": "events", "subject": "ids.consumer"},
            "consumers/work": {"type": "pull", "stream": "events"},
            "consumers/hook": {
                "type": "webhook", "stream": "events", "url": url, "allow_private": True
            },
        }  # fmt: skip
        ids: dict[str, str] = {}
        for path, spec in entities.items():
            api("PUT", f"/v1/{path}", spec)
            kind, name = path.split("/")
            found = api("GET", f"/v1/{path}")
            ids[name] = str(uuid.UUID(found["id"]))
            assert api("GET", f"/v1/{kind}/{ids[name]}") == found
            assert found["name"] == name
        assert len(set(ids.values())) == len(entities)
        api("PATCH", f"/v1/consumers/{ids['work']}", {"max_deliver": 3})
        assert api("GET", "/v1/consumers/work")["spec"]["max_deliver"] == 3
        wanted = {
            "sinks": {"direct", "events"},
            "nats_consumers": {"mail"},
            "consumers": {"work", "hook"},  # there once a run has made their stream
        }

        def taken() -> bool:
            status = pipeline.status()
            return all(names <= status.get(of, {}).keys() for of, names in wanted.items())

        pipeline.wait_for(taken, PATIENCE, "taken")
        pipeline.wait_ready()
        database.execute("INSERT INTO items VALUES (1), (2)")
        pulled: list[dict[str, Any]] = []

        def published(of: str) -> list[dict[str, Any]]:
            return [json.loads(message.data) for message in streams.messages(f"IDS_{of}")]

        def all_came() -> bool:
            pulled.extend(api.receive(ids["work"]))
            return (
                len(pulled)
                == len(posted)
                == len(published("sink"))
                == len(published("consumer"))
                == 2
            )

        pipeline.wait_for(all_came, PATIENCE, "everywhere")
        assert consumers_of(pulled) == {(ids["work"], "work")}
        assert consumers_of(posted) == {(ids["hook"], "hook")}
        of_sink, of_consumer = {(ids["direct"], "direct")}, {(ids["mail"], "mail")}
        assert consumers_of(published("sink")) == of_sink
        assert consumers_of(published("consumer")) == of_consumer
        # They last: messages after a restart have the same.
        assert pipeline.stop() == 0
        pipeline.start().wait_ready()
        database.execute("INSERT INTO items VALUES (3)")
        pipeline.wait_for(
            lambda: len(published("sink")) == len(published("consumer")) == 3, PATIENCE, "published"
        )
        assert consumers_of(published("sink")) == of_sink
        assert consumers_of(published("consumer")) == of_consumer
