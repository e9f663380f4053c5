"""The demo's consumer: one of JetStream, for the changes of tables and the events of the API."""

from __future__ import annotations

import time
from typing import Any

import orjson

from penstock.demo.fake_stripe import COLLECTION
from penstock.demo.ledger import DELETED, Change, Ledger
from penstock.embedded.handles import JetStream, Msg

STREAM = "shop"
SUBJECTS = "shop.>"


class Consumer:
    """Follows the stream from its first message on; `events` is the ledger of the API's events."""

    def __init__(self, client: JetStream, ledger: Ledger, events: Ledger) -> None:
        self._client = client
        self._ledger = ledger
        self._events = events
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
            (self._events if change.table == COLLECTION else self._ledger).received(change, now)
        self.last_seq = message.seq


def read_change(subject: str, data: bytes) -> Change:
    """Return the change of a message; raises `ValueError` or `KeyError` if it cannot."""
    message = orjson.loads(data)
    if "event" in message:
        change = change_of_event(message["event"])
        wanted = f"shop.api.{change.table}.{message['event']['event_type']}"
    else:
        change = change_of(message)
        wanted = f"shop.public.{change.table}.{change.action}"
    if subject != wanted:
        raise ValueError(f"a message of {change.table}, {change.action}, on the wrong subject")
    return change


def change_of_event(event: dict[str, Any]) -> Change:
    """Return the change of an API's event; raises `ValueError` or `KeyError` if it cannot."""
    action = {"inserted": "insert", "updated": "update", "deleted": "delete"}[event["event_type"]]
    change = change_of_record(event)
    if (action == "delete") != (change.version == DELETED):
        raise ValueError(f"event {event['event_type']} does not go with deleted {event['deleted']}")
    if (action == "insert") != (change.version == 1):
        raise ValueError(f"event {event['event_type']} does not go with version {change.version}")
    return change._replace(action=action)


def change_of_record(record: dict[str, Any]) -> Change:
    """Return the version of a record; raises `ValueError` or `KeyError` if it cannot."""
    version = DELETED if record["deleted"] else int(record["data"]["metadata"]["version"])
    number = int(record["upstream_id"].removeprefix("cus_"))
    return Change(record["collection_id"], number, "record", version)


def change_of(message: dict[str, Any]) -> Change:
    """Return the change of a message; raises `ValueError` or `KeyError` if it cannot."""
    table, action = message["metadata"]["table_name"], message["action"]
    record = message["record"]
    # An old tuple holds the key alone unless the replica identity is full.
    version = DELETED if action == "delete" else int(record["version"])
    if action not in ("insert", "update", "delete") or (action == "insert") != (version == 1):
        raise ValueError(f"action {action} does not go with version {version}")
    return Change(table, int(record["id"]), action, version)
