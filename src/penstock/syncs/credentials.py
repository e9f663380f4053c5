"""Tokens that APIs hand out, kept encrypted in the store."""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import msgspec
import orjson
import psycopg

from penstock.core import queries
from penstock.core.errors import StoreError
from penstock.syncs.errors import SyncError
from penstock.syncs.tokens import OAuthTokens

KEY_VARIABLE: Final = "PENSTOCK_SECRET_KEY"
KEY_FILE: Final = "secret.key"
_SHORTEST_KEY: Final = 32
_NONCE: Final = 12
_SQL: Final = queries.load("penstock.syncs", "credentials.sql")
Connect = Callable[[], AbstractContextManager[psycopg.Connection[Any]]]


class SecretKey:
    """Seals what is kept; `texts` has the key and, behind it, those that it has replaced."""

    def __init__(self, texts: list[str]) -> None:
        self._keys: Final = {}
        for text in texts:
            if len(text) < _SHORTEST_KEY:
                raise SyncError(
                    "credential",
                    f"{KEY_VARIABLE} has a key of {len(text)} characters, and needs {_SHORTEST_KEY}.",
                    remedy="Make one: openssl rand -base64 32",
                )
            key = hashlib.sha256(b"penstock credential tokens\0" + text.encode()).digest()
            self._keys[hashlib.sha256(key).hexdigest()[:16]] = key
        self.key_id: Final = next(iter(self._keys))

    def __repr__(self) -> str:
        return f"SecretKey({self.key_id})"

    def seal(self, data: bytes, about: str) -> bytes:
        """Return `data` encrypted; it opens only with the same `about`."""
        # It takes 20 ms to import, and few runs have such tokens.
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - see above

        nonce = secrets.token_bytes(_NONCE)
        return nonce + AESGCM(self._keys[self.key_id]).encrypt(nonce, data, about.encode())

    def open(self, key_id: str, sealed: bytes, about: str) -> bytes:
        """Return what was sealed; raises `SyncError` where this is another key."""
        from cryptography.exceptions import InvalidTag  # noqa: PLC0415 - as in `seal`
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM  # noqa: PLC0415 - as in `seal`

        try:
            key = self._keys[key_id]
            return AESGCM(key).decrypt(sealed[:_NONCE], sealed[_NONCE:], about.encode())
        except (KeyError, InvalidTag):
            raise SyncError(
                "credential",
                f"The tokens of {about} were encrypted with another key.",
                remedy=f"Set {KEY_VARIABLE} to the new key, a comma and the earlier one, or give the "
                "credential a new refresh token.",
            ) from None


def secret_key(folder: Path | None, environment: Mapping[str, str] = os.environ) -> SecretKey:
    """Return the key of `PENSTOCK_SECRET_KEY`, or that of a file in `folder`, which is made.

    `folder` is that of the embedded store, None for an external one, which needs the variable.
    """
    if text := environment.get(KEY_VARIABLE, "").strip():
        return SecretKey([each.strip() for each in text.split(",") if each.strip()])
    if folder is None:
        raise SyncError(
            "credential",
            "There is no key with which to encrypt the tokens of credentials in the store.",
            remedy=f"Set {KEY_VARIABLE} wherever Penstock runs, to the output of: "
            "openssl rand -base64 32",
        )
    path = folder / KEY_FILE
    try:
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        pass
    else:
        with os.fdopen(file, "w") as new:
            new.write(secrets.token_urlsafe(32))
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise SyncError(
            "credential",
            f"{path} can be read by others: its mode is {mode:o}.",
            remedy=f"Run: chmod 600 {path}",
        )
    return SecretKey([path.read_text().strip()])


def origin_of(properties: Mapping[str, str]) -> str:
    """Return what tokens were got with: the credential's properties, which are secrets."""
    return orjson.dumps(properties, option=orjson.OPT_SORT_KEYS).decode()


class StoredTokens:
    """Keeps the tokens of one credential in the store: see `tokens.TokenKeeper`.

    Args:
        connect: Lends a connection, in autocommit mode.
        own: Makes one that nothing else waits for: it is kept while an API is asked.
        key: Seals the tokens.
        credential: The credential's name.
        origin: What the user gave, its refresh token among it: tokens that were got with another
            origin are not used.
    """

    def __init__(
        self, connect: Connect, own: Connect, key: SecretKey, credential: str, origin: str = ""
    ) -> None:
        self._connect: Final = connect
        self._own: Final = own
        self._key: Final = key
        self._credential: Final = credential
        self._origin: Final = hashlib.sha256(origin.encode()).hexdigest()[:16]

    def load(self) -> OAuthTokens | None:
        """Return the tokens that are kept."""
        with self._connect() as connection:
            return self._kept(connection)

    def renew(
        self, stale: OAuthTokens | None, ask: Callable[[OAuthTokens | None], OAuthTokens]
    ) -> OAuthTokens:
        """Return tokens other than `stale`, under a lock of the credential."""
        tokens: OAuthTokens | None = None
        try:
            with self._own() as connection, connection.transaction():
                connection.execute(_SQL["lock"], [self._credential])
                kept = self._kept(connection)
                if kept is not None and kept != stale:
                    return kept
                tokens = ask(kept)
                self._save(connection, tokens)
        except (psycopg.Error, StoreError):
            if tokens is None:
                raise
            # The connection broke meanwhile, and what these were got with may serve no more.
            with self._own() as connection:
                self._save(connection, tokens)
        return tokens

    def _kept(self, connection: psycopg.Connection[Any]) -> OAuthTokens | None:
        return self._opened(connection.execute(_SQL["load"], [self._credential]).fetchone())

    def _save(self, connection: psycopg.Connection[Any], tokens: OAuthTokens) -> None:
        sealed = self._key.seal(msgspec.json.encode(tokens), self._credential)
        connection.execute(_SQL["save"], [self._credential, self._origin, self._key.key_id, sealed])

    def _opened(self, row: Any) -> OAuthTokens | None:
        if row is None or row[0] != self._origin:
            return None
        return msgspec.json.decode(
            self._key.open(row[1], row[2], self._credential), type=OAuthTokens
        )
