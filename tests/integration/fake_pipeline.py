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


class Stream:
    """Keeps order among workers: while one has messages that it has not acked, no other gets any."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._free = threading.Semaphore()

    def put(self, message: dict[str, Any]) -> None:
        self._messages.put(message)

    def receive(self) -> list[dict[str, Any]]:
        if not self._free.acquire(timeout=0.2):
            return []
        found: list[dict[str, Any]] = []
        with contextlib.suppress(queue.Empty):
            found.append(self._messages.get(timeout=0.2))
            while len(found) < 100:
                found.append(self._messages.get_nowait())
        if not found:
            self._free.release()
        return found

    def ack(self) -> None:
        self._free.release()


STREAM, RECORDS = Stream(), Stream()
APPLIED: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()


class Http(BaseHTTPRequestHandler):
    """`/readyz`, what is applied, and two streams, of which each ack is for all that is in flight."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        found = self.stream.receive() if "/receive" in self.path else []
        self.answer({"data": [{"ack_id": "1", "data": message} for message in found]})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.path == "/v1/apply":
            APPLIED.put(yaml.safe_load(body))
        else:
            self.stream.ack()
        self.answer({"success": True})

    @property
    def stream(self) -> Stream:
        return RECORDS if "/records/" in self.path else STREAM

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
