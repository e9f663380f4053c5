"""Publishes numbered messages to an outbox, and knows for certain which of them were committed.

A message's key stands for whatever the business is about: its messages carry 1, 2, 3… in the order of
their commits. Ids are noted beside them, in the same statement, so that the outbox may be swept.
"""

from __future__ import annotations

from typing import Any, Final

import psycopg
from psycopg.types.json import Jsonb

from .writer import BIG_ROWS, Key, Step, Transaction, Writer

OUTBOX: Final = "chaos"
SCHEMA: Final = f"""
CREATE SCHEMA bookkeeping;
CREATE TABLE bookkeeping.marks (txn text PRIMARY KEY);
CREATE TABLE bookkeeping.published (id bigint PRIMARY KEY);
SELECT tide.outbox_create('{OUTBOX}', retention_hours => 0);
"""
_PUBLISH: Final = f"""
INSERT INTO bookkeeping.published
SELECT tide.outbox_publish('{OUTBOX}', payload, dedup_key, headers)
FROM unnest(%s::jsonb[], %s::text[], %s::jsonb[]) AS m (payload, dedup_key, headers)
RETURNING id
"""
_HEADERS: Final = Jsonb({"trace": "chaos"})


class Publisher(Writer):
    """Publishes messages of keys of its own, where a `Writer` changes rows.

    A `Step`'s action is the message's id at the stream, and its version the number of the key's
    message. Every other message has a dedup key of its own.
    """

    ids: set[int]

    def __init__(self, url: str, number: int, keys: int, rate: float, seed: int) -> None:
        super().__init__(url, number, keys, rate, seed, tables=(OUTBOX,))
        self.ids = set()

    def _change(self, connection: psycopg.Connection[Any], planned: Transaction, note: str) -> None:
        self._publish(connection, planned, [self._random.choice(self._keys)], note)

    def _sweep(self, connection: psycopg.Connection[Any], planned: Transaction) -> None:
        """Publish so many messages that the transaction is a big one."""
        self._publish(connection, planned, self._random.choices(self._keys, k=BIG_ROWS), "big")

    def _publish(
        self, connection: psycopg.Connection[Any], planned: Transaction, keys: list[Key], note: str
    ) -> None:
        payloads, names = [], []
        for key in keys:
            row = self._row(planned, key)
            row.version += 1
            payloads.append(Jsonb({"key": key.id, "n": row.version, "note": note}))
            # What was rolled back may have had the name, too: the first try came to nothing.
            names.append(f"{key.id}/{row.version}" if row.version % 2 else None)
        found = connection.execute(_PUBLISH, [payloads, names, [_HEADERS] * len(keys)]).fetchall()
        for key, name, payload, (id_,) in zip(keys, names, payloads, found, strict=True):
            planned.steps.append((key, Step(name or f"{OUTBOX}:{id_}", payload.obj["n"])))
            planned.ids.add(id_)
        planned.messages += len(keys)

    def _take(self, planned: Transaction) -> None:
        super()._take(planned)
        self.ids |= planned.ids
