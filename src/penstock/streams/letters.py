"""The dead letters in the store."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple, TypedDict, Unpack

from penstock.core import queries
from penstock.core.delivery import DeadLetter
from penstock.streams.connection import Also, Lends
from penstock.streams.records import StoredLetter

_QUERIES: Final = queries.load("penstock.streams", "store.sql")
_SQL: Final = {
    name: text.replace("{fits}", _QUERIES["letter_fits"]) for name, text in _QUERIES.items()
}


Publishing = Literal["sink", "consumer"]
"""What publishes, and has its dead letters by its name: a sink, or a consumer of type nats."""


class Fitting(TypedDict, total=False):
    """What dead letters may be selected by; None of a member leaves it out.

    Attributes:
        code: Their cause.
        key: The idempotency key of their message.
        text: Stands in the reason, the message, its key or its subject, upper or lower case.
        replayed: Whether they were replayed.
        through: The last number.
    """

    code: str | None
    key: str | None
    text: str | None
    replayed: bool | None
    through: int | None


class Cause(NamedTuple):
    """The dead letters of a sink or a consumer with one code; `reason` is that of the newest."""

    sink: str | None
    consumer: str | None
    code: str
    waiting: int
    replayed: int
    first_at: datetime
    last_at: datetime
    last_id: int
    reason: str


_ALL: Final[dict[str, Any]] = {
    **dict.fromkeys(("sink", "consumer", "id", "code", "key", "text", "replayed", "through")),
    "after": 0,
}


class DeadLetters:
    """The dead letters of all sinks and consumers. All methods raise `StoreError`."""

    def __init__(self, connection: Lends) -> None:
        self._connection = connection

    def add(self, name: str, letters: Sequence[DeadLetter], kind: Publishing = "sink") -> None:
        """Store what a sink, or a consumer of type nats, can never deliver."""
        rows = [
            (
                name,
                letter.idempotency_key,
                _storable(letter.subject),
                letter.code,
                _storable(letter.reason),
                _storable(letter.body),
            )
            for letter in letters
        ]
        with self._connection.lend() as connection, connection.transaction():
            connection.cursor().executemany(_SQL["add_dead_letter"].replace("{kind}", kind), rows)

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
        newest: bool = False,
        **more: Unpack[Fitting],
    ) -> list[StoredLetter]:
        """Return dead letters behind number `after`, the oldest or the `newest` first.

        Of one sink or consumer if named.
        """
        given = {"sink": sink, "consumer": consumer, "after": after, **more}
        values = {**_ALL, **given, "limit": limit, "offset": offset}
        return self._stored(values, "DESC" if newest else "ASC")

    def causes(
        self, sink: str | None = None, consumer: str | None = None, **more: Unpack[Fitting]
    ) -> list[Cause]:
        """Return how many dead letters of each sink and consumer have each code."""
        values = {**_ALL, "sink": sink, "consumer": consumer, **more}
        rows = self._connection.rows(_SQL["dead_letter_causes"], values)
        return [Cause(*row) for row in rows]

    def get(self, id: int) -> StoredLetter | None:  # noqa: A002 - the field's name
        """Return one dead letter, None if there is none of that id."""
        values = {**_ALL, "id": id, "limit": 1, "offset": 0}
        return next(iter(self._stored(values, "ASC")), None)

    def mark_replayed(self, id: int, also: Also = ()) -> None:  # noqa: A002 - the field's name
        """Record that a dead letter was delivered after all, and do `also` in one transaction."""
        with self._connection.lend() as connection, connection.transaction():
            for statement in ((_SQL["mark_replayed"], [id]), *also):
                connection.execute(*statement)

    def purge(
        self,
        sink: str | None = None,
        consumer: str | None = None,
        id: int | None = None,  # noqa: A002 - the field's name
        **more: Unpack[Fitting],
    ) -> int:
        """Delete the dead letters that fit all that is given; return how many there were."""
        values = {**_ALL, "sink": sink, "consumer": consumer, "id": id, **more}
        with self._connection.lend() as connection:
            return connection.execute(_SQL["purge"], values).rowcount

    def _stored(
        self, values: dict[str, Any], direction: Literal["ASC", "DESC"]
    ) -> list[StoredLetter]:
        query = _SQL["dead_letters"].replace("{direction}", direction)
        return [StoredLetter(*row) for row in self._connection.rows(query, values)]


def _storable(text: str) -> str:
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}")
