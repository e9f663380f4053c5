"""What a sync of a `FaultyApi` comes to: its events folded, its newest records and the API are one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self
from uuid import UUID

import psycopg

from .faulty_api import COLLECTIONS, FaultyApi


class Event(NamedTuple):
    """What happened to an object; `unseen`: it is known since it was deleted, which is no event."""

    what: str
    collection: str
    id: str
    data: Any
    updated_at: str | None

    @classmethod
    def of(cls, what: str, record: Mapping[str, Any]) -> Self:
        """Return the event of a record, as a row of the table or as the event itself has it."""
        collection = record["collection_id"].partition(":")[2]
        return cls(
            what, collection, record["upstream_id"], record["data"], record["upstream_updated_at"]
        )

    @classmethod
    def sent(cls, event: Mapping[str, Any]) -> Self:
        """Return the event of a message."""
        return cls.of(event["event_type"], event)


def rows_of(connection: psycopg.Connection[Any], sync: str) -> list[dict[str, Any]]:
    """Return a sync's rows of the records table."""
    query = "SELECT to_jsonb(r) FROM penstock.records r WHERE sync_id = %s"
    return [row for (row,) in connection.execute(query, [UUID(sync)])]


def wrong_with(
    api: FaultyApi, url: str, syncs: int, sent: Iterable[Mapping[str, Any]]
) -> list[str]:
    """Judge so many syncs by the events that were sent, in their order; return what is wrong."""
    of: dict[str, list[Event]] = {}
    for event in sent:
        of.setdefault(event["sync_id"], []).append(Event.sent(event))
    found = [f"{len(of)} of {syncs} syncs have events"] if len(of) != syncs else []
    with psycopg.connect(url) as connection:
        for sync, events in of.items():
            seen = {(event.collection, event.id) for event in events}
            rows = [
                row
                for row in rows_of(connection, sync)
                if not row["deleted"] or _key(row) in seen  # else nothing was ever sent of it
            ]
            try:
                judge(api, COLLECTIONS, rows, events)
            except AssertionError as error:
                found.append(f"{sync}: {error}")
    return found


def _key(row: Mapping[str, Any]) -> tuple[str, str]:
    return row["collection_id"].partition(":")[2], row["upstream_id"]


def judge(
    api: FaultyApi,
    names: Sequence[str],
    rows: Iterable[Mapping[str, Any]],
    events: Iterable[Event],
) -> None:
    """Compare the events of one sync, in their order, its newest records and the API, for collections.

    Raises `AssertionError`.
    """
    folded: dict[tuple[str, str], tuple[bool, int, Any]] = {}
    times: dict[tuple[str, str], str | None] = {}
    deletes: Counter[tuple[str, str]] = Counter()
    for event in events:
        key = event.collection, event.id
        before, version = folded.get(key), event.data.get("v", 0)
        is_deleted = event.what in ("deleted", "unseen")
        if is_deleted:
            assert before is None or not before[0], f"{key} is deleted twice"
            deletes[key] += event.what == "deleted"
        elif before is not None:
            assert version > before[1], f"{key} has version {version} after {before}"
            assert (event.what == "inserted") == before[0], f"{key} is {event.what} after {before}"
        else:
            assert event.what == "inserted", f"{key} is {event.what} at first"
        last = times.get(key)
        assert last is None or (event.updated_at or "") >= last, f"{key} goes back from {last}"
        times[key] = event.updated_at
        folded[key] = is_deleted, max(version, before[1] if before else 0), event.data
    newest = {_key(row): row for row in rows}
    assert {k: (of[0], of[2]) for k, of in folded.items()} == {
        key: (row["deleted"], row["data"]) for key, row in newest.items()
    }
    for name in names:
        alive = {i: of[2] for (of_name, i), of in folded.items() if of_name == name and not of[0]}
        assert alive == json.loads(json.dumps(api.alive(name))), name
    for (name, id_), count in deletes.items():
        assert count <= api.deletes[name, int(id_)], f"{name} {id_} is deleted too often"
