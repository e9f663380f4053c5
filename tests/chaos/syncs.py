"""Syncs beside the tables of a run: of an API that changes and fails while everything else does."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from penstock.embedded.handles import JetStream

from ..faulty_api import COLLECTIONS, PROVIDER, Change, FaultyApi, Served, Turn, made
from ..loopback_api import LoopbackApi
from ..sync_oracle import wrong_with
from ..waits import await_end
from .verdict import Verdict, read_all

STREAM: Final = "SYNCS"
_SUBJECT: Final = "syncs.{collection_id}.{upstream_id}"
_SYNCS, _IDS = 2, 40
_CHANGE_SECONDS: Final = 0.2
_FAULTS: Final = ("429", "429 later", "500", "cut", "hang-up", "twice")
"""What a sync gets over within seconds: each is one answer of thirty."""
_SHARE: Final = 1 / 30
_SETTLE_SECONDS: Final = 400.0


class Syncs:
    """The API, and what its two syncs, of one credential, come to; it serves while it is entered."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        at_first = [Change(name, id_, late=10 * id_) for name in COLLECTIONS for id_ in range(_IDS)]
        self._api = made(FaultyApi(time.time), at_first)
        self._served = Served(self._api)
        self._loopback = LoopbackApi(self._served.answer)
        self._stopping = threading.Event()
        self._sent = 0
        self._thread = threading.Thread(target=self._change, name="api", daemon=True)

    def config(self, records: str, nats: str) -> Mapping[str, Any]:
        """Return what a file has of them; `records` is the Postgres of their table."""
        sync = {
            "provider": "fake", "collections": [*COLLECTIONS], "credential": "key",
            "frequency": "1s", "sweep_interval": "10s", "max_deleted_share": 1.0,
        }  # fmt: skip
        rate = {"allowed_requests": 40}
        return {
            "records": {"store": records},
            "providers": {"fake": {**PROVIDER, "base_url": self._loopback.url, "rate_limit": rate}},
            "credentials": {"key": {"provider": "fake"}},
            "syncs": {f"s{n}": sync for n in range(_SYNCS)},
            "sinks": {
                "syncs": {"type": "nats", "source": "syncs", "url": nats, "subject": _SUBJECT}
            },
        }

    def __enter__(self) -> Syncs:
        self._loopback.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        self._loopback.__exit__(None, None, None)

    def stop(self) -> None:
        """Change nothing more, and let all requests go well."""
        self._stopping.set()
        await_end(self._thread)
        with self._served.lock:
            self._api.turns.clear()

    def settle(self, records: str, nats: str) -> None:
        """Stop, and wait until all events are there; what is still wrong then, `judge` finds."""
        self.stop()
        deadline = time.monotonic() + _SETTLE_SECONDS
        while self._wrong(records, nats) and time.monotonic() < deadline:
            threading.Event().wait(1.0)

    def judge(self, records: str, nats: str, verdict: Verdict) -> str:
        """Blame what is wrong; return what was done."""
        for what in self._wrong(records, nats):
            verdict.blame("syncs", what)
        faults = sum(self._api.faults.values())
        return f"{self._api.requests} requests, {faults} failed, {self._sent} events"

    def _wrong(self, records: str, nats: str) -> list[str]:
        sent = [json.loads(message.data)["event"] for message in read_all(nats, STREAM)]
        self._sent = len(sent)
        return wrong_with(self._api, records, _SYNCS, sent)

    def _change(self) -> None:
        """Change an object now and then, and have requests fail."""
        chance = self._random
        while not self._stopping.wait(_CHANGE_SECONDS * 2 * chance.random()):
            change = Change(
                chance.choice(COLLECTIONS), chance.randrange(_IDS), chance.random() < 0.3
            )
            fault = chance.choice(_FAULTS) if chance.random() < _SHARE else None
            with self._served.lock:
                self._api.turns.append(Turn((change,), fault))
                if len(self._api.turns) > 10:  # no request comes: it changes nonetheless
                    for turn in self._api.turns:
                        for late in turn.changes:
                            self._api.change(late)
                    self._api.turns.clear()


def add_stream(streams: JetStream, window: float) -> None:
    """Make the stream that events go to; nothing may be there twice within `window` seconds."""
    streams.add_stream(STREAM, "syncs.>", duplicate_window=window)
