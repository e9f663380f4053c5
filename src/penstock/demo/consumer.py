"""The demo's consumer: reads JetStream as a worker would and enters every message in the ledger."""

from __future__ import annotations

import time
from typing import Any

import orjson

from penstock.demo.ledger import DELETED, Change, Ledger
from penstock.embedded.handles import JetStream, Msg

STREAM = "shop"
SUBJECTS = "shop.>"


class Consumer:
    """Follows the stream from its first message on."""

    def __init__(self, client: JetStream, ledger: Ledger) -> None:
        self._client = client
        self._ledger = ledger
        self.last_seq = 0

    def start(self) -> None:
        """Make the stream and follow it."""
        self._client.add_stream(STREAM, SUBJECTS, duplicate_window=120)
        self._client.follow(STREAM, SUBJECTS, self._on_message)

    def caught_up(self) -> bool:
        """Whether everything that is in the stream has been read."""
        return self.last_seq >= self._client.info(STREAM).state.last_seq

    def _on_message(self, message: Msg) -> None:
        now = time.perf_counter()
        try:
            change = read_change(message.subject, message.data)
        except (KeyError, TypeError, ValueError) as error:
            self._ledger.stray(f"{message.subject}: {type(error).__name__}: {error}")
        else:
            self._ledger.received(change, now)
        self.last_seq = message.seq


def read_change(subject: str, data: bytes) -> Change:
    """Return the change of a message; raises `ValueError` or `KeyError` if it cannot."""
    change = change_of(orjson.loads(data))
    if subject != f"shop.public.{change.table}.{change.action}":
        raise ValueError(f"a message of {change.table}, {change.action}, on the wrong subject")
    return change


def change_of(message: dict[str, Any]) -> Change:
    """Return the change of a message; raises `ValueError` or `KeyError` if it cannot."""
    table, action = message["metadata"]["table_name"], message["action"]
    record = message["record"]
    # An old tuple holds the key alone unless the replica identity is full.
    version = DELETED if action == "delete" else int(record["version"])
    if action not in ("insert", "update", "delete") or (action == "insert") != (version == 1):
        raise ValueError(f"action {action} does not go with version {version}")
    return Change(table, int(record["id"]), action, version)
