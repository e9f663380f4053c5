"""The dead letters in the store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from penstock.core import queries
from penstock.core.delivery import DeadLetter
from penstock.streams.connection import Lends
from penstock.streams.records import StoredLetter

_SQL: Final = queries.load("penstock.streams", "store.sql")


class DeadLetters:
    """The dead letters of all sinks and consumers. All methods raise `StoreError`."""

    def __init__(self, connection: Lends) -> None:
        self._connection = connection

    def add(self, sink: str, letters: Sequence[DeadLetter]) -> None:
        """Store what a sink can never deliver."""
        rows = [
            (
                sink,
                letter.idempotency_key,
                _storable(letter.subject),
                letter.code,
                _storable(letter.reason),
                _storable(letter.body),
            )
            for letter in letters
        ]
        with self._connection.lend() as connection, connection.transaction():
            connection.cursor().executemany(_SQL["add_dead_letter"], rows)

    def known(self, sink: str, keys: Sequence[str]) -> set[str]:
        """Return which idempotency keys a sink has dead letters of already."""
        rows = self._connection.rows(_SQL["known_dead_letters"], [sink, list(keys)])
        return {str(key) for (key,) in rows}

    def page(
        self,
        sink: str | None = None,
        consumer: str | None = None,
        limit: int = 100,
        offset: int = 0,
        after: int = 0,
        *,
        unreplayed: bool = False,
    ) -> list[StoredLetter]:
        """Return dead letters behind number `after`, oldest first; of one sink or consumer if named.

        With `unreplayed` only those that were not replayed.
        """
        values = {
            "sink": sink, "consumer": consumer, "id": None, "limit": limit, "offset": offset,
            "after": after, "unreplayed": unreplayed,
        }  # fmt: skip
        return [StoredLetter(*row) for row in self._connection.rows(_SQL["dead_letters"], values)]

    def get(self, id: int) -> StoredLetter | None:  # noqa: A002 - the field's name
        """Return one dead letter, None if there is none of that id."""
        values = {
            "sink": None, "consumer": None, "id": id, "limit": 1, "offset": 0, "after": 0,
            "unreplayed": False,
        }  # fmt: skip
        rows = self._connection.rows(_SQL["dead_letters"], values)
        return StoredLetter(*rows[0]) if rows else None

    def mark_replayed(self, id: int) -> None:  # noqa: A002 - the field's name
        """Record that a dead letter was delivered after all."""
        with self._connection.lend() as connection:
            connection.execute(_SQL["mark_replayed"], [id])

    def purge(
        self,
        sink: str | None = None,
        consumer: str | None = None,
        id: int | None = None,  # noqa: A002 - the field's name
        *,
        replayed: bool = False,
    ) -> int:
        """Delete the dead letters that fit all that is given; return how many there were.

        With `replayed` only those that were replayed.
        """
        values = {"sink": sink, "consumer": consumer, "id": id, "replayed": replayed}
        with self._connection.lend() as connection:
            return connection.execute(_SQL["purge"], values).rowcount


def _storable(text: str) -> str:
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")
