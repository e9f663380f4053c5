"""A stand-in for the pipeline: triggers, polls of the API, and a loop that passes on what they found.

Run as `fake_pipeline.py <config> <listen> <fault>`; the fault makes it misbehave as a broken
pipeline would, so that a test can see the demo find out: none, lose, swap, repeat, invent, crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import queue
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import nats
import psycopg
import yaml

SETUP = """
CREATE SCHEMA fake;
CREATE TABLE fake.log (seq bigserial PRIMARY KEY, tab text, action text, record jsonb);
CREATE FUNCTION fake.log_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO fake.log (tab, action, record)
    VALUES (TG_TABLE_NAME, lower(TG_OP), CASE TG_OP WHEN 'DELETE' THEN to_jsonb(OLD)
                                                    ELSE to_jsonb(NEW) END);
    RETURN NULL;
END $$;
"""
TRIGGER = """CREATE TRIGGER log_change AFTER INSERT OR UPDATE OR DELETE ON {}
    FOR EACH ROW EXECUTE FUNCTION fake.log_change()"""
TAKE = "WITH taken AS (DELETE FROM fake.log RETURNING *) SELECT * FROM taken ORDER BY seq"


Queue = queue.SimpleQueue[dict[str, Any]]
STREAM: Queue = queue.SimpleQueue()
RECORDS: Queue = queue.SimpleQueue()
APPLIED: Queue = queue.SimpleQueue()


class Http(BaseHTTPRequestHandler):
    """`/readyz`, and a stream whose acks mean nothing."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        data: list[dict[str, Any]] = []
        if "/receive" in self.path:
            stream = RECORDS if "/records/" in self.path else STREAM
            with contextlib.suppress(queue.Empty):
                data.append({"ack_id": "1", "data": stream.get(timeout=0.2)})
                while len(data) < 100:
                    data.append({"ack_id": "1", "data": stream.get_nowait()})
        self.answer({"data": data})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/apply":
            APPLIED.put(yaml.safe_load(body))
        self.answer({"success": True})

    def answer(self, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        pass


def misbehave(rows: list[Any], fault: str) -> list[Any]:
    if fault == "lose":
        return [row for row in rows if row[0] % 20 != 0]
    if fault == "repeat" and rows:
        return [*rows, rows[0]]
    if fault == "invent" and rows:
        return [*rows, (0, "orders", "insert", {"id": 10**9, "version": 1})]
    if fault == "swap":
        # An update before what came before it in its row.
        return sorted(rows, key=lambda row: row[2] == "insert")
    return rows


class Sync:
    """Polls the API's customers, and knows what has changed."""

    def __init__(self, config: dict[str, Any]) -> None:
        provider = config["providers"]["fake_stripe"]
        key = config["credentials"]["fake_stripe"]["properties"]["api_key"]
        headers = {"Authorization": f"Bearer {key}"}
        self._http = httpx.Client(base_url=provider["base_url"], headers=headers, trust_env=False)
        self._known: dict[str, Any] = {}
        self._next = 0.0

    def is_due(self) -> bool:
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + 0.1
        return True

    def poll(self, fault: str) -> list[tuple[str, dict[str, Any]]]:
        listed = {each["id"]: each for each in self._all("/v1/customers")}
        gone = [each["data"]["object"]["id"] for each in self._all("/v1/events")]
        if fault == "lose":
            listed = {k: c for k, c in listed.items() if c["metadata"]["version"] != "2"}
        changed = [each for key, each in listed.items() if self._known.get(key) != each]
        found = [("updated" if each["id"] in self._known else "inserted", each) for each in changed]
        found += [("deleted", self._known.pop(key)) for key in gone if key in self._known]
        self._known |= {each["id"]: each for kind, each in found if kind != "deleted"}
        return found

    def _all(self, path: str) -> list[Any]:
        found: list[Any] = []
        page: dict[str, str] = {}
        while True:
            answer = self._http.get(path, params=page).raise_for_status().json()
            found += answer["data"]
            if not answer["has_more"]:
                return found
            page = {"page": answer["next_page"]}


async def main(config_file: str, listen: str, fault: str) -> None:
    config = yaml.safe_load(Path(config_file).read_text())
    host, port = listen.split(":")
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    if fault == "crash":
        sys.exit("the fake pipeline crashes")
    client = await nats.connect(config["sinks"]["jetstream"]["url"])
    jetstream = client.jetstream()
    url = config["sources"]["shop"]["url"]
    async with await psycopg.AsyncConnection.connect(url, autocommit=True) as connection:
        await connection.execute(SETUP)
        for table in ("customers", "orders", "payments"):
            await connection.execute(TRIGGER.format(table).encode())
        server = ThreadingHTTPServer((host, int(port)), Http)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        sync: Sync | None = None
        while not stop.is_set():
            if not APPLIED.empty():
                sync = Sync(APPLIED.get())
            for kind, data in sync.poll(fault) if sync is not None and sync.is_due() else ():
                record = {
                    "collection_id": "fake_stripe:customers", "upstream_id": data["id"],
                    "data": data, "deleted": kind == "deleted",
                }  # fmt: skip
                RECORDS.put({"record": record})
                event = json.dumps({"event": {**record, "event_type": kind}}).encode()
                await jetstream.publish(f"shop.api.fake_stripe:customers.{kind}", event)
            rows = await (await connection.execute(TAKE)).fetchall()
            for _, table, action, record in misbehave(rows, fault):
                message = {"record": record, "action": action, "metadata": {"table_name": table}}
                body = json.dumps(message).encode()
                STREAM.put(message)
                await jetstream.publish(f"shop.public.{table}.{action}", body)
            # Slowly when swapping, so that a row has more than one change to swap.
            await asyncio.sleep(1.0 if fault == "swap" else 0.02)
    await client.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
