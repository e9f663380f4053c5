"""The API's tokens in the store."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from typing import Final

import psycopg

from penstock.core import queries
from penstock.core.errors import StoreError
from penstock.streams.connection import StoreConnection
from penstock.streams.records import Token

ROLES: Final = ("worker", "viewer", "admin")
_SQL: Final = queries.load("penstock.streams", "store.sql")


class Tokens:
    """The API's tokens. All methods raise `StoreError`."""

    def __init__(self, connection: StoreConnection) -> None:
        self._connection = connection

    def create(self, name: str, role: str, consumers: Sequence[str] | None = None) -> str:
        """Make a token and return it. Only its hash is stored, so it can't be read again."""
        token = f"pst_{secrets.token_urlsafe(32)}"
        hashed = hashlib.sha256(token.encode()).digest()
        values = [name, hashed, role, None if consumers is None else list(consumers)]
        with self._connection.lend() as connection, connection.transaction():
            try:
                connection.execute(_SQL["create_token"], values)
            except psycopg.errors.UniqueViolation:
                raise StoreError(
                    "name_taken",
                    f"There is a token {name!r} already.",
                    remedy="Give this one another name; a revoked token's is not used again.",
                ) from None
            connection.execute(_SQL["notify"], ["t"])
        return token

    def all(self) -> list[Token]:
        """Return all tokens, revoked ones too."""
        return [Token(*row) for row in self._connection.rows(_SQL["tokens"])]

    def revoke(self, name: str) -> bool:
        """Make a token worthless at once; return False where no live token has that name."""
        with self._connection.lend() as connection, connection.transaction():
            revoked = connection.execute(_SQL["revoke_token"], [name]).rowcount
            connection.execute(_SQL["notify"], ["t"])
        return revoked > 0
